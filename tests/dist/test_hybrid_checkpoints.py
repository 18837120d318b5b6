"""Checkpoints of a mesh: saved and loaded by meshes of other shapes, and by ranks without one."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from support.checkpoints import OPTIMIZERS, Setup, case_of, from_bytes, require_equal, to_bytes, train, trained_by, whole_state
from support.hybrid import mesh_of
from support.ranks import Ranks
from undertow import DistributedDataParallel, ShardedOptimizer, SyncConfig, load_checkpoint, save_checkpoint
from undertow.runtime.checkpoint_metadata import stored_entries


@contextlib.contextmanager
def on_mesh(setup: Setup, shape: tuple[int, int], *, seed: int = 7) -> Iterator[tuple[DistributedDataParallel, Any]]:
    torch.manual_seed(seed)
    cls, settings = OPTIMIZERS[setup.optimizer]
    config = SyncConfig(strategy="hybrid", reduction="ordered", bucket_cap_mb=setup.bucket_cap_mb)
    with mesh_of(*shape) as mesh:
        ddp = DistributedDataParallel(case_of(setup).make(), device_mesh=mesh, config=config)
        try:
            yield ddp, ShardedOptimizer(cls, ddp, **settings)
        finally:
            ddp.close()


def begins(setup: Setup, path: Path) -> bytes:
    with on_mesh(setup, (2, 2)) as (model, optimizer):
        train(setup, model, optimizer, steps=range(2))
        save_checkpoint(path, model, optimizer, extra={"step": 2})
        return to_bytes(whole_state(model, optimizer))


def goes_on(setup: Setup, shape: tuple[int, int] | None, path: Path, then: Path, before: bytes) -> bytes:
    with trained_by(setup, seed=8) if shape is None else on_mesh(setup, shape, seed=8) as (model, optimizer):
        extra = load_checkpoint(path, model, optimizer)
        require_equal(whole_state(model, optimizer), from_bytes(before))
        train(setup, model, optimizer, steps=range(extra["step"], extra["step"] + 2))
        save_checkpoint(then, model, optimizer, extra={"step": extra["step"] + 2})
        return to_bytes(whole_state(model, optimizer))


@pytest.mark.parametrize("setup", [Setup(), Setup(case="brain"), Setup(case="tied transformer", optimizer="sgd")], ids=str)
def test_any_mesh_loads_what_another_one_or_plain_ranks_have_saved(
    two_ranks: Ranks, four_ranks: Ranks, tmp_path: Path, setup: Setup
) -> None:
    chain: list[tuple[Ranks, tuple[int, int] | None]] = [
        (two_ranks, None),
        (four_ranks, (2, 2)),
        (four_ranks, (4, 1)),
        (two_ranks, (1, 2)),
        (four_ranks, (2, 2)),
    ]
    before, *_ = four_ranks.run(begins, setup, tmp_path / "0")
    for number, (ranks, shape) in enumerate(chain):
        known = ranks.run(goes_on, setup, shape, tmp_path / str(number), tmp_path / str(number + 1), before)
        assert all(each == known[0] for each in known[1:])
        before = known[0]


def interrupted(setup: Setup, path: Path) -> None:
    with on_mesh(setup, (2, 2)) as (model, optimizer):
        train(setup, model, optimizer, steps=range(6))
        expected = whole_state(model, optimizer)
    with on_mesh(setup, (2, 2)) as (model, optimizer):
        train(setup, model, optimizer, steps=range(3))
        save_checkpoint(path, model, optimizer)
    with on_mesh(setup, (2, 2), seed=8) as (model, optimizer):
        load_checkpoint(path, model, optimizer)
        train(setup, model, optimizer, steps=range(3, 6))
        require_equal(whole_state(model, optimizer), expected)


def test_who_goes_on_from_a_checkpoint_gets_the_bits_of_who_was_not_interrupted(four_ranks: Ranks, tmp_path: Path) -> None:
    four_ranks.run(interrupted, Setup(), tmp_path / "checkpoint")


def stored(path: Path) -> list[list[int]]:
    """Of every tensor of the optimizer's state: its elements, and those of all that was stored of it."""
    setup = Setup()
    with on_mesh(setup, (2, 2)) as (model, optimizer):
        train(setup, model, optimizer, steps=range(2))
        save_checkpoint(path, model, optimizer)
    entries = stored_entries((path / ".metadata").read_bytes())
    return [
        [math.prod(entry.shape), sum(math.prod(piece.sizes) for piece in entry.pieces)]
        for name, entry in entries.items()
        if name.endswith("exp_avg") and entry.shape is not None
    ]


def test_one_replica_stores_each_shard(four_ranks: Ranks, tmp_path: Path) -> None:
    for sizes in four_ranks.run(stored, tmp_path / "checkpoint"):
        assert len(sizes) == 4
        assert all(whole == of_chunks for whole, of_chunks in sizes)
