"""A sharded optimizer that gives its shards to torch's own torch.distributed.checkpoint, without help of ours."""

from __future__ import annotations

import copy
import io
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from support.checkpoints import (
    Setup,
    case_of,
    from_bytes,
    require_equal,
    to_bytes,
    train,
    trained_by,
    whole_state,
)
from support.errors import text_of
from support.ranks import Ranks
from undertow import CheckpointError, ConfigError, ShardedOptimizer, SyncConfig, attach, save_checkpoint
from undertow.optim_state import ShardedState

in_shards = partial(Setup, state_dict="sharded")


def load(path: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> None:
    """As torch's documentation does it."""
    of_model, of_optimizer = get_state_dict(model, optimizer, options=StateDictOptions(**options))
    state = {"model": of_model, "optimizer": of_optimizer}
    dcp.load(state, checkpoint_id=path)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
        options=StateDictOptions(**options),
    )


def save(path: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> None:
    of_model, of_optimizer = get_state_dict(model, optimizer, options=StateDictOptions(**options))
    # Buffers of two ranks may differ, and torch saves those of any rank.
    params = {name.removeprefix("module.") for name, _ in model.named_parameters()}
    mine = {name: value for name, value in of_model.items() if dist.get_rank() == 0 or name in params}
    dcp.save({"model": mine, "optimizer": of_optimizer}, checkpoint_id=path)


def begins(setup: Setup, path: Path, options: dict[str, Any]) -> bytes:
    with trained_by(setup) as (model, optimizer):
        train(setup, model, optimizer, steps=range(2))
        save(path, model, optimizer, **options)
        return to_bytes(whole_state(model, optimizer))


def goes_on(setup: Setup, path: Path, state: bytes, options: dict[str, Any]) -> None:
    wanted = from_bytes(state)
    with trained_by(setup, seed=8) as (model, optimizer):
        load(path, model, optimizer, **options)
        require_equal(whole_state(model, optimizer), wanted)
        train(setup, model, optimizer, steps=range(2, 4))
        after = whole_state(model, optimizer)
    with trained_by(replace(setup, strategy="ddp"), seed=9) as (model, optimizer):
        model.load_state_dict(wanted["model"])
        optimizer.load_state_dict(wanted["optimizer"])
        train(setup, model, optimizer, steps=range(2, 4))
        require_equal(after, whole_state(model, optimizer))


@pytest.mark.parametrize("options", [{}, {"flatten_optimizer_state_dict": True}, {"cpu_offload": True}], ids=str)
@pytest.mark.parametrize("strategies", [("zero1", "zero2"), ("zero1", "ddp"), ("ddp", "zero1")], ids=" to ".join)
@pytest.mark.parametrize("case", ["mlp", "convolutions", "tied transformer"])
def test_torchs_own_functions_save_and_load_over_other_ranks(
    two_ranks: Ranks, three_ranks: Ranks, tmp_path: Path, case: str, strategies: tuple[str, str], options: dict[str, Any]
) -> None:
    before, after = (in_shards(case, strategy) for strategy in strategies)
    state, *_ = two_ranks.run(begins, before, tmp_path / "saved", options)
    three_ranks.run(goes_on, replace(after, bucket_cap_mb=None), tmp_path / "saved", state, options)


def test_they_save_and_load_whole_states_too(two_ranks: Ranks, three_ranks: Ranks, tmp_path: Path) -> None:
    state, *_ = two_ranks.run(begins, Setup(), tmp_path / "saved", {})
    three_ranks.run(goes_on, Setup(strategy="zero2"), tmp_path / "saved", state, {})


def nothing_changes(setup: Setup) -> None:
    with trained_by(setup) as (model, optimizer):
        before = {name: value.clone() for name, value in model.state_dict().items()}
        assert not optimizer.state
        get_state_dict(model, optimizer)
        model.wait()
        require_equal(dict(model.state_dict()), before)
        if optimizer.state:
            assert {type(value) for state in optimizer.state.values() for value in state.values()} <= {ShardedState, Tensor}
        case_of(setup).loss(model, 0).backward()
        optimizer.step()


@pytest.mark.parametrize("case", ["mlp", "brain", "oddities", "convolutions"])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "plain sgd", "nadam"])
def test_asking_before_training_changes_no_parameter(ranks: Ranks, case: str, optimizer: str) -> None:
    ranks.run(nothing_changes, in_shards(case, optimizer=optimizer))


def test_asking_before_training_changes_no_parameter_of_a_rank_alone() -> None:
    with Ranks(1) as ranks:
        ranks.run(nothing_changes, in_shards())


def no_step_is_taken(setup: Setup) -> None:
    states = []
    for asks in (False, True):
        with trained_by(setup) as (model, optimizer):
            for step in range(3):
                optimizer.zero_grad()
                if asks and step:
                    get_state_dict(model, optimizer)  # no gradients are there, and a state is
                case_of(setup).loss(model, step).backward()
                if asks and step:
                    get_state_dict(model, optimizer)
                    assert all(param.grad is not None for param in model.parameters())
                optimizer.step()
            states.append(whole_state(model, optimizer))
    require_equal(*states)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "plain sgd"])
@pytest.mark.parametrize("case", ["mlp", "brain"])
def test_asking_during_training_changes_nothing(ranks: Ranks, case: str, optimizer: str) -> None:
    ranks.run(no_step_is_taken, in_shards(case, optimizer=optimizer))


