"""Carries the messages of exchanges as sends and receives, all posted at once: for gloo.

`backend_collectives` has the same methods for all other backends.

Reasons: docs/design/exchanges.md.
"""

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from undertow.plan.layout import equal_parts, round_up
from undertow.ranks.exchange_messages import (
    Arriving,
    Borrowed,
    ExchangeStage,
    Gathering,
    Hop,
    Recut,
    Wait,
    adjacent,
    aligned_sizes,
    are_uneven,
    hops_between,
)
from undertow.ranks.handle import Handle, ThreadWork, Work
from undertow.ranks.parcels import ALIGN_BYTES, Parcel, sum_in_order
from undertow.ranks.threads import Worker
from undertow.ranks.transport import OwnGroup

_MOST_SENT_WHOLE = 1 << 14  # bytes of a tensor that a rank sends whole to all others, in all
# Bytes of a message that is copied, so that a trailer can follow it: longer copies take more time
# than a second message.
_MOST_COPIED = 1 << 16
_LEAST_PART = 8  # elements of a sum
# Gathers of more ranks are passed on, unless a rank's message has more bytes: it takes longer to
# send than the processor time of a message, and each round waits for the one before.
_MOST_DIRECT_RANKS = 8
_MOST_PASSED_ON = 1 << 16


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
        return Handle(work, waiter=self.group.waiter)

    def _advance(self, work: ThreadWork, wait: Wait, alone: Worker | None = None) -> None:
        """Waits, and runs the next stage. `alone` is the thread of a gather."""
        try:
            with torch.no_grad():
                further = wait.run_next()
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

    def exchange(
        self, messages: Sequence[Tensor], tag: int, trailer: Tensor | None = None
    ) -> Arriving:
        """Sends each rank its message, and receives one like this rank's own from each.

        `tag` identifies the messages among those in flight. A small `trailer` for all ranks follows
        each message if that is small too: a copy takes less time than a second message.
        """
        if trailer is None or not _may_follow(trailer, messages):
            return self._exchange(messages, tag)
        last = trailer.view(messages[0].dtype)
        sizes = [message.numel() + last.numel() for message in messages]
        memory = self.take(sum(sizes), last.dtype)
        torch.cat([part for message in messages for part in (message, last)], out=memory)
        arriving = self._exchange(torch.split(memory, sizes), tag)
        own = messages[self.group.rank]
        numel = own.numel()
        values = [message[:numel] for message in arriving.messages]
        values[self.group.rank] = own  # a 16-bit trailer of a rank before may have moved the copy
        trailers = [message[numel:].view(trailer.dtype) for message in arriving.messages]
        # The memory has both, and the trailers are read last.
        held = [*arriving.held, memory]
        return Arriving(values, arriving.works, [], trailers=Arriving(trailers, [], held))

    def _exchange(self, messages: Sequence[Tensor], tag: int) -> Arriving:
        group, own = self.group.process_group, messages[self.group.rank]
        # Side by side, so that they are decoded at once.
        stride = round_up(own.numel(), ALIGN_BYTES)
        memory = self.take((len(messages) - 1) * stride, own.dtype)
        rows = memory.view(len(messages) - 1, stride)
        received = list(rows[:, : own.numel()].unbind())
        received.insert(self.group.rank, own)
        works = self.group.receive_each(received, tag, group)
        works += self.group.send_each(messages, tag, group)
        return Arriving(received, works, [memory])

    def scatter(
        self, storage: Tensor, own: Tensor, parcel: Parcel, tag: int, trailer: Tensor
    ) -> Arriving:
        """Sends each rank its part of `storage`, and receives the summands of this rank's part.

        A backend that adds up itself may write their sum into `own`. The trailer is as in
        `exchange`.
        """
        borrowed = Borrowed(self.take)
        messages = parcel.messages(storage, borrowed.take)
        arriving = self.exchange(messages, tag, trailer)
        arriving.held.extend(borrowed.tensors)
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
            arriving.sums.extend(self.group.receive_each(arriving.parts, tag, group))

    def share_sum(self, arriving: Arriving, tag: int) -> list[Work]:
        """Sends this rank's part of a sum, when its works are complete; returns the works until
        `finish_sum`."""
        if not arriving.parts:
            return []
        own = arriving.parts[self.group.rank]
        own.copy_(sum_in_order(arriving.messages, into=torch.empty_like(own)))
        self.give_back(arriving.held)
        sent = [own] * self.group.num_ranks
        return [*arriving.sums, *self.group.send_each(sent, tag, self.group.process_group)]

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
        rooms = aligned_sizes(sizes)
        memory = self.take(sum(rooms), dtype)
        places = torch.split(memory, rooms)
        messages = [place[:size] for place, size in zip(places, sizes, strict=True)]
        gathering = Gathering(messages[self.group.rank], messages, held=[memory], group=over)
        return self._on_its_way(gathering, memory, adjacent(rooms))

    def prepare_parts(
        self, flat: Tensor, parts: Sequence[range], *, over: dist.ProcessGroup | None
    ) -> Gathering:
        """Prepares to gather the parts of a tensor that has this rank's own.

        If they differ much, the tensor has room for as many equal pieces as ranks.
        """
        whole = flat[: parts[-1].stop]
        messages = torch.split(whole, list(map(len, parts)))
        gathering = Gathering(messages[self.group.rank], messages, group=over)
        return self._on_its_way(gathering, whole, parts)

    def _on_its_way(self, gathering: Gathering, flat: Tensor, places: Sequence[range]) -> Gathering:
        """Has messages that lie at these places of `flat` travel in equal pieces, if they differ
        much, and in hops, if they are many and small.

        A piece arrives in place, also where this rank's message lies, which it has sent by then.
        """
        rank, over = self.group.rank, gathering.group
        if not are_uneven(places):
            most_bytes = flat.itemsize * max(map(len, places))
            if len(places) <= _MOST_DIRECT_RANKS or most_bytes > _MOST_PASSED_ON:
                return gathering
            return replace(gathering, hops=hops_between(flat, places, rank=rank))
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
        for hop in gathering.hops:
            for number, piece in enumerate(hop.received):
                hop.works.append(self.group.receive(piece, hop.of, tag + number, group))
        if not gathering.hops:
            gathering.works.extend(self.group.receive_each(gathering.messages, tag, group))

    def send_hop(self, gathering: Gathering, hop: Hop, tag: int) -> None:
        """Sends messages of a gather that are here."""
        group = gathering.group or self.group.process_group
        for number, piece in enumerate(hop.sent):
            gathering.works.append(self.group.send(piece, hop.to, tag + number, group))

    def expect_recut(self, recut: Recut, tag: int) -> None:
        """Posts the receives of elements that ranks have in other parts."""
        places = [recut.received[part.start : part.stop] for part in recut.of]
        group = recut.group or self.group.process_group
        recut.works.extend(self.group.receive_each(places, tag, group))

    def send_recut(self, recut: Recut, tag: int) -> None:
        """Sends this rank's elements to the ranks whose parts have them."""
        rank = self.group.rank
        places = [recut.sent[part.start : part.stop] for part in recut.to]
        kept = recut.received[recut.of[rank].start : recut.of[rank].stop]
        if kept.data_ptr() != places[rank].data_ptr():
            kept.copy_(places[rank])
        group = recut.group or self.group.process_group
        recut.works.extend(self.group.send_each(places, tag, group))

    def send_to_all(self, gathering: Gathering, tag: int) -> None:
        """Sends this rank's message of a gather."""
        messages = [gathering.own] * self.group.num_ranks
        group = gathering.group or self.group.process_group
        gathering.works.extend(self.group.send_each(messages, tag, group))

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


def _may_follow(trailer: Tensor, messages: Sequence[Tensor]) -> bool:
    """Returns True if the trailer may follow each of these messages, of all ranks, as a part of it.

    All ranks find the same, because they know the sizes of all messages.
    """
    num_bytes, dtype = trailer.nbytes, messages[0].dtype
    if not 0 < len(messages) * num_bytes <= _MOST_SENT_WHOLE:
        return False
    sizes = {message.nbytes for message in messages}
    is_aligned = not any(size % trailer.itemsize for size in sizes)
    has_dtype = dtype in (trailer.dtype, torch.uint8)
    return has_dtype and is_aligned and max(sizes) <= _MOST_COPIED
