"""The gradients of a bucket under a sharded optimizer: placeholders over this rank's shard in
`.grad`, and a reduce-scatter to the ranks that own the shards.

.grad   None ── autograd ──> gradient ── pack ──> None ── reduce-scatter ──> placeholder (part)

placeholder ── zero_grad ──> None
placeholder ── autograd adds ──> .added ── pack, reduce-scatter ──> part += new

Reasons: docs/design/sharded-optimizer.md.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import ClassVar

import torch
from torch import Tensor

from undertow.buckets.gradients import Copy, FlatGradients, has_values
from undertow.buckets.transfer import BucketTransfer, Reducer
from undertow.plan import Bucket, Plan
from undertow.ranks.dither import Turn
from undertow.ranks.handle import Handle
from undertow.ranks.parcels import Encoded
from undertow.schedule import OpKind
from undertow.sharded.params import ShardPart
from undertow.sharded.placeholder import GradientPlaceholder
from undertow.sharded.shard_exchanges import ShardExchanges

_grad_of = attrgetter("grad")


class ShardedGradients:
    """Gradients whose reduced values are the `shard`.

    `parts` has a placeholder for each parameter, and its part of the shard. Gradients that are not
    reduced yet are `whole`.
    """

    def __init__(
        self,
        whole: FlatGradients,
        shard: Tensor,
        parts: Sequence[tuple[GradientPlaceholder, ShardPart]],
    ) -> None:
        self.params, self.whole, self._shard = whole.params, whole, shard
        self.earlier: Collection[int] = ()
        # Copies of packed gradients into the bucket. `ReduceScatter.start` makes them, over gloo in
        # the thread that sends, so that backward continues.
        self.copies: list[Copy] = []
        self._parts = parts
        self._before: dict[int, GradientPlaceholder] = {}  # by position, the former `.grad`
        self._keeps_shard = False  # its values must stay until `bind`
        self._reduced = self._shard

    def arrived(self) -> Iterable[Tensor | None]:
        for grad in map(_grad_of, self.params):
            yield grad.added if isinstance(grad, GradientPlaceholder) else grad

    def pack(self, not_arrived: Collection[int], *, is_discarded: bool = False) -> list[int]:
        self._before = {}
        earlier: set[int] = set()
        for position, param in enumerate(self.params):
            grad = param.grad
            if isinstance(grad, GradientPlaceholder):
                self._before[position] = grad
                param.grad, grad.added = grad.added, None
                if not grad.is_cleared:
                    earlier.add(position)
        self.earlier = earlier
        self._keeps_shard = is_discarded or bool(earlier)
        self.copies = []
        return self.whole.pack(not_arrived, later=self.copies)

    def room(self) -> Tensor:
        """Returns memory for the reduced values: the shard, unless its present values must stay."""
        self._reduced = torch.empty_like(self._shard) if self._keeps_shard else self._shard
        return self._reduced

    def values(self) -> Sequence[Tensor]:
        return (self._reduced,)

    def bind(self, used_elsewhere: Collection[int]) -> None:
        """Moves the reduced values to their final place, and puts placeholders into `.grad`."""
        reduced, self._reduced = self._reduced, self._shard
        unused, self.whole.kept = self.whole.kept, {}
        for position, (placeholder, part) in enumerate(self._parts):
            if position in unused and position not in used_elsewhere:
                self.params[position].grad = self._before.get(position, unused[position])
                continue
            if reduced is not self._shard:
                own = part.of_shard(self._shard)
                write = own.add_ if position in self.earlier else own.copy_
                write(part.of_shard(reduced))
            placeholder.bind_to(self.params[position])
        self._before = {}
        if unused:
            self.note_known()

    @torch.no_grad()
    def bind_local(self) -> None:
        self.whole.copy_in(self.copies)
        self.whole.bind(())
        for position, placeholder in self._before.items():
            param = self.params[position]
            param.grad, placeholder.added = placeholder, param.grad

    def note_known(self) -> None:
        self.whole.note_known()

    def is_written(self, position: int) -> bool:
        grad = self.params[position].grad
        if isinstance(grad, GradientPlaceholder):
            return grad.added is not None and has_values(grad.added)
        return self.whole.is_written(position)

    def has_result(self) -> bool:
        grads = map(_grad_of, self.params)
        return any(grad is not None and not _is_dropped(grad) for grad in grads)

    def late_values(self, late: Mapping[int, Tensor]) -> Sequence[Tensor]:
        return self.whole.late_values(late)

    def add_late(self, values: Sequence[Tensor]) -> None:
        for param, (placeholder, part) in zip(self.params, self._parts, strict=True):
            own = part.of_shard(self._shard)
            if not isinstance(param.grad, GradientPlaceholder):
                placeholder.bind_to(param)
                own.zero_()
            own.add_(part.of_bucket(values[0]))

    def release(self) -> None:
        self.whole.release()


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
            self._mark_nonfinite(whole.values(), in_format)
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


def _is_dropped(grad: Tensor) -> bool:
    return isinstance(grad, GradientPlaceholder) and grad.is_cleared and grad.added is None
