"""Where parameters and reduced gradients of a plan lie, and the buckets that follow from it.

Reasons: docs/design/buckets.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from undertow.buckets.bucket import LiveBucket, Shared
from undertow.buckets.gradients import BucketGradients, WholeGradients
from undertow.buckets.memory import BucketMemory
from undertow.buckets.sparse import SparseGradients
from undertow.buckets.transfer import transfer_of
from undertow.plan import Bucket
from undertow.ranks.exchanges import Exchanges
from undertow.ranks.transport import OwnGroup
from undertow.schedule import DDP, Strategy


class BucketLayout:
    """The layout of a plan whose parameters and reduced gradients lie whole on every rank of
    `group`, the ranks that reductions wait for.

    `Sharding` is the layout of shards.
    """

    strategy: Strategy = DDP
    # that reduce or gather its shards
    exchanges: tuple[Exchanges, ...] = ()

    def __init__(self, group: OwnGroup) -> None:
        self.group = group

    @property
    def holds_shards(self) -> bool:
        """True if ranks have shards of a gradient that was not set to zero."""
        return False

    def live_buckets(self, shared: Shared) -> Sequence[LiveBucket]:
        """Returns the buckets of the plan, in its order."""
        return [_whole_bucket(spec, shared) for spec in shared.plan.buckets]

    def wait_for_parameters(self) -> None:
        """Waits until all parameters that an optimizer has updated have arrived."""

    def make_gradients_whole(self, named_params: Iterable[tuple[str, Tensor]]) -> None:
        """Called before gradients move to another plan.

        Raises PhaseError if ranks have shards of one of them.
        """


def _whole_bucket(spec: Bucket, shared: Shared) -> LiveBucket:
    params = shared.params_of(spec)
    gradients: BucketGradients
    if spec.is_sparse:
        gradients = SparseGradients(params, BucketMemory(spec, ()))
    else:
        gradients = WholeGradients(params, BucketMemory(spec, params))
    transfer = transfer_of(spec, shared.plan, gradients, params, shared.reducer)
    return LiveBucket(spec, shared, gradients, transfer)
