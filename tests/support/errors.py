"""Errors are product text: tests pin all of it."""

import contextlib
from collections.abc import Callable

import pytest

from undertow.errors import ConfigError

Call = Callable[[], object]


def refusal(call: Call) -> str:
    return text_of(ConfigError, call)


def text_of(error: type[Exception], call: Call) -> str:
    with pytest.raises(error) as caught:
        call()
    return str(caught.value)


def in_pieces() -> contextlib.AbstractContextManager[object]:
    """Expects the warning of a class that is cut into parts, and that nobody knows."""
    return pytest.warns(UserWarning, match="will see flat pieces of parameters")
