"""The groups of ranks that shards are exchanged over.

               shard ──>
replicate   rank 0  rank 1      gradients: reduce-scatter over `shard`, all-reduce over `replicate`
    │       rank 2  rank 3      parameters: all-gather over `shard`
    v
"""

from undertow.config import SyncConfig
from undertow.ranks.exchanges import Collectives, exchanges_over
from undertow.ranks.transport import OwnGroup


class ShardGroups:
    """Exchanges over separate groups: `shard` and, on a mesh, `replicate`. Construction is a
    collective call.

    `all_ranks` is the group of all these ranks. Reductions give means over all of them. `close`
    ends the threads and destroys the groups.
    """

    def __init__(self, all_ranks: OwnGroup, config: SyncConfig) -> None:
        user = all_ranks.user
        self.rank, self.num_ranks = user.rank, len(user.ranks)
        device = all_ranks.device
        axes = [
            OwnGroup(axis, device=device, limits=config, within=all_ranks) for axis in user.axes()
        ]
        for axis in axes if self.num_ranks > 1 else ():
            axis.open()  # every rank creates each of them
        # On a mesh, inner sums are not divided: the mean is rounded once, after all summands are
        # added.
        divisor = self.num_ranks if len(axes) == 1 else 1
        self.shard = exchanges_over(axes[0], config, divisor=divisor)
        self.replicate: Collectives | None = None
        if len(axes) > 1:
            self.replicate = exchanges_over(axes[1], config, divisor=self.num_ranks)

    def close(self) -> None:
        for axis in (self.shard, self.replicate):
            if axis is not None:
                axis.close()
                axis.group.close()
