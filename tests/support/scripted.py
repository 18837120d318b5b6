"""Trials that take a given plan after the first window, whatever was measured."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle
from typing import Any

from support.inside import trials_are
from undertow.plan import Groups, Plan, plan_from_groups
from undertow.tune.trials import Trial


def all_in_one(plan: Plan) -> Groups:
    kinds: dict[object, list[int]] = {}
    for index, spec in enumerate(plan.params):
        kinds.setdefault(spec.kind, []).append(index)
    return tuple(map(tuple, kinds.values()))


def one_each(plan: Plan) -> Groups:
    return tuple((index,) for index in reversed(range(len(plan.params))))


class ScriptedTrials:
    """Has what `Trials` has."""

    def __init__(self, present: Plan, candidate: Plan) -> None:
        self.present, self.before, self.candidate = present, present, candidate
        self.tried: list[Any] = []
        self.are_over = False
        self.stopped = ""
        self.times_ms: list[float] = []

    @property
    def is_new(self) -> bool:
        return self.present is not self.before

    @property
    def plan(self) -> Plan:
        return self.present

    def window_ends(self, time_ms: float) -> None:
        self.times_ms.append(time_ms)
        self.present, self.are_over = self.candidate, True

    def fail(self, reason: str) -> None:
        self.present = self.before
        self.tried.append(Trial(plan=self.candidate, failure=reason))

    def drop(self) -> None:
        """The first window runs again."""

    def stop(self, reason: str) -> None:
        self.are_over, self.stopped = True, reason


@contextlib.contextmanager
def scripted(*plans: Callable[[Plan], Groups] | None, wires: Sequence[str | None] = ()) -> Iterator[list[Plan]]:
    """Moves to the next of `plans` whenever trials begin, or stays; yields the plans that were in force then."""
    seen: list[Plan] = []
    nexts = cycle(plans)

    def trials(present: Plan, _order: Sequence[int], *, block: int, **_settings: Any) -> ScriptedTrials:
        seen.append(present)
        move = next(nexts)
        if move is None:
            return ScriptedTrials(present, present)
        groups = move(present)
        wire = next(filter(None, present.wires), None)
        formats = tuple(wires) or (wire,) * len(groups)
        candidate = plan_from_groups(present.params, groups, num_ranks=present.num_ranks, wires=formats, block=block)
        return ScriptedTrials(present, candidate)

    with trials_are(trials):
        yield seen
