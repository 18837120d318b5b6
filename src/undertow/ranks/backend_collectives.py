"""Carries the messages of exchanges by the backend's collectives: for all backends except gloo.

`posted_messages` has the same methods for gloo.

Reasons: docs/design/exchanges.md.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from undertow.plan.layout import equal_parts, round_up
from undertow.ranks.exchange_messages import (
    Arriving,
    ExchangeStage,
    Gathering,
    Hop,
    Recut,
    Wait,
    adjacent,
    aligned_sizes,
    are_uneven,
)
from undertow.ranks.handle import Handle, Work
from undertow.ranks.parcels import Parcel
from undertow.ranks.transport import OwnGroup


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
            return wait.run_next()

    def group_to_hold(self) -> dist.ProcessGroup | None:
        """Returns None: the works hold it."""
        return None

    def sums_itself(self, parcel: Parcel) -> bool:
        return not (parcel.is_narrow or self._in_order)

    def exchange(
        self, messages: Sequence[Tensor], tag: int, trailer: Tensor | None = None
    ) -> Arriving:
        """Exchanges messages. Does not send the trailer: the caller sums it."""
        num_ranks, rank = len(messages), self.group.rank
        rooms = aligned_sizes([message.numel() for message in messages])
        sent = messages[0].new_zeros(sum(rooms))
        for place, message in zip(torch.split(sent, rooms), messages, strict=True):
            place[: message.numel()].copy_(message)
        received = sent.new_empty(num_ranks, rooms[rank])
        own_rooms = [rooms[rank]] * num_ranks
        work = self.group.exchange(received.view(-1), sent, own_rooms, rooms)
        arrived = [row[: messages[rank].numel()] for row in received]
        return Arriving(arrived, [work], [received, sent])

    def scatter(
        self, storage: Tensor, own: Tensor, parcel: Parcel, tag: int, trailer: Tensor
    ) -> Arriving:
        if not self.sums_itself(parcel) or len(set(map(len, parcel.parts))) > 1:
            return self.exchange(parcel.messages(storage, self.take), tag)
        values = storage[: parcel.parts[-1].stop]
        part = own if own.dtype == values.dtype else torch.empty_like(own, dtype=values.dtype)
        work = self.group.scatter_sum(part, values)
        return Arriving([part], [work], [part, values])

    def start_sum(self, tensor: Tensor, tag: int, *, is_whole: bool = False) -> Arriving:
        return Arriving([], list(self.group.all_reduce_unnamed(tensor).works), [])

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
        rooms, rank = aligned_sizes(sizes), self.group.rank
        own = self.take(rooms[rank], dtype).zero_()
        flat = self.take(round_up(sum(rooms), len(rooms)), dtype)
        places = adjacent(rooms)
        messages = [flat[place.start :][:size] for place, size in zip(places, sizes, strict=True)]
        gathering = Gathering(own, messages, held=[flat], flat=flat[: sum(rooms)], sizes=rooms)
        # Means of parts that differ much: ranks have added up these parts, so they are equal.
        return gathering if into is not None else self._in_separate_pieces(gathering, flat, places)

    def prepare_parts(
        self, flat: Tensor, parts: Sequence[range], *, over: dist.ProcessGroup | None
    ) -> Gathering:
        part = parts[self.group.rank]
        own, sizes = flat[part.start : part.stop], list(map(len, parts))
        gathering = Gathering(own, [], flat=flat[: parts[-1].stop], sizes=sizes)
        return self._in_separate_pieces(gathering, flat, parts)

    def _in_separate_pieces(
        self, gathering: Gathering, flat: Tensor, places: Sequence[range]
    ) -> Gathering:
        """Has messages travel in equal pieces, in separate memory, if they differ much.

        This rank's piece is apart from `flat`, because a backend may read and write at once.
        """
        if not are_uneven(places):
            return gathering
        numel, rank = flat.numel() // len(places), self.group.rank
        pieces = equal_parts(len(places), numel, stop=flat.numel())
        # Zeros follow the last message.
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

    def send_hop(self, gathering: Gathering, hop: Hop, tag: int) -> None:
        """Is never called: the backend's collectives pass on by themselves."""

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
