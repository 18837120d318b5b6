"""Outer synchronization after parameters were written in place before training: no hook of torch tells of it."""

import contextlib
import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from support.errors import text_of
from support.levels import some
from support.outer import loss_of, replica, same_everywhere, train, values_of
from support.ranks import in_ranks
from undertow import DistributedDataParallel, Outer, ReplicaMismatch, SyncConfig, attach, load_checkpoint, save_checkpoint

OUTER = Outer(every=2, fragments=2, delay=1)


def small(seed: int = 3) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 80), nn.Tanh(), nn.Linear(80, 3))


def initialize(part: nn.Module) -> None:
    """As users do by `model.apply(initialize)`."""
    if isinstance(part, nn.Linear):
        torch.manual_seed(part.in_features)
        part.reset_parameters()


def other() -> nn.Module:
    return small().apply(initialize)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """With a state that is zero before the first step, whoever makes it."""
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def stored(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, object]]:
    of_model, of_optimizer = get_state_dict(model, optimizer)
    return {"model": of_model, "optimizer": of_optimizer}


def load_by_torch(model: nn.Module, optimizer: torch.optim.Optimizer, path: Path) -> None:
    """As docs/checkpoints.md does."""
    room = stored(model, optimizer)
    dcp.load(room, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=room["model"], optim_state_dict=room["optimizer"])


def load_parameters(model: nn.Module, _: torch.optim.Optimizer, path: Path) -> None:
    room = {"model": model.state_dict()}
    dcp.load(room, checkpoint_id=path)


def apply(model: nn.Module, _: torch.optim.Optimizer, __: Path) -> None:
    model.apply(initialize)


@torch.no_grad()
def copy_each(model: nn.Module, _: torch.optim.Optimizer, __: Path) -> None:
    for own, value in zip(model.parameters(), other().parameters(), strict=True):
        own.copy_(value)


def write_data(model: nn.Module, _: torch.optim.Optimizer, __: Path) -> None:
    for own, value in zip(model.parameters(), other().parameters(), strict=True):
        own.data = value.data


WAYS: dict[str, Callable[[nn.Module, torch.optim.Optimizer, Path], None]] = {
    "get and set": load_by_torch,
    "dcp.load": load_parameters,
    "apply": apply,
    "copy_": copy_each,
    "data": write_data,
}


def require_same(model: nn.Module, wanted: dict[str, Tensor]) -> None:
    assert all(torch.equal(value, wanted[name]) for name, value in model.state_dict().items())


def trained_from_other(path: Path, *, num_forwards: int = 0) -> dict[str, Tensor]:
    """The parameters of a run that begins with the other ones, which it saves before."""
    with replica(other(), OUTER) as ddp:
        optimizer = sgd(ddp)
        dcp.save({"model": ddp.module.state_dict(), "optimizer": {}}, checkpoint_id=path / "bare")
        dcp.save(stored(ddp, optimizer), checkpoint_id=path / "stored")
        for _ in range(num_forwards):
            loss_of(ddp, 0, dist.get_rank())
        train(ddp, optimizer, range(5))
        return values_of(ddp.module)


@in_ranks(2)
@pytest.mark.parametrize("way", some(WAYS, most=3))
@pytest.mark.parametrize("has_forward", some([False, True], most=1))
def test_training_begins_with_parameters_that_were_written_in_place(way: str, has_forward: bool, tmp_path: Path) -> None:
    num_forwards = 1 if has_forward else 0
    wanted = trained_from_other(tmp_path, num_forwards=num_forwards)
    with replica(small(), OUTER) as ddp:
        optimizer = sgd(ddp)
        for _ in range(num_forwards):  # such as one that compiles the model
            loss_of(ddp, 0, dist.get_rank())
        model = ddp if way == "get and set" else ddp.module
        WAYS[way](model, optimizer, tmp_path / ("stored" if way == "get and set" else "bare"))
        train(ddp, optimizer, range(5))
        require_same(ddp.module, wanted)


@pytest.mark.deep
@in_ranks(2)
def test_an_attached_model_begins_with_them_too(tmp_path: Path) -> None:
    wanted = trained_from_other(tmp_path)
    model = small()
    with contextlib.closing(attach(model, config=SyncConfig(outer=OUTER))):
        optimizer = sgd(model)
        model.apply(initialize)
        for number in range(5):
            optimizer.zero_grad()
            loss_of(model, number, dist.get_rank()).backward()
            optimizer.step()
        require_same(model, wanted)


