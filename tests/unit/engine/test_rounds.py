"""Ends of rounds on the host of a mesh, where a rank hears one later if a round was sound at all places."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

from undertow.engine.progress import Gradients, Progress
from undertow.engine.round import Round, RoundKind, Stage, Terms
from undertow.engine.rounds import Rounds


class Places:
    """Checks of which only the reports of other places are real: if each round was sound there."""

    def __init__(self, are_sound: Sequence[bool]) -> None:
        self.are_sound = iter(are_sound)
        self.then: Callable[..., object] | None = None
        self.stop, self.numbers = SimpleNamespace(grace_s=None), SimpleNamespace(is_on=False)
        self.every = None

    def hear(self) -> None:
        if self.then is not None:
            self.then(is_sound=next(self.are_sound))

    def report_to_places(self, _ended: Round, *, is_sound: bool, then: Callable[..., object]) -> None:
        assert is_sound
        self.then = then


def after_rounds(num_forwards: Sequence[int], *, are_sound: Sequence[bool]) -> tuple[list[int], Progress]:
    """Runs a round after each of these numbers of forwards. Returns the numbers that counted for the choice of a plan."""
    counted, progress, plans = list[int](), Progress(), Mock()
    moves: Any = SimpleNamespace(round_was_sound=counted.append)
    plans.group = SimpleNamespace(is_on_mesh=True, is_broken=False, hardware=SimpleNamespace(is_host=True))
    plans.hooks.tuning.has_settled = False
    places: Any = Places(are_sound)
    rounds = Rounds(plans, moves, progress, places, Mock(), Mock())
    for number, num in enumerate(num_forwards):
        for _ in range(num):
            progress.forward_begins(synchronizes=True, is_last=True)
        compiled: Any = SimpleNamespace(buckets=(), plan=None, has_formats=False)
        ending = Round(kind=RoundKind.REDUCE, terms=Terms(number=number), stage=Stage.ADD_LATE)
        ending.compiled, ending.hooks = compiled, Mock()
        rounds.now = ending
        rounds.advance(ending)
    return counted, progress


def test_a_round_counts_when_the_next_one_ends_with_the_forwards_before_that_end() -> None:
    """The time is taken then, and would belong to a step of another kind."""
    counted, _ = after_rounds([1, 3, 1, 2], are_sound=[True] * 3)
    assert counted == [3, 1, 2]


def test_a_round_that_has_failed_elsewhere_leaves_the_next_gradients_sound() -> None:
    counted, progress = after_rounds([1, 1], are_sound=[False])
    assert progress.gradients is Gradients.SOUND
    assert counted == []
