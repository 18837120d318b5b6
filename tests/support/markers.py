"""Marker expressions: a name that no marker has is an error, not an empty run."""

import difflib
import re

import pytest


def require_known(config: pytest.Config) -> None:
    """UsageError, which is exit code 4, where -m names a marker that is not registered."""
    known = {re.split(r"[:(]", line)[0] for line in config.getini("markers")}
    named = re.findall(r"[A-Za-z_]\w*(?!\w*\s*=)", re.sub(r"\([^()]*=[^()]*\)", "", config.getoption("markexpr")))
    for name in named:
        if name not in known | {"and", "or", "not", "True", "False"}:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"Did you mean {near[0]!r}?" if near else "pytest --markers lists them."
            raise pytest.UsageError(f"-m names {name!r}, and no marker is called so. {hint}")
