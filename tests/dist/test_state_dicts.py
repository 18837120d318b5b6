"""The state dict of a sharded optimizer, whole as a plain one's: whoever saves and loads those can do with it."""

import copy
import pickle
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

from support.checkpoints import (
    Setup,
    case_of,
    copied,
    from_bytes,
    load_whole,
    require_equal,
    state_after,
    taken_from,
    to_bytes,
    train,
    trained_by,
    whole_state,
)
from support.errors import text_of
from support.levels import some
from support.ranks import Ranks, in_ranks
from undertow import (
    ConfigError,
    DistributedDataParallel,
    PhaseError,
    ShardedOptimizer,
    StallTimeout,
    SyncConfig,
)


def saved(value: Any) -> bytes:
    """As frameworks do: every rank asks, and the first one writes."""
    found = [to_bytes(value) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(found)
    return found[0]


@pytest.mark.slow
@in_ranks(2, 3)
@pytest.mark.parametrize("strategy", ["zero1", "zero2"])
@pytest.mark.parametrize("case", ["mlp", "convolutions"])
def test_training_goes_on_from_what_torch_save_wrote_also_by_a_plain_optimizer_and_back(case: str, strategy: str) -> None:
    setup = Setup(case, strategy)
    with trained_by(setup) as (model, optimizer):
        assert optimizer.state_dict()["state"] == {}
        train(setup, model, optimizer, steps=range(2))
        state = saved({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    with trained_by(setup, seed=8) as (model, optimizer):
        load_whole(model, optimizer, from_bytes(state))
        train(setup, model, optimizer, steps=range(2, 4))
        require_equal(whole_state(model, optimizer), state_after(setup, 4))
    there = taken_from(replace(setup, strategy="ddp"), from_bytes(state), steps=range(2, 3))
    with trained_by(setup, seed=9) as (model, optimizer):
        load_whole(model, optimizer, there)
        require_equal(whole_state(model, optimizer)["optimizer"]["param_groups"], there["optimizer"]["param_groups"])
        train(setup, model, optimizer, steps=range(3, 4))
        require_equal(whole_state(model, optimizer), state_after(setup, 4))


@in_ranks(2)
@pytest.mark.parametrize("saves", some([{}, {"cpu_offload": True}], most=1), ids=str)
@pytest.mark.parametrize("loads", some([{}, {"broadcast_from_rank0": True}], most=1), ids=str)
def test_torchs_full_state_dict_saves_and_loads(saves: dict[str, bool], loads: dict[str, bool]) -> None:
    with trained_by(Setup(), num_steps=2) as (model, optimizer):
        of_model, of_optimizer = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True, **saves))
        state = saved({"model": of_model, "optimizer": of_optimizer})
    with trained_by(Setup(), seed=8) as (model, optimizer):
        has_it = dist.get_rank() == 0 or not loads.get("broadcast_from_rank0")
        loaded = from_bytes(state) if has_it else {"model": {}, "optimizer": {}}
        # One by one: with both at once torch takes a rank that has neither for one that loads no model.
        options = StateDictOptions(full_state_dict=True, **loads)
        set_model_state_dict(model, loaded["model"], options=options)
        set_optimizer_state_dict(model, optimizer, loaded["optimizer"], options=options)
        train(Setup(), model, optimizer, steps=range(2, 4))
        require_equal(whole_state(model, optimizer), state_after(Setup(), 4))


@in_ranks(2, 3)
@pytest.mark.parametrize("optimizer", some(["AdamW", "SGD", "plain SGD", "NAdam"], most=1))
def test_a_full_state_has_what_torchs_has_of_every_parameter_with_elements(optimizer: str) -> None:
    of_model = [value.numel() for value in case_of(Setup("oddities")).make().parameters()]
    ours, torchs = (
        {
            number: {key: value.shape for key, value in state.items() if not key.startswith("master")}
            for number, state in state_after(Setup("oddities", strategy, optimizer), 1)["optimizer"]["state"].items()
            if of_model[number] > 0 and any(not key.startswith("master") for key in state)
        }
        for strategy in ("zero1", "ddp")
    )
    assert ours == torchs


@in_ranks(2)
def test_one_rank_may_have_all_of_the_state_until_the_next_step() -> None:
    with trained_by(Setup(), num_steps=2) as (model, optimizer):
        wanted = optimizer.state_dict()
        optimizer.consolidate_state_dict(to=1)
        if dist.get_rank() == 1:
            require_equal(copied(optimizer.state_dict()), wanted)
        else:
            assert text_of(PhaseError, optimizer.state_dict) == (
                "consolidate_state_dict() gathered the state on rank 1, and state_dict() is called on another rank.\n"
                "  ShardedOptimizer.state_dict\n"
                "  Call state_dict() on rank 1 only, until the next step."
            )
        optimizer.param_groups[0]["lr"] = 0.5
        assert dist.get_rank() == 0 or optimizer.state_dict()["param_groups"][0]["lr"] == 0.5
        train(Setup(), model, optimizer, steps=range(2, 3))
        assert optimizer.state_dict()["state"][0]["step"] == wanted["state"][0]["step"] + 1
        assert text_of(ConfigError, lambda: optimizer.consolidate_state_dict(to=2)) == (
            "to=2 is not one of the 2 ranks.\n  ShardedOptimizer.consolidate_state_dict\n"
            "  Give a rank of the process group, 0 to 1."
        )


@pytest.mark.waits
@in_ranks(2, is_fresh=True)
def test_a_rank_that_gathers_the_state_alone_says_what_it_waits_for() -> None:
    model = DistributedDataParallel(nn.Linear(4, 3), config=SyncConfig(stall_warning_s=1.0, stall_timeout_s=2.0))
    optimizer = ShardedOptimizer(torch.optim.AdamW, model, lr=0.1)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    if dist.get_rank() == 0:
        awaited = "the state of a ShardedOptimizer, for which every rank must call state_dict()"
        head, *_, remedy = text_of(StallTimeout, optimizer.state_dict).splitlines()
        assert head.endswith(f" s for {awaited}: rank 1 has not arrived.")
        assert remedy.startswith("  Make the call on every rank")
    dist.barrier()


@in_ranks(2)
def test_hooks_of_state_dicts_see_the_state_and_may_change_it() -> None:
    with trained_by(Setup(), num_steps=1) as (_, optimizer):
        seen: dict[str, Any] = {}
        optimizer.register_state_dict_post_hook(lambda _, found: {**found, "state": {**found["state"], "mine": "kept"}})
        state = optimizer.state_dict()
        assert state["state"].pop("mine") == "kept"

        def doubled(_optimizer: object, given: dict[str, Any]) -> dict[str, Any]:
            return {**given, "state": {n: {key: 2 * value for key, value in of.items()} for n, of in given["state"].items()}}

        optimizer.register_load_state_dict_pre_hook(doubled)
        optimizer.register_load_state_dict_post_hook(lambda it: seen.update(step=next(iter(it.state.values()))["step"].item()))
        optimizer.load_state_dict(state)
        assert seen == {"step": 2.0}
        found = optimizer.state_dict()["state"]
        assert torch.equal(found[0]["exp_avg"], 2 * state["state"][0]["exp_avg"])


# Through torch.distributed.checkpoint, without help of ours.


def load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> None:
    """As torch's documentation does it."""
    chosen = StateDictOptions(**options)
    of_model, of_optimizer = get_state_dict(model, optimizer, options=chosen)
    state = {"model": of_model, "optimizer": of_optimizer}
    dcp.load(state, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"], options=chosen)


def save(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> None:
    of_model, of_optimizer = get_state_dict(model, optimizer, options=StateDictOptions(**options))
    # Buffers of two ranks may differ, and torch saves those of any rank.
    params = {name.removeprefix("module.") for name, _ in model.named_parameters()}
    mine = {name: value for name, value in of_model.items() if dist.get_rank() == 0 or name in params}
    dcp.save({"model": mine, "optimizer": of_optimizer}, checkpoint_id=path)


def begins(setup: Setup, path: Path, options: dict[str, Any]) -> bytes:
    with trained_by(setup, num_steps=2) as (model, optimizer):
        save(path, model, optimizer, **options)
        return to_bytes(whole_state(model, optimizer))


def goes_on(setup: Setup, path: Path, state: bytes, options: dict[str, Any]) -> None:
    wanted = from_bytes(state)
    with trained_by(setup, seed=8) as (model, optimizer):
        load(path, model, optimizer, **options)
        require_equal(whole_state(model, optimizer), wanted)
        train(setup, model, optimizer, steps=range(2, 4))
        after = whole_state(model, optimizer)
    require_equal(copied(after), taken_from(replace(setup, strategy="ddp"), wanted, steps=range(2, 4)))


@pytest.mark.deep
@pytest.mark.parametrize("options", some([{}, {"flatten_optimizer_state_dict": True}, {"cpu_offload": True}], most=1), ids=str)
@pytest.mark.parametrize("strategies", [("zero1", "zero2"), ("ddp", "zero1")], ids=" to ".join)
def test_torchs_own_functions_save_and_load_over_other_ranks(
    two_ranks: Ranks, three_ranks: Ranks, tmp_path: Path, strategies: tuple[str, str], options: dict[str, Any]
) -> None:
    before, after = (Setup("tied transformer", strategy) for strategy in strategies)
    state, *_ = two_ranks.run(begins, before, tmp_path / "saved", options)
    three_ranks.run(goes_on, replace(after, bucket_cap_mb=None), tmp_path / "saved", state, options)


@in_ranks(1, 2, 3)
@pytest.mark.parametrize("case", ["brain", "oddities"])
@pytest.mark.parametrize("optimizer", ["AdamW", "SGD", "plain SGD", "NAdam"])
def test_asking_before_training_changes_no_parameter(case: str, optimizer: str) -> None:
    setup = Setup(case, optimizer=optimizer)
    with trained_by(setup) as (model, optimizer):
        before = {name: value.clone() for name, value in model.state_dict().items()}
        assert not optimizer.state
        get_state_dict(model, optimizer)
        model.wait()
        require_equal(dict(model.state_dict()), before)
        case_of(setup).loss(model, 0).backward()
        optimizer.step()


def save_while_training(path: Path, model: Any, optimizer: Any) -> None:
    of_model, of_optimizer = get_state_dict(model, optimizer)
    group = dist.new_group()  # the thread that saves meets the other ranks there, and we are elsewhere
    result = dcp.async_save({"model": of_model, "optimizer": of_optimizer}, checkpoint_id=path, process_group=group)
    train(Setup(), model, optimizer, steps=range(2, 5))
    result.result()
    dist.destroy_process_group(group)


# A save that is asynchronous has what was there when it was called.
@pytest.mark.deep
@in_ranks(2, 3)
def test_torchs_functions_load_what_was_saved(tmp_path: Path) -> None:
    with trained_by(Setup(), num_steps=2) as (model, optimizer):
        wanted = copied(whole_state(model, optimizer))
        save_while_training(tmp_path / "saved", model, optimizer)
    with trained_by(Setup(), seed=8) as (model, optimizer):
        load(tmp_path / "saved", model, optimizer)
        require_equal(whole_state(model, optimizer), wanted)


@pytest.mark.deep
@in_ranks(2)
def test_wide_values_of_16_bit_parameters_are_asked_for_by_name(tmp_path: Path) -> None:
    with trained_by(Setup("brain", "ddp")) as (model, optimizer):
        save(tmp_path, model, optimizer)
    with (
        trained_by(Setup("brain")) as (model, optimizer),
        pytest.raises(CheckpointException, match=r"Missing key in checkpoint state_dict: optimizer.state.0.weight.master"),
    ):
        load(tmp_path, model, optimizer)


# Models: savers find each parameter in memory of its own, also where a sharded optimizer has moved it.


def layer_of(model: nn.Module) -> nn.Module:
    return next(module for module in model.modules() if next(module.parameters(recurse=False), None) is not None)


# What is saved of a module: of a wrapper what is inside it.
FORMS: dict[str, Callable[[nn.Module], Any]] = {
    "state_dict()": lambda module: module.state_dict(),
    "the module": lambda module: module,
    "state_dict() of a layer": lambda module: layer_of(module).state_dict(),
    "a layer": layer_of,
    "a parameter": lambda module: next(module.parameters()),
    "a copy of a layer": lambda module: copy.deepcopy(layer_of(module)),
}


def tensors_of(value: Any) -> dict[str, Tensor]:
    if isinstance(value, Tensor):
        return {"": value}
    return dict(value.state_dict() if isinstance(value, nn.Module) else value)


@pytest.mark.deep
@in_ranks(2)
@pytest.mark.parametrize("case", some(["mlp", "convolutions", "tied transformer", "oddities", "brain"], most=1))
def test_what_is_saved_of_a_model_in_shards_is_what_is_saved_of_a_plain_one(case: str) -> None:
    setup = Setup(case, bucket_cap_mb=None)
    with trained_by(setup, num_steps=2) as (model, _):
        model.wait()
        plain = case_of(setup).make()
        plain.load_state_dict(model.module.state_dict())
        for name, form in FORMS.items():
            for goes_through in (partial(copied, weights_only=False), lambda value: pickle.loads(pickle.dumps(value))):
                mine, wanted = (tensors_of(goes_through(form(module))) for module in (model.module, plain))
                require_equal(mine, wanted, name)
                # What is loaded has the storages that were written.
                sizes, wanted_sizes = (
                    [(it.untyped_storage().nbytes(), it.stride()) for it in found.values()] for found in (mine, wanted)
                )
                assert sizes == wanted_sizes, name


@in_ranks(2)
def test_a_state_dict_goes_on_referring_to_the_parameters() -> None:
    setup = Setup(bucket_cap_mb=None)
    with trained_by(setup, num_steps=1) as (model, optimizer):
        values, kept = model.state_dict(), list(model.module.parameters())
        with torch.no_grad():
            for value in values.values():
                value.fill_(0.5)
        assert all(bool((param == 0.5).all()) for param in kept)
        train(setup, model, optimizer, steps=range(1, 2))
        model.wait()
        assert all(torch.equal(param, value) for param, value in zip(kept, values.values(), strict=True))
        assert not any(bool((param == 0.5).all()) for param in kept)