@pytest.mark.deep
@in_ranks(2)
def test_so_does_a_copy_of_a_model_that_has_not_trained(tmp_path: Path) -> None:
    wanted = trained_from_other(tmp_path)
    with replica(small(), OUTER) as ddp, contextlib.closing(copy.deepcopy(ddp)) as made:
        made.apply(initialize)
        train(made, sgd(made), range(5))
        require_same(made.module, wanted)


@in_ranks(2)
def test_before_training_they_are_saved_and_shown_as_the_global_ones(tmp_path: Path) -> None:
    wanted = other().state_dict()
    with replica(small(), OUTER) as ddp:
        optimizer = sgd(ddp)
        ddp.apply(initialize)
        with ddp.outer.synchronized():
            require_same(ddp.module, wanted)
        require_same(ddp.module, wanted)
        ddp.apply(lambda part: part.weight.data.zero_() if isinstance(part, nn.Linear) else None)
        assert not ddp.outer.state_dict()["global"]["0.weight"].any()
        ddp.apply(initialize)
        save_checkpoint(tmp_path / "saved", ddp, optimizer)
    with contextlib.closing(DistributedDataParallel(small())) as plain:
        load_checkpoint(tmp_path / "saved", plain, sgd(plain))
        require_same(plain.module, wanted)


@in_ranks(2)
def test_they_count_after_broadcast_parameters_too() -> None:
    with replica(small(), Outer(every=2, fragments=1, delay=0)) as ddp:
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        train(ddp, optimizer, range(3))
        ddp.broadcast_parameters()
        ddp.apply(initialize)
        state = ddp.outer.state_dict()
        assert not state["momentum"]
        for name, value in other().state_dict().items():
            assert torch.equal(state["global"][name], value)


@pytest.mark.deep
@in_ranks(2, is_fresh=True)
def test_a_write_on_one_rank_is_an_error_on_all() -> None:
    with replica(small(), Outer(every=2, fragments=1, delay=0)) as ddp:
        if dist.get_rank() == 1:
            ddp.apply(initialize)
        text = text_of(ReplicaMismatch, lambda: train(ddp, sgd(ddp), range(2)))
    assert text == (
        "rank 1 has other global parameters than the other replicas.\n  exchange of fragment 0\n"
        "  Load the same parameters on every rank, or call broadcast_parameters() after. A run that resumes also needs the "
        "saved state of model.outer on every rank."
    )


@in_ranks(2)
def test_a_state_keeps_its_global_parameters_whatever_the_replica_has(tmp_path: Path) -> None:
    """The replica's own ones are others, and may come before or after."""
    with replica(small(), OUTER) as ddp:
        optimizer = sgd(ddp)
        train(ddp, optimizer, range(4))
        dcp.save({str(dist.get_rank()): ddp.module.state_dict()}, checkpoint_id=tmp_path / "own")
        of_outer, of_optimizer = ddp.outer.state_dict(), copy.deepcopy(optimizer.state_dict())
        train(ddp, optimizer, range(4, 9))
        wanted = values_of(ddp.module)
    for is_outer_first in (False, True):
        with replica(small(), OUTER) as ddp:
            optimizer = sgd(ddp)
            optimizer.load_state_dict(copy.deepcopy(of_optimizer))
            if is_outer_first:
                ddp.outer.load_state_dict(of_outer)
            dcp.load({str(dist.get_rank()): ddp.module.state_dict()}, checkpoint_id=tmp_path / "own")
            if not is_outer_first:
                ddp.outer.load_state_dict(of_outer)
            train(ddp, optimizer, range(4, 9))
            require_same(ddp.module, wanted)


@in_ranks(2)
def test_steps_of_another_library_before_the_first_one_that_counts_are_training() -> None:
    """Two optimizers that are not torch's: a forward runs between them."""
    line = nn.Linear(2, 2)
    for param in line.parameters():
        nn.init.zeros_(param)
    with replica(line, Outer(every=1, fragments=1, delay=0, lr=1.0, momentum=0.0, wire=None)) as ddp:
        for param in line.parameters():
            ddp(torch.ones(1, 2))
            with torch.no_grad():
                param.fill_(1.0 + dist.get_rank())
        ddp.outer.step()
        assert line.weight.eq(1.5).all()
        assert same_everywhere(line.weight.detach())
