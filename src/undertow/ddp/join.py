"""Uneven inputs: ranks that have run out of data shadow the others until the last one has, like torch's Join.

Before each forward an active rank tells the others its next action; a rank that has joined follows it without data.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, Joinable, JoinHook, _JoinConfig

from undertow.errors import PhaseError
from undertow.runtime.peers.waiting import over_users
from undertow.runtime.step.sharded_steps import no_join_with_shards
from undertow.sync import GradientSync


class UnevenInputs(Join):
    """torch's context manager for one model. It also restores the model's state, and reports a rank that is gone."""

    def __init__(self, joinable: Joinable, enable: bool, throw_on_early_termination: bool, **how: Any) -> None:
        super().__init__([joinable], enable, throw_on_early_termination, is_enabled=enable, **how)
        self._hook = cast(ShadowHook, self._join_hooks[0])

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            super().__exit__(kind, error, trace)
        finally:
            self._hook.ends()
            for joinable in self._joinables:
                joinable._join_config = _JoinConfig.construct_disabled_join_config()  # type: ignore[no-untyped-call]

    def _get_num_nonjoined_procs(self) -> int:
        with _over_users(self._hook.sync, "what ranks that have data do next"):
            num_active = int(super()._get_num_nonjoined_procs())  # type: ignore[no-untyped-call]
        self._hook.rescale(num_active)
        return num_active

    def _notify_procs_to_terminate(self) -> None:
        with _over_users(self._hook.sync, "all ranks, to tell that there is no more data"):
            super()._notify_procs_to_terminate()  # type: ignore[no-untyped-call]


class ShadowHook(JoinHook):
    """Actions of a rank that has run out of data while others train on.

    Raises PhaseError for a model with experts, or with a sharded optimizer.
    """

    def __init__(self, sync: GradientSync, *, divide_by_initial_world_size: bool, is_enabled: bool) -> None:
        self.divides_by_initial_world_size = divide_by_initial_world_size
        self.sync = sync
        if is_enabled:
            _require_join(sync)
            sync.own_group.borrowers.add("join")

    def main_hook(self) -> None:
        """Takes part in one step of the others."""
        sync = self.sync
        said = _exchange(sync)
        if said.source is not None:
            sync.synchronize_buffers(source=said.source)
        if said.synchronizes:
            sync.shadow()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Gives every rank the model of a rank that trained to the end; from then on all ranks count again."""
        sync = self.sync
        self.ends()
        sync.join_ends()
        said = _exchange(sync, source=sync.rank if is_last_joiner else None)
        sync.share(("parameters", "buffers"), source=0 if said.source is None else said.source)

    def ends(self) -> None:
        """Ends the use of the user's process group."""
        self.sync.own_group.borrowers.discard("join")

    def rescale(self, num_active: int) -> None:
        """Makes means run over `num_active` ranks, unless they are to be over all ranks."""
        self.sync.rescale = 1.0 if self.divides_by_initial_world_size else self.sync.num_ranks / max(1, num_active)


def _require_join(sync: GradientSync) -> None:
    """Raises PhaseError if a rank without data could not take part in the others' steps."""
    if sync.experts:
        raise PhaseError(
            "a rank that has run out of data cannot leave a model with experts: tokens of others need those that it holds.",
            where="join",
            remedy="Give every rank as many batches.",
        )
    if sync.steps is not None:
        raise no_join_with_shards()


def announce_forward(sync: GradientSync, joinable: Joinable, hook: ShadowHook, *, with_buffers: bool) -> int | None:
    """Tells the ranks that have joined this rank's next action.

    Returns the rank that buffers follow, or None: rank 0 may have run out of data long ago.
    """
    hook.rescale(_num_active(sync, joinable))
    source = sync.rank if with_buffers else None
    return _exchange(sync, source=source, synchronizes=sync.synchronizes).source


def _num_active(sync: GradientSync, joinable: Joinable) -> int:
    """Tells ranks that have joined that this one has not. Returns how many have not, as far as it may ask."""
    with _over_users(sync, "all ranks, to tell them that there is data"):
        work = Join.notify_join_context(joinable)
        if work is None:
            return sync.num_ranks
        work.wait()
        return int(_flat(work.get_future().value()).item())


@contextlib.contextmanager
def _over_users(sync: GradientSync, what: str) -> Iterator[None]:
    """Marks a wait of torch's Join, which communicates over the user's group."""
    with sync.waiting(what), over_users(sync.process_group):
        yield


@dataclass(frozen=True, slots=True)
class _Said:
    source: int | None  # the highest rank that offers its tensors
    synchronizes: bool  # true if any rank's backward will synchronize


def _exchange(sync: GradientSync, *, source: int | None = None, synchronizes: bool = False) -> _Said:
    """Exchanges the next action of active ranks."""
    said = torch.tensor([0 if source is None else source + 1, int(synchronizes)], device=sync.device)
    with sync.waiting("all ranks, to tell what they do"):
        sync.own_group.all_reduce(said, dist.ReduceOp.MAX)
    highest, any_synchronizes = said.tolist()
    return _Said(highest - 1 if highest else None, bool(any_synchronizes))


def _flat(value: Any) -> torch.Tensor:
    """Unwraps the result of a collective, which backends nest differently."""
    while not isinstance(value, torch.Tensor):
        value = value[0]
    return value
