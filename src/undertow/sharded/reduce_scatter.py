"""How the gradients of a bucket travel to the ranks that own them.

Reasons: docs/design/sharded-optimizer.md.
"""

from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor

from undertow.buckets.facts import TrailerCodec
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
            wire_bytes=exchanges.wire_bytes(spec, inside, across),
            encoded=[parcel for parcel in self._parcels if isinstance(parcel, Encoded)],
        )
        self._passed_on = exchanges.passed_on(spec)
        self._spec, self._plan, self._gradients = spec, plan, gradients
        self._reducer, self._exchanges = reducer, exchanges

    def start(self, trailer: TrailerCodec, turn: Turn) -> Sequence[Handle]:
        gradients, reducer, spec = self._gradients, self._reducer, self._spec
        memory, copies = gradients.memory, gradients.copies
        # Both now: the reduce-scatter waits for the offsets, and so does what follows it.
        inside, across = self._exchanges.dithered(self._parcels, turn, device=memory.flat.device)
        self._across = across
        # If only rows exchange in a format, values count as if they did within rows.
        encoded = inside if isinstance(inside, Encoded) else across

        def fill() -> None:
            """Completes the bucket, over gloo in the thread that sends."""
            memory.copy_in(copies)
            in_format = encoded if isinstance(encoded, Encoded) else None
            reducer.mark_nonfinite((memory.gradients,), spec, trailer, in_format)
            if in_format is not None and reducer.lost.is_counting:
                reducer.lost.count(memory.flat, spec, self._plan, in_format)

        handle = self._exchanges.inside.reduce_scatter(
            memory.flat,
            gradients.room(),
            inside,
            trailer=memory.trailer,
            parts=self._passed_on,
            fill=fill,
        )
        return (handle,)

    def start_across(self, inside: Sequence[Handle], turn: Turn) -> Sequence[Handle]:
        gradients, exchanges = self._gradients, self._exchanges.across
        memory, across = gradients.memory, self._across
        # the schedule of a strategy with two axes
        assert exchanges is not None
        assert across is not None
        (before,) = inside
        (reduced,) = gradients.values()
        return (exchanges.all_reduce_behind(before, reduced, across, trailer=memory.trailer),)

    def start_late(self, values: Sequence[Tensor]) -> Sequence[Handle]:
        return self._reducer.reduce_each(values)
