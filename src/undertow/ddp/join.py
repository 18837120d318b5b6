"""Uneven inputs: ranks that have run out of data shadow the others until the last one has, like
torch's Join.

Before each forward an active rank tells the others its next action; a rank that has joined follows
it without data.
"""

from types import TracebackType
from typing import Any, cast

import torch
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from undertow.buckets.facts import FactCodec
from undertow.config import refused
from undertow.plan.facts import FactKind
from undertow.sync.gradient_sync import GradientSync
from undertow.torch_private import private

_ACTIONS = {
    "offers": FactKind.RANK_FLAGS,  # its tensors, which the others take over
    "synchronizes": FactKind.RANK_FLAGS,  # in the backward that follows
}


class UnevenInputs(Join):
    """torch's context manager for one model. It also restores the model's state, and reports a rank
    that is gone.

    torch's part communicates over the user's group.
    """

    def __init__(
        self, joinable: Joinable, enable: bool, throw_on_early_termination: bool, **how: Any
    ) -> None:
        super().__init__([joinable], enable, throw_on_early_termination, is_enabled=enable, **how)
        self._hook = cast(ShadowHook, self._join_hooks[0])

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            super().__exit__(kind, error, trace)
        finally:
            # torch no longer uses the user's group
            self._hook.sync._group.borrowers.discard("join")
            private.end_join(self._joinables[0])

    def _get_num_nonjoined_procs(self) -> int:
        with self._hook.sync._group.waiting("the next action of ranks with data"):
            num_active = int(super()._get_num_nonjoined_procs())  # type: ignore[no-untyped-call]
        self._hook.rescale(num_active)
        return num_active

    def _notify_procs_to_terminate(self) -> None:
        with self._hook.sync._group.waiting("all ranks, to say that its data has ended"):
            super()._notify_procs_to_terminate()  # type: ignore[no-untyped-call]


class ShadowHook(JoinHook):
    """Actions of a rank that has run out of data while others train on.

    Raises PhaseError for a model with experts, a sharded optimizer or outer synchronization.
    """

    def __init__(
        self, sync: GradientSync, divides_by_initial_world_size: bool, *, is_enabled: bool
    ) -> None:
        self.sync = sync
        self._divides_by_initial_world_size = divides_by_initial_world_size
        if is_enabled:
            if sync.experts:
                raise refused("experts", "join", where="join")
            if sync._own.sharded_steps is not None:
                raise refused("join", "shards", where="join")
            if sync.outer is not None:
                raise refused("join", "outer", where="join")
            sync._group.borrowers.add("join")

    def main_hook(self) -> None:
        """Takes part in one step of the others."""
        source, synchronizes = _exchange_actions(self.sync)
        if source is not None:
            self.sync._own.synchronize_buffers(source=source)
        if synchronizes:
            self.sync._own.shadow()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Gives every rank the model of a rank that trained to the end.

        From then on all ranks count again.
        """
        self.sync._group.borrowers.discard("join")
        self.sync._engine.progress.join_ends()
        source, _ = _exchange_actions(self.sync, offers=is_last_joiner)
        self.sync._whole.share(("parameters", "buffers"), source=source or 0)

    def rescale(self, num_active: int) -> None:
        """Makes means run over `num_active` ranks, unless the user wants them over all ranks."""
        is_over_all = self._divides_by_initial_world_size
        self.sync._engine.progress.rescale = (
            1.0 if is_over_all else self.sync.num_ranks / max(1, num_active)
        )

    def announce_forward(self, joinable: Joinable, *, with_buffers: bool) -> int | None:
        """Tells the ranks that have joined that this rank has data, and its next action.

        Returns the rank that buffers follow, or None: rank 0 may have run out of data long ago.
        """
        sync, num_active = self.sync, self.sync.num_ranks
        with sync._group.waiting("all ranks, to say that it has data"):
            work = Join.notify_join_context(joinable)
            if work is not None:
                work.wait()
                num_active = int(work.get_future().value()[0].item())
        self.rescale(num_active)
        engine, members = sync._engine, sync._own.members
        # no backward follows if nothing is trained
        trains = engine.current_plan.trains or members.has_changed()
        source, _ = _exchange_actions(
            sync, offers=with_buffers, synchronizes=engine.synchronizes and trains
        )
        return source


def _exchange_actions(
    sync: GradientSync, *, offers: bool = False, synchronizes: bool = False
) -> tuple[int | None, bool]:
    """Exchanges the next action of active ranks.

    Returns the highest rank that offers its tensors, and True if any rank's backward will
    synchronize.
    """
    group = sync._group
    codec = FactCodec.alone(_ACTIONS, rank=group.rank, num_ranks=group.num_ranks)
    said = torch.zeros(codec.numel, device=group.device)
    marked = {"offers": offers, "synchronizes": synchronizes}
    for name, is_set in marked.items():
        codec.write_flags(said, {name: [group.rank] if is_set else []})
    group.all_reduce(said, "all ranks, to learn which of them still train").wait()
    told = codec.flags((said != 0).tolist())
    return max(told["offers"], default=None), bool(told["synchronizes"])
