"""Buckets by hand, without hooks."""

from __future__ import annotations

import asyncio
import contextlib
import math
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from support.errors import Call, text_of
from support.models import noise
from support.naive import naive_mean, require_same_gradients
from support.ranks import in_ranks
from support.units import Units
from undertow import BucketedDDPHooks, ConfigError, GradientBucket, GradientBucketManager, PhaseError


def rank_sum() -> float:
    """What a tensor full of rank + 1 becomes."""
    return float(sum(range(1, dist.get_world_size() + 1)))


def require_sums(grads: list[Tensor]) -> None:
    """Of tensors that were full of rank + 1."""
    assert {value for grad in grads for value in grad.flatten().tolist()} == {rank_sum()}


def gradients_of_sizes(sizes: list[int]) -> list[Tensor]:
    return [torch.full((size // 4,), float(dist.get_rank() + 1)) for size in sizes]


@in_ranks(2, 3)
def test_the_largest_come_first_and_sums_come_back() -> None:
    grads = gradients_of_sizes([60, 80, 120, 200, 400])
    with GradientBucketManager(None, grads, bucket_size_in_bytes=400) as manager:
        assert [[grad.numel() for grad in bucket.gradients] for bucket in manager.buckets] == [[100], [50, 30, 20], [15]]
        assert [manager.get_bucket_index(grad) for grad in grads] == [2, 1, 1, 1, 0]
        assert not any(manager.is_reduced(grad) for grad in grads)
        manager.reduce_all_async()
        manager.wait_for_all()
        assert all(manager.is_reduced(grad) for grad in grads)
        assert {grad[0].item() for grad in grads} == {dist.get_rank() + 1}
        manager.copy_back_all()
    require_sums(grads)


@in_ranks(2, 3)
def test_the_means_of_parameters_come_back_into_their_gradients() -> None:
    """Parameters stand for their `.grad`; storage is allocated once."""
    model, bare, pointers = Units("linear double bfloat16"), Units("linear double bfloat16"), []
    with GradientBucketManager(dist.group.WORLD, model.parameters(), bucket_size_in_bytes=100) as manager:
        for step in range(3):
            for each in (model, bare):
                each.zero_grad()
                each(noise(2, 4, step=step), "012").sum().backward()
            assert len(manager.reduce_all_async(dist.ReduceOp.AVG)) == len(manager.buckets)
            manager.copy_back_all()
            naive_mean(bare)
            require_same_gradients(model, bare)
            pointers.append([bucket.bucket_tensor.data_ptr() for bucket in manager.buckets])
        for bucket in manager.buckets:
            assert len({grad.dtype for grad in bucket.gradients}) == 1
            assert bucket.bucket_tensor.numel() == sum(grad.numel() for grad in bucket.gradients)
    assert pointers == pointers[:1] * 3


@in_ranks(2, 3)
def test_a_bucket_is_reduced_until_it_is_prepared_again() -> None:
    grads = [torch.full((2, 3), float(dist.get_rank() + 1)), torch.full((4,), 10.0)]
    bucket = GradientBucket(bucket_index=5, size_in_bytes=64, gradients=grads)
    assert (bucket.bucket_index, bucket.size_in_bytes, bucket.offsets) == (5, 64, [0, 6])
    assert not bucket.is_reduced
    bucket.prepare()
    assert torch.equal(bucket.bucket_tensor, torch.cat([grad.flatten() for grad in grads]))
    assert not bucket.is_reduced
    handle = bucket.reduce_async()
    assert handle is bucket.reduction_handle
    while not handle.is_completed():
        pass
    assert bucket.is_reduced
    bucket.copy_back()
    handle.wait()  # a second time, and after the polling, is fine
    require_sums(grads[:1])
    bucket.prepare()
    assert not bucket.is_reduced


async def gathered(manager: GradientBucketManager) -> int:
    """How often something else ran meanwhile."""
    ticks = []

    async def tick() -> None:
        while True:
            ticks.append(await asyncio.sleep(0))

    ticker = asyncio.ensure_future(tick())
    handles = manager.reduce_all_async()
    for handle in (*handles, handles[0]):  # which is long complete
        await handle
    ticker.cancel()
    return len(ticks)


@in_ranks(2, 3)
def test_handles_can_be_awaited() -> None:
    grads = gradients_of_sizes([400, 200])
    with GradientBucketManager(None, grads, bucket_size_in_bytes=400) as manager:
        assert asyncio.run(gathered(manager)) > 0
        manager.copy_back_all()
    require_sums(grads)


NOTHING_NEW = (
    "bucket 0 holds no new gradients to reduce.\n"
    "  GradientBucket.reduce_async\n"
    "  Call prepare() after every backward, and reduce once."
)


@in_ranks(2)
def test_calls_in_the_wrong_order_are_refused() -> None:
    param = torch.zeros(2, requires_grad=True)
    bucket, manager = GradientBucket(0, 8, [param]), GradientBucketManager(None, [param])
    assert text_of(ConfigError, bucket.prepare) == (
        "gradient 0 of bucket 0 is missing: its .grad is None.\n"
        "  a tensor of shape (2,)\n"
        "  Run backward first, and leave tensors out that get no gradient."
    )
    assert text_of(PhaseError, bucket.reduce_async) == NOTHING_NEW
    assert text_of(PhaseError, bucket.copy_back) == (
        "bucket 0 has not been reduced.\n  GradientBucket.copy_back\n  Call prepare() and reduce_async() first."
    )
    assert text_of(ConfigError, lambda: manager.get_bucket_index(torch.zeros(3))) == (
        "a tensor of shape (3,) belongs to no bucket.\n"
        "  GradientBucketManager of 1 tensors in 1 buckets\n"
        "  Give the manager this very tensor when you make it (the parameter, not a copy or its gradient)."
    )
    for index in (1, -1):
        text = text_of(ConfigError, partial(manager.reduce_bucket_async, index))
        assert text == f"there is no bucket {index}.\n  GradientBucketManager of 1 buckets"
    param.grad = torch.ones(2)
    bucket.prepare()
    bucket.reduce_async().wait()
    assert text_of(PhaseError, bucket.reduce_async) == NOTHING_NEW
    bucket.copy_back()
    assert text_of(PhaseError, bucket.copy_back) == (
        "bucket 0 has no new result: it has been copied back already.\n"
        "  GradientBucket.copy_back\n"
        "  Call prepare() and reduce_async() after every backward, and copy back once."
    )
    bucket.prepare()
    bucket.reduce_async()
    assert text_of(PhaseError, bucket.prepare) == (
        "bucket 0 is still being reduced.\n  GradientBucket.prepare\n  Wait for reduction_handle first."
    )
    bucket.reduction_handle.wait()
    bucket.prepare()


CALLS_OF_A_MANAGER = {
    "reduce_bucket_async": lambda manager, _: manager.reduce_bucket_async(0),
    "reduce_all_async": lambda manager, _: manager.reduce_all_async(),
    "wait_for_all": lambda manager, _: manager.wait_for_all(),
    "copy_back_all": lambda manager, _: manager.copy_back_all(),
    "get_bucket_index": lambda manager, grad: manager.get_bucket_index(grad),
    "is_reduced": lambda manager, grad: manager.is_reduced(grad),
}


@in_ranks(2)
@pytest.mark.parametrize("is_context", [False, True], ids=["close", "with"])
def test_every_call_of_a_closed_manager_is_refused(is_context: bool) -> None:
    grads = gradients_of_sizes([8, 4])
    manager = GradientBucketManager(None, grads)
    with manager if is_context else contextlib.nullcontext():
        manager.reduce_all_async()
        manager.copy_back_all()
    for _ in range(2):  # a second time does nothing
        manager.close()
    for name, call in CALLS_OF_A_MANAGER.items():
        text = text_of(PhaseError, partial(call, manager, grads[0]))
        assert text == f"this GradientBucketManager is closed.\n  GradientBucketManager.{name}\n  Make a new one."


@in_ranks(2)
def test_nothing_leaves_when_a_gradient_is_missing() -> None:
    """Of the bucket that leaves last: the first must not be on its way to ranks for which this one does not wait."""
    params = [torch.zeros(4, requires_grad=True), torch.zeros(2, requires_grad=True)]
    params[0].grad, params[1].grad = gradients_of_sizes([16, 8])
    params[1].grad = None
    with GradientBucketManager(None, params, bucket_size_in_bytes=16) as manager:
        assert [len(bucket.gradients) for bucket in manager.buckets] == [1, 1]
        with pytest.raises(ConfigError, match="is missing"):
            manager.reduce_all_async()
        assert [bucket.reduction_handle for bucket in manager.buckets] == [None, None]
        params[1].grad = gradients_of_sizes([8])[0]
        manager.reduce_all_async()
        manager.copy_back_all()
    require_sums([param.grad for param in params])


@in_ranks(2)
def test_results_are_copied_back_once() -> None:
    grads = gradients_of_sizes([16, 8])
    with GradientBucketManager(None, grads, bucket_size_in_bytes=16) as manager:
        manager.reduce_bucket_async(0)
        with pytest.raises(PhaseError, match=r"bucket 1 has not been reduced\."):
            manager.copy_back_all()
        assert grads[0].tolist() == [dist.get_rank() + 1.0] * 4  # nothing was copied
        manager.buckets[0].copy_back()
        grads[0].mul_(2)  # and stays
        manager.reduce_bucket_async(1)
        manager.copy_back_all()
        assert [grad[0].item() for grad in grads] == [2 * rank_sum(), rank_sum()]
        with pytest.raises(PhaseError, match=r"bucket 0 has no new result: it has been copied back already\."):
            manager.copy_back_all()


def made(*tensors: Any, size: float = 8) -> Call:
    return lambda: GradientBucketManager(None, tensors, bucket_size_in_bytes=size)


def made_bucket(*tensors: Tensor, size: float = 8) -> Call:
    return lambda: GradientBucket(3, size, tensors)


TWICE = torch.zeros(2)
REFUSED: list[tuple[Call, str]] = [
    (
        made(TWICE, torch.zeros(1), TWICE),
        "parameters 0 and 2 are the same tensor, of shape (2,).\n"
        "  GradientBucketManager\n"
        "  Name every parameter once; model.parameters() does so for tied weights.",
    ),
    (
        made(TWICE, "weight"),
        "parameter 1 is no tensor but str.\n  GradientBucketManager\n  Pass model.parameters(), or the gradient tensors.",
    ),
    (
        made(torch.zeros(2, dtype=torch.int64)),
        "parameter 0 has dtype torch.int64, which has no gradients.\n"
        "  GradientBucketManager\n"
        "  Leave integer and boolean tensors out.",
    ),
    *(
        (
            made(TWICE, size=size),
            f"a bucket size must be positive, got cap_bytes={size}.\n"
            "  the largest sizes of buckets\n"
            "  Give a size above zero; math.inf puts everything into one bucket.",
        )
        for size in (0, -1, math.nan)
    ),
    (made_bucket(), "bucket 3 is empty.\n  GradientBucket\n  Give it at least one gradient."),
    (
        made_bucket(torch.zeros(1), torch.zeros(1, dtype=torch.float64), size=99),
        "bucket 3 mixes gradients of (torch.float32, device(type='cpu')) and (torch.float64, device(type='cpu')).\n"
        "  GradientBucket\n"
        "  Put each dtype and device into buckets of its own; GradientBucketManager does.",
    ),
    *(
        (
            made_bucket(TWICE, size=size),
            f"bucket 3 of {size} bytes cannot hold 8 bytes of gradients.\n"
            "  GradientBucket\n"
            "  Give a positive size that is large enough.",
        )
        for size in (7, 0, -1, math.nan)
    ),
]


@pytest.mark.parametrize(("call", "text"), REFUSED)
def test_what_cannot_work_is_refused(call: Call, text: str) -> None:
    assert text_of(ConfigError, call) == text


@in_ranks(2)
def test_a_manager_of_nothing_has_no_buckets() -> None:
    with GradientBucketManager(None, []) as manager:
        manager.reduce_all_async()
        manager.copy_back_all()
        assert len(manager.buckets) == 0


@in_ranks(2, 3)
def test_hooks_reduce_a_bare_models_gradients_until_they_are_closed() -> None:
    model, bare = Units("linear linear"), Units("linear linear")
    hooks = BucketedDDPHooks(model, dist.group.WORLD, bucket_size_mb=1e-4)
    for step in range(3):
        for each in (model, bare):
            each.zero_grad()
            each(noise(2, 4, step=step), "01").sum().backward()
        if step < 2:
            naive_mean(bare)
        require_same_gradients(model, bare)
        if step > 0:  # the second time it does nothing
            hooks.close()
