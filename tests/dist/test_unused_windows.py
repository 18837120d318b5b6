"""Which parameters were unused: over the micro-batches of a step, and alike in a group of one rank."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from support.models import Branches, noise
from support.ranks import Ranks, in_ranks
from undertow import DistributedDataParallel, ExpertGroup, ShardedOptimizer, SyncConfig, attach

Seen = list[set[int]]
ALL = {0, 1, 2}


class Trained:
    """A model whose layers a forward names, and the layers that it says are unused."""

    def __init__(self, kind: str, group: dist.ProcessGroup | None, **settings: Any) -> None:
        self.model = Branches()
        is_sharded = kind.startswith("zero")
        config = SyncConfig(strategy=kind if is_sharded else None, bucket_cap_mb=3e-5, **settings)  # in pieces under shards
        if kind == "attach":
            self.target = attach(self.model, process_group=group, config=config)
        else:
            self.target = DistributedDataParallel(self.model, process_group=group, config=config)
        self._forward = self.model if kind == "attach" else self.target
        plain = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.opt = ShardedOptimizer(torch.optim.SGD, self.target, lr=0.1) if is_sharded else plain

    def forward(self, *layers: int) -> torch.Tensor:
        return self._forward(noise(2, 4), layers).sum()

    @property
    def unused(self) -> set[int]:
        names = self.target.unused_parameters
        assert len(set(names)) == len(names)
        found = {int(name.split(".")[1]) for name in names}
        assert {f"layers.{index}.{kind}" for index in found for kind in ("weight", "bias")} == set(names)
        return found


def a_step(it: Trained) -> Iterator[set[int]]:
    loss = it.forward(0)
    yield it.unused
    loss.backward()
    yield it.unused
    it.opt.step()
    it.opt.zero_grad()
    yield it.unused
    loss = it.forward(0, 1)
    yield it.unused
    loss.backward()
    yield it.unused


def an_accumulation(it: Trained) -> Iterator[set[int]]:
    for layers in ((0,), (1,)):
        with it.target.accumulate():
            it.forward(*layers).backward()
        yield it.unused
    it.forward(1).backward()
    yield it.unused
    with it.target.accumulate():
        yield it.unused
        loss = it.forward(0, 2)
        yield it.unused
        loss.backward()
        yield it.unused
    it.target.reduce_gradients_async().wait()
    yield it.unused


def two_forwards_first(it: Trained) -> Iterator[set[int]]:
    losses = it.forward(0), it.forward(2)
    for loss in losses:
        loss.backward()
        yield it.unused


def gradients_thrown_away(it: Trained) -> Iterator[set[int]]:
    with it.target.accumulate():
        it.forward(1).backward()
    it.opt.zero_grad()
    it.forward(0).backward()
    yield it.unused


def a_loss_that_reaches_nothing(it: Trained) -> Iterator[set[int]]:
    it.forward()
    yield it.unused
    it.opt.step()
    yield it.unused


def one_more_forward(it: Trained) -> Iterator[set[int]]:
    it.forward(0).backward()
    it.forward(0)
    it.opt.step()
    yield it.unused


def no_forward_of_the_whole(it: Trained) -> Iterator[set[int]]:
    for index in (0, 1):
        it.model.layers[index](noise(2, 4)).sum().backward()
        yield it.unused
        it.opt.step()
        it.opt.zero_grad()


def a_frozen_layer(it: Trained) -> Iterator[set[int]]:
    it.model.layers[1].requires_grad_(False)
    it.forward(0, 1).backward()
    yield it.unused
    it.model.layers[1].requires_grad_(True)
    it.forward(0).backward()
    yield it.unused


NONE: set[int] = set()
WAYS: dict[Callable[[Trained], Iterator[set[int]]], Seen] = {
    a_step: [NONE, {1, 2}, {1, 2}, NONE, {2}],
    an_accumulation: [NONE, NONE, {2}, {2}, NONE, NONE, {1}],
    two_forwards_first: [{1, 2}, {1}],
    gradients_thrown_away: [{1, 2}],
    a_loss_that_reaches_nothing: [NONE, ALL],
    one_more_forward: [NONE],
    no_forward_of_the_whole: [{1, 2}, {0, 2}],
    a_frozen_layer: [{2}, {1, 2}],
}


def seen(way: Callable[[Trained], Iterator[set[int]]], kind: str, is_alone: bool) -> Seen:
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())] if is_alone else []
    it = Trained(kind, groups[dist.get_rank()] if is_alone else None)
    try:
        if way is not a_frozen_layer:  # it is the layout that is to be in shards
            it.forward(0, 1, 2).backward()
            it.opt.step()
            it.opt.zero_grad()
        return list(way(it))
    finally:
        it.target.close()
        if is_alone:
            dist.destroy_process_group(groups[dist.get_rank()])


@pytest.mark.parametrize("is_alone", [False, True], ids=["two ranks", "one rank"])
@pytest.mark.parametrize("kind", ["wrapper", "attach", "zero1", "zero2"])
@pytest.mark.parametrize("way", WAYS)
def test_what_is_unused_is_named(
    two_ranks: Ranks, way: Callable[[Trained], Iterator[set[int]]], kind: str, is_alone: bool
) -> None:
    assert two_ranks.run(seen, way, kind, is_alone) == [WAYS[way]] * 2


def experts_of_one_rank() -> list[set[str]]:
    """Layer 1 and 2 are experts that this rank alone has."""
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    experts = tuple(ExpertGroup(match=f"layers.{index}.*", process_group=groups[dist.get_rank()]) for index in (1, 2))
    model = Branches()
    ddp = DistributedDataParallel(model, config=SyncConfig(experts=experts))
    found = []
    for layers in ((0, 1), (0,), (1,)):
        ddp(noise(2, 4), layers).sum().backward()
        ddp.finish()  # where nothing dense was reached
        found.append({name.split(".")[1] for name in ddp.unused_parameters})
    ddp.close()
    dist.destroy_process_group(groups[dist.get_rank()])
    return found


def test_experts_of_one_rank_that_got_nothing_are_named(two_ranks: Ranks) -> None:
    assert two_ranks.run(experts_of_one_rank) == [[{"2"}, {"1", "2"}, {"0", "2"}]] * 2


@in_ranks(2)
def test_a_rank_alone_notes_gradients_without_a_frame() -> None:
    """A rank alone waits for no gradient: what notes them is C, and gone with the wrapper."""
    group = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    model: nn.Module = Branches()
    ddp = DistributedDataParallel(model, process_group=group, config=SyncConfig(record="off"))
    hooks = [hook for param in model.parameters() for hook in (param._post_accumulate_grad_hooks or {}).values()]
    assert len(hooks) == len(list(model.parameters()))
    assert not any(hasattr(hook, "__code__") or hasattr(hook, "func") for hook in hooks)
    ddp.close()
    assert not any(param._post_accumulate_grad_hooks for param in model.parameters())
    with contextlib.suppress(ValueError):
        dist.destroy_process_group(group)
