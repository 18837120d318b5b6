"""A closed wrapper averages nothing, and says so instead of training on."""

from __future__ import annotations

import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from support.errors import text_of
from support.ranks import Ranks, in_ranks
from undertow import DistributedDataParallel, PhaseError, ShardedOptimizer, SyncConfig, attach

REMEDY = "Train `model.module`, the module itself, without averaging, or wrap it anew."


def closed(call: str) -> str:
    return f"this model is closed: its gradients are not averaged any more.\n  {call}, rank {dist.get_rank()}\n  {REMEDY}"


def linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(4, 3)


def batch() -> torch.Tensor:
    return torch.full((2, 4), 1.0 + dist.get_rank())


def train_through_a_closed_wrapper() -> None:
    model = DistributedDataParallel(linear())
    model(batch()).sum().backward()
    model.close()
    model.close()
    assert text_of(PhaseError, lambda: model(batch())) == closed("a training forward")
    with torch.no_grad():
        assert torch.equal(model(batch()), model.module(batch()))
    model.eval()
    assert torch.equal(model(batch()), model.module(batch()))
    model.train()
    model.module.zero_grad()
    model.module(batch()).sum().backward()  # the user's own module, on this rank's batch alone
    assert torch.equal(model.module.bias.grad, torch.full((3,), 2.0))
    assert torch.equal(model.module.weight.grad, torch.full((3, 4), 2.0 * (1 + dist.get_rank())))


def test_a_training_forward_through_a_closed_wrapper_is_an_error(two_ranks: Ranks) -> None:
    two_ranks.run(train_through_a_closed_wrapper)


def test_so_it_is_with_one_rank() -> None:
    with Ranks(1) as alone:
        alone.run(train_through_a_closed_wrapper)


@in_ranks(2)
@pytest.mark.parametrize("anew", [DistributedDataParallel, attach])
def test_it_is_none_where_a_newer_wrapper_averages(anew: Callable[[nn.Module], Any]) -> None:
    earlier = DistributedDataParallel(linear())
    earlier.close()
    newer = anew(earlier.module)
    earlier(batch()).sum().backward()
    assert torch.equal(earlier.module.weight.grad, torch.full((3, 4), 3.0))
    newer.close()
    assert text_of(PhaseError, lambda: earlier(batch())) == closed("a training forward")


CALLS: dict[str, Callable[[Any], object]] = {
    "accumulate()": lambda sync: sync.accumulate().__enter__(),
    "weight(n)": lambda sync: sync.weight(2),
    "finish()": lambda sync: sync.finish(),
    "reduce_gradients_async()": lambda sync: sync.reduce_gradients_async(),
    "register_comm_hook()": lambda sync: sync.register_comm_hook(None, print),
    "broadcast_parameters()": lambda sync: sync.broadcast_parameters(),
    "measure_network()": lambda sync: sync.measure_network(),
    "ShardedOptimizer": lambda sync: ShardedOptimizer(torch.optim.SGD, sync, lr=0.1),
}


@in_ranks(2)
def test_what_asks_a_closed_one_to_synchronize_is_the_same_error() -> None:
    for wrap in (DistributedDataParallel, attach):
        model = wrap(linear())
        (model.module if wrap is DistributedDataParallel else model._module)(batch()).sum().backward()
        model.close()
        for name, call in CALLS.items():
            assert text_of(PhaseError, lambda call=call, model=model: call(model)) == closed(name)
        model.wait()
        assert model.report(show=False).rank == dist.get_rank()
        assert len(model.plan.params) == 2
    wrapper = DistributedDataParallel(linear())
    wrapper.close()
    assert text_of(PhaseError, wrapper.join) == closed("join()")
    assert text_of(PhaseError, wrapper.no_sync().__enter__) == closed("accumulate()")
    assert text_of(PhaseError, lambda: wrapper._update_process_group(dist.group.WORLD)) == closed("_update_process_group")


def gather_state_when_closed() -> list[str]:
    model = DistributedDataParallel(linear())
    optimizer = ShardedOptimizer(torch.optim.AdamW, model, lr=0.1)
    model(batch()).sum().backward()
    optimizer.step()
    model.close()
    assert optimizer.sharded_state_dict()["state"]  # this rank's shards, which save_checkpoint writes
    return [text_of(PhaseError, call) for call in (optimizer.state_dict, optimizer.consolidate_state_dict)]


def test_the_state_of_shards_cannot_be_gathered_when_the_model_is_closed(two_ranks: Ranks) -> None:
    for rank, texts in enumerate(two_ranks.run(gather_state_when_closed)):
        assert set(texts) == {
            "the model of this optimizer is closed: nobody brings the ranks' shards together.\n"
            f"  ShardedOptimizer, rank {rank}\n"
            "  Call state_dict() before close(); save_checkpoint() works afterwards too."
        }


@in_ranks(2)
@pytest.mark.parametrize(("is_attached", "strategy"), [(False, None), (True, None), (False, "zero1")])
def test_a_backward_after_close_is_warned_of_if_its_forward_was_before(is_attached: bool, strategy: str | None) -> None:
    module, config = linear(), SyncConfig(strategy=strategy)
    model = attach(module, config=config) if is_attached else DistributedDataParallel(module, config=config)
    called = module if is_attached else model
    called(batch()).sum().backward()
    loss, other_loss = called(batch()).sum(), called(batch()).sum()
    model.close()
    with pytest.warns(UserWarning, match="this backward averages nothing: the model was closed between its forward and this"):
        loss.backward()
    other_loss.backward()  # it is told once
    assert not module._forward_pre_hooks
    assert not module.weight._post_accumulate_grad_hooks
    model = DistributedDataParallel(module)
    model(batch())
    model.close()
    pickle.dumps(module)
    module(batch()).sum().backward()  # the forward of this one is the user's own
    assert not module._forward_pre_hooks
    model = DistributedDataParallel(module)
    model(batch())
    model.close()
    dropped = weakref.ref(module)
    del module, model, called
    gc.collect()
    assert dropped() is None
