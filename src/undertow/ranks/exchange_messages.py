"""The messages of an exchange on their way, as data that both carriers use.

Wait       the end of a stage of an exchange, and the next stage
Arriving   one message from each rank
Recut      elements that move from the parts of some ranks to the parts of others
Gathering  a message of each rank that goes to all ranks
Hop        a round of a gather whose messages are passed on
Borrowed   memory for messages

An exchange is a chain of stages. A stage returns the messages to wait for, and the next stage; the
carrier decides who waits: a thread of the host (`posted_messages`), or a stream
(`backend_collectives`). `exchanges` has the stages, which are the same for both. They are functions
and not one generator: on a device the last one runs in the first wait, and if Ctrl-C ends that, it
must run again from its beginning in the next wait.

Reasons: docs/design/exchanges.md.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from undertow.plan.layout import round_up
from undertow.plan.owners import MOST_OVER_MEAN
from undertow.ranks.handle import Work
from undertow.ranks.parcels import ALIGN_BYTES, Room


@dataclass(frozen=True, slots=True)
class Wait:
    """The end of a stage: when the works are complete, the next one follows."""

    works: Sequence[Work]
    then: "ExchangeStage"
    is_last: bool = True  # the next stage completes the exchange
    is_in_turn: bool = True  # all ranks start such exchanges in the same order

    def run_next(self) -> "Wait | None":
        """Waits for the works, and runs the next stage."""
        for work in self.works:
            work.wait()
        return self.then()


ExchangeStage: TypeAlias = Callable[[], Wait | None]


@dataclass(frozen=True, slots=True)
class Arriving:
    """Messages on their way to this rank, one from each rank."""

    messages: Sequence[Tensor]
    works: list[Work]
    held: list[Tensor]  # memory to give back when the messages have been read
    parts: Sequence[Tensor] = ()  # of a tensor, if ranks sum up a part each
    sums: list[Work] = field(default_factory=list)  # receives of these sums
    trailers: "Arriving | None" = None  # that follow the messages


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
class Hop:
    """A round of a gather whose messages are passed on: this rank sends what it has to one rank,
    and receives what it lacks from another one."""

    to: int
    of: int
    sent: Sequence[Tensor]  # one or two pieces of the memory, not empty
    received: Sequence[Tensor]
    works: list[Work] = field(default_factory=list)  # of the receives


def hops_between(flat: Tensor, places: Sequence[range], *, rank: int) -> list[Hop]:
    """Returns the rounds in which a rank gets the messages of all, which lie side by side at
    `places` of `flat`.

    After k rounds it has those of 2^k ranks, from its own on (Bruck's algorithm).
    """
    num_ranks, num_held = len(places), 1
    hops: list[Hop] = []
    while num_held < num_ranks:
        num_more = min(num_held, num_ranks - num_held)
        to, of = (rank - num_held) % num_ranks, (rank + num_held) % num_ranks
        sent = _messages_from(rank, num_more, flat, places)
        hops.append(Hop(to, of, sent, _messages_from(of, num_more, flat, places)))
        num_held += num_more
    return hops


def _messages_from(first: int, number: int, flat: Tensor, places: Sequence[range]) -> list[Tensor]:
    """Returns the memory of this number of messages from `first` on; rank 0 follows the last."""
    num_beyond = max(0, first + number - len(places))
    last = first + number - num_beyond - 1
    pieces = [flat[places[first].start : places[last].stop]]
    if num_beyond:
        pieces.append(flat[places[0].start : places[num_beyond - 1].stop])
    return [piece for piece in pieces if piece.numel()]


@dataclass(frozen=True, slots=True)
class Gathering:
    """A message of each rank that goes to all ranks; the carrier sends `own` when it is written.

    If the messages differ much in length, each rank receives an equal piece of all of them, and
    sends it to all: `pieces` is this gather, and `recut` brings the pieces. Small messages of many
    ranks are passed on, in `hops`.
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
    hops: Sequence[Hop] = ()


@dataclass(frozen=True, slots=True)
class Borrowed:
    """Memory for messages that a carrier lends, to give back together."""

    lend: Room
    tensors: list[Tensor] = field(default_factory=list)

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        tensor = self.lend(numel, dtype)
        self.tensors.append(tensor)
        return tensor


def are_uneven(parts: Sequence[range]) -> bool:
    """Returns True if the largest part is so large that its rank would send, receive and hold more
    than twice as much as the mean rank."""
    sizes = list(map(len, parts))
    return max(sizes) * len(sizes) > MOST_OVER_MEAN * sum(sizes)


def adjacent(sizes: Sequence[int]) -> list[range]:
    """Returns ranges of these sizes, side by side from 0 on."""
    stops = list(accumulate(sizes))
    return [range(stop - size, stop) for stop, size in zip(stops, sizes, strict=True)]


def aligned_sizes(sizes: Sequence[int]) -> list[int]:
    """Returns the sizes of places for messages side by side: each begins at a multiple of 16
    elements, so that bytes can be viewed in any dtype.

    Every place has elements: in a matrix with zero columns, the second row would begin outside.
    """
    return [round_up(max(1, size), ALIGN_BYTES) for size in sizes]


def _within(part: range, other: range) -> range:
    """Returns the elements of `part` that are in `other` too, counted from the start of `part`."""
    start = min(max(part.start, other.start), part.stop)
    stop = max(start, min(part.stop, other.stop))
    return range(start - part.start, stop - part.start)
