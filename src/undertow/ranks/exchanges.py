"""Exchanges of parts: reduce-scatter, all-gather and an ordered all-reduce.

They are made of sends and receives, or of the backend's collectives. Sends and receives, all posted
at once, are for gloo. Its reduce-scatter sends as much as an all-reduce, and its single all-gather
does not fill a link. Each rank adds the received values itself, in rank order, and in fp32 if the
gradients are narrower. The result has the same bits whatever bucket a gradient is sent in.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import cycle

import torch
import torch.distributed as dist
from torch import Tensor

from undertow.config import SyncConfig
from undertow.errors import require
from undertow.ranks.transport import Handle, OwnGroup, Task, Work

_GATHER_TAG = 1 << 24  # ranks may start gathers in different orders: a number identifies each
_NUM_EXCHANGES = 1 << 16  # far more than may be in flight

_Arriving = tuple[Sequence[Tensor], Sequence[Work]]  # a part of every rank, and the messages


class P2PCollectives:
    """Exchanges by sends and receives; threads post and complete them in the order of their start.

    `divisor` is the divisor of means. `in_order` sends sums in full width; the order of additions
    is the same in any case. Reductions are sent in `wire` if that is narrower, and added in
    `accumulation_dtype`.
    """

    divides_first = False  # values are divided after the cast for a narrower wire

    def __init__(
        self,
        group: OwnGroup,
        *,
        in_order: bool,
        divisor: float,
        wire: torch.dtype | None = None,
    ) -> None:
        self.group = group
        self._in_order = in_order
        self._divisor = divisor
        self._wire = wire
        # An exchange sends messages of up to three kinds.
        self._tags = cycle(range(0, 4 * _NUM_EXCHANGES, 4))
        # Reused memory for received parts: fresh memory costs a page fault for every 4 KiB.
        self.free: dict[tuple[int, torch.dtype], list[Tensor]] = {}
        # The backward's thread would wait for the copy into the bucket and for gloo's send. That
        # copies into the socket, or blocks while gloo reads from that peer.
        self._posting = group.worker("undertow-posts")
        self._adding = group.worker("undertow-adds")
        self._gathering = group.worker("undertow-gathers")

    def reduce_scatter(
        self, storage: Tensor, shard: Tensor, *, trailer: range, pack: Task | None = None
    ) -> Handle:
        """Starts to write the mean over ranks of this rank's part of `storage` into `shard`.

        The mean is the sum divided by the divisor. `pack` fills `storage` first. Every rank starts
        its reduce-scatters and all-reduces in the same order.

        storage: [number of ranks * shard.numel() or more], the parts one after another. The range
        `trailer` becomes its sum over ranks on every rank.
        shard: of `accumulation_dtype(storage.dtype)`.
        """
        num_ranks = self.group.num_ranks
        tag = next(self._tags)

        def post() -> Task:
            if pack is not None:
                pack()
            sent = cast_for_wire(storage[: num_ranks * shard.numel()], self._wire)
            values = self._exchange(sent.view(num_ranks, -1).unbind(), tag)
            # Separate messages: combining the two would halve their number but require adjacent
            # memory.
            add_up_flags = self._post_sum(storage[trailer.start : trailer.stop], tag + 1)

            def add_up() -> None:
                self._add_up(values, shard)
                if self._divisor != 1:
                    shard.div_(self._divisor)
                add_up_flags()

            return add_up

        return Handle.in_threads(post, self._posting, self._adding, complete=self.group.complete)

    def all_reduce(self, tensor: Tensor) -> Handle:
        """Starts to replace `tensor` by its mean over ranks, added in rank order.

        Ranks of a mesh are added row by row, like exchanges inside and across its rows.
        """
        post = partial(self._post_all_reduce, tensor, tensor, self._divisor, next(self._tags))
        return Handle.in_threads(
            post, self._posting, self._adding, self._gathering, complete=self.group.complete
        )

    def all_reduce_behind(self, before: Handle, tensor: Tensor, *, trailer: Tensor) -> Handle:
        """Starts an all-reduce of a tensor that is ready when `before` is complete.

        `trailer` becomes its sum over ranks. `before` are reduce-scatters over other ranks, each
        followed by one of these, in the same order. If no order is required, `tensor` is sent in
        the trailer's dtype, as in an all-reduce of the backend's.
        """
        tag = next(self._tags)

        def post() -> Task:
            before.wait()
            add_up_trailer = self._post_sum(trailer, tag + 2)
            divisor = self._divisor
            # Sums over the inner ranks that are not divided yet may be too large for 16 bits, so
            # divide before the cast.
            if torch.float16 in (self._wire, trailer.dtype):
                tensor.div_(divisor)
                divisor = 1
            sent = tensor if self._in_order else tensor.to(trailer.dtype)
            add_up_values = self._post_all_reduce(sent, tensor, divisor, tag)

            def add_up() -> Task:
                add_up_trailer()
                return add_up_values()

            return add_up

        return Handle.in_threads(
            post, self._posting, self._adding, self._gathering, complete=self.group.complete
        )

    def all_gather(self, flat: Tensor, *, number: int, then: Task | None = None) -> Handle:
        """Starts to fill `flat`, which has this rank's part, with the parts of all ranks.

        `then` is called at the end. `number` identifies a gather among those in flight.

        flat: [number of ranks * part]
        """
        tag = _GATHER_TAG + number
        # Held until the end: after the last step, the user may destroy the groups before the other
        # ranks' parts arrive.
        post = partial(self._post_all_gather, self.group.process_group, flat, then, tag)
        return Handle.in_threads(post, self._posting, self._gathering, complete=self.group.complete)

    def close(self) -> None:
        """Ends the threads."""
        for thread in (self._posting, self._adding, self._gathering):
            thread.shutdown()

    def _post_all_reduce(
        self, values: Tensor, target: Tensor, divisor: float, tag: int
    ) -> Callable[[], Task]:
        group = self.group.process_group
        narrow = cast_for_wire(values, self._wire)
        parts = narrow.tensor_split(self.group.num_ranks)
        own = parts[self.group.rank]
        total = self._taken(own.numel(), accumulation_dtype(own.dtype))
        arriving = self._exchange(parts, tag)
        # Received into the sent parts: a peer returns a part's result only after it has received
        # the part.
        returning = self.group.receive(parts, tag + 1, group)

        def add_up() -> Task:
            own.copy_(self._add_up(arriving, total).div_(divisor))
            self._give_back([total])
            returning.extend(self.group.send([own] * len(parts), tag + 1, group))
            return widen

        def widen() -> None:
            _wait_for(returning)
            if narrow is not target:
                target.copy_(narrow)

        return add_up

    def _post_sum(self, tensor: Tensor, tag: int) -> Callable[[], object]:
        """Sends all of `tensor` to every peer; the returned function replaces it by the sum."""
        arriving = self._exchange([tensor] * self.group.num_ranks, tag)
        return lambda: tensor.copy_(self._add_up(arriving, torch.empty_like(tensor)))

    def _post_all_gather(
        self, group: dist.ProcessGroup, flat: Tensor, then: Task | None, tag: int
    ) -> Task:
        parts = flat.view(self.group.num_ranks, -1).unbind()
        works = self.group.receive(parts, tag, group)
        works += self.group.send([parts[self.group.rank]] * len(parts), tag, group)
        return partial(_end_gather, works, then, group)

    def _exchange(self, sent: Sequence[Tensor], tag: int) -> _Arriving:
        """Sends `sent[peer]` to each peer, and receives tensors like this rank's own."""
        group = self.group.process_group
        own = sent[self.group.rank]
        received = [own] * len(sent)
        for peer in self.group.peers:
            received[peer] = self._taken(own.numel(), own.dtype)
        works = self.group.receive(received, tag, group)
        works += self.group.send(sent, tag, group)
        return received, works

    def _add_up(self, arriving: _Arriving, into: Tensor) -> Tensor:
        received, works = arriving
        _wait_for(works)
        sum_in_order(received, into=into, rows=self.group.user.row_places)
        self._give_back(received[peer] for peer in self.group.peers)
        return into

    def _taken(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Returns memory; only the posting thread takes, while another one gives back."""
        free = self.free.get((numel, dtype))
        return free.pop() if free else torch.empty(numel, dtype=dtype)

    def _give_back(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            self.free.setdefault((tensor.numel(), tensor.dtype), []).append(tensor)


def _wait_for(works: Sequence[Work]) -> None:
    for work in works:
        work.wait()


def _end_gather(works: Sequence[Work], then: Task | None, _held: dist.ProcessGroup) -> None:
    _wait_for(works)
    if then is not None:
        then()


class BackendCollectives:
    """Exchanges as of `P2PCollectives`, by the backend's collectives.

    With `in_order`, ranks exchange their parts, and each rank adds its part itself.
    """

    def __init__(
        self,
        group: OwnGroup,
        *,
        in_order: bool,
        divisor: float,
        wire: torch.dtype | None = None,
    ) -> None:
        self.group = group
        self.divides_first = not in_order
        self._divisor = divisor
        self._wire = wire
        # Collectives wait for others on this stream, so that the host waits for neither.
        self._behind = torch.cuda.Stream(group.device) if group.device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def reduce_scatter(
        self, storage: Tensor, shard: Tensor, *, trailer: range, pack: Task | None = None
    ) -> Handle:
        if pack is not None:
            with torch.no_grad():
                pack()
        values = storage[: self.group.num_ranks * shard.numel()]
        divisor = self._divisor
        if not self.divides_first:
            sent = cast_for_wire(values, self._wire)
            work, parts = self._exchanged(sent)
        else:
            if travels_narrower(storage.dtype, self._wire):
                # The backend would add these values in 16 bits, and their sum may overflow.
                values = values.div(divisor)
                divisor = 1
            sent = cast_for_wire(values, self._wire)
            part = shard if shard.dtype == sent.dtype else torch.empty_like(shard, dtype=sent.dtype)
            work = self.group.scatter_sum(part, sent)
            parts = [part]

        def finish() -> None:
            self._add_up(parts, shard)
            if divisor != 1:
                shard.div_(divisor)
            _used_here(sent)  # held until now, because NCCL reads it

        of_trailer = self.group.all_reduce_async(storage[trailer.start : trailer.stop])
        return Handle(work, *of_trailer.works, finish=finish)

    def all_reduce(self, tensor: Tensor) -> Handle:
        narrow = cast_for_wire(tensor, self._wire)
        part_numel = -(-narrow.numel() // self.group.num_ranks)
        padded = narrow.new_zeros(self.group.num_ranks * part_numel)
        padded[: narrow.numel()].copy_(narrow)
        work, parts = self._exchanged(padded)
        # Unlike the others, this handle covers both halves: the second one starts on the stream
        # after the first.
        work.wait()
        total = padded.new_empty(part_numel, dtype=accumulation_dtype(narrow.dtype))
        self._add_up(parts, total)
        own = total.div_(self._divisor).to(padded.dtype)

        def finish() -> None:
            tensor.copy_(_used_here(padded)[: tensor.numel()])
            _used_here(own)  # held until now, because NCCL reads it

        return Handle(self.group.gather_parts(padded, own), finish=finish)

    def all_reduce_behind(self, before: Handle, tensor: Tensor, *, trailer: Tensor) -> Handle:
        with torch.cuda.stream(self._behind):
            before.wait()
            of_trailer = self.group.all_reduce_async(trailer)
            if not self.divides_first:
                mean = self.all_reduce(tensor)
                return Handle(*of_trailer.works, *mean.works, finish=mean.wait)
            sent = cast_for_wire(tensor.div(self._divisor).to(trailer.dtype), self._wire)
            work = self.group.all_reduce_async(sent)
        works = (*of_trailer.works, *work.works)
        return Handle(*works, finish=lambda: tensor.copy_(_used_here(sent)))

    def all_gather(self, flat: Tensor, *, number: int, then: Task | None = None) -> Handle:
        own = flat.view(self.group.num_ranks, -1)[self.group.rank]
        return Handle(self.group.gather_parts(flat, own), finish=then)

    def close(self) -> None:
        """Does nothing: there are no threads."""

    def _exchanged(self, sent: Tensor) -> tuple[Work, Sequence[Tensor]]:
        """Sends each rank its part of `sent`; returns the parts of all ranks that will arrive."""
        received = torch.empty_like(sent)
        work = self.group.exchange(received, sent)
        return work, received.view(self.group.num_ranks, -1).unbind()

    def _add_up(self, parts: Sequence[Tensor], into: Tensor) -> None:
        for part in parts:
            _used_here(part)
        sum_in_order(parts, into=into, rows=self.group.user.row_places)


Collectives = P2PCollectives | BackendCollectives


def exchanges_over(group: OwnGroup, config: SyncConfig, *, divisor: float) -> Collectives:
    """Returns the fastest exchanges for the group's backend; means are divided by `divisor`."""
    require(
        not group.is_over_gloo or group.device.type == "cpu",
        f"{group.backend} sends and receives from the host's memory only, and parameters are on "
        f"{group.device}.",
        where='ShardedOptimizer, or reduction="ordered"',
        remedy='Initialize torch.distributed with "nccl" to train on GPUs.',
    )
    kind: type[Collectives] = P2PCollectives if group.is_over_gloo else BackendCollectives
    in_order = config.reduction == "ordered"
    return kind(group, in_order=in_order, divisor=divisor, wire=wire_of(config))


def wire_of(config: SyncConfig) -> torch.dtype | None:
    """Returns the dtype on the wire of values that are wider, or None."""
    return None if config.wire_dtype is None else getattr(torch, config.wire_dtype)


def travels_narrower(dtype: torch.dtype, wire: torch.dtype | None) -> bool:
    """Returns True if `dtype` is cast for the wire: real numbers with more bytes than `wire`."""
    return wire is not None and dtype.is_floating_point and dtype.itemsize > wire.itemsize


def cast_for_wire(tensor: Tensor, wire: torch.dtype | None) -> Tensor:
    """Returns `tensor`, or a copy of it in `wire` if that is narrower."""
    is_cast = travels_narrower(tensor.dtype, wire) and not tensor.is_sparse
    return tensor.to(wire) if is_cast else tensor


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype that values of `dtype` are added in."""
    return torch.float32 if dtype.itemsize == 2 else dtype


def sum_in_order(
    parts: Sequence[Tensor], *, into: Tensor, rows: Sequence[Sequence[int]] = ()
) -> Tensor:
    """Adds `parts` in their order; the order in torch.sum depends on the position of an element.

    With the `rows` of a mesh, which list positions of ranks, it adds each row and then the rows.
    """
    if rows:
        of_rows = ([parts[place] for place in row] for row in rows)
        parts = [sum_in_order(row, into=torch.empty_like(into)) for row in of_rows]
    first, *rest = parts
    if rest and first.dtype == into.dtype:  # saves one pass over memory
        torch.add(first, rest.pop(0), out=into)
    else:
        into.copy_(first)
    for part in rest:
        into.add_(part)
    return into


def _used_here(tensor: Tensor) -> Tensor:
    """Keeps memory until the current stream, perhaps not its own, is done with it."""
    if tensor.device.type == "cuda":
        tensor.record_stream(torch.cuda.current_stream())
    return tensor
