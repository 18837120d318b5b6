"""Buckets by hand, without hooks."""

from __future__ import annotations

import asyncio
import contextlib
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from support.errors import text_of
from support.models import mlp, noise
from support.naive import naive_mean, require_same_gradients
from support.ranks import Ranks, in_ranks
from undertow import BucketedDDPHooks, ConfigError, GradientBucket, GradientBucketManager, PhaseError

SIZES = [100, 50, 30, 20, 15]


def rank_sum(op: str = "sum") -> float:
    """What a tensor full of rank + 1 becomes."""
    total = sum(range(1, dist.get_world_size() + 1))
    return total / dist.get_world_size() if op == "mean" else float(total)


def gradients_of_sizes(sizes: list[int]) -> list[Tensor]:
    return [torch.full((size // 4,), float(dist.get_rank() + 1)) for size in sizes]


def manager_groups_and_reduces() -> tuple[list[list[int]], list[int]]:
    grads = gradients_of_sizes([size * 4 for size in reversed(SIZES)])
    with GradientBucketManager(None, grads, bucket_size_in_bytes=400) as manager:
        sizes = [[grad.numel() for grad in bucket.gradients] for bucket in manager.buckets]
        assert [manager.get_bucket_index(grad) for grad in grads] == [2, 1, 1, 1, 0]
        assert not any(manager.is_reduced(grad) for grad in grads)
        manager.reduce_all_async()
        manager.wait_for_all()
        assert all(manager.is_reduced(grad) for grad in grads)
        assert not any(torch.equal(grad, torch.full_like(grad, rank_sum())) for grad in grads)
        manager.copy_back_all()
    assert all(torch.equal(grad, torch.full_like(grad, rank_sum())) for grad in grads)
    return sizes, list(map(sum, sizes))


def test_the_largest_come_first_and_sums_come_back(ranks: Ranks) -> None:
    for sizes, totals in ranks.run(manager_groups_and_reduces):
        assert sizes == [[100], [50, 30, 20], [15]]
        assert totals == [100, 100, 15]


@in_ranks(2, 3)
def test_the_means_of_parameters_come_back_into_their_gradients() -> None:
    """Parameters stand for their `.grad`; storage is allocated once."""
    model, bare = mlp(), mlp()
    bare.load_state_dict(model.state_dict())
    dtypes = [torch.float32, torch.float64, torch.bfloat16]
    others = [torch.zeros(3, dtype=dtype, requires_grad=True) for dtype in dtypes]
    pointers = []
    with GradientBucketManager(dist.group.WORLD, [*model.parameters(), *others], bucket_size_in_bytes=200) as manager:
        for step in range(3):
            for each in (model, bare):
                each.zero_grad()
                each(noise(2, 6, step=step)).sum().backward()
            for other in others:
                other.grad = torch.full_like(other, dist.get_rank() + 1)
            handles = manager.reduce_all_async(dist.ReduceOp.AVG)
            assert len(handles) == len(manager.buckets)
            manager.copy_back_all()
            naive_mean(bare)
            require_same_gradients(model, bare)
            for other in others:
                assert torch.equal(other.grad, torch.full_like(other, rank_sum("mean")))
            pointers.append([bucket.bucket_tensor.data_ptr() for bucket in manager.buckets])
        for bucket in manager.buckets:
            assert len({grad.dtype for grad in bucket.gradients}) == 1
            assert bucket.bucket_tensor.numel() == sum(grad.numel() for grad in bucket.gradients)
    assert pointers == pointers[:1] * 3


def bucket_by_hand() -> list[bool]:
    grads = [torch.full((2, 3), float(dist.get_rank() + 1)), torch.full((4,), 10.0)]
    bucket = GradientBucket(bucket_index=5, size_in_bytes=64, gradients=grads)
    assert (bucket.bucket_index, bucket.size_in_bytes, bucket.offsets) == (5, 64, [0, 6])
    states = [bucket.is_reduced]
    bucket.prepare()
    assert torch.equal(bucket.bucket_tensor, torch.cat([grad.flatten() for grad in grads]))
    states.append(bucket.is_reduced)
    handle = bucket.reduce_async()
    assert handle is bucket.reduction_handle
    while not handle.is_completed():
        pass
    states.append(bucket.is_reduced)
    bucket.copy_back()
    handle.wait()  # a second time, and after the polling, is fine
    assert torch.equal(grads[0], torch.full((2, 3), rank_sum()))
    bucket.prepare()
    return [*states, bucket.is_reduced]


def test_a_bucket_is_reduced_until_it_is_prepared_again(ranks: Ranks) -> None:
    assert ranks.run(bucket_by_hand) == [[False, False, True, False]] * ranks.num_ranks


async def gathered(manager: GradientBucketManager) -> int:
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0)

    ticker = asyncio.ensure_future(tick())
    handles = manager.reduce_all_async()
    for handle in handles:
        await handle
    await handles[0]  # long complete
    ticker.cancel()
    return ticks


def awaited() -> bool:
    grads = gradients_of_sizes([400, 200])
    with GradientBucketManager(None, grads, bucket_size_in_bytes=400) as manager:
        ticks = asyncio.run(gathered(manager))
        manager.copy_back_all()
    return ticks > 0 and all(torch.equal(grad, torch.full_like(grad, rank_sum())) for grad in grads)


def test_handles_can_be_awaited(ranks: Ranks) -> None:
    assert all(ranks.run(awaited))


def errors_of_phases() -> dict[str, str]:
    param = torch.zeros(2, requires_grad=True)
    bucket = GradientBucket(0, 8, [param])
    manager = GradientBucketManager(None, [param])
    texts = {
        "missing": text_of(ConfigError, bucket.prepare),
        "unprepared": text_of(PhaseError, bucket.reduce_async),
        "unreduced": text_of(PhaseError, bucket.copy_back),
        "no bucket": text_of(ConfigError, lambda: manager.get_bucket_index(torch.zeros(3))),
        "no index": text_of(ConfigError, lambda: manager.reduce_bucket_async(1)),
        "negative index": text_of(ConfigError, lambda: manager.reduce_bucket_async(-1)),
    }
    param.grad = torch.ones(2)
    bucket.prepare()
    bucket.reduce_async().wait()
    texts["reduced twice"] = text_of(PhaseError, bucket.reduce_async)
    bucket.copy_back()
    texts["copied twice"] = text_of(PhaseError, bucket.copy_back)
    bucket.prepare()
    bucket.reduce_async()
    texts["prepared in flight"] = text_of(PhaseError, bucket.prepare)
    bucket.reduction_handle.wait()
    bucket.prepare()
    return texts


def test_calls_in_the_wrong_order_are_refused(two_ranks: Ranks) -> None:
    nothing_new = (
        "bucket 0 holds no new gradients to reduce.\n"
        "  GradientBucket.reduce_async\n"
        "  Call prepare() after every backward, and reduce once."
    )
    for texts in two_ranks.run(errors_of_phases):
        assert texts == {
            "missing": "gradient 0 of bucket 0 is missing: its .grad is None.\n"
            "  a tensor of shape (2,)\n"
            "  Run backward first, and leave tensors out that get no gradient.",
            "unprepared": nothing_new,
            "unreduced": "bucket 0 has not been reduced.\n  GradientBucket.copy_back\n  Call prepare() and reduce_async() first.",
            "no bucket": "a tensor of shape (3,) belongs to no bucket.\n"
            "  GradientBucketManager of 1 tensors in 1 buckets\n"
            "  Give the manager this very tensor when you make it (the parameter, not a copy or its gradient).",
            "no index": "there is no bucket 1.\n  GradientBucketManager of 1 buckets",
            "negative index": "there is no bucket -1.\n  GradientBucketManager of 1 buckets",
            "reduced twice": nothing_new,
            "copied twice": "bucket 0 has no new result: it has been copied back already.\n"
            "  GradientBucket.copy_back\n"
            "  Call prepare() and reduce_async() after every backward, and copy back once.",
            "prepared in flight": "bucket 0 is still being reduced.\n"
            "  GradientBucket.prepare\n"
            "  Wait for reduction_handle first.",
        }


CALLS_OF_A_MANAGER = {
    "reduce_bucket_async": lambda manager, _: manager.reduce_bucket_async(0),
    "reduce_all_async": lambda manager, _: manager.reduce_all_async(),
    "wait_for_all": lambda manager, _: manager.wait_for_all(),
    "copy_back_all": lambda manager, _: manager.copy_back_all(),
    "get_bucket_index": lambda manager, grad: manager.get_bucket_index(grad),
    "is_reduced": lambda manager, grad: manager.is_reduced(grad),
}


def closed_manager(is_context: bool) -> dict[str, str]:
    grads = gradients_of_sizes([8, 4])
    manager = GradientBucketManager(None, grads)
    with manager if is_context else contextlib.nullcontext():
        manager.reduce_all_async()
        manager.copy_back_all()
    manager.close()
    manager.close()  # a second time does nothing
    return {name: text_of(PhaseError, lambda call=call: call(manager, grads[0])) for name, call in CALLS_OF_A_MANAGER.items()}


@pytest.mark.parametrize("is_context", [False, True], ids=["close", "with"])
def test_every_call_of_a_closed_manager_is_refused(two_ranks: Ranks, is_context: bool) -> None:
    for texts in two_ranks.run(closed_manager, is_context):
        assert texts == {
            name: f"this GradientBucketManager is closed.\n  GradientBucketManager.{name}\n  Make a new one."
            for name in CALLS_OF_A_MANAGER
        }


def one_missing_gradient() -> bool:
    """Of the bucket that leaves last: the first must not be on its way to ranks for which this one does not wait."""
    params = [torch.zeros(4, requires_grad=True), torch.zeros(2, requires_grad=True)]
    params[0].grad = torch.full((4,), float(dist.get_rank() + 1))
    with GradientBucketManager(None, params, bucket_size_in_bytes=16) as manager:
        assert [len(bucket.gradients) for bucket in manager.buckets] == [1, 1]
        text_of(ConfigError, manager.reduce_all_async)
        assert [bucket.reduction_handle for bucket in manager.buckets] == [None, None]
        params[1].grad = torch.full((2,), float(dist.get_rank() + 1))
        manager.reduce_all_async()
        manager.copy_back_all()
    return all(torch.equal(param.grad, torch.full_like(param, rank_sum())) for param in params)


def test_nothing_leaves_when_a_gradient_is_missing(two_ranks: Ranks) -> None:
    assert two_ranks.run(one_missing_gradient) == [True, True]


def copied_one_by_one() -> list[str]:
    grads = gradients_of_sizes([16, 8])
    with GradientBucketManager(None, grads, bucket_size_in_bytes=16) as manager:
        manager.reduce_bucket_async(0)
        texts = [text_of(PhaseError, manager.copy_back_all)]
        assert torch.equal(grads[0], torch.full_like(grads[0], dist.get_rank() + 1.0))  # nothing was copied
        manager.buckets[0].copy_back()
        grads[0].mul_(2)  # and stays
        manager.reduce_bucket_async(1)
        manager.copy_back_all()
        assert [grad[0].item() for grad in grads] == [2 * rank_sum(), rank_sum()]
        return [*texts, text_of(PhaseError, manager.copy_back_all)]


def test_results_are_copied_back_once(two_ranks: Ranks) -> None:
    for texts in two_ranks.run(copied_one_by_one):
        assert [text.splitlines()[0] for text in texts] == [
            "bucket 1 has not been reduced.",
            "bucket 0 has no new result: it has been copied back already.",
        ]


@in_ranks(2)
def test_hooks_may_be_closed_twice() -> None:
    model = mlp()
    hooks = BucketedDDPHooks(model, dist.group.WORLD)
    hooks.close()
    hooks.close()


TWICE = torch.zeros(2)
ARGUMENTS: dict[str, tuple[list[Any], float, str]] = {
    "twice": (
        [TWICE, torch.zeros(1), TWICE],
        8,
        "parameters 0 and 2 are the same tensor, of shape (2,).\n"
        "  GradientBucketManager\n"
        "  Name every parameter once; model.parameters() does so for tied weights.",
    ),
    "no tensor": (
        [TWICE, "weight"],
        8,
        "parameter 1 is no tensor but str.\n  GradientBucketManager\n  Pass model.parameters(), or the gradient tensors.",
    ),
    "integers": (
        [torch.zeros(2, dtype=torch.int64)],
        8,
        "parameter 0 has dtype torch.int64, which has no gradients.\n"
        "  GradientBucketManager\n"
        "  Leave integer and boolean tensors out.",
    ),
    **{
        f"size {size}": (
            [TWICE],
            size,
            f"a bucket size must be positive, got cap_bytes={size}.\n"
            "  the largest sizes of buckets\n"
            "  Give a size above zero; math.inf puts everything into one bucket.",
        )
        for size in (0, -1, math.nan)
    },
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_a_manager_refuses_what_cannot_work(name: str) -> None:
    tensors, size, text = ARGUMENTS[name]
    assert text_of(ConfigError, lambda: GradientBucketManager(None, tensors, bucket_size_in_bytes=size)) == text


BUCKETS: dict[str, tuple[float, list[Tensor], str]] = {
    "empty": (8, [], "bucket 3 is empty.\n  GradientBucket\n  Give it at least one gradient."),
    "mixed": (
        99,
        [torch.zeros(1), torch.zeros(1, dtype=torch.float64)],
        "bucket 3 mixes gradients of (torch.float32, device(type='cpu')) and (torch.float64, device(type='cpu')).\n"
        "  GradientBucket\n"
        "  Put each dtype and device into buckets of its own; GradientBucketManager does.",
    ),
    **{
        f"size {size}": (
            size,
            [torch.zeros(2)],
            f"bucket 3 of {size} bytes cannot hold 8 bytes of gradients.\n"
            "  GradientBucket\n"
            "  Give a positive size that is large enough.",
        )
        for size in (7, 0, -1, math.nan)
    },
}


@pytest.mark.parametrize("name", BUCKETS)
def test_a_bucket_refuses_what_cannot_work(name: str) -> None:
    size, tensors, text = BUCKETS[name]
    assert text_of(ConfigError, lambda: GradientBucket(3, size, tensors)) == text


def empty_manager() -> int:
    with GradientBucketManager(None, []) as manager:
        manager.reduce_all_async()
        manager.copy_back_all()
        return len(manager.buckets)


def test_a_manager_of_nothing_has_no_buckets(two_ranks: Ranks) -> None:
    assert two_ranks.run(empty_manager) == [0, 0]


@in_ranks(2, 3)
def test_hooks_reduce_a_bare_models_gradients_until_they_are_closed() -> None:
    model, bare = mlp(), mlp()
    bare.load_state_dict(model.state_dict())
    hooks = BucketedDDPHooks(model, dist.group.WORLD, bucket_size_mb=1e-4)
    for step in range(2):
        for each in (model, bare):
            each.zero_grad()
            each(noise(2, 6, step=step)).sum().backward()
        naive_mean(bare)
        require_same_gradients(model, bare)
    hooks.close()
    for each in (model, bare):
        each.zero_grad()
        each(noise(2, 6)).sum().backward()
    require_same_gradients(model, bare)
