"""Checks numbers when a profile is created or read; errors name the field."""

from __future__ import annotations

import math
from reprlib import repr as brief
from typing import Any

from undertow.errors import ConfigError
from undertow.plan.layout import MOST

_ROUNDING_US = 1.0  # two times of one step may disagree by this much, because each is rounded separately


def checked_us(value: Any, field: str) -> float:
    """Returns `value` as a time in microseconds; raises ConfigError unless it is finite and not negative."""
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
    """Returns a gradient's ready time in microseconds since backward began; raises ConfigError if it is after backward ends."""
    ready_us = checked_us(value, field)
    if ready_us > backward_us + _ROUNDING_US:
        raise ConfigError(
            f"{field} must not be behind the end of backward, got {brief(value)}.",
            where=f"backward_us is {brief(backward_us)}",
            remedy="Count from the beginning of backward; a gradient that never comes has backward_us.",
        )
    return ready_us


def checked_integer(value: Any, field: str, *, lowest: int) -> int:
    """Returns a whole number; raises ConfigError if it is less than `lowest` or does not fit into 64 bits."""
    if isinstance(value, bool) or not isinstance(value, int) or value < lowest:
        raise ConfigError(
            f"{field} must be a whole number, {lowest} or more, got {brief(value)}.",
            remedy=f"Write a number such as {lowest}, without a decimal point or quotes.",
        )
    if value > MOST:
        raise too_large(field, value)
    return value


def too_large(field: str, value: int) -> ConfigError:
    """Returns the error for a number above `MOST`."""
    return ConfigError(f"{field} is too large: {brief(value)}.", remedy=f"At most {MOST} can be counted.")
