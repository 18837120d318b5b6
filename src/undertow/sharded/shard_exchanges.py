"""The exchanges of shards: inside a row of ranks, and on a mesh across rows.

          inside ──>
across   rank 0  rank 1      gradients: reduce-scatter `inside`, all-reduce `across`
  │      rank 2  rank 3      parameters: all-gather `inside`
  v
"""

from collections.abc import Sequence

import torch

from undertow.config import SyncConfig
from undertow.plan import Bucket
from undertow.plan.layout import equal_parts, round_up
from undertow.ranks.dither import Rounding, Turn
from undertow.ranks.exchange_messages import are_uneven
from undertow.ranks.exchanges import Exchanges, accumulation_dtype, exchanges_over
from undertow.ranks.parcels import Encoded, FullWidth, Parcel
from undertow.ranks.transport import OwnGroup
from undertow.wire import Wire, wire_for


class ShardExchanges:
    """Exchanges `inside` a row of ranks and, on a mesh, `across` rows. Construction is a collective
    call.

    `all_ranks` is the group of all these ranks. Each axis of a mesh has a group of its own, and so
    have collectives that a stream runs one after another. Messages that have tags share
    `all_ranks`: a group is a connection to each other rank. Reductions give means over all of
    these ranks. `close` ends the threads and destroys the groups that were made here.
    """

    def __init__(self, all_ranks: OwnGroup, config: SyncConfig) -> None:
        user = all_ranks.user
        self.rank, self.num_ranks = user.rank, len(user.ranks)
        self._wires = config.wires
        self.param_wire = config.param_wire
        device = all_ranks.device
        axes = [all_ranks]
        if user.rows or not all_ranks.can.send_from_host:
            axes = [
                OwnGroup(axis, device=device, limits=config, within=all_ranks)
                for axis in user.axes()
            ]
        self._own_axes = [axis for axis in axes if axis is not all_ranks]
        for axis in axes if self.num_ranks > 1 else ():
            if not axis.is_open:
                axis.open()  # every rank creates each of them
        # On a mesh, inner sums are not divided: the mean is rounded once, after all summands are
        # added.
        divisor = self.num_ranks if len(axes) == 1 else 1
        self.inside = exchanges_over(axes[0], config, divisor=divisor, is_second=True)
        self.across: Exchanges | None = None
        if len(axes) > 1:
            self.across = exchanges_over(axes[1], config, divisor=self.num_ranks)

    def parcels_of(self, spec: Bucket) -> tuple[Parcel, Parcel | None]:
        """Returns how a bucket's gradients travel inside a row, and its shard across rows.

        If one rank owns much more of the bucket than others, ranks add up equal parts:
        `passed_on` says so.
        """
        num_shards, rank = self.inside.group.num_ranks, self.inside.group.rank
        owned = parts = spec.parts(num_shards, num_ranks=self.num_ranks)
        all_parts = self.shards_of(spec)
        if self.passed_on(spec) is not None:
            parts = spec.equal_parts(num_shards, num_ranks=self.num_ranks, is_padded=False)
            all_parts = spec.equal_parts(num_shards, num_ranks=self.num_ranks, is_padded=True)
        inside, across = (None, None) if spec.wire is None else self._wires
        # `wire="auto"` does not name a format: the plan has it.
        if inside is None and across is None:
            inside = across = spec.wire
        dtype, is_host = getattr(torch, spec.dtype), self.inside.group.hardware.is_host
        parcel = _parcel(
            wire_for(inside, spec.dtype, spec.itemsize),
            dtype,
            narrow_numel=spec.narrow_numel,
            parts=parts,
            is_host=is_host,
            all_parts=all_parts,
        )
        if self.across is None:
            return parcel, None
        own, num_rows = owned[rank], self.across.group.num_ranks
        wire = wire_for(across, spec.dtype, spec.itemsize)
        part_numel, padded_numel = spec.shard_numel, num_rows * spec.shard_numel
        if spec.owners is not None:
            block = 1 if wire is None else wire.block
            part_numel, padded_numel = round_up(-(-len(own) // num_rows), block), len(own)
        crossing = _parcel(
            wire,
            accumulation_dtype(dtype),
            narrow_numel=min(max(spec.narrow_numel - own.start, 0), len(own)),
            parts=equal_parts(num_rows, part_numel, stop=len(own)),
            is_host=is_host,
            all_parts=equal_parts(num_rows, part_numel, stop=padded_numel),
        )
        return parcel, crossing

    def dithered(
        self, parcels: tuple[Parcel, Parcel | None], turn: Turn, *, device: torch.device
    ) -> tuple[Parcel, Parcel | None]:
        """Returns the parcels of one synchronization, with the offsets of its turn.

        The stages have different ones: a sum over a row has been rounded before.
        """
        inside, across = parcels
        if isinstance(inside, Encoded):
            inside = inside.dithered(turn, Rounding.OWN, rank=self.inside.group.rank, device=device)
        if self.across is not None and isinstance(across, Encoded):
            rank = self.across.group.rank
            across = across.dithered(turn, Rounding.ACROSS, rank=rank, device=device)
        return inside, across

    def passed_on(self, spec: Bucket) -> list[range] | None:
        """Returns the parts of ranks that get their means from the ranks that add up equal parts of
        a bucket; None if each rank adds up its own part."""
        owned = self.shards_of(spec)
        return owned if are_uneven(owned) else None

    def shards_of(self, spec: Bucket) -> list[range]:
        """Returns the elements of a bucket that each rank of a row has, as they are gathered."""
        num_shards = self.inside.group.num_ranks
        return spec.parts(num_shards, num_ranks=self.num_ranks, is_padded=True)

    def shard_numel(self, spec: Bucket) -> int:
        """Returns the number of a bucket's elements that this rank owns, padding included."""
        return len(self.shards_of(spec)[self.inside.group.rank])

    def wire_bytes(self, spec: Bucket, inside: Parcel, across: Parcel | None) -> int:
        """Returns the bytes of a bucket that are passed to collectives, over both axes."""
        num_bytes = inside.payload(spec.itemsize) + spec.trailer_bytes
        if across is not None:
            num_bytes += across.payload(spec.itemsize) + spec.trailer_bytes
        return num_bytes

    @property
    def axes(self) -> tuple[Exchanges, ...]:
        return (self.inside,) if self.across is None else (self.inside, self.across)

    def close(self) -> None:
        for axis in self.axes:
            axis.close()
        for group in self._own_axes:
            group.close()


def _parcel(
    wire: Wire | None,
    dtype: torch.dtype,
    *,
    narrow_numel: int,
    parts: Sequence[range],
    all_parts: Sequence[range],
    is_host: bool,
) -> Parcel:
    """Returns a parcel in a format, without padding, or in full width if that has no more bytes."""
    if wire is None:
        return FullWidth(all_parts)
    return Encoded(wire, dtype, narrow_numel, parts, is_host=is_host)
