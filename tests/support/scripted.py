"""Tuners that have other plans tried, one after another, whatever was measured."""

import contextlib
from collections.abc import Callable, Iterator
from itertools import cycle
from unittest import mock

from undertow.plan import GroupEntry, Piece, Plan
from undertow.plan.layout import unit_numel
from undertow.tune import Decision, Outcome, Tuner

Groups = tuple[tuple[GroupEntry, ...], ...]


def all_in_one(plan: Plan) -> Groups:
    kinds: dict[object, list[int]] = {}
    for index, spec in enumerate(plan.params):
        kinds.setdefault(spec.kind, []).append(index)
    return tuple(map(tuple, kinds.values()))


def one_each(plan: Plan) -> Groups:
    return tuple((index,) for index in reversed(range(len(plan.params))))


def in_pieces(plan: Plan) -> Groups:
    """Every parameter that can be cut is, in two buckets."""
    firsts, seconds = [], []
    for index, spec in enumerate(plan.params):
        unit = unit_numel(itemsize=spec.itemsize, num_ranks=plan.num_ranks)
        if spec.numel <= unit:
            firsts.append((index,))
            continue
        firsts.append((Piece(param=index, first=0, stop=unit),))
        seconds.append((Piece(param=index, first=unit, stop=spec.numel),))
    return (*firsts, *seconds)


@contextlib.contextmanager
def scripted(*plans: Callable[[Plan], Groups]) -> Iterator[list[Plan]]:
    """Moves to the next of `plans` at every decision; yields the plans that were in force when one was decided on."""
    seen: list[Plan] = []
    nexts = cycle(plans)

    def decide(_tuner: Tuner, plan: Plan, *, has_shards: bool) -> Decision:
        seen.append(plan)
        return Decision(outcome=Outcome.MOVE, groups=next(nexts)(plan))

    with mock.patch.object(Tuner, "decide", decide):
        yield seen
