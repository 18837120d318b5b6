"""What ranks of tests need, imported once: they are forked off a process that has it."""

import pytest
import rich.table  # noqa: F401
import torch._dynamo
import torch.distributed.checkpoint
import torch.utils.checkpoint  # noqa: F401
from _pytest.assertion import install_importhook

from support.warm import start_new_interpreters
from undertow import *  # noqa: F403  # all of its names: each brings its modules with it

start_new_interpreters()
# Asserts in ranks say what the values were, as they do where pytest itself imports a test.
_CONFIG = pytest.Config.fromdictargs({"assertmode": "rewrite"}, ["--disable-plugin-autoload", "-c", "/dev/null"])
install_importhook(_CONFIG).mark_rewrite("support")
