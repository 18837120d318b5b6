"""How the messages of an exchange travel: two carriers with the same methods.

PostedMessages      sends and receives, all posted at once: for gloo
BackendCollectives  all-to-all, all-gather and the backend's own sums: for all others

An exchange is a chain of stages. A stage returns the messages to wait for, and the next stage; the
carrier decides who waits: a thread of the host, or a stream. `exchanges` has the stages, which are
the same for both.

Reasons: docs/design/exchanges.md.
"""

import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from undertow.plan.layout import equal_parts, round_up
from undertow.plan.owners import MOST_OVER_MEAN
from undertow.ranks.handle import Handle, ThreadWork, Work
from undertow.ranks.parcels import ALIGN_BYTES, Parcel, sum_in_order
from undertow.ranks.threads import Worker
from undertow.ranks.transport import OwnGroup

_MOST_SENT_WHOLE = 1 << 14  # bytes of a tensor that a rank sends whole to all others, in all
_LEAST_PART = 8  # elements of a sum


@dataclass(frozen=True, slots=True)
class Wait:
    """The end of a stage: when the works are complete, the next one follows."""

    works: Sequence[Work]
    then: "ExchangeStage"
    is_last: bool = True  # the next stage completes the exchange
    is_in_turn: bool = True  # all ranks start such exchanges in the same order


ExchangeStage: TypeAlias = Callable[[], Wait | None]


@dataclass(frozen=True, slots=True)
class Arriving:
    """Messages on their way to this rank, one from each rank."""

    messages: Sequence[Tensor]
    works: list[Work]
    held: list[Tensor]  # memory to give back when the messages have been read
    parts: Sequence[Tensor] = ()  # of a tensor, if ranks sum up a part each
    sums: list[Work] = field(default_factory=list)  # receives of these sums


@dataclass(frozen=True, slots=True)
class Recut:
    """Elements that ranks have in some parts, on their way to the ranks that have other parts."""

    sent: Tensor  # this rank's elements
    received: Tensor  # its elements afterwards
    to: Sequence[range]  # of `sent`, for each rank
    of: Sequence[range]  # of `received`, from each rank
    works: list[Work] = field(default_factory=list)
    group: dist.ProcessGroup | None = None  # held until they have arrived

    @classmethod
    def between(
        cls,
        sent: Tensor,
        received: Tensor,
        *,
        rank: int,
        before: Sequence[range],
        after: Sequence[range],
        over: dist.ProcessGroup | None = None,
    ) -> "Recut":
        """Returns the way from the parts `before` to the parts `after` of the same elements."""
        to = [_within(before[rank], part) for part in after]
        return cls(sent, received, to, [_within(after[rank], part) for part in before], group=over)


@dataclass(frozen=True, slots=True)
class Gathering:
    """A message of each rank that goes to all ranks; the carrier sends `own` when it is written.

    If the messages differ much in length, each rank receives an equal piece of all of them, and
    sends it to all: `pieces` is this gather, and `recut` brings the pieces.
    """

    own: Tensor  # memory for this rank's message
    messages: Sequence[Tensor]  # as they arrive
    works: list[Work] = field(default_factory=list)
    held: list[Tensor] = field(default_factory=list)  # memory to give back afterwards
    flat: Tensor | None = None  # all messages, if they lie side by side
    sizes: Sequence[int] = ()  # their elements there
    group: dist.ProcessGroup | None = None  # held until the messages have arrived
    pieces: "Gathering | None" = None
    recut: Recut | None = None


@dataclass(frozen=True, slots=True)
class Room:
    """Memory for messages, which is given back together."""

    carrier: "Carrier"
    taken: list[Tensor] = field(default_factory=list)

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        tensor = self.carrier.take(numel, dtype)
        self.taken.append(tensor)
        return tensor

    def give_back(self) -> None:
        self.carrier.give_back(self.taken)


