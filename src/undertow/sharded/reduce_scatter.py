"""How the gradients of a bucket travel to the ranks that own them.

Reasons: docs/design/sharded-optimizer.md.
"""

from collections.abc import Sequence
from typing import ClassVar

from undertow.buckets.transfer import BucketTransfer, Reducer
from undertow.plan import Bucket, Plan
from undertow.ranks.dither import Turn
from undertow.ranks.handle import Handle
from undertow.ranks.parcels import Encoded
from undertow.schedule import OpKind
from undertow.sharded.gradients import ShardedGradients
from undertow.sharded.shard_exchanges import ShardExchanges


class ReduceScatter(BucketTransfer):
    """A reduce-scatter over the ranks that have the shards, and on a mesh an all-reduce of the
    shard across rows."""

    kind: ClassVar = OpKind.REDUCE_SCATTER
    sums_trailer = True

    def __init__(
        self,
        spec: Bucket,
        plan: Plan,
        gradients: ShardedGradients,
        reducer: Reducer,
        exchanges: ShardExchanges,
    ) -> None:
        self._parcels = inside, across = exchanges.parcels_of(spec)
        self._across = across  # with the offsets of the synchronization under way
        super().__init__(
            spec,
            reducer,
            gradients.whole,
            wire_bytes=exchanges.wire_bytes(spec, inside, across),
            encoded=[parcel for parcel in self._parcels if isinstance(parcel, Encoded)],
        )
        self._passed_on = exchanges.passed_on(spec)
        self._plan, self._gradients, self._exchanges = plan, gradients, exchanges

    def start(self, turn: Turn) -> Sequence[Handle]:
        gradients, lost = self._gradients, self.reducer.lost
        whole, copies = gradients.whole, gradients.copies
        # Both now: the reduce-scatter waits for the offsets, and so does what follows it.
        inside, across = self._exchanges.dithered(self._parcels, turn, device=whole.flat.device)
        self._across = across
        # If only rows exchange in a format, values count as if they did within rows.
        encoded = inside if isinstance(inside, Encoded) else across

        def fill() -> None:
            """Completes the bucket, over gloo in the thread that sends."""
            whole.copy_in(copies)
            in_format = encoded if isinstance(encoded, Encoded) else None
            self.mark_nonfinite(whole.values(), in_format)
            if in_format is not None and lost.is_counting:
                lost.count(whole.flat, self.spec, self._plan, in_format)

        handle = self._exchanges.inside.reduce_scatter(
            whole.flat,
            gradients.room(),
            inside,
            trailer=whole.trailer,
            parts=self._passed_on,
            fill=fill,
        )
        return (handle,)

    def start_across(self, inside: Sequence[Handle], turn: Turn) -> Sequence[Handle]:
        gradients, across = self._gradients, self._across
        exchanges = self._exchanges.across
        # the schedule of a strategy with two axes
        assert exchanges is not None
        assert across is not None
        (before,) = inside
        (reduced,) = gradients.values()
        return (
            exchanges.all_reduce_behind(before, reduced, across, trailer=gradients.whole.trailer),
        )
