"""Where a growing function reaches a value."""

from collections.abc import Callable

_NUM_TRIES = 60


def solve(function: Callable[[float], float], target: float, *, low: float, high: float) -> float:
    """The argument between `low` and `high` at which `function` is `target`, to a millionth of it.

    Illinois method: few calls where the function is nearly straight. ValueError where the target is not between its ends.
    """
    below, above = function(low) - target, function(high) - target
    if not below <= 0 <= above:
        raise ValueError(f"{target} is not between {below + target} at {low} and {above + target} at {high}")
    for _ in range(_NUM_TRIES):
        argument = (low * above - high * below) / (above - below)
        value = function(argument) - target
        if abs(value) <= 1e-6 * abs(target):
            return argument
        if value < 0:
            low, below, above = argument, value, above / 2
        else:
            high, above, below = argument, value, below / 2
    raise ValueError(f"no argument found for {target}")