def attached_and_wrapped_agree(path: Path) -> None:
    setup = in_shards()
    with trained_by(setup) as (model, optimizer):
        train(setup, model, optimizer, steps=range(2))
        save(path, model, optimizer)
        wanted = whole_state(model, optimizer)
    bare = case_of(setup).make()
    sync = attach(bare, config=SyncConfig(reduction="ordered"))
    try:
        optimizer = ShardedOptimizer(torch.optim.AdamW, sync, state_dict="sharded", lr=1.0)
        load(path, bare, optimizer)
        require_equal({f"module.{name}": value for name, value in bare.state_dict().items()}, wanted["model"])
        require_equal(optimizer.full_state_dict(), wanted["optimizer"])
    finally:
        sync.close()


def test_what_a_wrapper_saved_is_loaded_by_an_attached_module(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(attached_and_wrapped_agree, tmp_path / "saved")


def saved_while_training(path: Path) -> None:
    setup = in_shards()
    with trained_by(setup) as (model, optimizer):
        train(setup, model, optimizer, steps=range(2))
        wanted = from_bytes(to_bytes(whole_state(model, optimizer)))
        of_model, of_optimizer = get_state_dict(model, optimizer)
        group = dist.new_group()  # the thread that saves meets the other ranks there, and we are elsewhere
        saved = dcp.async_save({"model": of_model, "optimizer": of_optimizer}, checkpoint_id=path, process_group=group)
        train(setup, model, optimizer, steps=range(2, 5))
        saved.result()
        dist.destroy_process_group(group)
    with trained_by(setup, seed=8) as (model, optimizer):
        load(path, model, optimizer)
        require_equal(whole_state(model, optimizer), wanted)


def test_an_asynchronous_save_has_what_was_there_when_it_was_called(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(saved_while_training, tmp_path / "saved")


def ours_is_read_by_torch(path: Path) -> None:
    setup = in_shards()
    with trained_by(setup) as (model, optimizer):
        train(setup, model, optimizer, steps=range(2))
        save_checkpoint(path, model, optimizer)
        wanted = whole_state(model, optimizer)
    with trained_by(setup, seed=8) as (model, optimizer):
        load(path, model, optimizer)
        require_equal(whole_state(model, optimizer), wanted)


def test_torchs_functions_load_what_save_checkpoint_saved(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(ours_is_read_by_torch, tmp_path / "saved")


def masters_are_missing(path: Path) -> None:
    with trained_by(in_shards("brain", "ddp")) as (model, optimizer):
        save(path, model, optimizer)
    with (
        trained_by(in_shards("brain")) as (model, optimizer),
        pytest.raises(CheckpointException, match=r"Missing key in checkpoint state_dict: optimizer.state.0.weight.master"),
    ):
        load(path, model, optimizer)


def test_wide_values_of_16_bit_parameters_are_asked_for_by_name(two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks.run(masters_are_missing, tmp_path / "saved")


def refusals() -> dict[str, str]:
    setup = in_shards()
    with trained_by(setup) as (model, optimizer):
        train(setup, model, optimizer, steps=range(1))
        state = optimizer.state_dict()
        some = state["state"][0]["exp_avg"]
        copied = copy.deepcopy(state)
        train(setup, model, optimizer, steps=range(1, 2))
        assert not torch.equal(copied["state"][0]["exp_avg"].pieces[0][1], some.pieces[0][1])
        other = ShardedState(next(model.parameters()), torch.float32, ())
        _, whole = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
        part = some.pieces[0][0]
        return {
            "here": f"[{part.start}, {part.stop})",
            "pickle": text_of(CheckpointError, lambda: torch.save(state, io.BytesIO())),
            "arithmetic": text_of(CheckpointError, lambda: some + 1),
            "values": text_of(CheckpointError, some.sum),
            "not here": text_of(CheckpointError, lambda: other.of_part(part)),
            "full_state_dict=True": text_of(CheckpointError, lambda: torch.save(whole, io.BytesIO())).splitlines()[0],
            "another kind": text_of(ConfigError, lambda: ShardedOptimizer(torch.optim.SGD, model, state_dict="shards", lr=1.0)),
        }


def test_what_a_part_of_a_state_refuses(two_ranks: Ranks) -> None:
    first, _ = two_ranks.run(refusals)
    here = first.pop("here")
    pickle = "the state of a sharded optimizer cannot be pickled: this rank has a part of it."
    no_values = "the state of a sharded optimizer has no values of its own: this rank has a part of it.\n"
    ask = "  Ask for all of it with optimizer.full_state_dict(), on every rank."
    assert first == {
        "pickle": f"{pickle}\n  ShardedState(shape=(8, 6), dtype=torch.float32, elements {here} here)\n"
        '  Leave state_dict="sharded" out of ShardedOptimizer(...), or save by torch.distributed.checkpoint.',
        "arithmetic": f"{no_values}  aten.add.Tensor, of a state of shape (8, 6)\n{ask}",
        "values": f"{no_values}  aten.sum.default, of a state of shape (8, 6)\n{ask}",
        "not here": f"elements {here} of a state of shape (8, 6) are not on this rank.\n"
        "  ShardedOptimizer.load_state_dict\n"
        "  Load through torch.distributed.checkpoint, or from full_state_dict().",
        "full_state_dict=True": pickle,
        "another kind": 'state_dict must be "full" or "sharded", got \'shards\'.\n  ShardedOptimizer\n'
        '  Leave it out, or write state_dict="sharded" to save by torch.distributed.checkpoint.',
    }
