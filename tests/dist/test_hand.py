"""Gradients by hand: in buckets without hooks, and what average_gradients makes of every kind."""

import asyncio
import contextlib
import math
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from support import inside
from support.alike import of_all_ranks
from support.errors import Call, text_of
from support.models import CASES, noise
from support.naive import collectives, naive_mean, require_same, require_same_gradients
from support.ranks import in_ranks
from support.units import Units
from undertow import (
    BucketedDDPHooks,
    ConfigError,
    DistributedDataParallel,
    GradientBucket,
    GradientBucketManager,
    PhaseError,
    PlanMismatch,
    WrongType,
    average_gradients,
)


def rank_sum() -> float:
    """What a tensor full of rank + 1 becomes."""
    return float(sum(range(1, dist.get_world_size() + 1)))


def require_sums(grads: list[Tensor]) -> None:
    assert {value for grad in grads for value in grad.flatten().tolist()} == {rank_sum()}


def gradients_of_sizes(sizes: list[int]) -> list[Tensor]:
    return [torch.full((size // 4,), float(dist.get_rank() + 1)) for size in sizes]


@in_ranks(2, 3)
def test_the_largest_come_first_and_sums_come_back() -> None:
    grads = gradients_of_sizes([60, 80, 120, 200, 400])
    with GradientBucketManager(None, grads, bucket_size_in_bytes=400) as manager:
        assert (
            [[grad.numel() for grad in bucket.gradients] for bucket in manager.buckets],
            [manager.get_bucket_index(grad) for grad in grads],
        ) == ([[100], [50, 30, 20], [15]], [2, 1, 1, 1, 0])
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
            handle = manager.reduce_all_async(dist.ReduceOp.AVG)
            handle.wait()
            assert handle.is_completed()
            manager.copy_back_all()
            naive_mean(bare)
            require_same_gradients(model, bare)
            pointers.append([bucket.bucket_tensor.data_ptr() for bucket in manager.buckets])
        for bucket in manager.buckets:
            assert (len({grad.dtype for grad in bucket.gradients}), bucket.bucket_tensor.numel()) == (
                1,
                sum(grad.numel() for grad in bucket.gradients),
            )
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
    handle = manager.reduce_all_async()
    for each in (handle, handle, manager.buckets[0].reduction_handle):  # the first is waited for, the others are complete
        await each
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
        "  Run backward first, and leave out tensors that get no gradient."
    )
    assert text_of(PhaseError, bucket.reduce_async) == NOTHING_NEW
    assert text_of(PhaseError, bucket.copy_back) == (
        "bucket 0 has not been reduced.\n  GradientBucket.copy_back\n  Call prepare() and reduce_async() first."
    )
    assert text_of(ConfigError, lambda: manager.get_bucket_index(torch.zeros(3))) == (
        "a tensor of shape (3,) belongs to no bucket.\n"
        "  GradientBucketManager of 1 tensors in 1 buckets\n"
        "  Give this tensor itself to the manager when you make it: the parameter, not a copy or its gradient."
    )
    for index in (1, -1):
        assert text_of(ConfigError, partial(manager.reduce_bucket_async, index)) == (
            f"bucket {index} does not exist.\n  GradientBucketManager of 1 buckets"
        )
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
        assert text == "this GradientBucketManager is closed.\n  GradientBucketManager\n  Make a new one.", name


@in_ranks(2)
def test_nothing_leaves_when_a_gradient_is_missing() -> None:
    """Of the bucket that leaves last: the first must not be on its way to ranks for which this one does not wait."""
    params = [torch.zeros(4, requires_grad=True), torch.zeros(2, requires_grad=True)]
    params[0].grad, params[1].grad = gradients_of_sizes([16, 8])
    params[1].grad = None
    with GradientBucketManager(None, params, bucket_size_in_bytes=16) as manager:
        assert [len(bucket.gradients) for bucket in manager.buckets] == [1, 1]
        assert "is missing" in text_of(ConfigError, manager.reduce_all_async)
        assert [bucket.reduction_handle for bucket in manager.buckets] == [None, None]
        params[1].grad = gradients_of_sizes([8])[0]
        manager.reduce_all_async()
        manager.copy_back_all()
    require_sums([param.grad for param in params])


def made(*tensors: Any, size: float = 8) -> Call:
    return lambda: GradientBucketManager(None, tensors, bucket_size_in_bytes=size)


def made_bucket(*tensors: Tensor, size: float = 8) -> Call:
    return lambda: GradientBucket(3, size, tensors)


TENSOR = torch.zeros(2)
TWICE = torch.zeros(2)
REFUSED: list[tuple[Call, str]] = [
    (
        made(TWICE, torch.zeros(1), TWICE),
        "parameters 0 and 2 are the same tensor, of shape (2,).\n"
        "  GradientBucketManager\n"
        "  Name every parameter once; model.parameters() does so for tied weights.",
    ),
    (
        made(torch.zeros(2, dtype=torch.int64)),
        "parameter 0 has dtype torch.int64, which has no gradients.\n"
        "  GradientBucketManager\n"
        "  Leave integer and boolean tensors out.",
    ),
    (
        made(TENSOR, "weight"),
        "parameter 1 is not a tensor but str.\n  GradientBucketManager\n  Pass model.parameters(), or the gradient tensors.",
    ),
    *(
        (
            made(TENSOR, size=size),
            f"the size of a bucket must be positive, got {size}.\n"
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
        "  Put each dtype and device into separate buckets; GradientBucketManager does.",
    ),
    *(
        (
            made_bucket(TENSOR, size=size),
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


@in_ranks(2)
def test_a_gradient_that_was_replaced_since_the_manager_was_made_is_refused() -> None:
    model = nn.Linear(2, 1)
    model(torch.ones(1, 2)).sum().backward()
    with GradientBucketManager(None, [it.grad for it in model.parameters()]) as manager:
        manager.reduce_all_async()
        manager.copy_back_all()
        model.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        assert text_of(PhaseError, manager.reduce_all_async) == (
            "gradient 0 of bucket 0 is out of date: it is no longer the .grad of its parameter.\n"
            "  a tensor of shape (1, 2)\n"
            "  Give the parameters instead of their gradients, or call zero_grad(set_to_none=False)."
        )


@in_ranks(2)
def test_gradients_that_no_bucket_can_hold_are_refused_by_their_place() -> None:
    layer = nn.Embedding(4, 2, sparse=True)
    layer(torch.tensor([1])).sum().backward()
    with GradientBucketManager(None, layer.parameters()) as manager:
        assert text_of(ConfigError, manager.reduce_all_async) == (
            "gradient 0 of bucket 0 must be dense and of torch.float32, got torch.float32 of layout torch.sparse_coo.\n"
            "  a tensor of shape (4, 2)\n"
            "  Make the bucket after dtypes are set. For a sparse gradient use average_gradients, or DistributedDataParallel."
        )


@in_ranks(2)
def test_a_rank_outside_of_the_group_is_told_so() -> None:
    group = dist.new_group([0])
    if dist.get_rank() == 1:
        with GradientBucketManager(group, [torch.zeros(2)]) as manager:
            text = text_of(WrongType, manager.reduce_all_async)
        assert text.startswith("process_group must be a torch.distributed.ProcessGroup, got ")
    else:
        dist.destroy_process_group(group)


@in_ranks(2)
@pytest.mark.parametrize(("op", "factor"), [(dist.ReduceOp.SUM, 2), (dist.ReduceOp.AVG, 1), ("sum", 2)], ids=str)
def test_a_reduction_can_be_polled_and_awaited_and_takes_torchs_operations(op: Any, factor: int) -> None:
    async def step(reduction: Any) -> None:
        await reduction

    model = nn.Linear(2, 1, bias=False)
    with contextlib.closing(DistributedDataParallel(model)) as ddp:
        for _ in range(2):
            model.zero_grad()
            with ddp.no_sync():
                ddp(torch.ones(1, 2)).sum().backward()
            reduction = ddp.reduce_gradients_async(op)
            asyncio.run(step(reduction))
            assert (reduction.is_completed(), model.weight.grad.tolist()) == (True, [[factor, factor]])


WHERE = "average_gradients(gradients, parameters)"


@in_ranks(2, 3)
@pytest.mark.parametrize("case_name", CASES)
def test_the_mean_is_that_of_an_all_reduce_per_gradient(case_name: str) -> None:
    """Each dtype is one collective. Before them, ranks compare shapes and count the gradients that are there."""
    case = CASES[case_name]
    model = case.model()
    num_dtypes = len({param.dtype for param in model.parameters()})
    for step in range(2):
        local = torch.autograd.grad(case.loss(model, step), list(model.parameters()))
        with collectives() as called:
            averaged = average_gradients(iter(local), model.parameters())  # generators will do
            assert called == ["all_reduce"] * (2 + num_dtypes)
        holder = nn.ParameterList(nn.Parameter(torch.empty_like(gradient)) for gradient in local)
        for param, gradient in zip(holder, local, strict=True):
            param.grad = gradient.detach().clone(memory_format=torch.contiguous_format)
        naive_mean(holder)
        require_same(dict(enumerate(averaged)), {index: param.grad for index, param in enumerate(holder)})


@in_ranks(2, 3)
def test_ranks_may_hold_a_gradient_with_other_strides() -> None:
    """The gradient of each rank lies in memory in another way, and all but one have none."""
    rank, values, num_ranks = dist.get_rank(), noise(3, 4), dist.get_world_size()
    turned = values.t().contiguous().t()
    averaged = average_gradients([turned if rank == 0 else values])
    partly = average_gradients([turned if rank == 0 else None], [torch.zeros(3, 4, requires_grad=True)])
    require_same({"all": averaged[0]}, {"all": sum(noise(3, 4, rank=each) for each in range(num_ranks)) / num_ranks})
    require_same({"one": partly[0]}, {"one": noise(3, 4, rank=0) / num_ranks})


@in_ranks(2)
def test_a_mean_of_16_bits_does_not_overflow_where_the_sum_would() -> None:
    (mean,) = average_gradients([torch.full((3,), 40_000.0, dtype=torch.float16)])
    assert mean.tolist() == [40_000.0] * 3


@in_ranks(2, 3)
def test_an_expanded_gradient_becomes_one_that_can_be_written() -> None:
    """And the same tensor may be the gradient of two."""
    x, y = (torch.zeros(2, 3, requires_grad=True) for _ in range(2))
    gradients = torch.autograd.grad((x + y).sum() * dist.get_rank(), [x, y])
    assert gradients[0].stride() == (0, 0)
    averaged, other = average_gradients(gradients)
    averaged[0, 0] = 7.0
    mean = (dist.get_world_size() - 1) / 2
    assert (averaged.tolist(), other.unique().tolist(), gradients[0].unique().tolist()) == (
        [[7.0, mean, mean], [mean] * 3],
        [mean],
        [dist.get_rank()],
    )


@in_ranks(2, 3)
def test_sparse_gradients_become_dense() -> None:
    """Ranks use different rows; the last one uses none."""
    rank, num_ranks, embedding = dist.get_rank(), dist.get_world_size(), nn.Embedding(4, 1, sparse=True)
    local: tuple[Tensor | None, ...] = (None,)
    if rank < num_ranks - 1:
        local = torch.autograd.grad(embedding(torch.tensor([rank, 3, 3])).sum(), [embedding.weight])
        assert local[0].is_sparse
    (averaged,) = average_gradients(local, embedding.parameters())
    used = [float(row < num_ranks - 1) for row in range(3)]
    assert (averaged * num_ranks).flatten().round().tolist() == [*used, 2.0 * (num_ranks - 1)]


@in_ranks(2, 3)
def test_results_are_cut_off_from_the_graph_and_from_each_other() -> None:
    """Gradients that can be differentiated themselves; the results cannot, and each is a tensor of its own to autograd."""
    x = torch.full((2,), dist.get_rank() + 1.0, requires_grad=True)
    gradients = torch.autograd.grad((x**3).sum(), [x], create_graph=True)
    first, second = average_gradients([*gradients, *gradients])
    assert (first.requires_grad, second.requires_grad) == (False, False)
    weight = torch.ones(2, requires_grad=True)
    loss = (weight * second).sum()
    first.zero_()  # does not touch what the graph of `loss` has saved
    loss.backward()
    gradients[0].sum().backward()
    assert x.grad.tolist() == [6.0 * (dist.get_rank() + 1)] * 2
    mean = sum(3.0 * (rank + 1) ** 2 for rank in range(dist.get_world_size())) / dist.get_world_size()
    assert weight.grad.tolist() == pytest.approx([mean] * 2, rel=1e-6)  # 14 / 3 is no number of fp32


@in_ranks(2, 3)
def test_a_backend_that_cannot_average_gives_the_same() -> None:
    with inside.without_averaging_backends():
        (averaged, _) = average_gradients([torch.full((2,), 6.0 * dist.get_rank()), None], [torch.zeros(2)] * 2)
    assert averaged.tolist() == [3.0 * (dist.get_world_size() - 1)] * 2


PARAM = torch.zeros(2, requires_grad=True)
ORDER = "Pass the parameters that torch.autograd.grad was given, in the same order."
ENTRY = "Pass the gradients that torch.autograd.grad returned, and the parameters that you gave it."
UNKNOWN = "If a gradient is None, pass parameters too: the tensors that you gave to torch.autograd.grad."
LIST = "Pass the tuple that torch.autograd.grad returned, and a tuple or list of the parameters that you gave it."
UNLIKE = "gradient 0 must be like its parameter, (2,) torch.float32 on cpu, got"

NOT_AVERAGED: list[tuple[type[Exception], tuple[Any, ...], str, str]] = [
    (
        ConfigError,
        ([torch.zeros(2), None],),
        "gradient 1 has no parameter that tells its shape.",
        UNKNOWN,
    ),
    (ConfigError, ([None], [PARAM, PARAM]), "there are 1 gradients and 2 parameters.", ORDER),
    (WrongType, ([torch.zeros(2), 3.0],), "gradient 1 must be a tensor or None, got float.", ENTRY),
    (WrongType, ([torch.zeros(2).long()],), "gradient 0 must be floating-point or complex, got torch.int64.", ENTRY),
    (ConfigError, ([torch.zeros(2)], [None]), "gradient 0 has no parameter that tells its shape.", UNKNOWN),
    (WrongType, (torch.zeros(2),), "gradients must be a sequence of tensors, got Tensor.", LIST),
    (WrongType, ([None], PARAM), "parameters must be a sequence of tensors, got Tensor.", LIST),
    (ConfigError, ([torch.zeros(3)], [PARAM]), f"{UNLIKE} (3,) torch.float32 on cpu.", ORDER),
    (ConfigError, ([torch.zeros(2).half()], [PARAM]), f"{UNLIKE} (2,) torch.float16 on cpu.", ORDER),
]


@in_ranks(2)
def test_what_cannot_be_averaged_is_refused_before_anything_is_sent() -> None:
    with collectives() as called:
        for error, arguments, what, remedy in NOT_AVERAGED:
            assert text_of(error, partial(average_gradients, *arguments)) == f"{what}\n  {WHERE}\n  {remedy}"
    assert called == []


@in_ranks(2)
def test_a_call_inside_a_backward_is_refused() -> None:
    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda gradient: average_gradients([gradient])[0])
    assert text_of(PhaseError, x.sum().backward) == (
        f"average_gradients() was called inside a backward.\n  {WHERE}\n"
        "  Call it after torch.autograd.grad has returned: during a backward, ranks may run in different orders."
    )


UNLIKE_RANK_0 = {
    "another shape": ([(2, 3)], [(3, 2)]),
    "another order": ([(4,), (2, 1)], [(2, 1), (4,)]),
    "another size": ([(2, 3)], [(2, 4)]),
    "one more": ([(2, 3)], [(2, 3), (1,)]),
    "none": ([(2, 3)], []),
}


@in_ranks(2, 3)
@pytest.mark.parametrize("name", [*UNLIKE_RANK_0, "another dtype"])
def test_gradients_that_differ_between_ranks_are_an_error_on_every_rank_before_they_are_sent(name: str) -> None:
    first, others = UNLIKE_RANK_0.get(name, ([(2,)], [(2,)]))
    dtype = torch.bfloat16 if name == "another dtype" and dist.get_rank() == 0 else torch.float32
    gradients = [torch.zeros(shape, dtype=dtype) for shape in (others if dist.get_rank() else first)]
    with collectives() as called:
        text = text_of(PlanMismatch, lambda: average_gradients(gradients))
    assert called == ["all_reduce"]
    assert average_gradients([torch.ones(2)])[0].tolist() == [1.0, 1.0]  # nothing is left over from before
    what, where, remedy = text.splitlines()
    before, _, digest = where.rpartition(" ")
    differing = 1 if dist.get_world_size() == 2 else 0  # of two ranks the second, else the one that is alone
    assert (what, before, len(set(of_all_ranks(digest))), remedy) == (
        "ranks gave gradients of different shapes or dtypes, or only some gave parameters.",
        f"  rank {differing} differs; rank {dist.get_rank()}: {len(gradients)} gradients, digest",
        2,
        "  Give the gradients of the same parameters in the same order on every rank.",
    )


@in_ranks(2)
def test_parameters_that_only_one_rank_passes_are_an_error_on_both() -> None:
    gradients = [torch.ones(2)]
    parameters = gradients if dist.get_rank() == 0 else None
    text = text_of(PlanMismatch, lambda: average_gradients(gradients, parameters))
    assert text.startswith("ranks gave gradients of different shapes or dtypes, or only some gave parameters.")
