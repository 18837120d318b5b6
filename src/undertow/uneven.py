"""Uneven inputs: ranks that have run out of data keep the others company until the last one has, as torch's Join has it.

Per forward, an active rank tells the others what it is about to do; a rank that has joined does the same without data.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, Joinable, JoinHook, _JoinConfig

from undertow.sync import Sync


class UnevenInputs(Join):
    """torch's context manager, which also leaves its participants as it found them."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            super().__exit__(kind, error, trace)
        finally:
            for joinable in self._joinables:
                joinable._join_config = _JoinConfig.construct_disabled_join_config()  # type: ignore[no-untyped-call]


class ShadowHook(JoinHook):
    """What a rank does that has run out of data, while others train on."""

    def __init__(self, sync: Sync, *, divide_by_initial_world_size: bool) -> None:
        self.divides_by_initial_world_size = divide_by_initial_world_size
        self._sync = sync

    def main_hook(self) -> None:
        """Takes part in one step of the others."""
        source, synchronises = _exchange(self._sync, source=None, synchronises=False)
        if source is not None:
            self._sync.synchronise_buffers(source=source)
        if synchronises:
            self._sync.shadow()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Gives every rank the model of one that trained to the end; from here on all ranks count again."""
        self._sync.join_ends()
        source, _ = _exchange(self._sync, source=self._sync.rank if is_last_joiner else None, synchronises=False)
        self._sync.share(("parameters", "buffers"), source=0 if source is None else source)


def announce_forward(sync: Sync, joinable: Joinable, hook: ShadowHook, *, with_buffers: bool) -> int | None:
    """Tells the ranks that have joined what this one is about to do.

    Returns the rank that buffers follow, None where they do not: rank 0 may have run out of data long ago.
    """
    work = Join.notify_join_context(joinable)
    sync.rescale = 1.0
    if work is not None and not hook.divides_by_initial_world_size:
        work.wait()
        num_active = _flat(work.get_future().value()).item()
        sync.rescale = sync.num_ranks / num_active
    source, _ = _exchange(sync, source=sync.rank if with_buffers else None, synchronises=not sync.is_accumulating)
    return source


def _exchange(sync: Sync, *, source: int | None, synchronises: bool) -> tuple[int | None, bool]:
    """The highest rank that offers its tensors, and whether any rank's backward will synchronise."""
    said = torch.tensor([0 if source is None else source + 1, int(synchronises)], device=sync.device)
    with sync.waiting("all ranks, to tell whether they have data"):
        dist.all_reduce(said, op=dist.ReduceOp.MAX, group=sync.own_group.process_group)
    highest, any_synchronises = said.tolist()
    return (highest - 1 if highest else None), bool(any_synchronises)


def _flat(value: Any) -> torch.Tensor:
    """Backends nest the result of a collective differently."""
    while not isinstance(value, torch.Tensor):
        value = value[0]
    return value
