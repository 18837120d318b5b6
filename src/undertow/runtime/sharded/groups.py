"""The groups that a sharded optimizer exchanges over: ranks with the other shards of a replica, and ranks with the same shard.

               shard ──>
replicate   rank 0  rank 1      gradients: reduce-scatter over `shard`, then all-reduce of the shards over `replicate`
    │       rank 2  rank 3      parameters: all-gather over `shard`
    v
"""

from __future__ import annotations

from collections.abc import Callable

from undertow.config import SyncConfig
from undertow.runtime.comm.collectives import P2PCollectives, exchanges_over
from undertow.runtime.comm.group import OwnGroup
from undertow.runtime.comm.handles import Handle, ThreadHandle


class ShardGroups:
    """Exchanges over separate groups: `shard` and, on a mesh, `replicate`. Construction is a collective call.

    `all_ranks` is the group of all these ranks. Reductions give sums over all of them, divided by `divisor`. `close` ends the
    threads and destroys the groups.
    """

    def __init__(self, all_ranks: OwnGroup, config: SyncConfig, *, divisor: float) -> None:
        user = all_ranks.user
        self.rank, self.num_ranks = user.rank, len(user.ranks)
        refs = [user] if user.replicate is None else [user.shard, user.replicate]
        self._groups = [OwnGroup(ref, device=all_ranks.device, within=all_ranks) for ref in refs]
        for group in self._groups if self.num_ranks > 1 else ():
            group.open(all_meet=True)  # every rank creates each of them
        # Inner sums are not divided: the mean is rounded once, after all summands are added.
        divisors = [divisor] if user.replicate is None else [1, divisor]
        exchanges = [
            exchanges_over(group, config, divisor=divisor) for group, divisor in zip(self._groups, divisors, strict=True)
        ]
        self.shard, self.replicate = exchanges[0], exchanges[1] if len(exchanges) > 1 else None
        self._updating = all_ranks.worker("undertow-updates")

    @property
    def can_step_in_backward(self) -> bool:
        """True if `after_reductions` is supported."""
        return isinstance(self.shard, P2PCollectives)

    def after_reductions(self, work: Callable[[], object]) -> Handle:
        """Runs `work` in a thread that delays no reduction; `work` waits for the last reduction started. One call at a time."""
        if self.replicate is None and isinstance(self.shard, P2PCollectives):
            return self.shard.after_reductions(work)
        # The threads that complete exchanges over `replicate` must complete the next reduction.
        started = ThreadHandle(self._groups[0].result)
        self._updating.submit(started.run, work)
        return started

    def close(self) -> None:
        for exchanges in (self.shard, self.replicate):
            if exchanges is not None:
                exchanges.close()
        self._updating.shutdown()
        for group in self._groups:
            group.close()
