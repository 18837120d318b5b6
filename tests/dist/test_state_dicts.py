"""The state dict of a sharded optimizer is a plain one's: whoever saves and loads those saves and loads this one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from support.checkpoints import Setup, from_bytes, require_equal, to_bytes, train, trained_by, whole_state
from support.errors import text_of
from support.ranks import Ranks, in_ranks
from undertow import (
    CheckpointError,
    ConfigError,
    DistributedDataParallel,
    PhaseError,
    ShardedOptimizer,
    StallTimeout,
    SyncConfig,
)
from undertow.optim_state import ShardedState


def saved(value: Any) -> bytes:
    """As frameworks do: every rank asks, and the first one writes."""
    found = [to_bytes(value) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(found)
    return found[0]


def uninterrupted(setup: Setup) -> dict[str, Any]:
    with trained_by(setup) as (model, optimizer):
        train(setup, model, optimizer, steps=range(4))
        return whole_state(model, optimizer)


def goes_on_after_plain_files(setup: Setup) -> None:
    with trained_by(setup) as (model, optimizer):
        assert optimizer.state_dict()["state"] == {}
        train(setup, model, optimizer, steps=range(2))
        state = saved({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    for other in (setup, replace(setup, strategy="ddp")):
        with trained_by(other, seed=8) as (model, optimizer):
            loaded = from_bytes(state)
            model.load_state_dict(loaded["model"])
            optimizer.load_state_dict(loaded["optimizer"])
            train(setup, model, optimizer, steps=range(2, 4))
            require_equal(whole_state(model, optimizer), uninterrupted(other))


@pytest.mark.parametrize("strategy", ["zero1", "zero2"])
@pytest.mark.parametrize("case", ["mlp", "convolutions"])
def test_training_goes_on_from_what_torch_save_wrote(ranks: Ranks, case: str, strategy: str) -> None:
    ranks.run(goes_on_after_plain_files, Setup(case, strategy))


def goes_on_after_full_state_dict(setup: Setup, saves: dict[str, bool], loads: dict[str, bool]) -> None:
    with trained_by(setup) as (model, optimizer):
        train(setup, model, optimizer, steps=range(2))
        of_model, of_optimizer = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True, **saves))
        state = saved({"model": of_model, "optimizer": of_optimizer})
    with trained_by(setup, seed=8) as (model, optimizer):
        has_it = dist.get_rank() == 0 or not loads.get("broadcast_from_rank0")
        loaded = from_bytes(state) if has_it else {"model": {}, "optimizer": {}}
        # One by one: with both at once torch takes a rank that has neither for one that loads no model.
        options = StateDictOptions(full_state_dict=True, **loads)
        set_model_state_dict(model, loaded["model"], options=options)
        set_optimizer_state_dict(model, optimizer, loaded["optimizer"], options=options)
        train(setup, model, optimizer, steps=range(2, 4))
        require_equal(whole_state(model, optimizer), uninterrupted(setup))


@pytest.mark.parametrize("saves", [{}, {"cpu_offload": True}], ids=str)
@pytest.mark.parametrize("loads", [{}, {"broadcast_from_rank0": True}], ids=str)
def test_torchs_full_state_dict_saves_and_loads(two_ranks: Ranks, saves: dict[str, bool], loads: dict[str, bool]) -> None:
    two_ranks.run(goes_on_after_full_state_dict, Setup(), saves, loads)


def one_rank_has_it(setup: Setup) -> list[str]:
    texts = []
    with trained_by(setup) as (model, optimizer):
        train(setup, model, optimizer, steps=range(2))
        wanted = optimizer.full_state_dict()
        optimizer.consolidate_state_dict(to=1)
        if dist.get_rank() == 1:
            found = from_bytes(to_bytes(optimizer.state_dict()))
            require_equal(found, wanted)
        else:
            texts.append(text_of(PhaseError, optimizer.state_dict))
        optimizer.param_groups[0]["lr"] = 0.5
        if dist.get_rank() == 1:
            assert optimizer.state_dict()["param_groups"][0]["lr"] == 0.5
        train(setup, model, optimizer, steps=range(2, 3))
        now = optimizer.state_dict()
        assert isinstance(now["state"][0]["exp_avg"], ShardedState) == (setup.state_dict == "sharded")
        assert now["state"][0]["step"] == optimizer.full_state_dict()["state"][0]["step"] == wanted["state"][0]["step"] + 1
        texts.append(text_of(ConfigError, lambda: optimizer.consolidate_state_dict(to=2)))
    return texts


@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_one_rank_may_have_all_of_the_state_until_the_next_step(two_ranks: Ranks, kind: str) -> None:
    first, second = two_ranks.run(one_rank_has_it, Setup(state_dict=kind))
    no_rank = (
        "to=2 is not one of the 2 ranks.\n  ShardedOptimizer.consolidate_state_dict\n  Give a rank of the process group, 0 to 1."
    )
    elsewhere = (
        "the state was brought to rank 1 by consolidate_state_dict(), and is asked for on another rank.\n"
        "  ShardedOptimizer.state_dict\n"
        "  Call state_dict() on rank 1 only, or full_state_dict() on every rank."
    )
    assert (first, second) == ([elsewhere, no_rank], [no_rank])


def asks_alone() -> str:
    setup = Setup()
    with trained_by(setup) as (model, optimizer):
        train(setup, model, optimizer, steps=range(2))
        if dist.get_rank() == 0:
            return text_of(CheckpointError, optimizer.state_dict)
        return text_of(CheckpointError, lambda: train(setup, model, optimizer, steps=range(2, 3)))


def test_a_state_dict_on_one_rank_only_is_an_error_on_all(fresh_pair: Ranks) -> None:
    first, second = (text.splitlines() for text in fresh_pair.run(asks_alone))
    what = "rank 0 called state_dict() of a ShardedOptimizer, which gathers it from every rank, and rank 1 did not."
    remedy = "  Call it on every rank. Before a framework calls it on one rank only, call consolidate_state_dict() on every rank."
    assert (first[0], first[-1]) == (second[0], second[-1]) == (what, remedy)


def asks_while_others_wait_elsewhere() -> str:
    config = SyncConfig(stall_warning_s=1.0, stall_timeout_s=2.0)
    model = DistributedDataParallel(torch.nn.Linear(4, 3), config=config)
    optimizer = ShardedOptimizer(torch.optim.AdamW, model, lr=0.1)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    text = text_of(StallTimeout, optimizer.state_dict) if dist.get_rank() == 0 else ""
    dist.barrier()
    return text


def test_a_rank_that_gathers_the_state_alone_says_what_it_waits_for(fresh_pair: Ranks) -> None:
    text, _ = fresh_pair.run(asks_while_others_wait_elsewhere)
    awaited = "the state of a ShardedOptimizer, which every rank brings in state_dict()"
    assert text.splitlines()[0].endswith(f" s for {awaited}: rank 1 has not come.")


@in_ranks(2)
def test_hooks_of_state_dicts_see_the_state_and_may_change_it() -> None:
    setup = Setup()
    with trained_by(setup) as (model, optimizer):
        train(setup, model, optimizer, steps=range(1))
        seen: dict[str, Any] = {}
        optimizer.register_state_dict_post_hook(lambda _, found: {**found, "state": {**found["state"], "mine": "kept"}})
        state = optimizer.state_dict()
        assert state["state"].pop("mine") == "kept"

        def doubled(_optimizer: object, given: dict[str, Any]) -> dict[str, Any]:
            states = {n: {key: 2 * value for key, value in of.items()} for n, of in given["state"].items()}
            return {**given, "state": states}

        optimizer.register_load_state_dict_pre_hook(doubled)
        optimizer.register_load_state_dict_post_hook(lambda it: seen.update(step=next(iter(it.state.values()))["step"].item()))
        optimizer.load_state_dict(state)
        assert seen == {"step": 2.0}
        found = optimizer.full_state_dict()["state"]
        assert torch.equal(found[0]["exp_avg"], 2 * state["state"][0]["exp_avg"])
