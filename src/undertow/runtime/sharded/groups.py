"""The axes along which a sharded optimizer exchanges: where ranks have shards of one another, and where they have the same.

            inside ──>
across   rank 0  rank 1      gradients: reduce-scatter inside, then all-reduce of the shards across
   │     rank 2  rank 3      parameters: all-gather inside
   v
"""

from __future__ import annotations

from collections.abc import Callable

from undertow.config import SyncConfig
from undertow.runtime.comm.backend import exchanges_over
from undertow.runtime.comm.cast import wire_dtype_named
from undertow.runtime.comm.group import OwnGroup
from undertow.runtime.comm.handles import Handle
from undertow.runtime.comm.p2p import Exchange, P2PCollectives


class ShardGroups:
    """Exchanges over groups of their own, `inside` and, where ranks form a mesh, `across`; making them is a collective call.

    `all_ranks` is the group of all of them. They reduce to sums over those, divided by `divisor`. `close` ends their threads and
    destroys the groups.
    """

    def __init__(self, all_ranks: OwnGroup, config: SyncConfig, *, divisor: float) -> None:
        user = all_ranks.user
        self.rank, self.num_ranks = user.rank, len(user.ranks)
        refs = [user] if user.across is None else [user.inside, user.across]
        self._groups = [OwnGroup(ref, device=all_ranks.device, within=all_ranks) for ref in refs]
        for group in self._groups if self.num_ranks > 1 else ():
            group.all_meet = True  # each of them is made on every rank
            group.open()
        in_order, wire = config.reduction == "ordered", wire_dtype_named(config.wire_dtype)
        # Sums inside are not divided: the mean is rounded once, when all summands are in it.
        divisors = [divisor] if user.across is None else [1, divisor]
        exchanges = [
            exchanges_over(group, in_order=in_order, divisor=divisor, wire=wire)
            for group, divisor in zip(self._groups, divisors, strict=True)
        ]
        self.inside, self.across = exchanges[0], exchanges[1] if len(exchanges) > 1 else None
        self._updating = all_ranks.worker("undertow-updates")

    @property
    def can_step_in_backward(self) -> bool:
        """Whether `after_reductions` is there."""
        return isinstance(self.inside, P2PCollectives)

    def after_reductions(self, work: Callable[[], object]) -> Handle:
        """Starts `work`, which waits for the last reduction that was started, where it keeps no other one; one at a time."""
        if self.across is None and isinstance(self.inside, P2PCollectives):
            return self.inside.after_reductions(work)
        # The threads that complete exchanges across have the next reduction to complete.
        started = Exchange(self._groups[0])
        self._updating.submit(started.run, work)
        return started

    def close(self) -> None:
        for exchanges in (self.inside, self.across):
            if exchanges is not None:
                exchanges.close()
        self._updating.shutdown()
        for group in self._groups:
            group.close()
