"""Wrappers that end, are dropped, or are followed by another one."""

from __future__ import annotations

import gc
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn

from support.drop_in import TIMEOUT_S, SideBySide, squares
from support.errors import text_of
from support.ranks import Ranks
from undertow import DistributedDataParallel, PhaseError


def linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(4, 3)


def earlier_wrapper_goes_on(is_closed: bool) -> tuple[str, bool]:
    """What a training forward of the earlier wrapper says when the newer one has ended; whether evaluation still works."""
    module = linear()
    earlier = DistributedDataParallel(module)
    newer = DistributedDataParallel(module)
    earlier(torch.ones(2, 4)).sum().backward()  # the newer one averages
    if is_closed:
        newer.close()
    del newer
    gc.collect()
    text = text_of(PhaseError, lambda: earlier(torch.ones(2, 4)))
    with torch.no_grad():
        works = earlier(torch.ones(2, 4)).shape == (2, 3)
    earlier.close()
    return text, works


@pytest.mark.parametrize("is_closed", [True, False], ids=["closed", "dropped"])
def test_a_wrapper_says_so_when_the_one_that_followed_it_is_gone(two_ranks: Ranks, is_closed: bool) -> None:
    for text, works in two_ranks.run(earlier_wrapper_goes_on, is_closed, timeout_s=TIMEOUT_S):
        assert works
        assert text == (
            "this module was wrapped again, and the newer wrapper is closed or gone: nobody averages its gradients.\n"
            "  parameter 'weight'\n"
            "  Train through the newer wrapper and keep it, or wrap the module anew."
        )


def closed_in_backward() -> str:
    ddp = DistributedDataParallel(linear())
    texts: list[str] = []
    x = torch.ones(2, 4, requires_grad=True)
    x.register_hook(lambda _: texts.append(text_of(PhaseError, ddp.close)))
    ddp(x).sum().backward()
    ddp.close()
    return texts[0]


def test_close_inside_a_backward_is_refused(two_ranks: Ranks) -> None:
    for rank, text in enumerate(two_ranks.run(closed_in_backward)):
        assert text == (
            "close() was called inside a backward.\n"
            f"  rank {rank}\n"
            "  Call it after backward: gradients of this one may be on their way."
        )


def num_groups_left_by_dropped_wrappers() -> int:
    before = len(dist.distributed_c10d._world.pg_map)
    for _ in range(3):
        ddp = DistributedDataParallel(linear())
        ddp(torch.ones(2, 4)).sum().backward()
        del ddp
        gc.collect()
    return len(dist.distributed_c10d._world.pg_map) - before


def test_a_dropped_wrapper_leaves_no_process_group(two_ranks: Ranks) -> None:
    assert two_ranks.run(num_groups_left_by_dropped_wrappers) == [0, 0]


def optimizers_in_backward(through_the_module: bool) -> None:
    """They step on the mean while the module is wrapped, and by themselves again afterwards."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`torch.jit.* is deprecated", DeprecationWarning)  # torch's own use of it
        from torch.distributed.optim import _apply_optimizer_in_backward
    model = linear()
    bare = linear()
    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.125})
    with SideBySide(model, 1e-6, bare=bare) as side:
        called = side.module if through_the_module else side.ddp
        for step in range(3):
            loss = squares(5, 4, step=step)
            bare.zero_grad()
            loss(called).backward()
            loss(bare).backward()
            for param in bare.parameters():
                dist.all_reduce(param.grad)
                param.grad /= dist.get_world_size()
            torch.optim.SGD(bare.parameters(), lr=0.125).step()
            assert all(param.grad is None for param in model.parameters())
            side.compare_parameters()
    before = model.weight.detach().clone()
    loss = squares(5, 4, step=9)(model)
    (wanted,) = torch.autograd.grad(loss, [model.weight], retain_graph=True)
    loss.backward()
    assert torch.equal(model.weight, before - 0.125 * wanted)
    assert model.weight.grad is None


@pytest.mark.parametrize("through_the_module", [False, True], ids=["through the wrapper", "through the module"])
def test_optimizers_in_backward_step_on_the_mean_until_close(two_ranks: Ranks, through_the_module: bool) -> None:
    two_ranks.run(optimizers_in_backward, through_the_module, timeout_s=TIMEOUT_S)
