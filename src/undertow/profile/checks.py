"""Numbers of profiles, checked where a profile is made and where one is read; errors name the field."""

from __future__ import annotations

import math
from reprlib import repr as brief
from typing import Any

from undertow.errors import ConfigError
from undertow.plan.layout import MOST

_ROUNDING_US = 1.0  # by so much two times of one step may disagree, each rounded by itself


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


def checked_ready_us(value: Any, field: str, *, backward_us: float) -> float:
    """When a gradient is there: in microseconds since backward began, and not behind its end."""
    ready_us = checked_us(value, field)
    if ready_us > backward_us + _ROUNDING_US:
        raise ConfigError(
            f"{field} must not be behind the end of backward, got {brief(value)}.",
            where=f"backward_us is {brief(backward_us)}",
            remedy="Count from the beginning of backward; a gradient that never comes has backward_us.",
        )
    return ready_us


def checked_integer(value: Any, field: str, *, lowest: int) -> int:
    """A whole number that is not less than `lowest`, and fits into 64 bits."""
    if isinstance(value, bool) or not isinstance(value, int) or value < lowest:
        raise ConfigError(
            f"{field} must be a whole number, {lowest} or more, got {brief(value)}.",
            remedy=f"Write a number such as {lowest}, without a decimal point or quotes.",
        )
    if value > MOST:
        raise too_large(field, value)
    return value


def too_large(field: str, value: int) -> ConfigError:
    """The error of a number beyond `MOST`."""
    return ConfigError(f"{field} is too large: {brief(value)}.", remedy=f"At most {MOST} can be counted.")
