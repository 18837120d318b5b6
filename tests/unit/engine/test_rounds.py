"""Rounds on the host of a mesh, which count for the choice of a plan when the next one ends."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from undertow.engine.progress import Progress
from undertow.engine.round import Round, RoundKind, Stage, Terms
from undertow.engine.rounds import Rounds


def counted_after(num_forwards: Sequence[int], *, are_sound: Sequence[bool]) -> list[int]:
    """Runs a round after each of these numbers of forwards; each was sound at the other places, or not.

    Returns the numbers that counted for the choice of a plan.
    """
    counted, progress, plans, checks = list[int](), Progress(), Mock(), Mock(every=None)
    plans.group = SimpleNamespace(is_on_mesh=True, is_broken=False, hardware=SimpleNamespace(is_host=True))
    plans.tuning.has_settled = False
    checks.stop.grace_s, checks.numbers.is_on = None, False
    moves: Any = SimpleNamespace(round_was_sound=counted.append)
    rounds = Rounds(plans, moves, progress, checks, Mock(), Mock())
    for number, (num, is_sound) in enumerate(zip(num_forwards, are_sound, strict=True)):
        for _ in range(num):
            progress.forward_begins(synchronizes=True, is_last=True)
        ending = Round(kind=RoundKind.REDUCE, terms=Terms(number=number), stage=Stage.ADD_LATE)
        ending.compiled, ending.hooks = Mock(buckets=(), has_formats=False), Mock()
        rounds.now = ending
        rounds.advance(ending)
        checks.report_to_places.call_args.kwargs["then"](is_sound=is_sound)
    return counted


@pytest.mark.parametrize(("are_sound", "counted"), [((True, True, True), [3, 2]), ((True, False, True), [3])])
def test_a_round_on_a_mesh_counts_with_the_forwards_before_the_end_of_the_next_one(
    are_sound: tuple[bool, ...], counted: list[int]
) -> None:
    """The time of a trial is taken then: other forwards would belong to another step than the one that is timed."""
    assert counted_after([1, 3, 2], are_sound=are_sound) == counted
