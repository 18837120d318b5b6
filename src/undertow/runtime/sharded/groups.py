"""The groups that a sharded optimizer exchanges over: ranks with the other shards of a replica, and ranks with the same shard.

               shard ──>
replicate   rank 0  rank 1      gradients: reduce-scatter over `shard`, then all-reduce of the shards over `replicate`
    │       rank 2  rank 3      parameters: all-gather over `shard`
    v
"""

from undertow.config import SyncConfig
from undertow.runtime.comm.collectives import exchanges_over
from undertow.runtime.comm.group import OwnGroup


class ShardGroups:
    """Exchanges over separate groups: `shard` and, on a mesh, `replicate`. Construction is a collective call.

    `all_ranks` is the group of all these ranks. Reductions give sums over all of them, divided by `divisor`. `close` ends the
    threads and destroys the groups.
    """

    def __init__(self, all_ranks: OwnGroup, config: SyncConfig, *, divisor: float) -> None:
        user = all_ranks.user
        self.rank, self.num_ranks = user.rank, len(user.ranks)
        # Inner sums are not divided: the mean is rounded once, after all summands are added.
        axes = [(user, divisor)] if user.replicate is None else [(user.shard, 1), (user.replicate, divisor)]
        groups = [OwnGroup(ref, device=all_ranks.device, within=all_ranks) for ref, _ in axes]
        for group in groups if self.num_ranks > 1 else ():
            group.open(all_meet=True)  # every rank creates each of them
        exchanges = [exchanges_over(group, config, divisor=divisor) for group, (_, divisor) in zip(groups, axes, strict=True)]
        self.shard, self.replicate = exchanges[0], exchanges[1] if len(exchanges) > 1 else None

    def close(self) -> None:
        axes = [axis for axis in (self.shard, self.replicate) if axis is not None]
        for axis in axes:
            axis.close()
        for axis in axes:
            axis.group.close()
