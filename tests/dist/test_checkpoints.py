"""Checkpoints: saved by some ranks and loaded by others, interrupted, cut short, and of another model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from support.checkpoints import Setup, from_bytes, require_equal, to_bytes, train, trained_by, whole_state
from support.ranks import Ranks
from undertow import load_checkpoint, save_checkpoint


@pytest.fixture(scope="module")
def one_rank() -> Iterator[Ranks]:
    with Ranks(1) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def pools(one_rank: Ranks, two_ranks: Ranks, three_ranks: Ranks) -> dict[int, Ranks]:
    return {1: one_rank, 2: two_ranks, 3: three_ranks}


def begins(setup: Setup, path: Path) -> bytes:
    with trained_by(setup) as (model, optimizer):
        train(setup, model, optimizer, steps=range(2))
        save_checkpoint(path, model, optimizer, extra={"step": 2})
        return to_bytes(whole_state(model, optimizer))


def goes_on(setup: Setup, path: Path, then: Path, before: bytes, compares: bool) -> bytes:
    """Loads, trains on beside torch's optimizer that had `before`, and saves again."""
    known = from_bytes(before)
    with trained_by(setup, seed=8) as (model, optimizer):
        extra = load_checkpoint(path, model, optimizer)
        require_equal(whole_state(model, optimizer), known)
        train(setup, model, optimizer, steps=range(extra["step"], extra["step"] + 2))
        save_checkpoint(then, model, optimizer, extra={"step": extra["step"] + 2})
        after = whole_state(model, optimizer)
    if compares:
        with trained_by(replace(setup, strategy="ddp"), seed=9) as (model, optimizer):
            model.load_state_dict(known["model"])
            optimizer.load_state_dict(known["optimizer"])
            train(setup, model, optimizer, steps=range(extra["step"], extra["step"] + 2))
            require_equal(after, whole_state(model, optimizer))
    return to_bytes(after)


CHAINS = {
    "2 to 3 to 2 to 1 to 3": [(2, "zero1"), (3, "zero2"), (2, "zero1"), (1, "zero1"), (3, "zero1")],
    "ddp to zero1 to ddp to zero2": [(2, "ddp"), (3, "zero1"), (2, "ddp"), (2, "zero2")],
}


@pytest.mark.parametrize("chain", CHAINS.values(), ids=CHAINS)
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("case", ["mlp", "convolutions", "tied transformer"])
def test_training_goes_on_with_the_same_bits(
    pools: dict[int, Ranks], tmp_path: Path, case: str, optimizer: str, chain: list[tuple[int, str]]
) -> None:
    caps = [3e-4, None, 1e-6]
    for place, (num_ranks, strategy) in enumerate(chain):
        setup = Setup(case, strategy, optimizer, caps[place % 3])
        if place == 0:
            state, *_ = pools[num_ranks].run(begins, setup, tmp_path / "0")
        else:
            arguments = (setup, tmp_path / str(place - 1), tmp_path / str(place), state, True)
            state, *_ = pools[num_ranks].run(goes_on, *arguments)


@pytest.fixture(scope="module")
def four_ranks() -> Iterator[Ranks]:
    with Ranks(4) as ranks:
        yield ranks


def test_four_ranks_then_two_then_three(pools: dict[int, Ranks], four_ranks: Ranks, tmp_path: Path) -> None:
    setup = Setup("oddities", "zero1", "nadam")
    state, *_ = four_ranks.run(begins, setup, tmp_path / "0")
    for place, num_ranks in enumerate([2, 3], start=1):
        arguments = (replace(setup, bucket_cap_mb=None), tmp_path / str(place - 1), tmp_path / str(place), state, False)
        state, *_ = pools[num_ranks].run(goes_on, *arguments)


def goes_on_like_one_run(setup: Setup, path: Path) -> None:
    with trained_by(setup) as (model, optimizer):
        train(setup, model, optimizer, steps=range(2))
        save_checkpoint(path, model, optimizer)
        train(setup, model, optimizer, steps=range(2, 4))
        wanted = whole_state(model, optimizer)
    with trained_by(setup, seed=8) as (model, optimizer):
        train(setup, model, optimizer, steps=range(1))  # what is loaded takes the place of a state that is there
        load_checkpoint(path, model, optimizer)
        train(setup, model, optimizer, steps=range(2, 4))
        require_equal(whole_state(model, optimizer), wanted)


