"""Communication hooks: torch's own, and one that writes down what it is given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, fp16_compress_hook

from support.drop_in import TIMEOUT_S, SideBySide, squares, with_both_plans
from support.models import Branches, mlp, noise
from support.naive import require_same_gradients
from support.ranks import in_ranks

NUM_STEPS = 3


def naive_fp16_mean(model: nn.Module) -> None:
    """What the hook does, parameter by parameter: halves travel, divided beforehand."""
    for param in model.parameters():
        half = param.grad.half() / dist.get_world_size()
        dist.all_reduce(half)
        param.grad.copy_(half)


def compare(side: SideBySide, hook: Callable[..., Any]) -> None:
    if hook is allreduce_hook:
        side.compare()
        return
    naive_fp16_mean(side.bare)
    for ours, wanted in zip(side.module.parameters(), side.bare.parameters(), strict=True):
        # With three ranks two roundings of partial sums in fp16, each of at most about the largest value.
        tolerance = 2 * torch.finfo(torch.float16).eps * float(wanted.grad.abs().max()) * (dist.get_world_size() > 2)
        torch.testing.assert_close(ours.grad, wanted.grad, rtol=0.0, atol=tolerance)
        wanted.grad.copy_(ours.grad)  # what is compared next begins with the same bits


TORCHS_HOOKS = pytest.mark.parametrize("hook", [allreduce_hook, fp16_compress_hook])


@in_ranks(2, 3, timeout_s=TIMEOUT_S)
@with_both_plans
@TORCHS_HOOKS
def test_a_hook_of_torchs_reduces(hook: Callable[..., Any], bucket_cap_mb: float | None) -> None:
    with SideBySide(mlp(), bucket_cap_mb) as side:
        side.ddp.register_comm_hook(None, hook)
        for step in range(NUM_STEPS):
            side.zero_grad()
            side.backward(squares(5, 6, step=step))
            compare(side, hook)
            side.optimize()


@in_ranks(2, 3, timeout_s=TIMEOUT_S)
@with_both_plans
@TORCHS_HOOKS
def test_a_hook_reduces_what_was_accumulated(hook: Callable[..., Any], bucket_cap_mb: float | None) -> None:
    with SideBySide(mlp(), bucket_cap_mb) as side:
        side.ddp.register_comm_hook(dist.group.WORLD, hook)
        for step in range(NUM_STEPS):
            side.zero_grad()
            with side.accumulating():
                side.backward(squares(5, 6, step=2 * step))
                require_same_gradients(side.ddp, side.bare)  # nothing was sent, nor halved
            side.backward(squares(5, 6, step=2 * step + 1))
            compare(side, hook)
            side.optimize()


@in_ranks(2, 3, timeout_s=TIMEOUT_S)
@with_both_plans
def test_a_hook_adds_to_gradients_that_were_kept(bucket_cap_mb: float | None) -> None:
    with SideBySide(mlp(), bucket_cap_mb) as side:
        side.ddp.register_comm_hook(None, allreduce_hook)
        for step in range(NUM_STEPS):
            side.backward(squares(5, 6, step=step))
            side.compare()


# By step, what each rank uses; a third rank uses what the first one does.
USES = {
    "unused on rank 1": [((0, 1, 2), (0, 2))] * NUM_STEPS,
    "unused on all ranks": [((0, 2), (0, 2))] * NUM_STEPS,
    "another one in every step": [((0,), (1, 2)), ((1,), (0,)), ((0, 1, 2), (2,))],
}


@in_ranks(2, 3, timeout_s=TIMEOUT_S)
@with_both_plans
@pytest.mark.parametrize("name", USES)
def test_a_hook_allows_unused_parameters(name: str, bucket_cap_mb: float | None) -> None:
    with SideBySide(Branches(), bucket_cap_mb) as side:
        side.ddp.register_comm_hook(None, allreduce_hook)
        for step, uses in enumerate(USES[name]):
            order = uses[dist.get_rank() % 2]
            side.step(lambda model, step=step, order=order: model(noise(2, 4, step=step), order).square().mean())


def completed(value: Tensor) -> torch.futures.Future[Tensor]:
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(value)
    return future


@dataclass
class Seen:
    """What a hook was given in one backward."""

    indices: list[int] = field(default_factory=list)
    are_last: list[bool] = field(default_factory=list)
    params: list[Tensor] = field(default_factory=list)


# Without annotations, as torch's own wrapper demands: it compares them, and these would be text.
def look_around(seen, bucket):
    """Checks the six methods of torch's GradBucket, and reduces nothing."""
    buffer, gradients, params = bucket.buffer(), bucket.gradients(), bucket.parameters()
    assert buffer.dim() == 1
    assert buffer.numel() == sum(param.numel() for param in params)  # without padding or trailer
    assert [gradient.shape for gradient in gradients] == [param.shape for param in params]
    begin = buffer.data_ptr()
    assert all(begin <= gradient.data_ptr() < begin + buffer.nbytes for gradient in gradients)
    seen.indices.append(bucket.index())
    seen.are_last.append(bucket.is_last())
    seen.params.extend(params)
    return completed(buffer)


