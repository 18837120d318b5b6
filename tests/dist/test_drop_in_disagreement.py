"""Ranks that change their parameters differently: an error on every rank, in the step in which it happens."""

from __future__ import annotations

import re

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


def require_told(texts: list[str], difference: str) -> None:
    """Every rank has the same text, which names both ranks and the first parameter that differs."""
    last = len(texts) - 1
    assert texts == texts[:1] * len(texts)
    what, counts, told, _ = texts[0].splitlines()
    assert what == "ranks disagree on the parameters."
    assert re.search(rf"^  rank 0: \d parameters, .*   rank {last}: \d parameters, ", counts)
    assert told == f"  first difference: {difference.format(rank=last)}"


# Of what is trained before: 'layers.1.weight', 'layers.1.bias', 'layers.2.weight', 'layers.2.bias'.
ON_ONE_RANK = [
    (unfrozen, "parameter 0 is 'layers.1.weight' on rank 0 and 'layers.0.weight' on rank {rank}"),
    (frozen, "parameter 0 is 'layers.1.weight' on rank 0 and 'layers.2.weight' on rank {rank}"),
    (exchanged, "parameter 0 is 'layers.1.weight' on rank 0 and 'layers.0.weight' on rank {rank}"),
    (parameter_added, "parameter 0 is 'layers.1.weight' on rank 0 and 'shift' on rank {rank}"),
    (submodule_added, "parameter 4 is missing on rank 0 and 'layers.3.weight' on rank {rank}"),
    (submodule_removed, "parameter 2 is 'layers.2.weight' on rank 0 and missing on rank {rank}"),
    (cast_to_double, "dtype of parameter 0 ('layers.1.weight') is float32 on rank 0 and float64 on rank {rank}"),
]


@pytest.mark.parametrize(("change", "difference"), ON_ONE_RANK, ids=lambda it: getattr(it, "__name__", ""))
def test_a_change_on_one_rank_is_an_error_on_all(fresh: Ranks, change: Change, difference: str) -> None:
    require_told(fresh.run(changed_on_some_ranks, {fresh.num_ranks - 1: change}, timeout_s=TIMEOUT_S), difference)


DIFFERENT = [
    (frozen, unfrozen, "parameter 0 is 'layers.2.weight' on rank 0 and 'layers.0.weight' on rank {rank}"),
    (parameter_added, submodule_added, "parameter 0 is 'shift' on rank 0 and 'layers.1.weight' on rank {rank}"),
    (submodule_replaced, submodule_removed, "parameter 2 is 'layers.2.weight' on rank 0 and missing on rank {rank}"),
    (
        cast_to_bfloat16,
        cast_to_double,
        "dtype of parameter 0 ('layers.1.weight') is bfloat16 on rank 0 and float64 on rank {rank}",
    ),
]


@pytest.mark.parametrize(("change", "other", "difference"), DIFFERENT, ids=lambda it: getattr(it, "__name__", ""))
def test_different_changes_are_an_error_on_all(fresh: Ranks, change: Change, other: Change, difference: str) -> None:
    last = fresh.num_ranks - 1
    changes = {**dict.fromkeys(range(last), change), last: other}
    require_told(fresh.run(changed_on_some_ranks, changes, timeout_s=TIMEOUT_S), difference)
