"""Errors are product text: tests pin all of it."""

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