@in_ranks(2, 3, timeout_s=TIMEOUT_S)
@with_both_plans
def test_a_hook_is_given_a_bucket_with_torchs_methods(bucket_cap_mb: float | None) -> None:
    with SideBySide(mlp(), bucket_cap_mb) as side:
        seen = Seen()
        side.ddp.register_comm_hook(seen, look_around)
        for step in range(NUM_STEPS):
            seen.indices, seen.are_last, seen.params = [], [], []
            side.zero_grad()
            with side.accumulating():
                side.backward(squares(5, 6, step=2 * step))
            assert seen.indices == []  # the hook is for what is sent
            side.backward(squares(5, 6, step=2 * step + 1))
            num_buckets = len(seen.indices)
            assert num_buckets == (4 if bucket_cap_mb else 1)
            assert seen.indices == list(range(num_buckets))
            assert seen.are_last == [index == num_buckets - 1 for index in range(num_buckets)]
            assert {id(param) for param in seen.params} == {id(param) for param in side.module.parameters()}
            require_same_gradients(side.ddp, side.bare)  # the hook has not reduced them


def triple(_state, bucket):
    return completed(3 * bucket.buffer())


def triple_by_set_buffer(_state, bucket):
    bucket.set_buffer(3 * bucket.buffer())
    return completed(bucket.buffer())


def triple_in_place(_state, bucket):
    for gradient in bucket.gradients():
        gradient.mul_(3)
    return completed(bucket.buffer())


def triple_in_a_chain(_state, bucket):
    return completed(bucket.buffer()).then(lambda future: 3 * future.value())


@in_ranks(2, 3, timeout_s=TIMEOUT_S)
@with_both_plans
@pytest.mark.parametrize("hook", [triple, triple_by_set_buffer, triple_in_place, triple_in_a_chain])
def test_what_the_future_of_a_hook_holds_becomes_the_gradient(hook: Callable[..., Any], bucket_cap_mb: float | None) -> None:
    with SideBySide(mlp(), bucket_cap_mb) as side:
        side.ddp.register_comm_hook(None, hook)
        for step in range(NUM_STEPS):
            side.zero_grad()
            side.backward(squares(5, 6, step=step))
            for param in side.bare.parameters():
                param.grad *= 3
            require_same_gradients(side.ddp, side.bare)


@in_ranks(2, 3, timeout_s=TIMEOUT_S)
@with_both_plans
def test_a_change_is_followed_under_a_hook(bucket_cap_mb: float | None) -> None:
    """A layer is frozen, and another one unfrozen, while a hook owns the buckets."""
    model = Branches()
    model.layers[0].requires_grad_(False)
    with SideBySide(model, bucket_cap_mb) as side:
        side.ddp.register_comm_hook(None, allreduce_hook)
        for step in range(4):
            if step == 2:
                for module in side.both_modules:
                    module.layers[0].requires_grad_(True)
                    module.layers[1].requires_grad_(False)
            side.step(squares(2, 4, step=step))
