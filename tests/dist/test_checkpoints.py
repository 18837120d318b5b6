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
