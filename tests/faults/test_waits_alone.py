"""A call that all ranks have to make, and one does not: it ends by stall_timeout_s, and says why."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from support.ranks import Ranks
from undertow import (
    DistributedDataParallel,
    GradientBucketManager,
    ShardedOptimizer,
    StallTimeout,
    SyncConfig,
    attach,
    load_checkpoint,
    save_checkpoint,
)
from undertow.runtime import private

LIMITS = SyncConfig(stall_warning_s=0.5, stall_timeout_s=1.0, buffers="off")
REMEDY = "  Look at what the late ranks are doing, or set stall_timeout_s higher if that is how it must be."


@pytest.fixture
def pair() -> Iterator[Ranks]:
    with Ranks(2) as ranks:
        yield ranks


class Logged(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(plain(record.getMessage()))


def plain(text: str) -> str:
    """Without seconds, and without stacks."""
    lines = re.sub(r"\d+ s\b", "N s", text).split("\n")
    return "\n".join(line for line in lines if ", line " not in line)


@contextlib.contextmanager
def logged() -> Iterator[list[str]]:
    handler = Logged()
    logging.getLogger("undertow").addHandler(handler)
    yield handler.texts
    logging.getLogger("undertow").removeHandler(handler)


def error_of(name: str, call: Callable[[], object]) -> str:
    """What `call`, which only rank 0 makes, raises there; rank 1 comes back when that is known, and has done nothing else."""
    if dist.get_rank() == 0:
        with pytest.raises(StallTimeout) as caught:
            call()
        private.default_store().set(name, "")
        return plain(str(caught.value))
    private.default_store().wait([name])
    return ""


def wrapped() -> tuple[DistributedDataParallel, dist.ProcessGroup]:
    """A model, and a group that only it is synchronised over: a fault breaks it."""
    group = dist.new_group([0, 1])
    model = DistributedDataParallel(nn.Linear(4, 3), process_group=group, config=LIMITS)
    model(torch.ones(2, 4)).sum().backward()
    return model, group


def waits_for_the_first_wrapper() -> tuple[str, list[str]]:
    with logged() as texts:
        found = error_of("first", lambda: attach(nn.Linear(4, 3), config=LIMITS))
        if dist.get_rank() == 1:  # it comes too late
            with pytest.raises(StallTimeout) as caught:
                attach(nn.Linear(4, 3), config=LIMITS)
            found = plain(str(caught.value))
    attach(nn.Linear(4, 3), config=LIMITS).close()  # from here on both are in the same place again
    return found, texts


def test_the_first_wrapper_of_all_ends_with_the_rank_that_has_made_none(pair: Ranks) -> None:
    results = pair.run(waits_for_the_first_wrapper)
    for rank, (text, _) in enumerate(results):
        assert text == (
            "rank 1 has made no such wrapper within N s, and other ranks wait for it.\n"
            f"  the making of a process group, rank {rank}\n"
            "  Wrap the model on every rank of the group. "
            "If that takes longer, set stall_timeout_s and the process group's timeout higher."
        )
    assert set(results[0][1]) <= {"rank 0 has waited N s for rank 1 to synchronise a model."}


def waits_for_another_wrapper() -> tuple[str, list[str]]:
    first = attach(nn.Linear(4, 3), config=LIMITS)
    with logged() as texts:
        found = error_of("another", lambda: DistributedDataParallel(nn.Linear(2, 2), config=LIMITS))
        if dist.get_rank() == 1:
            with pytest.raises(StallTimeout) as caught:
                DistributedDataParallel(nn.Linear(2, 2), config=LIMITS)
            found = plain(str(caught.value))
    third = DistributedDataParallel(nn.Linear(2, 2), config=LIMITS)
    third(torch.ones(2, 2)).sum().backward()
    for model in (third, first):
        model.close()
    return found, texts


def test_another_wrapper_ends_with_the_rank_that_has_made_none(pair: Ranks) -> None:
    results = pair.run(waits_for_another_wrapper)
    report = (
        "rank 0 has waited N s for all ranks, to make a process group: rank 1 has made no such wrapper.",
        "  rank 0: synchronisation 0, waits for all ranks, to make a process group",
        "  rank 1: has made no such wrapper, in code outside of the model",
    )
    for rank, (text, _) in enumerate(results):
        head, *rest = report
        assert text == "\n".join([head, f"  synchronisation 0, rank {rank}", *rest, REMEDY])
    assert set(results[0][1]) == {"\n".join(report)}
    assert len(results[0][1]) <= 2  # before the time is over, and perhaps as it is


def waits_alone(folder: Path) -> dict[str, str]:
    found = {}

    def note(name: str, prepare: Callable[..., Callable[[], object]]) -> None:
        model, group = wrapped()
        found[name] = error_of(name, prepare(model, group))
        model.close()
        dist.destroy_process_group(group)

    note("ShardedOptimizer", lambda model, _: lambda: ShardedOptimizer(torch.optim.SGD, model, lr=0.1))
    note("save_checkpoint", lambda model, _: lambda: save_checkpoint(folder, model))
    note("load_checkpoint", lambda model, _: lambda: load_checkpoint(folder, model))
    note("GradientBucketManager", lambda _, group: lambda: reduce_by_hand(group))
    return found


def reduce_by_hand(group: dist.ProcessGroup) -> None:
    manager = GradientBucketManager(group, [torch.ones(3)])
    manager.reduce_bucket_async(0).wait()


WAITS_FOR = {
    "ShardedOptimizer": "all ranks, to make a process group",
    "save_checkpoint": "all ranks, to save a checkpoint",
    "load_checkpoint": "all ranks, to load a checkpoint",
    "GradientBucketManager": "a reduction over the process group",
}


def test_every_call_of_all_ranks_ends_with_the_rank_that_does_not_make_it(pair: Ranks, tmp_path: Path) -> None:
    found, _ = pair.run(waits_alone, tmp_path / "checkpoint", timeout_s=120.0)
    for name, waits_for in WAITS_FOR.items():
        head, where, waiting, late, remedy = found[name].split("\n")
        assert head == f"rank 0 has waited N s for {waits_for}: rank 1 has not come."
        assert where == "  synchronisation 1, rank 0"
        assert waiting == f"  rank 0: synchronisation 1, waits for {waits_for}"
        assert late == "  rank 1: synchronisation 1, in code outside of the model, no training forward since synchronisation 1"
        assert remedy == REMEDY
