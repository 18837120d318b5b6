"""Tuners that have other plans tried, one after another, whatever was measured."""

import contextlib
from collections.abc import Callable, Iterator
from itertools import cycle
from unittest import mock

from undertow.plan import Groups, Plan
from undertow.tune import Decision, Outcome, Tuner


def all_in_one(plan: Plan) -> Groups:
    kinds: dict[object, list[int]] = {}
    for index, spec in enumerate(plan.params):
        kinds.setdefault(spec.kind, []).append(index)
    return tuple(map(tuple, kinds.values()))


def one_each(plan: Plan) -> Groups:
    return tuple((index,) for index in reversed(range(len(plan.params))))


@contextlib.contextmanager
def scripted(*plans: Callable[[Plan], Groups]) -> Iterator[list[Plan]]:
    """Moves to the next of `plans` at every decision; yields the plans that were in force when one was decided on."""
    seen: list[Plan] = []
    nexts = cycle(plans)

    def decide(_tuner: Tuner, plan: Plan, *, has_shards: bool) -> Decision:
        seen.append(plan)
        groups = next(nexts)(plan)
        wire = next(filter(None, plan.wires), None)
        return Decision(outcome=Outcome.MOVE, groups=groups, wires=(wire,) * len(groups))

    with mock.patch.object(Tuner, "decide", decide):
        yield seen
