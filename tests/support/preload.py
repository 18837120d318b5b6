"""What ranks of tests need, imported once: they are forked off a process that has it."""

from __future__ import annotations

import pytest
import rich.table  # noqa: F401
from _pytest.assertion import install_importhook

import undertow  # noqa: F401

# Asserts in ranks say what the values were, as they do where pytest itself imports a test.
_CONFIG = pytest.Config.fromdictargs({"assertmode": "rewrite"}, ["--disable-plugin-autoload", "-c", "/dev/null"])
install_importhook(_CONFIG).mark_rewrite("support")
