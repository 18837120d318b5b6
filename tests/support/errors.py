"""Errors are product text: tests pin all of it."""

from __future__ import annotations

from collections.abc import Callable

import pytest


def text_of(error: type[Exception], call: Callable[[], object]) -> str:
    """What `call`, which must raise `error`, tells its user."""
    with pytest.raises(error) as caught:
        call()
    return str(caught.value)
