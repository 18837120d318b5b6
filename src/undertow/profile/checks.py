"""Numbers of profiles, checked where a profile is made and where one is read; errors name the field."""

from __future__ import annotations

import math
from reprlib import repr as brief
from typing import Any

from undertow.errors import ConfigError


def checked_us(value: Any, field: str) -> float:
    """A time in microseconds."""
    try:
        is_time = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= float(value) < math.inf
    except OverflowError:  # an integer beyond all floats
        is_time = False
    if not is_time:
        raise ConfigError(
            f"{field} must be a number of microseconds, zero or more, got {brief(value)}.",
            remedy="A millisecond is 1000. NaN and infinity are no times.",
        )
    return float(value)


def checked_integer(value: Any, field: str, *, lowest: int) -> int:
    """A whole number that is not less than `lowest`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < lowest:
        raise ConfigError(
            f"{field} must be a whole number, {lowest} or more, got {brief(value)}.",
            remedy=f"Write a number such as {lowest}, without a decimal point or quotes.",
        )
    return value