@pytest.mark.parametrize(
    "setup",
    [Setup("brain"), Setup("brain", "zero2", "sgd"), Setup("oddities"), Setup(optimizer="amsgrad"), Setup(optimizer="plain sgd")],
    ids=lambda setup: f"{setup.case} {setup.optimizer}",
)
def test_it_is_as_if_there_had_been_no_break(ranks: Ranks, tmp_path: Path, setup: Setup) -> None:
    ranks.run(goes_on_like_one_run, setup, tmp_path / "saved")


def masters_come_from_the_parameters(path: Path) -> None:
    with trained_by(Setup("brain", "ddp")) as (model, optimizer):
        train(Setup("brain"), model, optimizer, steps=range(2))
        save_checkpoint(path, model, optimizer)
        wanted = whole_state(model, optimizer)
    with trained_by(Setup("brain"), seed=8) as (model, optimizer):
        load_checkpoint(path, model, optimizer)
        after = whole_state(model, optimizer)
        require_equal(after["model"], wanted["model"])
        for number, state in after["optimizer"]["state"].items():
            assert torch.equal(state["master"], list(model.parameters())[number].float())
            assert torch.equal(state["exp_avg"], wanted["optimizer"]["state"][number]["exp_avg"].float())
        train(Setup("brain"), model, optimizer, steps=range(2, 3))
        save_checkpoint(path, model, optimizer)
        wanted = whole_state(model, optimizer)
    with trained_by(Setup("brain", "ddp"), seed=9) as (model, optimizer):
        load_checkpoint(path, model, optimizer)
        require_equal(whole_state(model, optimizer)["model"], wanted["model"])
        train(Setup("brain"), model, optimizer, steps=range(3, 4))
        assert {key for state in optimizer.state.values() for key in state} == {"step", "exp_avg", "exp_avg_sq"}


def test_parameters_of_16_bits_come_from_and_go_to_a_plain_optimizer(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(masters_come_from_the_parameters, tmp_path / "saved")


def schedules_go_on(path: Path) -> None:
    def of(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)

    setup = Setup()
    with trained_by(setup) as (model, optimizer):
        scheduler = of(optimizer)
        for step in range(4):
            if step == 2:
                save_checkpoint(path, model, optimizer, extra={"scheduler": scheduler.state_dict()})
            train(setup, model, optimizer, steps=range(step, step + 1))
            scheduler.step()
        wanted = whole_state(model, optimizer)
    with trained_by(setup, seed=8) as (model, optimizer):
        scheduler = of(optimizer)
        scheduler.load_state_dict(load_checkpoint(path, model, optimizer)["scheduler"])
        for step in range(2, 4):
            train(setup, model, optimizer, steps=range(step, step + 1))
            scheduler.step()
        require_equal(whole_state(model, optimizer), wanted)


def test_a_schedule_of_learning_rates_goes_on(two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks.run(schedules_go_on, tmp_path / "saved")


def full_states_travel(strategy: str, case: str) -> None:
    setup, plain = Setup(case, strategy), Setup(case, "ddp")
    with trained_by(setup) as (model, optimizer):
        train(setup, model, optimizer, steps=range(2))
        saved = from_bytes(to_bytes(whole_state(model, optimizer)))
        train(setup, model, optimizer, steps=range(2, 4))
        wanted = whole_state(model, optimizer)
    with trained_by(plain, seed=8) as (model, optimizer):
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        train(plain, model, optimizer, steps=range(2, 3))
        there = from_bytes(to_bytes(whole_state(model, optimizer)))
    with trained_by(setup, seed=9) as (model, optimizer):
        model.load_state_dict(there["model"])
        optimizer.load_state_dict(there["optimizer"])
        require_equal(whole_state(model, optimizer)["optimizer"]["param_groups"], there["optimizer"]["param_groups"])
        train(setup, model, optimizer, steps=range(3, 4))
        require_equal(whole_state(model, optimizer), wanted)


@pytest.mark.parametrize("case", ["mlp", "convolutions"])
@pytest.mark.parametrize("strategy", ["zero1", "zero2"])
def test_full_states_go_to_a_plain_optimizer_and_back(ranks: Ranks, strategy: str, case: str) -> None:
    ranks.run(full_states_travel, strategy, case)
