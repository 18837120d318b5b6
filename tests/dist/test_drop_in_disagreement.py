"""Ranks that change their parameters differently: an error on every rank, in the step in which it happens."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from dist.test_drop_in_changes import (
    Change,
    Layers,
    cast_to_bfloat16,
    cast_to_double,
    exchanged,
    frozen,
    loss,
    new_data,
    parameter_added,
    submodule_added,
    submodule_removed,
    submodule_replaced,
    unfrozen,
)
from support.drop_in import TIMEOUT_S, SideBySide
from support.errors import text_of
from support.ranks import Ranks
from undertow import PlanMismatch


@pytest.fixture(params=["fresh_pair", "fresh_ranks"])
def fresh(request: pytest.FixtureRequest) -> Ranks:
    """Ranks that may be left in any state."""
    return request.getfixturevalue(request.param)


def changed_on_some_ranks(changes: dict[int, Change]) -> str:
    """The error of the step before which each rank changes what `changes` says."""

    def train(step: int) -> None:
        loss(side.ddp, step).backward()
        side.ddp.finish()

    with SideBySide(Layers(), 1e-6) as side:
        for step in range(2):
            train(step)
        changes.get(dist.get_rank(), new_data)(side.module)
        return text_of(PlanMismatch, lambda: train(2))


# What the rank that has changed says of it.
SAID = [
    (unfrozen, "parameter 'layers.0.weight' is trained now"),
    (frozen, "parameter 'layers.1.weight' is not trained any more"),
    (exchanged, "parameter 'layers.1.weight' is not trained any more"),
    (parameter_added, "parameter 'shift' is trained now"),
    (submodule_added, "parameter 'layers.3.weight' is trained now"),
    (submodule_removed, "parameter 'layers.2.weight' is not trained any more"),
    (cast_to_double, "parameter 'layers.1.weight' was (4, 4) float32 on cpu and is (4, 4) float64 on cpu"),
]


@pytest.mark.parametrize(("change", "said"), SAID, ids=lambda it: getattr(it, "__name__", ""))
def test_a_change_on_one_rank_is_an_error_on_all(fresh: Ranks, change: Change, said: str) -> None:
    last = fresh.num_ranks - 1
    for rank, text in enumerate(fresh.run(changed_on_some_ranks, {last: change}, timeout_s=TIMEOUT_S)):
        assert text == (
            f"the parameters have changed on rank {last} and not on rank {', '.join(map(str, range(last)))}.\n"
            f"  synchronisation 2, rank {rank}{f': {said}' if rank == last else ''}\n"
            "  Freeze, unfreeze, add and replace parameters in the same step on every rank."
        )


# Of what is trained before: 'layers.1.weight', 'layers.1.bias', 'layers.2.weight', 'layers.2.bias'.
DIFFERENCES = [
    (frozen, unfrozen, "parameter 0 is 'layers.2.weight' on rank 0 and 'layers.0.weight' on rank {rank}"),
    (parameter_added, submodule_added, "parameter 0 is 'shift' on rank 0 and 'layers.1.weight' on rank {rank}"),
    (submodule_replaced, submodule_removed, "parameter 2 is 'layers.2.weight' on rank 0 and missing on rank {rank}"),
    (
        cast_to_bfloat16,
        cast_to_double,
        "dtype of parameter 0 ('layers.1.weight') is bfloat16 on rank 0 and float64 on rank {rank}",
    ),
]


@pytest.mark.parametrize(("change", "other", "difference"), DIFFERENCES, ids=lambda it: getattr(it, "__name__", ""))
def test_different_changes_are_an_error_on_all(fresh: Ranks, change: Change, other: Change, difference: str) -> None:
    last = fresh.num_ranks - 1
    changes = {**dict.fromkeys(range(last), change), last: other}
    texts = fresh.run(changed_on_some_ranks, changes, timeout_s=TIMEOUT_S)
    assert texts == texts[:1] * fresh.num_ranks
    lines = texts[0].splitlines()
    assert lines[0] == "ranks disagree on the parameters."
    assert lines[2] == f"  first difference: {difference.format(rank=last)}"
