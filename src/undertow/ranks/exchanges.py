"""Exchanges of parts: reduce-scatter, all-gather and an ordered all-reduce.

They are made of sends and receives, or of the backend's collectives. Sends and receives, all posted
at once, are for gloo. Its reduce-scatter sends as much as an all-reduce, and its single all-gather
does not fill a link. Each rank decodes the messages for its part and adds them itself, in rank
order, and in fp32 if the gradients are narrower. The result has the same bits whatever bucket a
gradient is sent in.

Reasons: docs/design/exchanges.md.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import cycle

import torch
import torch.distributed as dist
from torch import Tensor

from undertow.config import SyncConfig
from undertow.errors import require
from undertow.plan.layout import equal_parts, round_up
from undertow.ranks.parcels import (
    ALIGN_BYTES,
    Encoded,
    FullWidth,
    Parcel,
    sum_in_order,
)
from undertow.ranks.threads import Worker
from undertow.ranks.transport import Handle, OwnGroup, Task, Work

_GATHER_TAG = 1 << 24  # ranks may start gathers in different orders: a number identifies each
_NUM_EXCHANGES = 1 << 16  # far more than may be in flight

_Arriving = tuple[list[Tensor], list[Work]]  # a message of every rank, and the transfers


class P2PCollectives:
    """Exchanges by sends and receives; threads post and complete them in the order of their start.

    `divisor` is the divisor of means.
    """

    def __init__(self, group: OwnGroup, *, divisor: float) -> None:
        self.group = group
        self._divisor = divisor
        # An exchange sends messages of up to three kinds.
        self._tags = cycle(range(0, 4 * _NUM_EXCHANGES, 4))
        # Reused memory for messages: fresh memory costs a page fault for every 4 KiB.
        self.free: dict[tuple[int, torch.dtype], list[Tensor]] = {}
        # The backward's thread would wait for the copy into the bucket, for encoding, and for
        # gloo's send. That copies into the socket, or blocks while gloo reads from that peer.
        self._posting = group.worker("undertow-posts")
        self._adding = group.worker("undertow-adds")
        self._gathering = group.worker("undertow-gathers")

    def reduce_scatter(
        self,
        storage: Tensor,
        shard: Tensor,
        parcel: Parcel,
        *,
        trailer: Tensor,
        fill: Task | None = None,
    ) -> Handle:
        """Starts to write the mean over ranks of this rank's part of `storage` into `shard`.

        The mean is the sum divided by the divisor. `fill` writes `storage` first. Every rank starts
        its reduce-scatters and all-reduces in the same order.

        storage: has the parts of `parcel`. `trailer` becomes its sum over ranks on every rank.
        shard: of `accumulation_dtype(storage.dtype)`; a shorter part leaves zeros at its end.
        """
        rank = self.group.rank
        tag = next(self._tags)

        def post() -> Task:
            if fill is not None:
                fill()
            sent = parcel.messages(storage, self._taken)
            values = self._exchange(sent, tag)
            # Separate messages: combining the two would halve their number but require adjacent
            # memory.
            add_up_flags = self._post_sum(trailer, tag + 1)

            def add_up() -> None:
                num_own = len(parcel.parts[rank])
                own = shard[:num_own]
                self._add_up(values, parcel, own)
                if self._divisor != 1:
                    own.div_(self._divisor)
                shard[num_own:].zero_()
                add_up_flags()
                if parcel.is_narrow:
                    self._give_back(sent)

            return add_up

        return self._started(post, self._adding)

    def all_reduce(
        self,
        tensor: Tensor,
        parcel: Parcel | None = None,
        *,
        trailer: Tensor | None = None,
        is_alike: Callable[[Tensor], bool] | None = None,
    ) -> Handle:
        """Starts to replace `tensor` by its mean over ranks, added in rank order.

        Without a parcel all of it travels in full width. `trailer` is no part of the parcel, and
        becomes its sum over ranks. With `is_alike` the trailer travels first, and `tensor` only if
        this returns True for it, as it must on all ranks or none: if a message is longer than the
        memory for it, gloo ends the process.
        """
        if parcel is None:
            parcel = _whole(tensor, self.group)
        tag = next(self._tags)

        def post() -> Task:
            sent = parcel.messages(tensor, self._taken)
            if is_alike is None or trailer is None:
                return self._post_all_reduce(sent, tensor, parcel, self._divisor, tag, trailer)
            self._post_sum(trailer, tag + 2)()
            if not is_alike(trailer):
                return lambda: _nothing
            return self._post_all_reduce(sent, tensor, parcel, self._divisor, tag, None)

        return self._started(post, self._adding, self._gathering)

    def all_reduce_behind(
        self, before: Handle, tensor: Tensor, parcel: Parcel, *, trailer: Tensor
    ) -> Handle:
        """Starts an all-reduce of a tensor that is ready when `before` is complete.

        `trailer` becomes its sum over ranks. `before` are reduce-scatters over other ranks, each
        followed by one of these, in the same order. A tensor in full width is sent in the trailer's
        dtype.
        """
        tag = next(self._tags)

        def post() -> Task:
            before.wait()
            divisor = self._divisor
            # Sums over the inner ranks that are not divided yet may be too large for a narrow
            # format, so divide before they are encoded.
            if parcel.is_narrow or trailer.dtype == torch.float16:
                tensor.div_(divisor)
                divisor = 1
            values = tensor if parcel.is_narrow else tensor.to(trailer.dtype)
            sent = parcel.messages(values, self._taken)
            return self._post_all_reduce(sent, tensor, parcel, divisor, tag, trailer)

        return self._started(post, self._adding, self._gathering)

    def all_gather(
        self, flat: Tensor, parts: Sequence[range], *, number: int, then: Task | None = None
    ) -> Handle:
        """Starts to fill `flat`, which has this rank's part, with the parts of all ranks.

        `then` is called at the end. `number` identifies a gather among those in flight.

        flat: [elements of all parts]
        """
        tag = _GATHER_TAG + number
        messages = torch.split(flat[: parts[-1].stop], list(map(len, parts)))
        post = partial(self._post_all_gather, self.group.process_group, messages, then, tag)
        return self._started(post, self._gathering)

    def all_gather_differences(
        self,
        write_difference: Callable[[Tensor], None],
        flat: Tensor,
        parcel: Encoded,
        *,
        number: int,
        then: Task,
    ) -> Handle:
        """Starts to add to each part of `flat` the difference that its rank writes, as it arrives.

        `then` is called at the end. `number` identifies a gather among those in flight.
        """
        group, tag = self.group.process_group, _GATHER_TAG + number
        rank = self.group.rank

        def post() -> Task:
            messages = [self._taken(size, torch.uint8) for size in parcel.sizes]
            difference = self._taken(len(parcel.parts[rank]), parcel.dtype)
            write_difference(difference)
            parcel.write(difference, rank, messages[rank])
            self._give_back([difference])

            def add() -> None:
                parcel.add_to(messages, flat)
                self._give_back(messages)
                then()

            return self._post_all_gather(group, messages, add, tag)

        return self._started(post, self._gathering)

    def release(self) -> None:
        """Frees the memory that is kept for later messages."""
        self.free.clear()

    def close(self) -> None:
        """Ends the threads."""
        for thread in (self._posting, self._adding, self._gathering):
            thread.shutdown()

    def _started(self, post: Task, *threads: Worker) -> Handle:
        """Runs `post` in the posting thread, and its further stages in the others."""
        return Handle.in_threads(post, self._posting, *threads, complete=self.group.complete)

    def _post_all_reduce(
        self,
        sent: list[Tensor],
        target: Tensor,
        parcel: Parcel,
        divisor: float,
        tag: int,
        trailer: Tensor | None,
    ) -> Task:
        add_up_flags = None if trailer is None else self._post_sum(trailer, tag + 2)
        group, rank = self.group.process_group, self.group.rank
        own = sent[rank]
        arriving = self._exchange(sent, tag)
        # Received into the sent messages: a peer returns the result of a part only after it has
        # received the part.
        returning = self.group.receive(sent, tag + 1, group)
        total = self._taken(len(parcel.parts[rank]), accumulation_dtype(target.dtype))

        def add_up() -> Task:
            if add_up_flags is not None:
                add_up_flags()
            parcel.write(self._add_up(arriving, parcel, total).div_(divisor), rank, own)
            self._give_back([total])
            returning.extend(self.group.send([own] * len(sent), tag + 1, group))
            return finish

        def finish() -> None:
            _wait_for(returning)
            parcel.open(sent, target)
            if parcel.is_narrow:
                self._give_back(sent)

        return add_up

    def _post_sum(self, tensor: Tensor, tag: int) -> Callable[[], object]:
        """Sends all of `tensor` to every peer; the returned function replaces it by the sum."""
        received, works = self._exchange([tensor] * self.group.num_ranks, tag)

        def add_up() -> None:
            _wait_for(works)
            tensor.copy_(sum_in_order(received, into=torch.empty_like(tensor)))
            del received[self.group.rank]
            self._give_back(received)

        return add_up

    def _post_all_gather(
        self, group: dist.ProcessGroup, parts: Sequence[Tensor], then: Task | None, tag: int
    ) -> Task:
        """Sends this rank's part, and receives the others.

        The process group is held until the end: after the last step, the user may destroy the
        groups before the other ranks' parts arrive.
        """
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

    def _add_up(self, arriving: _Arriving, parcel: Parcel, into: Tensor) -> Tensor:
        received, works = arriving
        _wait_for(works)
        parcel.add_up(received, self.group.rank, into=into)
        del received[self.group.rank]  # a part of the bucket
        self._give_back(received)
        return into

    def _taken(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Returns memory; only the posting thread takes, while others give back."""
        free = self.free.get((numel, dtype))
        return free.pop() if free else torch.empty(numel, dtype=dtype)

    def _give_back(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            self.free.setdefault((tensor.numel(), tensor.dtype), []).append(tensor)


def _wait_for(works: Sequence[Work]) -> None:
    for work in works:
        work.wait()


def _nothing() -> None:
    """The last stage of an exchange that ranks have not begun."""


def _end_gather(works: Sequence[Work], then: Task | None, _held: dist.ProcessGroup) -> None:
    _wait_for(works)
    if then is not None:
        then()


class BackendCollectives:
    """Exchanges as of `P2PCollectives`, by the backend's collectives.

    With `in_order`, or in a format, ranks exchange their parts, and each rank adds its part itself.
    An all-reduce then has two halves. A side stream waits between them, so that backward does not:

    caller   encode ──┐
    side              │              ┌── add up, encode own ──┐
    backend           └─ all-to-all ─┘                        └─ all-gather ─┐
    waiter                                                                   └── decode

    Each bend is a wait of one stream for another. At a launch, the backend waits for the current
    stream; in `work.wait()`, the current stream waits for the backend. A stream that waits for the
    all-gather has therefore waited for the side stream too, and no other event is needed.

    When nobody holds a tensor, the stream that has allocated it may write there at once. So each
    tensor is held until a stream has waited for its last use, and then kept for that stream:

    tensor     allocated by   written by   read by   kept for
    sent       caller         caller       backend   side
    received   caller         backend      side      side
    own        side           side         backend   waiter
    returned   side           backend      waiter    waiter
    """

    def __init__(self, group: OwnGroup, *, in_order: bool, divisor: float) -> None:
        self.group = group
        self._in_order = in_order
        self._divisor = divisor
        # Waits for collectives that others follow; neither the caller's stream nor the host does.
        self._side = group.hardware.new_stream()

    def reduce_scatter(
        self,
        storage: Tensor,
        shard: Tensor,
        parcel: Parcel,
        *,
        trailer: Tensor,
        fill: Task | None = None,
    ) -> Handle:
        if fill is not None:
            with torch.no_grad():
                fill()
        num_own = len(parcel.parts[self.group.rank])
        own = shard[:num_own]
        if parcel.is_narrow or self._in_order or not _are_equal(parcel.parts):
            sent, work, received = self._exchanged(parcel.messages(storage, self._room))
        else:
            sent = storage[: self.group.num_ranks * shard.numel()]
            part = own if own.dtype == sent.dtype else torch.empty_like(own, dtype=sent.dtype)
            work = self.group.scatter_sum(part, sent)
            received = [part]

        def finish() -> None:
            self._add_up(received, parcel, own)
            if self._divisor != 1:
                own.div_(self._divisor)
            shard[num_own:].zero_()
            self.group.hardware.keep(sent)  # held until now, because the backend reads it

        of_trailer = self.group.all_reduce_async(trailer)
        return Handle(work, *of_trailer.works, finish=finish)

    def all_reduce(
        self,
        tensor: Tensor,
        parcel: Parcel | None = None,
        *,
        trailer: Tensor | None = None,
        is_alike: Callable[[Tensor], bool] | None = None,  # not asked: the host would have to wait
    ) -> Handle:
        if parcel is None:
            parcel = _whole(tensor, self.group)
        mean = self._all_reduce(tensor, parcel, self._divisor)
        of_trailer: tuple[Work, ...] = ()
        if trailer is not None:
            of_trailer = self.group.all_reduce_async(trailer).works
        return Handle(*of_trailer, *mean.works, finish=mean.wait)

    def all_reduce_behind(
        self, before: Handle, tensor: Tensor, parcel: Parcel, *, trailer: Tensor
    ) -> Handle:
        hardware = self.group.hardware
        with hardware.use(self._side):
            before.wait()
            of_trailer = self.group.all_reduce_async(trailer)
            divisor, adds_here = self._divisor, parcel.is_narrow or self._in_order
            # Sums over the inner ranks may be too large for a narrow format.
            if parcel.is_narrow or trailer.dtype == torch.float16 or not adds_here:
                tensor.div_(divisor)
                divisor = 1
            sent = tensor if parcel.is_narrow else tensor.to(trailer.dtype)
            if adds_here:
                mean = self._all_reduce(sent, parcel, divisor)
            else:
                mean = self.group.all_reduce_async(sent)

        def finish() -> None:
            mean.wait()
            if sent is not tensor:
                tensor.copy_(hardware.keep(sent))

        return Handle(*of_trailer.works, *mean.works, finish=finish)

    def all_gather(
        self, flat: Tensor, parts: Sequence[range], *, number: int, then: Task | None = None
    ) -> Handle:
        part = parts[self.group.rank]
        sent, work = self._gathered(flat[part.start : part.stop], flat, list(map(len, parts)))

        def finish() -> None:
            self.group.hardware.keep(sent)  # held until now, because the backend reads it
            if then is not None:
                then()

        return Handle(work, finish=finish)

    def all_gather_differences(
        self,
        write_difference: Callable[[Tensor], None],
        flat: Tensor,
        parcel: Encoded,
        *,
        number: int,
        then: Task,
    ) -> Handle:
        sizes, rank = parcel.sizes, self.group.rank
        rooms = _rooms(sizes)
        own = self._room(rooms[rank], torch.uint8)
        difference = self._room(len(parcel.parts[rank]), parcel.dtype)
        write_difference(difference)
        parcel.write(difference, rank, own[: sizes[rank]])
        received = self._room(sum(rooms), torch.uint8)
        sent, work = self._gathered(own, received, rooms)

        def finish() -> None:
            self.group.hardware.keep(received)
            parcel.add_to(_without_gaps(received, sizes), flat)
            self.group.hardware.keep(sent)  # held until now, because the backend reads it
            then()

        return Handle(work, finish=finish)

    def release(self) -> None:
        """Does nothing: no memory is kept."""

    def close(self) -> None:
        """Does nothing: it has no threads."""

    def _all_reduce(self, tensor: Tensor, parcel: Parcel, divisor: float) -> Handle:
        hardware, rank = self.group.hardware, self.group.rank
        messages = parcel.messages(tensor, self._room)
        sizes = [message.numel() for message in messages]
        sent, work, received = self._exchanged(messages)
        with hardware.use(self._side):
            work.wait()
            hardware.keep(sent)
            numel, dtype = len(parcel.parts[rank]), accumulation_dtype(tensor.dtype)
            total = tensor.new_empty(numel, dtype=dtype)
            self._add_up(received, parcel, total)
            rooms = _rooms(sizes)
            own = sent.new_zeros(rooms[rank])
            parcel.write(total.div_(divisor), rank, own[: sizes[rank]])
            returned = torch.empty_like(sent)
            means, all_gather = self._gathered(own, returned, rooms)

        def finish() -> None:
            parcel.open(_without_gaps(hardware.keep(returned), sizes), tensor)
            hardware.keep(means)  # held until now, because the backend reads it

        return Handle(all_gather, finish=finish)

    def _room(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(numel, dtype=dtype, device=self.group.device)

    def _exchanged(self, messages: Sequence[Tensor]) -> tuple[Tensor, Work, Sequence[Tensor]]:
        """Sends each rank its message; returns the sent memory, and the messages of all ranks that
        will arrive."""
        rank, num_ranks = self.group.rank, len(messages)
        rooms = _rooms([message.numel() for message in messages])
        sent = messages[0].new_zeros(sum(rooms))
        for place, message in zip(torch.split(sent, rooms), messages, strict=True):
            place[: message.numel()].copy_(message)
        received = sent.new_empty(num_ranks, rooms[rank])
        own_rooms = [rooms[rank]] * num_ranks
        work = self.group.exchange(received.view(-1), sent, own_rooms, rooms)
        return sent, work, [row[: messages[rank].numel()] for row in received]

    def _gathered(self, own: Tensor, received: Tensor, sizes: list[int]) -> tuple[Tensor, Work]:
        """Sends this rank's part to all, and receives parts of those sizes; returns the sent
        memory."""
        if len(set(sizes)) == 1:
            return own, self.group.gather_parts(received, own)
        sent = own.repeat(len(sizes))
        into = received[: sum(sizes)]
        return sent, self.group.exchange(into, sent, sizes, [own.numel()] * len(sizes))

    def _add_up(self, messages: Sequence[Tensor], parcel: Parcel, into: Tensor) -> None:
        for message in messages:
            self.group.hardware.keep(message)
        parcel.add_up(messages, self.group.rank, into=into)


def _whole(tensor: Tensor, group: OwnGroup) -> Parcel:
    """Returns a parcel of all of a tensor, in full width."""
    part_numel = -(-tensor.numel() // group.num_ranks)
    return FullWidth(equal_parts(group.num_ranks, part_numel, stop=tensor.numel()))


def _rooms(sizes: Sequence[int]) -> list[int]:
    """Returns the room of messages side by side: each begins at a multiple of that many elements,
    so that bytes can be viewed in any dtype.

    None is empty: in a matrix without columns, the second row begins at element 1.
    """
    return [round_up(max(1, size), ALIGN_BYTES) for size in sizes]


def _without_gaps(flat: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """Returns messages of these sizes that lie side by side in their rooms."""
    rooms = torch.split(flat, _rooms(sizes))
    return [room[:size] for room, size in zip(rooms, sizes, strict=True)]


def _are_equal(parts: Sequence[range]) -> bool:
    return len(set(map(len, parts))) == 1


Collectives = P2PCollectives | BackendCollectives


def exchanges_over(group: OwnGroup, config: SyncConfig, *, divisor: float) -> Collectives:
    """Returns the fastest exchanges for the group's backend; means are divided by `divisor`."""
    require(
        group.hardware.is_host or not group.can.send_from_host,
        f"{group.backend} sends and receives from the host's memory only, and parameters are on "
        f"{group.device}.",
        where='ShardedOptimizer, reduction="ordered", or wire=...',
        remedy='Initialize torch.distributed with "nccl" to train on GPUs.',
    )
    if group.can.send_from_host:
        return P2PCollectives(group, divisor=divisor)
    return BackendCollectives(group, in_order=config.reduction == "ordered", divisor=divisor)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype that values of `dtype` are added in."""
    return torch.float32 if dtype.itemsize == 2 else dtype
