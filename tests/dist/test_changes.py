"""A model that is copied or saved after it was wrapped: what belongs to this process stays behind."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from support.models import Branches, noise
from support.naive import naive_mean, require_same_gradients, wrapped, wrapped_and_bare
from support.ranks import Ranks
from undertow import attach


def deep_copied(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model)


def pickled(model: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(model))


def saved(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


with_every_way = pytest.mark.parametrize("way", [deep_copied, pickled, saved])
Way = Callable[[nn.Module], nn.Module]


def state_dict_goes_round() -> None:
    with wrapped(Branches()) as ddp:
        ddp(noise(2, 4)).sum().backward()
        file = io.BytesIO()
        torch.save(ddp.state_dict(), file)
        file.seek(0)
        ddp.load_state_dict(torch.load(file))
        ddp(noise(2, 4)).sum().backward()


def test_a_state_dict_can_be_saved_and_loaded(two_ranks: Ranks) -> None:
    two_ranks.run(state_dict_goes_round)


def copy_of_an_attached_model(way: Way) -> None:
    """The copy is a bare model: it trains alone on rank 0, while its origin goes on with the others."""
    model = Branches()
    bare = copy.deepcopy(model)
    sync = attach(model)
    for step in range(2):
        twin = way(model)
        if dist.get_rank() == 0:
            alone = copy.deepcopy(bare)
            for each in (twin, alone):
                each.zero_grad()
                each(noise(2, 4, step=step)).sum().backward()
            require_same_gradients(twin, alone)
        for each in (model, bare):
            each.zero_grad()
            each(noise(2, 4, step=step)).sum().backward()
        naive_mean(bare)
        require_same_gradients(model, bare)
        for each in (model, bare):
            torch.optim.SGD(each.parameters(), lr=0.1).step()
    sync.close()


@with_every_way
def test_a_copy_of_an_attached_model_is_bare(fresh_pair: Ranks, way: Way) -> None:
    fresh_pair.run(copy_of_an_attached_model, way, timeout_s=20.0)


def copy_without_the_hook(way: Way) -> list[str]:
    """The copy averages in the usual way, and may get a hook of its own; the origin keeps its own."""
    with wrapped_and_bare(Branches()) as (ddp, bare):
        ddp.register_comm_hook(None, doubled)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            twin = way(ddp)
        for model in (ddp, twin, bare):
            model(noise(2, 4)).sum().backward()
        naive_mean(bare)
        require_same_gradients(twin, bare)
        for param in bare.parameters():
            param.grad *= 2 * dist.get_world_size()
        require_same_gradients(ddp, bare)
        twin.register_comm_hook(None, allreduce_hook)
        twin.close()
    return [str(each.message) for each in caught]


def doubled(_state, bucket):
    """Twice the sum."""
    return dist.all_reduce(bucket.buffer().mul_(2), async_op=True).get_future()


@with_every_way
def test_a_communication_hook_is_not_copied(two_ranks: Ranks, way: Way) -> None:
    text = "the communication hook is not copied; register it on the copy again."
    assert two_ranks.run(copy_without_the_hook, way) == [[text]] * 2