class PostedMessages:
    """Sends and receives. One thread of the host posts them in order, and others complete them.

    The thread that trains does not post, because it would wait for copies into the bucket, for
    encoding, and for gloo's send. That copies into the socket, or blocks while gloo reads from that
    peer.

    One thread completes all reductions in order. Ranks may start gathers in different orders, for
    example when they step two optimizers, and read parameters in between. So no gather may wait for
    another one: the thread that posts waits for no message over this group, and each gather in
    flight has a thread that waits for its messages only.
    """

    reads_trailers = True  # an exchange may read its trailer before it sends the rest

    def __init__(self, group: OwnGroup) -> None:
        self.group = group
        # Reused memory for messages: fresh memory costs a page fault for every 4 KiB.
        self.free: dict[tuple[int, torch.dtype], list[Tensor]] = {}
        self._posting = group.worker("undertow-posts")
        self._completing = group.worker("undertow-completes")
        self._gathering: list[Worker] = []
        self._idle: list[Worker] = []  # those of `_gathering` without a gather

    def start(self, first: ExchangeStage, behind: Handle | None = None) -> Handle:
        """Starts an exchange with its first stage, when `behind` is complete."""
        work = ThreadWork()
        before = () if behind is None else (behind,)
        self._posting.submit(self._advance, work, Wait(before, first))
        return Handle(work, complete=self.group.complete)

    def _advance(self, work: ThreadWork, wait: Wait, alone: Worker | None = None) -> None:
        """Waits, and runs the next stage. `alone` is the thread of a gather."""
        try:
            with torch.no_grad():
                _wait_for(wait.works)
                further = wait.then()
            if further is None:
                if alone is not None:
                    self._idle.append(alone)
                work.set_result(None)
            elif further.is_in_turn:
                self._completing.submit(self._advance, work, further)
            else:
                thread = alone or self._gathering_thread()
                thread.submit(self._advance, work, further, thread)
        except BaseException as error:
            work.set_exception(error)

    def _gathering_thread(self) -> Worker:
        """Returns a thread without a gather. Called by the thread that posts only."""
        if self._idle:
            return self._idle.pop()
        thread = self.group.worker("undertow-gathers")
        self._gathering.append(thread)
        return thread

    def group_to_hold(self) -> dist.ProcessGroup | None:
        """Returns the process group, which a gather holds until its end.

        After the last step, the user may destroy the groups before the other ranks' parts arrive.
        """
        return self.group.process_group

    def sums_itself(self, parcel: Parcel) -> bool:
        """Returns True if the backend adds up, in its own order."""
        return False

    def exchange(self, messages: Sequence[Tensor], tag: int) -> Arriving:
        """Sends each rank its message, and receives one like this rank's own from each.

        `tag` identifies the messages among those in flight.
        """
        group, own = self.group.process_group, messages[self.group.rank]
        # Side by side, so that they are decoded at once.
        stride = round_up(own.numel(), ALIGN_BYTES)
        memory = self.take((len(messages) - 1) * stride, own.dtype)
        rows = memory.view(len(messages) - 1, stride)
        received = list(rows[:, : own.numel()].unbind())
        received.insert(self.group.rank, own)
        works = self.group.receive(received, tag, group)
        works += self.group.send(messages, tag, group)
        return Arriving(received, works, [memory])

    def scatter(self, storage: Tensor, own: Tensor, parcel: Parcel, tag: int) -> Arriving:
        """Sends each rank its part of `storage`, and receives the summands of this rank's part.

        A backend that adds up itself may write their sum into `own`.
        """
        room = Room(self)
        messages = parcel.messages(storage, room.take)
        arriving = self.exchange(messages, tag)
        arriving.held.extend(room.taken)
        return arriving

    def start_sum(self, tensor: Tensor, tag: int, *, is_whole: bool = False) -> Arriving:
        """Starts to replace a tensor by its sum over ranks.

        Few ranks send each other the whole tensor, so that its sum is there after one wait. Many
        send each other a part, and the owner of a part sends its sum, after a second wait:
        `expect_sum` and `share_sum`. With `is_whole` the tensor is always sent whole.
        """
        num_ranks, num_bytes = self.group.num_ranks, tensor.numel() * tensor.itemsize
        if is_whole or num_ranks * num_bytes <= _MOST_SENT_WHOLE:
            return self.exchange([tensor] * num_ranks, tag)
        parts = _spread(tensor, num_ranks, first=tag)
        return replace(self.exchange(parts, tag), parts=parts)

    def expect_sum(self, arriving: Arriving, tag: int) -> None:
        """Prepares to receive a sum from the owners of its parts.

        Called after all receives on which a rank's part of the sum depends, because an emulated
        link receives in order. An owner sends the sum of a part after it has received the part, so
        its memory is free by then.
        """
        if arriving.parts:
            group = self.group.process_group
            arriving.sums.extend(self.group.receive(arriving.parts, tag, group))

    def share_sum(self, arriving: Arriving, tag: int) -> list[Work]:
        """Sends this rank's part of a sum, when its works are complete; returns the works until
        `finish_sum`."""
        if not arriving.parts:
            return []
        own = arriving.parts[self.group.rank]
        own.copy_(sum_in_order(arriving.messages, into=torch.empty_like(own)))
        self.give_back(arriving.held)
        sent = [own] * self.group.num_ranks
        return [*arriving.sums, *self.group.send(sent, tag, self.group.process_group)]

    def finish_sum(self, tensor: Tensor, arriving: Arriving) -> None:
        """Completes the sum when all its works are complete."""
        if not arriving.parts:
            tensor.copy_(sum_in_order(arriving.messages, into=torch.empty_like(tensor)))
            self.give_back(arriving.held)

    def prepare(
        self,
        sizes: Sequence[int],
        dtype: torch.dtype,
        *,
        into: Sequence[Tensor] | None = None,
        over: dist.ProcessGroup | None = None,
    ) -> Gathering:
        """Prepares a gather of messages of these sizes; `into` may be used as memory for them.

        A peer's message may be received into memory that this rank sends to it: it answers only
        after it has received that.
        """
        if into is not None:
            return Gathering(into[self.group.rank], into, group=over)
        rooms = _rooms(sizes)
        memory = self.take(sum(rooms), dtype)
        places = torch.split(memory, rooms)
        messages = [place[:size] for place, size in zip(places, sizes, strict=True)]
        gathering = Gathering(messages[self.group.rank], messages, held=[memory], group=over)
        return self._in_pieces(gathering, memory, _adjacent(rooms))

    def prepare_parts(
        self, flat: Tensor, parts: Sequence[range], *, over: dist.ProcessGroup | None
    ) -> Gathering:
        """Prepares to gather the parts of a tensor that has this rank's own.

        If they differ much, the tensor has room for as many equal pieces as ranks.
        """
        whole = flat[: parts[-1].stop]
        messages = torch.split(whole, list(map(len, parts)))
        gathering = Gathering(messages[self.group.rank], messages, group=over)
        return self._in_pieces(gathering, whole, parts)

    def _in_pieces(self, gathering: Gathering, flat: Tensor, places: Sequence[range]) -> Gathering:
        """Has messages that lie at these places of `flat` travel in equal pieces, if they differ
        much.

        A piece arrives in place, also where this rank's message lies, which it has sent by then.
        """
        if not are_uneven(places):
            return gathering
        rank, over = self.group.rank, gathering.group
        pieces = equal_parts(len(places), -(-flat.numel() // len(places)), stop=flat.numel())
        messages = [flat[piece.start : piece.stop] for piece in pieces]
        own = flat[places[rank].start : places[rank].stop]
        recut = Recut.between(
            own, messages[rank], rank=rank, before=places, after=pieces, over=over
        )
        return replace(
            gathering, pieces=Gathering(messages[rank], messages, group=over), recut=recut
        )

    def receive(self, gathering: Gathering, tag: int) -> None:
        """Posts the receives of a gather, after those of messages that arrive earlier.

        Pieces of messages use the next tag too.
        """
        if gathering.pieces is not None and gathering.recut is not None:
            self.expect_recut(gathering.recut, tag)
            self.receive(gathering.pieces, tag + 1)
            return
        group = gathering.group or self.group.process_group
        gathering.works.extend(self.group.receive(gathering.messages, tag, group))

    def expect_recut(self, recut: Recut, tag: int) -> None:
        """Posts the receives of elements that ranks have in other parts."""
        places = [recut.received[part.start : part.stop] for part in recut.of]
        group = recut.group or self.group.process_group
        recut.works.extend(self.group.receive(places, tag, group))

    def send_recut(self, recut: Recut, tag: int) -> None:
        """Sends this rank's elements to the ranks whose parts have them."""
        rank = self.group.rank
        places = [recut.sent[part.start : part.stop] for part in recut.to]
        kept = recut.received[recut.of[rank].start : recut.of[rank].stop]
        if kept.data_ptr() != places[rank].data_ptr():
            kept.copy_(places[rank])
        group = recut.group or self.group.process_group
        recut.works.extend(self.group.send(places, tag, group))

    def send_to_all(self, gathering: Gathering, tag: int) -> None:
        """Sends this rank's message of a gather."""
        messages = [gathering.own] * self.group.num_ranks
        group = gathering.group or self.group.process_group
        gathering.works.extend(self.group.send(messages, tag, group))

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Returns memory for a message."""
        # Another thread may have taken the last one.
        with contextlib.suppress(KeyError, IndexError):
            return self.free[numel, dtype].pop()
        return torch.empty(numel, dtype=dtype)

    def give_back(self, tensors: Iterable[Tensor]) -> None:
        """Gives back memory that is not used after the present operators."""
        for tensor in tensors:
            self.free.setdefault((tensor.numel(), tensor.dtype), []).append(tensor)

    def release(self) -> None:
        """Frees the memory that is kept for later messages."""
        self.free.clear()

    def close(self) -> None:
        """Ends the threads after their last tasks."""
        self._posting.shutdown()
        self._completing.shutdown()
        for thread in self._gathering:
            thread.shutdown()


class BackendCollectives:
    """The backend's collectives. With `in_order`, or in a format, each rank adds its part itself.

    An exchange that waits in its middle has two halves. A side stream waits there, so that backward
    does not:

    caller   encode ──┐
    side              │              ┌── add up, encode own ──┐
    backend           └─ all-to-all ─┘                        └─ all-gather ─┐
    waiter                                                                   └── decode

    Each bend is a wait of one stream for another. At a launch, the backend waits for the current
    stream; in `work.wait()`, the current stream waits for the backend. A stream that waits for the
    all-gather has therefore waited for the side stream too, and no other event is needed.

    Without a reference to a tensor, the stream that allocated it may write there at once. So each
    tensor is held until a stream has waited for its last use, and then kept for that stream:

    tensor     allocated by   written by   read by   kept for
    sent       caller         caller       backend   side
    received   caller         backend      side      side
    own        caller         side         backend   waiter
    flat       caller         backend      waiter    waiter
    """

    reads_trailers = False  # the host would have to wait

    def __init__(self, group: OwnGroup, *, in_order: bool) -> None:
        self.group = group
        self._in_order = in_order
        # Waits for collectives that others follow; neither the caller's stream nor the host does.
        self._side = group.hardware.new_stream()

    @torch.no_grad()
    def start(self, first: ExchangeStage, behind: Handle | None = None) -> Handle:
        wait = first() if behind is None else self._aside(Wait((behind,), first))
        while wait is not None and not wait.is_last:
            wait = self._aside(wait)
        assert wait is not None  # an exchange has a last wait
        return Handle(*wait.works, finish=wait.then)

    def _aside(self, wait: Wait) -> Wait | None:
        """Has the side stream wait and run the next stage."""
        with self.group.hardware.use(self._side):
            _wait_for(wait.works)
            return wait.then()

    def group_to_hold(self) -> dist.ProcessGroup | None:
        """Returns None: the works hold it."""
        return None

    def sums_itself(self, parcel: Parcel) -> bool:
        return not (parcel.is_narrow or self._in_order)

    def exchange(self, messages: Sequence[Tensor], tag: int) -> Arriving:
        num_ranks, rank = len(messages), self.group.rank
        rooms = _rooms([message.numel() for message in messages])
        sent = messages[0].new_zeros(sum(rooms))
        for place, message in zip(torch.split(sent, rooms), messages, strict=True):
            place[: message.numel()].copy_(message)
        received = sent.new_empty(num_ranks, rooms[rank])
        own_rooms = [rooms[rank]] * num_ranks
        work = self.group.exchange(received.view(-1), sent, own_rooms, rooms)
        arrived = [row[: messages[rank].numel()] for row in received]
        return Arriving(arrived, [work], [received, sent])

    def scatter(self, storage: Tensor, own: Tensor, parcel: Parcel, tag: int) -> Arriving:
        if not self.sums_itself(parcel) or len(set(map(len, parcel.parts))) > 1:
            return self.exchange(parcel.messages(storage, self.take), tag)
        values = storage[: parcel.parts[-1].stop]
        part = own if own.dtype == values.dtype else torch.empty_like(own, dtype=values.dtype)
        work = self.group.scatter_sum(part, values)
        return Arriving([part], [work], [part, values])

    def start_sum(self, tensor: Tensor, tag: int, *, is_whole: bool = False) -> Arriving:
        return Arriving([], list(self.group.all_reduce_async(tensor).works), [])

    def expect_sum(self, arriving: Arriving, tag: int) -> None:
        """Does nothing: the backend receives the sum."""

    def share_sum(self, arriving: Arriving, tag: int) -> list[Work]:
        """Does nothing: the backend sends the sum."""
        return []

    def finish_sum(self, tensor: Tensor, arriving: Arriving) -> None:
        """Does nothing: the backend has written the sum."""

    def prepare(
        self,
        sizes: Sequence[int],
        dtype: torch.dtype,
        *,
        into: Sequence[Tensor] | None = None,
        over: dist.ProcessGroup | None = None,
    ) -> Gathering:
        rooms, rank = _rooms(sizes), self.group.rank
        own = self.take(rooms[rank], dtype).zero_()
        flat = self.take(round_up(sum(rooms), len(rooms)), dtype)
        places = _adjacent(rooms)
        messages = [flat[place.start :][:size] for place, size in zip(places, sizes, strict=True)]
        gathering = Gathering(own, messages, held=[flat], flat=flat[: sum(rooms)], sizes=rooms)
        # Means of parts that differ much: ranks have added up these parts, so they are equal.
        return gathering if into is not None else self._in_pieces(gathering, flat, places)

    def prepare_parts(
        self, flat: Tensor, parts: Sequence[range], *, over: dist.ProcessGroup | None
    ) -> Gathering:
        part = parts[self.group.rank]
        own, sizes = flat[part.start : part.stop], list(map(len, parts))
        gathering = Gathering(own, [], flat=flat[: parts[-1].stop], sizes=sizes)
        return self._in_pieces(gathering, flat, parts)

    def _in_pieces(self, gathering: Gathering, flat: Tensor, places: Sequence[range]) -> Gathering:
        if not are_uneven(places):
            return gathering
        numel, rank = flat.numel() // len(places), self.group.rank
        pieces = equal_parts(len(places), numel, stop=flat.numel())
        # Apart from `flat`: a backend may read and write at once. Zeros follow the last message.
        own = self.take(numel, flat.dtype).zero_()
        recut = Recut.between(gathering.own, own, rank=rank, before=places, after=pieces)
        gathering.held.append(gathering.own)
        whole = Gathering(own, [], flat=flat, sizes=[numel] * len(places))
        return replace(gathering, pieces=whole, recut=recut)

    def receive(self, gathering: Gathering, tag: int) -> None:
        """Does nothing: the collective that sends also receives."""

    def expect_recut(self, recut: Recut, tag: int) -> None:
        """Does nothing: the collective that sends also receives."""

    def send_recut(self, recut: Recut, tag: int) -> None:
        to, of = (list(map(len, parts)) for parts in (recut.to, recut.of))
        received, sent = recut.received[: sum(of)], recut.sent[: sum(to)]
        recut.works.append(self.group.exchange(received, sent, of, to))

    def send_to_all(self, gathering: Gathering, tag: int) -> None:
        sent, sizes, flat = gathering.own, list(gathering.sizes), gathering.flat
        assert flat is not None  # `prepare` and `prepare_parts` give one
        if len(set(sizes)) == 1:
            work = self.group.gather_parts(flat, sent)
        else:
            own_sizes = [sent.numel()] * len(sizes)
            sent = sent.repeat(len(sizes))
            work = self.group.exchange(flat, sent, sizes, own_sizes)
        gathering.works.append(work)
        gathering.held.append(sent)

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(numel, dtype=dtype, device=self.group.device)

    def give_back(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            self.group.hardware.keep(tensor)

    def release(self) -> None:
        """Does nothing: no memory is kept."""

    def close(self) -> None:
        """Does nothing: it has no threads."""


Carrier = PostedMessages | BackendCollectives


def _spread(tensor: Tensor, num_ranks: int, *, first: int) -> list[Tensor]:
    """Returns a part of a tensor for each rank, empty for most ranks if there are many.

    `first` is a number, the same on all ranks, that chooses which ranks have a part.
    """
    size = max(_LEAST_PART, -(-tensor.numel() // num_ranks))
    parts = list(torch.split(tensor, size))
    # Consecutive exchanges have other ranks: their tags differ by four.
    turn = first // 4 * len(parts) % num_ranks
    parts += [tensor[:0]] * (num_ranks - len(parts))
    return parts[-turn:] + parts[:-turn] if turn else parts


def are_uneven(parts: Sequence[range]) -> bool:
    """Returns True if the largest part is so large that its rank would send, receive and hold more
    than twice as much as the mean rank."""
    sizes = list(map(len, parts))
    return max(sizes) * len(sizes) > MOST_OVER_MEAN * sum(sizes)


def _adjacent(sizes: Sequence[int]) -> list[range]:
    """Returns ranges of these sizes, side by side from 0 on."""
    stops = list(accumulate(sizes))
    return [range(stop - size, stop) for stop, size in zip(stops, sizes, strict=True)]


def _within(part: range, other: range) -> range:
    """Returns the elements of `part` that are in `other` too, counted from the start of `part`."""
    start = min(max(part.start, other.start), part.stop)
    stop = max(start, min(part.stop, other.stop))
    return range(start - part.start, stop - part.start)


def _wait_for(works: Sequence[Work]) -> None:
    for work in works:
        work.wait()


def _rooms(sizes: Sequence[int]) -> list[int]:
    """Returns the room of messages side by side: each begins at a multiple of that many elements,
    so that bytes can be viewed in any dtype.

    Every room has elements: in a matrix with zero columns, the second row would begin outside.
    """
    return [round_up(max(1, size), ALIGN_BYTES) for size in sizes]
