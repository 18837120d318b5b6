"""A small part of `make soak`: one injection of some kinds, of a seed that can be chosen; other tests have each kind by name."""

from itertools import count

import pytest

from soak.injections import ENDINGS, KINDS, WAYS, inject, injection, judged, points_of
from support.faults import NUM_STEPS
from support.processes import Ended


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(KINDS)[::3])
def test_training_is_as_if_nothing_had_been_or_the_right_error_comes_on_every_rank(kind: str, soak_seed: int) -> None:
    one = next(drawn for number in count() if (drawn := injection(soak_seed, number)).kind == kind)
    verdict = inject(one)
    assert verdict.problems == (), f"{one}\n" + "\n".join([*verdict.problems, f"again: {one.command}"])


# On a mesh one row is through while in the other a rank is stopped.
@pytest.mark.slow
def test_a_rank_that_left_is_not_taken_for_the_one_that_is_waited_for() -> None:
    one = injection(2, 140)
    assert (one.kind, one.way, one.step, inject(one).problems) == ("stopped", "hybrid", NUM_STEPS - 1, ())


def test_everything_is_drawn_sooner_or_later() -> None:
    drawn = [injection(0, number) for number in range(3000)]
    assert {name: {getattr(one, name) for one in drawn} for name in ("kind", "point", "ending", "num_micro_batches")} == {
        "kind": set(KINDS),
        "point": {point for name in WAYS for point in points_of("killed", name, 4)},
        "ending": set(ENDINGS),
        "num_micro_batches": {1, 2},
    }
    assert {(one.way, one.num_ranks) for one in drawn} == {(name, of) for name, ranks in WAYS.items() for of in ranks}


GONE = "rank 1 is gone: its process exited or was killed without reporting an error.\n  synchronization 2, rank 0\n  Look."
TOLD = Ended({"kind": "RankLost", "text": GONE, "at": 10.5}, 1)


@pytest.mark.parametrize(
    ("other", "problem"),
    [
        (TOLD, ""),
        (Ended({"at": 10.5, "value": ["last.bias"]}, 0), "other bits: last.bias"),
        (Ended({**TOLD.words, "text": GONE.replace("rank 1", "rank 0")}, 1), "not RankLost"),
        (Ended({**TOLD.words, "at": 21.0}, 1), "only 11.0 s after the fault"),
        (Ended(TOLD.words, -6), "ended with -6, after its error"),
        (Ended({}, -6), "ended with -6, without a word"),
    ],
)
def test_how_ranks_end_is_judged(other: Ended, problem: str) -> None:
    one = next(
        drawn for number in count() if ((drawn := injection(0, number)).kind, drawn.rank, drawn.num_ranks) == ("killed", 1, 2)
    )
    assert [found.partition("\n")[0] for found in judged(one, [other, Ended({"fault": 10.0, "step": 2}, -9)]).problems] == (
        [f"rank 0: {problem}"] if problem else []
    )


def test_a_fault_that_has_not_come_to_pass_proves_nothing() -> None:
    assert judged(injection(0, 0), [Ended()] * 4).problems[0] == "the fault has not come to pass"
