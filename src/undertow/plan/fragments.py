"""Fragments of a model for outer synchronization: groups of whole layers, which take turns.

layers         0   1   2   3   4   5   6
fragment of 3  0   1   2   0   1   2   0      each has layers of all depths
"""

from collections.abc import Sequence
from dataclasses import dataclass

from undertow.config import Outer
from undertow.plan.lane import Lane
from undertow.wire import AUTO

MOST_FRAGMENTS = 16
_MARGIN = 1.5  # of an exchange, because links vary
# Periods that are timed. The rest of the first one delays the second, and the third as much.
_PERIODS = 3
_STEPS_FOR_DELAY = 10  # of an interval, for a step of delay: its training is overwritten


def layer_of(name: str) -> str:
    """Returns the layer of a parameter: its path to the first number, such as `transformer.h.3`.

    Without a number, it is the first child.
    """
    parts = name.split(".")
    for place, part in enumerate(parts[:-1]):
        if part.isdecimal():
            return ".".join(parts[: place + 1])
    return parts[0]


def layers_of(names: Sequence[str]) -> list[str]:
    """Returns the layers of these tensors, in their order."""
    return list(dict.fromkeys(map(layer_of, names)))


def offset_of(fragment: int, *, num_fragments: int, every: int) -> int:
    """Returns the steps from the start of a period until the exchange of a fragment starts."""
    return fragment * every // num_fragments


def starts_after(step: int, fragment: int, *, num_fragments: int, every: int) -> bool:
    """Returns True if the exchange of a fragment starts after this step, counted from 1."""
    offset = offset_of(fragment, num_fragments=num_fragments, every=every)
    return step >= every and (step - offset) % every == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Turns:
    """The number of fragments, and the steps that hide an exchange."""

    fragments: int
    delay: int


def fixed_turns(outer: Outer, *, num_layers: int) -> Turns:
    """Returns fragments and a delay that follow no measurement. Numbers in the settings are kept.

    Two fragments, and one step of delay, as in the published comparison of losses.
    """
    fragments = min(2, num_layers, outer.every) if outer.fragments == AUTO else outer.fragments
    delay = min(1, outer.every - 1) if outer.delay == AUTO else outer.delay
    return Turns(fragments=int(fragments), delay=int(delay))


def chosen_turns(
    outer: Outer, *, step_us: float, fixed_us: float, layers_us: Sequence[float]
) -> Turns:
    """Returns the fewest steps of delay, and then the fewest fragments, that hide every exchange
    even if it takes half as long again. Numbers in the settings are kept.

    An exchange of a fragment takes `fixed_us` and the time of its layers; exchanges follow each
    other over one link. The delay is a tenth of the interval at most: if that does not hide them,
    steps wait.
    """
    most = max(1, min(MOST_FRAGMENTS, len(layers_us), outer.every))
    counts = range(1, most + 1) if outer.fragments == AUTO else [int(outer.fragments)]
    longest = outer.every // _STEPS_FOR_DELAY
    delays = range(longest + 1) if outer.delay == AUTO else [int(outer.delay)]
    times_us = {
        count: [_MARGIN * (fixed_us + sum(layers_us[index::count])) for index in range(count)]
        for count in counts
    }
    for steps in delays:
        for count in counts:
            waits_us = exposed_us(times_us[count], delay=steps, every=outer.every, step_us=step_us)
            if waits_us == 0:
                return Turns(fragments=count, delay=steps)
    # Without a delay every exchange is waited for, and more of them take longer.
    count = counts[-1] if delays[-1] else counts[0]
    return Turns(fragments=count, delay=delays[-1])


def exposed_us(times_us: Sequence[float], *, delay: int, every: int, step_us: float) -> float:
    """Returns the mean wait of a step for exchanges of fragments, in a steady period; 0 if all of
    them are hidden.

    Args:
        times_us: The time of an exchange, by fragment.
        delay: Steps from the start of an exchange until it is due.
        every: Steps between two exchanges of a fragment.
        step_us: The time of a step without waits.
    """
    count = len(times_us)
    starts = [
        period * every + offset_of(fragment, num_fragments=count, every=every)
        for period in range(_PERIODS)
        for fragment in range(count)
    ]
    # An exchange that starts after a step leaves before the step waits for one that is due.
    begins = [(step, False, number) for number, step in enumerate(starts)]
    dues = [(step + delay, True, number) for number, step in enumerate(starts)]
    lane, waited_us = Lane(), 0.0
    ends_us, waits_us = [0.0] * len(starts), [0.0] * len(starts)
    for step, is_due, number in sorted([*begins, *dues]):
        now_us = step * step_us + waited_us
        if is_due:
            waits_us[number] = max(0.0, ends_us[number] - now_us)
            waited_us += waits_us[number]
        else:
            _, ends_us[number] = lane.send(times_us[number % count], ready_us=now_us)
    return sum(waits_us[-count:]) / every
