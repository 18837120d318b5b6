"""Which way a bucket travels, and where the mean is divided."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from support.strategies import spec
from undertow import SyncConfig
from undertow.buckets.comm_hook import CommHook
from undertow.buckets.facts import Facts
from undertow.buckets.gradients import FlatGradients
from undertow.buckets.sparse import SparseGradients
from undertow.buckets.transfer import AllReduce, EncodedExchange, HookedReduction, Reducer, SparseReduction, transfer_of
from undertow.device import device_of
from undertow.plan import plan_from_groups
from undertow.ranks.group import Abilities


def reducer(can: Abilities, *, hook: CommHook | None = None, **settings: Any) -> Reducer:
    """The reducer of the first of two ranks. Its group keeps what it is asked to reduce."""
    asked: list[tuple[list[float], Any]] = []

    def keep(tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> None:
        asked.append((tensor.tolist(), op))

    group: Any = SimpleNamespace(num_ranks=2, rank=0, names=range(2), can=can, hardware=device_of(torch.device("cpu")))
    group.all_reduce_unnamed, group.asked = keep, asked
    exchanges: Any = None if settings.get("wire") is None else "exchanges"
    return Reducer(group, SyncConfig(**settings), exchanges, hook)


def call_nothing(state: object, bucket: Any) -> Any:
    """A hook that is never called here."""


@pytest.mark.parametrize(
    ("dtype", "can", "settings", "is_divided_before"),
    [
        (torch.float32, Abilities(average=True), {}, False),
        (torch.float32, Abilities(), {}, True),
        (torch.float32, Abilities(average=True), {"average_in_collective": False}, True),
        # the sum of two ranks could overflow before it is divided
        (torch.float16, Abilities(average=True), {}, True),
        (torch.float16, Abilities(average=True, divide_first=True), {}, False),
    ],
)
def test_values_are_divided_by_the_backend_if_it_can_without_an_overflow(
    dtype: torch.dtype, can: Abilities, settings: dict[str, Any], is_divided_before: bool
) -> None:
    mean = reducer(can, **settings)
    mean.reduce(torch.tensor([4.0], dtype=dtype))
    expected = ([2.0], dist.ReduceOp.SUM) if is_divided_before else ([4.0], dist.ReduceOp.AVG)
    assert mean.group.asked == [expected]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("settings", "is_sparse", "has_hook", "expected", "divisor"),
    [
        ({}, False, False, AllReduce, 2),
        ({"wire": "int8"}, False, False, EncodedExchange, 1),
        ({}, True, False, SparseReduction, 2),
        ({}, True, True, HookedReduction, 2),
        ({}, False, True, HookedReduction, 2),
    ],
)
def test_a_bucket_has_one_transfer_that_knows_how_its_trailer_comes_back(
    settings: dict[str, Any], is_sparse: bool, has_hook: bool, expected: type, divisor: int
) -> None:
    wire = settings.get("wire")
    params = [spec("weight", 1024, is_sparse=is_sparse)]
    plan = plan_from_groups(params, ((0,),), num_ranks=2, wires=wire, block=256 if wire else 1)
    (bucket,) = plan.buckets
    weight = nn.Parameter(torch.zeros(1024))
    gradients = SparseGradients(bucket, [weight]) if is_sparse else FlatGradients(bucket, [weight])
    hook = CommHook(None, call_nothing) if has_hook else None
    transfer = transfer_of(bucket, plan, gradients, reducer(Abilities(), hook=hook, **settings))
    assert type(transfer) is expected
    transfer.trailer.write(unused=(), signature=0, step=0, facts=Facts(numbers={"busy_ms": 8.0}))
    gradients.trailer.div_(divisor)  # the other rank has written a zero
    assert transfer.trailer.numbers("busy_ms") == (8.0, 0.0)
