"""Readings of a round become errors."""

from types import SimpleNamespace
from typing import Any

import pytest

from support.errors import text_of
from undertow.buckets.facts import Reading
from undertow.engine.agreed_errors import changed_unlike, require_sound
from undertow.engine.round import Round, RoundKind, Terms
from undertow.errors import Desync, PeerFailed, PlanMismatch


def round_with(*readings: dict[str, Any], has_failed: bool = False) -> Round:
    result = Round(kind=RoundKind.REDUCE, terms=Terms(number=5, mode=0), has_failed=has_failed)
    for said in readings:
        result.found.add(Reading(**{"used": frozenset(), "ranks_differ": False, **said}), ())
    return result


def of_ranks(number: int) -> Any:
    """The group of rank 1, whose other ranks do not answer."""
    watch = SimpleNamespace(ask=lambda *_, **__: [])
    return SimpleNamespace(name=1, num_ranks=number, names=range(number), watch=watch)


DIFFERENT = "ranks are not in the same step.\n"
OVERDUE = "gradients arrived again after their bucket was sent, and were left out.\n"
FAILED = "backward failed on ranks 0, 2.\n"
SETTINGS = "ranks step with different settings of an optimizer.\n"
TEXTS = {
    DIFFERENT: "  synchronization 5, rank 1\n"
    "  Run the same number of synchronized backwards and steps on every rank. A rank without a backward calls finish().",
    OVERDUE: "  synchronization 5, rank 1, or the one before\n"
    "  Let the first two steps use parameters as often as later ones do, or set overlap=False.",
    FAILED: "  synchronization 5, rank 1\n"
    "  The gradients of this step are incomplete on every rank: drop them, and see the log of that rank.",
    SETTINGS: "  synchronization 5, rank 1\n"
    "  Give every rank the same settings. A scheduler must follow a number that all ranks have, such as the mean of "
    "their losses.",
}


@pytest.mark.parametrize(
    ("readings", "error", "what"),
    [
        ([{}, {"ranks_differ": True}], Desync, DIFFERENT),
        ([{"flags": {"late": (1,)}, "is_overdue": True}], Desync, OVERDUE),
        ([{"flags": {"failed": (2,)}}, {"flags": {"failed": (0, 2)}}], PeerFailed, FAILED),
        ([{"flags": {"failed": (0, 2)}, "ranks_differ": True}], Desync, DIFFERENT),
        ([{"flags": {"failed": (0, 2), "late": (0,)}, "is_overdue": True}], Desync, OVERDUE),
        ([{"unlike": ("settings",)}], PlanMismatch, SETTINGS),
        ([{"unlike": ("settings",), "flags": {"failed": (0, 2)}}], PeerFailed, FAILED),
        ([{"unlike": ("settings",), "ranks_differ": True}], Desync, DIFFERENT),
    ],
    ids=[
        "another step",
        "late and overdue",
        "failed",
        "failed in another step",
        "failed and overdue",
        "other settings",
        "failed and other settings",
        "other settings in another step",
    ],
)
def test_what_some_rank_reports_is_raised(readings: list[dict[str, Any]], error: type[Exception], what: str) -> None:
    assert text_of(error, lambda: require_sound(round_with(*readings), of_ranks(3))) == what + TEXTS[what]


@pytest.mark.parametrize(
    "readings",
    [[], [{"used": frozenset({0})}], [{"flags": {"late": (2,)}}], [{"is_overdue": True}], [{"flags": {"changed": (0,)}}]],
    ids=["nothing", "uses", "late in time", "overdue without late parts", "changes"],
)
def test_a_round_without_trouble_is_sound(readings: list[dict[str, Any]]) -> None:
    require_sound(round_with(*readings), of_ranks(3))


def test_a_rank_that_has_failed_itself_is_not_told_so() -> None:
    require_sound(round_with({"flags": {"failed": (1,)}}, has_failed=True), of_ranks(3))
    with pytest.raises(Desync):
        require_sound(round_with({"ranks_differ": True}, has_failed=True), of_ranks(3))


@pytest.mark.parametrize(
    ("change", "where"), [("", ""), ("parameter 'w' is trained now", ": parameter 'w' is trained now")], ids=["no word", "word"]
)
def test_parameters_that_changed_on_some_ranks_only_are_a_mismatch(change: str, where: str) -> None:
    error = changed_unlike(round_with({"flags": {"changed": (3,)}}, {"flags": {"changed": (1,)}}), of_ranks(4), change)
    assert (type(error), str(error)) == (
        PlanMismatch,
        "the parameters, or the communication hook, have changed on ranks 1, 3, but not on ranks 0, 2.\n"
        f"  synchronization 5, rank 1{where}\n"
        "  Freeze, unfreeze, add and replace parameters, and register hooks, in the same step on every rank.",
    )


@pytest.mark.parametrize("changed", [[], [(0, 1)], [(0,), (1,)]], ids=["nowhere", "everywhere", "everywhere, in two buckets"])
def test_parameters_that_changed_on_all_ranks_or_none_are_fine(changed: list[tuple[int, ...]]) -> None:
    assert changed_unlike(round_with(*({"flags": {"changed": ranks}} for ranks in changed)), of_ranks(2), "") is None


def test_late_buckets_are_those_of_this_round() -> None:
    readings = [{"flags": {"late": (4, 1)}}, {"flags": {"late": (1, 2)}}, {"flags": {"late": (0,)}, "is_overdue": True}]
    assert (round_with(*readings).found.late_buckets, round_with().found.late_buckets) == ([1, 2, 4], [])
