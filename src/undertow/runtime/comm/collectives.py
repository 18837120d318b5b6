"""Reduce-scatter, all-gather and an ordered all-reduce: built from sends and receives, or from the backend's own collectives.

Sends and receives, all posted at once, are for gloo, whose own reduce-scatter sends as much as an all-reduce, and whose single
all-gather does not fill a link. Each rank adds the received values itself, in rank order, and in fp32 if the gradients are
narrower. The result has the same bits whatever bucket a gradient is sent in.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import cycle

import torch
import torch.distributed as dist
from torch import Tensor

from undertow.config import SyncConfig
from undertow.errors import require
from undertow.runtime.comm.group import OwnGroup
from undertow.runtime.comm.handles import Handle, Posted, ThreadHandle, Work, WorkHandle
from undertow.runtime.peers.threads import Worker
from undertow.runtime.torch_private import private

_GATHER_TAG = 1 << 24  # gathers may start in a different order on another rank, so a number identifies each
_NUM_EXCHANGES = 1 << 16  # far more than may be in flight


class P2PCollectives:
    """Exchanges by sends and receives; threads post and complete them in the order of their start.

    `divisor` is the divisor of means, by default the number of ranks. `in_order` sends sums in full width; the order of additions
    is the same in any case. Reductions are sent in `wire` if that is narrower, and added in `accumulation_dtype`.
    """

    may_differ_in_order = True  # ranks may start gathers in different orders
    divides_first = False  # values are divided after the cast for a narrower wire

    def __init__(
        self, group: OwnGroup, *, in_order: bool = True, divisor: float | None = None, wire: torch.dtype | None = None
    ) -> None:
        self.group = group
        self._wire = wire
        self._divisor = group.num_ranks if divisor is None else divisor
        self._in_order = in_order
        self._peers = [peer for peer in range(group.num_ranks) if peer != group.rank]
        self._tags = cycle(range(0, 4 * _NUM_EXCHANGES, 4))  # an exchange sends messages of up to three kinds
        # Reused memory for messages from peers, because fresh memory costs a page fault for every 4 KiB.
        self.free: dict[tuple[int, torch.dtype, torch.device], list[Tensor]] = {}
        # Not in the backward's thread, which would wait for the copy into the bucket and for gloo's send: that copies into the
        # socket, or blocks while gloo reads from that peer.
        names = ("undertow-posts", "undertow-adds", "undertow-gathers")
        self._posting, self._adding, self._gathering = map(group.worker, names)

    def reduce_scatter(self, storage: Tensor, shard: Tensor, *, trailer: range, pack: Callable[[], object]) -> ThreadHandle:
        """Starts to write the mean or sum over ranks of this rank's part of `storage` into `shard`; `pack` fills `storage` first.

        With a custom divisor, the result is the sum over ranks divided by it.

        storage: [number of ranks * shard.numel() or more], the parts one after another. The range `trailer` becomes its sum over
        ranks on every rank. shard: of `accumulation_dtype(storage.dtype)`. Every rank starts its reduce-scatters and all-reduces
        in the same order.
        """
        post = partial(self._post_reduce_scatter, storage, shard, trailer, pack, next(self._tags))
        return self._start(ThreadHandle(self.group.result), post, self._adding)

    def all_reduce(self, tensor: Tensor) -> ThreadHandle:
        """Starts to replace `tensor` by its mean or sum over ranks, added in rank order. [any number of elements]

        Ranks of a mesh are added row by row, like exchanges inside and across its rows.
        """
        handle = ThreadHandle(self.group.result)
        return self._start(handle, partial(self._post_all_reduce, tensor, tensor, handle, next(self._tags)), self._adding)

    def all_reduce_behind(self, before: Handle, tensor: Tensor, *, trailer: Tensor) -> ThreadHandle:
        """Starts an all-reduce of a tensor that is ready when `before` is complete; `trailer` becomes its sum over ranks.

        `before` are reduce-scatters over other ranks, each followed by one of these, in the same order. If no order is required,
        `tensor` is sent in the trailer's dtype, as in an all-reduce of the backend's.
        """
        handle = ThreadHandle(self.group.result)
        post = partial(self._post_both, before, tensor, trailer, handle, next(self._tags))

        def start(_before: object) -> None:
            try:
                self._start(handle, post, self._adding)
            except RuntimeError as error:  # closed in the meantime
                handle.fail(error)

        before.on_done(start)
        return handle

    def all_gather(self, flat: Tensor, *, number: int, then: Callable[[], object]) -> ThreadHandle:
        """Starts to fill `flat`, which has this rank's part, with the parts of all ranks, and calls `then` at the end.

        flat: [number of ranks * part]. `number` identifies a gather among those in flight.
        """
        # Held until the end: after the last step, the user may destroy the groups before the other ranks' parts arrive.
        post = partial(self._post_all_gather, self.group.process_group, flat, then, _GATHER_TAG + number)
        return self._start(ThreadHandle(self.group.result), post, self._gathering)

    def close(self) -> None:
        """Ends the threads."""
        for thread in (self._posting, self._adding, self._gathering):
            thread.shutdown()

    def _post_reduce_scatter(
        self, storage: Tensor, shard: Tensor, trailer: range, pack: Callable[[], object], tag: int
    ) -> Posted:
        with torch.no_grad():
            pack()
        num_ranks = self.group.num_ranks
        own_trailer = storage[trailer.start : trailer.stop]
        received, works = self._exchange(
            list(cast_for_wire(storage[: num_ranks * shard.numel()], self._wire).view(num_ranks, -1)), tag=tag
        )
        # Separate messages: combining the two would halve their number but require adjacent memory.
        trailers, more = self._exchange([own_trailer] * num_ranks, tag=tag + 1)

        def add_up() -> None:
            sum_in_order(received, into=shard)
            if self._divisor != 1:
                shard.div_(self._divisor)
            self._add_up_trailer(own_trailer, trailers)
            self._give_back(received)

        return Posted([*works, *more], add_up)

    def _post_all_reduce(
        self, values: Tensor, target: Tensor, handle: ThreadHandle, tag: int, *, is_divided: bool = False
    ) -> Posted:
        tensor, divisor = cast_for_wire(values, self._wire), 1 if is_divided else self._divisor
        parts = list(tensor.tensor_split(self.group.num_ranks))
        own = parts[self.group.rank]
        total = self._taken(own.numel(), accumulation_dtype(tensor.dtype), tensor.device)
        received, works = self._exchange(parts, tag=tag)
        # Received into the sent parts: a peer returns a part's result only after it has received the part.
        returning = self._receive(parts, tag=tag + 1)

        def add_up() -> None:
            own.copy_(sum_in_order(received, into=total, rows=self.group.user.row_places).div_(divisor))
            self._give_back(received, total)
            widen = int if tensor is target else partial(target.copy_, tensor)
            returned = self._send([own] * len(parts), tag=tag + 1)
            self._gathering.submit(handle.complete, Posted([*returning, *returned], widen))

        return Posted(works, add_up, is_last=False)

    def _post_both(self, before: Handle, tensor: Tensor, trailer: Tensor, handle: ThreadHandle, tag: int) -> Posted:
        before.wait()  # it has ended; this raises if it failed
        trailers, works = self._exchange([trailer] * self.group.num_ranks, tag=tag + 2)
        # Sums over the inner ranks that are not divided yet may be too large for 16 bits, so divide before the cast.
        is_divided = torch.float16 in (self._wire, trailer.dtype)
        if is_divided:
            tensor.div_(self._divisor)
        sent = tensor if self._in_order else tensor.to(trailer.dtype)
        mean = self._post_all_reduce(sent, tensor, handle, tag, is_divided=is_divided)

        def add_up() -> None:
            self._add_up_trailer(trailer, trailers)
            mean.finish()

        return Posted([*works, *mean.works], add_up, is_last=False)

    def _post_all_gather(self, group: dist.ProcessGroup, flat: Tensor, then: Callable[[], object], tag: int) -> Posted:
        parts = list(flat.view(self.group.num_ranks, -1))
        returned = self._receive(parts, tag=tag, group=group)
        sent = self._send([parts[self.group.rank]] * len(parts), tag=tag, group=group)
        return Posted([*returned, *sent], then, held=group)

    def _start(self, handle: ThreadHandle, post: Callable[[], Posted], thread: Worker) -> ThreadHandle:
        self._posting.submit(handle.begin, post, thread)
        return handle

    def _exchange(self, sent: Sequence[Tensor], *, tag: int) -> tuple[list[Tensor], list[Work]]:
        """Sends `sent[peer]` to each peer, and receives tensors like this rank's own; returns these and the messages."""
        own = sent[self.group.rank]
        received = [
            own if peer == self.group.rank else self._taken(own.numel(), own.dtype, own.device) for peer in range(len(sent))
        ]
        return received, [*self._receive(received, tag=tag), *self._send(sent, tag=tag)]

    def _receive(self, received: Sequence[Tensor], *, tag: int, group: dist.ProcessGroup | None = None) -> list[Work]:
        group = group or self.group.process_group
        return [dist.irecv(received[peer], group=group, group_src=peer, tag=tag) for peer in self._peers]

    def _send(self, sent: Sequence[Tensor], *, tag: int, group: dist.ProcessGroup | None = None) -> list[Work]:
        group = group or self.group.process_group
        return [dist.isend(sent[peer], group=group, group_dst=peer, tag=tag) for peer in self._peers]

    def _taken(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        free = self.free.get((numel, dtype, device))
        return free.pop() if free else torch.empty(numel, dtype=dtype, device=device)

    def _give_back(self, received: Sequence[Tensor], *others: Tensor) -> None:
        """Returns the memory of the peers' tensors; called from the thread that completes exchanges, while another one takes."""
        for tensor in (*(received[peer] for peer in self._peers), *others):
            self.free.setdefault((tensor.numel(), tensor.dtype, tensor.device), []).append(tensor)

    def _add_up_trailer(self, trailer: Tensor, received: Sequence[Tensor]) -> None:
        trailer.copy_(sum_in_order(received, into=torch.empty_like(trailer)))
        self._give_back(received)


class BackendCollectives:
    """Exchanges as of `P2PCollectives`, by collectives.

    With `in_order`, ranks exchange their parts, and each rank adds its part itself.
    """

    may_differ_in_order = False

    def __init__(self, group: OwnGroup, *, in_order: bool, divisor: float | None = None, wire: torch.dtype | None = None) -> None:
        self.group = group
        self.divides_first = not in_order
        self._wire = wire
        self._divisor = group.num_ranks if divisor is None else divisor
        # Collectives wait for others on this stream, so that the host waits for neither.
        self._behind = torch.cuda.Stream(group.device) if group.device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def reduce_scatter(self, storage: Tensor, shard: Tensor, *, trailer: range, pack: Callable[[], object]) -> WorkHandle:
        with torch.no_grad():
            pack()
        num_ranks, pg = self.group.num_ranks, self.group.process_group
        values = storage[: num_ranks * shard.numel()]
        # The backend would add these values in 16 bits, and their sum may overflow.
        is_divided = self.divides_first and travels_narrower(storage.dtype, self._wire)
        parts = cast_for_wire(values.div(self._divisor) if is_divided else values, self._wire)
        if self.divides_first:
            narrow = shard if shard.dtype == parts.dtype else torch.empty_like(shard, dtype=parts.dtype)
            work = private.reduce_scatter(narrow, parts, group=pg, async_op=True)
            add_up: Callable[[], object] = int if narrow is shard else lambda: shard.copy_(_used_here(narrow))
        else:
            work, add_up = self._exchanged(parts, into=shard)

        def finish() -> None:
            add_up()
            if self._divisor != 1 and not is_divided:
                shard.div_(self._divisor)
            _used_here(parts)  # held until now, because NCCL reads it

        trailers = dist.all_reduce(storage[trailer.start : trailer.stop], group=pg, async_op=True)
        return WorkHandle(work, trailers, finish=finish)

    def all_reduce(self, tensor: Tensor) -> WorkHandle:
        num_ranks, pg = self.group.num_ranks, self.group.process_group
        narrow = cast_for_wire(tensor, self._wire)
        padded = narrow.new_zeros(-(-narrow.numel() // num_ranks) * num_ranks)
        padded[: narrow.numel()].copy_(narrow)
        total = torch.empty(padded.numel() // num_ranks, dtype=accumulation_dtype(narrow.dtype), device=narrow.device)
        work, add_up = self._exchanged(padded, into=total)
        # Unlike the others, this handle covers both halves: the second one starts on the stream after the first.
        work.wait()
        add_up()
        own = total.div_(self._divisor).to(padded.dtype)

        def finish() -> None:
            tensor.copy_(_used_here(padded)[: tensor.numel()])
            _used_here(own)  # held until now, because NCCL reads it

        return WorkHandle(private.all_gather(padded, own, group=pg, async_op=True), finish=finish)

    def all_reduce_behind(self, before: Handle, tensor: Tensor, *, trailer: Tensor) -> WorkHandle:
        pg = self.group.process_group
        with torch.cuda.stream(self._behind):
            before.wait()
            trailers = dist.all_reduce(trailer, group=pg, async_op=True)
            if not self.divides_first:
                mean = self.all_reduce(tensor)
                return WorkHandle(trailers, *mean.works, finish=mean.wait)
            sent = cast_for_wire(tensor.div(self._divisor).to(trailer.dtype), self._wire)
            work = dist.all_reduce(sent, group=pg, async_op=True)
        return WorkHandle(trailers, work, finish=lambda: tensor.copy_(_used_here(sent)))

    def all_gather(self, flat: Tensor, *, number: int, then: Callable[[], object]) -> WorkHandle:
        own = flat.view(self.group.num_ranks, -1)[self.group.rank]
        return WorkHandle(private.all_gather(flat, own, group=self.group.process_group, async_op=True), finish=then)

    def close(self) -> None:
        """Does nothing: there are no threads."""

    def _exchanged(self, parts: Tensor, *, into: Tensor) -> tuple[Work, Callable[[], object]]:
        received = torch.empty_like(parts)
        work = dist.all_to_all_single(received, parts, group=self.group.process_group, async_op=True)

        def add_up() -> None:
            rows = received.view(self.group.num_ranks, -1)
            sum_in_order([_used_here(row) for row in rows], into=into, rows=self.group.user.row_places)
            _used_here(parts)  # held until now, because NCCL reads it

        return work, add_up


Collectives = P2PCollectives | BackendCollectives


def exchanges_over(group: OwnGroup, config: SyncConfig, *, divisor: float) -> Collectives:
    """Returns the fastest exchanges for the group's backend; means are divided by `divisor`."""
    require(
        not group.is_over_gloo or group.device.type == "cpu",
        f"{group.backend} sends and receives from the host's memory only, and parameters are on {group.device}.",
        where='ShardedOptimizer, or reduction="ordered"',
        remedy='Initialize torch.distributed with "nccl" to train on GPUs.',
    )
    wire = None if config.wire_dtype is None else getattr(torch, config.wire_dtype)
    kind: type[Collectives] = P2PCollectives if group.is_over_gloo else BackendCollectives
    return kind(group, in_order=config.reduction == "ordered", divisor=divisor, wire=wire)


def travels_narrower(dtype: torch.dtype, wire: torch.dtype | None) -> bool:
    """Returns True if values of `dtype` are cast for the wire: real numbers with more bytes than `wire`."""
    return wire is not None and dtype.is_floating_point and dtype.itemsize > wire.itemsize


def cast_for_wire(tensor: Tensor, wire: torch.dtype | None) -> Tensor:
    """Returns `tensor`, or a copy of it in `wire` if that is narrower."""
    return tensor.to(wire) if travels_narrower(tensor.dtype, wire) and not tensor.is_sparse else tensor


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype that values of `dtype` are added in."""
    return torch.float32 if dtype.itemsize == 2 else dtype


def sum_in_order(parts: Sequence[Tensor], *, into: Tensor, rows: Sequence[Sequence[int]] = ()) -> Tensor:
    """Adds `parts` one after another, because the order inside torch.sum depends on the position of an element.

    With the `rows` of a mesh, which list positions of ranks, it adds each row first and then the rows.
    """
    if rows:
        parts = [sum_in_order([parts[place] for place in row], into=torch.empty_like(into)) for row in rows]
    first, *rest = parts
    if rest and first.dtype == into.dtype:  # saves one pass over memory
        torch.add(first, rest.pop(0), out=into)
    else:
        into.copy_(first)
    for part in rest:
        into.add_(part)
    return into


def _used_here(tensor: Tensor) -> Tensor:
    """Keeps the tensor's memory until the current stream, which may differ from the one it was allocated on, is done with it."""
    if tensor.device.type == "cuda":
        tensor.record_stream(torch.cuda.current_stream())
    return tensor
