"""Wrappers that end, are dropped, or are followed by another one."""

from __future__ import annotations

import gc
import warnings
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from support.drop_in import TIMEOUT_S, SideBySide, require_same_on_every_rank, squares
from support.errors import text_of
from support.models import noise
from support.ranks import Ranks, in_ranks
from undertow import DistributedDataParallel, PhaseError, attach


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


def step_in_backward(model: nn.Module, **settings: float) -> None:
    """Has torch put an SGD on each parameter."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`torch.jit.* is deprecated", DeprecationWarning)  # torch's own use of it
        from torch.distributed.optim import _apply_optimizer_in_backward
    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), settings)


@in_ranks(2, timeout_s=TIMEOUT_S)
@pytest.mark.parametrize("through_the_module", [False, True], ids=["through the wrapper", "through the module"])
def test_optimizers_in_backward_step_on_the_mean_until_close(through_the_module: bool) -> None:
    """They step on the mean while the module is wrapped, and by themselves again afterwards."""
    model = linear()
    bare = linear()
    step_in_backward(model, lr=0.125)
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


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.layer.register_forward_hook(self.note)  # a child that refers to its parent

    def note(self, *_: object) -> None:
        """Nothing."""

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


@in_ranks(2, timeout_s=TIMEOUT_S)
def test_a_layer_of_an_inner_wrapper_may_be_replaced() -> None:
    """An inner wrapper whose only layer is exchanged belongs to the outer one as before."""
    inner = DistributedDataParallel(Body())
    outer = DistributedDataParallel(nn.Sequential(inner, nn.Linear(4, 1)))
    for step in range(4):
        if step == 1:
            inner.module.layer = nn.Linear(4, 4)
        outer.zero_grad()
        outer(noise(2, 4, step=step)).sum().backward()
        torch.optim.SGD(outer.parameters(), lr=0.125).step()
        require_same_on_every_rank(outer)  # whose inputs differ
    outer.close()


def dropped_with_a_cycle(is_attached: bool) -> bool:
    model = Body()
    there = weakref.ref(model)
    holder = attach(model) if is_attached else DistributedDataParallel(model)
    (model if is_attached else holder)(torch.ones(2, 4)).sum().backward()
    del model, holder
    gc.collect()
    gc.collect()
    return there() is None


@pytest.mark.parametrize("is_attached", [True, False], ids=["attached", "wrapped"])
def test_a_model_whose_child_refers_to_it_is_freed(two_ranks: Ranks, is_attached: bool) -> None:
    assert two_ranks.run(dropped_with_a_cycle, is_attached) == [True, True]


@in_ranks(3, is_fresh=True, timeout_s=TIMEOUT_S)
def test_ranks_may_be_in_different_numbers_of_groups() -> None:
    """Rank 1 is in both groups, and rank 0 has let go of a wrapper that rank 1 still has."""
    members = [[0, 1], [1, 2]]
    groups = {tuple(ranks): dist.new_group(ranks) for ranks in members}
    mine = [group for ranks, group in groups.items() if dist.get_rank() in ranks]
    kept = [DistributedDataParallel(linear(), process_group=group) for group in mine]
    if dist.get_rank() == 0:
        kept.clear()
        gc.collect()
    for group in mine:
        ddp = DistributedDataParallel(linear(), process_group=group)
        ddp(torch.full((2, 4), float(dist.get_rank()))).sum().backward()
        # The mean of two ranks, each of which has two rows.
        assert torch.equal(ddp.module.weight.grad, torch.full((3, 4), float(sum(dist.get_process_group_ranks(group)))))
        ddp.close()
    for ddp in kept:
        ddp.close()
    for group in mine:
        dist.destroy_process_group(group)
