"""Reduce-scatter, all-gather and an all-reduce with an order, made of sends and receives that are all posted at once.

For gloo: its own reduce-scatter sends as much as an all-reduce, and a single one of its all-gathers does not fill a link.
What a rank has received it adds up itself, in rank order, in fp32 where the gradients are narrower: the same bits
whatever travels together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from undertow.runtime.comm.cast import cast_for_wire
from undertow.runtime.comm.group import OwnGroup
from undertow.runtime.comm.handles import FutureHandle, Handle, started
from undertow.runtime.peers.worker import Worker

_GATHER_TAG = 1 << 24  # gathers may start in another order on another rank: they are told apart by their number
_NUM_TAGS = 1 << 20


class Collectives(Protocol):
    """What takes tensors from one placement to another over a group."""

    group: OwnGroup
    may_differ_in_order: bool  # whether ranks may start gathers in different orders
    divides_first: bool  # before values are cast for a narrower wire

    def reduce_scatter(self, storage: Tensor, shard: Tensor, *, trailer: range, pack: Callable[[], object]) -> Handle:
        """Starts to write into `shard` the mean or sum over ranks of this rank's part of `storage`, which `pack` fills first.

        With a divisor of its own it is the sum over ranks, divided by that.

        storage: [number of ranks * shard.numel() or more]; parts are one behind the other. What lies in `trailer` becomes
        its sum over ranks on every rank. shard: of `wide_dtype(storage.dtype)`. Every rank starts these, and all-reduces, in
        the same order.
        """
        ...

    def all_reduce(self, tensor: Tensor) -> Handle:
        """Starts to replace `tensor` by its mean over ranks, or their sum, added up in rank order. [any number of elements]

        Ranks that form a mesh are added up row by row, as exchanges inside and across it do.
        """
        ...

    def all_reduce_behind(self, before: Handle, tensor: Tensor, *, trailer: Tensor) -> Handle:
        """The same with a tensor that is there when `before` is complete; `trailer` becomes its sum over ranks.

        `before` are reduce-scatters over other ranks, each of which has one of these, in the same order. Where no order is asked
        for, `tensor` travels in the dtype of the trailer, as in an all-reduce of the backend's.
        """
        ...

    def all_gather(self, flat: Tensor, *, number: int, then: Callable[[], object], first: Callable[[], object] = int) -> Handle:
        """Starts to fill `flat`, of which this rank has its part, with every other rank's, and calls `then` at the end.

        flat: [number of ranks * part]. `number` tells gathers that are under way from each other. `first` is called before
        anything of `flat` is sent, and may wait for it.
        """
        ...

    def close(self) -> None: ...


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """In which values of `dtype` are added up."""
    return torch.float32 if dtype.itemsize == 2 else dtype


class P2PCollectives:
    """Exchanges by sends and receives; threads post and complete them in the order in which they were started.

    `divisor` is that of means, if not the number of ranks. `in_order` sends all that was added up as wide as it is; the order of
    adds is the same in any case. What is reduced travels in `wire`, if that is narrower, and is added up in `accumulation_dtype`.
    `close` ends its threads.
    """

    may_differ_in_order = True
    divides_first = False

    def __init__(
        self, group: OwnGroup, *, in_order: bool = True, divisor: float | None = None, wire: torch.dtype | None = None
    ) -> None:
        self.group = group
        self._wire = wire
        self._divisor = group.num_ranks if divisor is None else divisor
        self._in_order = in_order
        self._rows = group.user.row_places
        self._tags = count()
        self._scratch = _Scratch()
        # Not in a backward, which would wait for the copy into the bucket, and in a send for gloo: that copies into the socket,
        # or waits while it reads from that peer.
        self._posting = group.worker("undertow-posts")
        self._adding = group.worker("undertow-adds")
        self._gathering = group.worker("undertow-gathers")

    def reduce_scatter(self, storage: Tensor, shard: Tensor, *, trailer: range, pack: Callable[[], object]) -> Exchange:
        post = partial(self._post_reduce_scatter, storage, shard, trailer, self._next_tag())

        def pack_and_post() -> _Posted:
            with torch.no_grad():
                pack()
            return post()

        return self._start(Exchange(self.group), pack_and_post, self._adding)

    def all_reduce(self, tensor: Tensor) -> Exchange:
        exchange = Exchange(self.group)
        return self._start(exchange, partial(self._post_all_reduce, tensor, tensor, exchange, self._next_tag()), self._adding)

    def all_reduce_behind(self, before: Handle, tensor: Tensor, *, trailer: Tensor) -> Exchange:
        exchange = Exchange(self.group)
        post_both = partial(self._post_both, tensor, trailer, exchange, self._next_tag(), self._next_tag())

        def post() -> _Posted:
            before.wait()  # it is over, and raises here if it has failed
            return post_both()

        def start(_before: object) -> None:
            try:
                self._start(exchange, post, self._adding)
            except RuntimeError as error:  # closed meanwhile
                exchange.fail(error)

        before.on_done(start)
        return exchange

    def all_gather(self, flat: Tensor, *, number: int, then: Callable[[], object], first: Callable[[], object] = int) -> Exchange:
        def post() -> _Posted:
            first()
            return self._post_all_gather(flat, then, _GATHER_TAG + number)

        return self._start(Exchange(self.group), post, self._gathering)

    def after_reductions(self, work: Callable[[], object]) -> Exchange:
        """Starts `work` where all reductions that were started so far are complete or have failed; one at a time."""
        return self._start(Exchange(self.group), lambda: _Posted((), work), self._adding)

    def close(self) -> None:
        self._posting.shutdown()
        self._adding.shutdown()
        self._gathering.shutdown()

    def _post_reduce_scatter(self, storage: Tensor, shard: Tensor, trailer: range, tag: int) -> _Posted:
        num_ranks = self.group.num_ranks
        parts = list(cast_for_wire(storage[: num_ranks * shard.numel()], self._wire).view(num_ranks, -1))
        own_trailer = storage[trailer.start : trailer.stop]
        # Of one message, of which there are then half as many, they would have to be one piece of memory.
        received, trailers = self._received_beside(parts), self._received_beside([own_trailer] * num_ranks)
        works = self._post(sent=parts, received=received, tag=tag)
        works += self._post(sent=[own_trailer] * num_ranks, received=trailers, tag=tag + 1)

        def add_up() -> None:
            sum_in_order(received, into=shard)
            if self._divisor != 1:
                shard.div_(self._divisor)
            own_trailer.copy_(sum_in_order(trailers, into=torch.empty_like(own_trailer)))
            self._scratch.give(self._of_peers(received) + self._of_peers(trailers))

        return _Posted(works, add_up)

    def _post_all_reduce(
        self, values: Tensor, target: Tensor, exchange: Exchange, tag: int, *, is_divided: bool = False
    ) -> _Posted:
        num_ranks, rank = self.group.num_ranks, self.group.rank
        tensor, divisor = cast_for_wire(values, self._wire), 1 if is_divided else self._divisor
        parts = list(tensor.tensor_split(num_ranks))
        own, total = parts[rank], self._scratch.take(parts[rank].numel(), accumulation_dtype(tensor.dtype), tensor.device)
        received = self._received_beside([own] * num_ranks)
        works = self._post(sent=parts, received=received, tag=tag)
        # Into what was sent: a peer has had all of our part of it before it sends what becomes of it.
        returning = self._receive(parts, tag=tag + 1)

        def add_up() -> None:
            own.copy_(sum_in_order(received, into=total, rows=self._rows).div_(divisor))
            self._scratch.give([*self._of_peers(received), total])
            last = [*returning, *self._send([own] * num_ranks, tag=tag + 1)]
            widen = int if tensor is target else partial(target.copy_, tensor)
            self._gathering.submit(exchange.complete, _Posted(last, widen))

        return _Posted(works, add_up, is_last=False)

    def _post_both(self, tensor: Tensor, trailer: Tensor, exchange: Exchange, tag: int, trailer_tag: int) -> _Posted:
        received = self._received_beside([trailer] * self.group.num_ranks)
        works = self._post(sent=[trailer] * self.group.num_ranks, received=received, tag=trailer_tag)
        # What was added up inside and is not divided yet may be too large for 16 bits: it is divided before they take it.
        is_divided = torch.float16 in (self._wire, trailer.dtype)
        if is_divided:
            tensor.div_(self._divisor)
        sent = tensor if self._in_order else tensor.to(trailer.dtype)
        mean = self._post_all_reduce(sent, tensor, exchange, tag, is_divided=is_divided)

        def add_up() -> None:
            trailer.copy_(sum_in_order(received, into=torch.empty_like(trailer)))
            self._scratch.give(self._of_peers(received))
            mean.finish()

        return _Posted([*works, *mean.works], add_up, is_last=False)

    def _post_all_gather(self, flat: Tensor, then: Callable[[], object], tag: int) -> _Posted:
        parts = list(flat.view(self.group.num_ranks, -1))
        own = parts[self.group.rank]
        return _Posted(self._post(sent=[own] * len(parts), received=parts, tag=tag), then)

    def _next_tag(self) -> int:
        return 2 * (next(self._tags) % _NUM_TAGS)

    def _received_beside(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Room for every peer's tensor like ours of `parts`, which stands in its place for this rank."""
        return [
            part if peer == self.group.rank else self._scratch.take(part.numel(), part.dtype, part.device)
            for peer, part in enumerate(parts)
        ]

    def _of_peers(self, received: Sequence[Tensor]) -> list[Tensor]:
        return [received[peer] for peer in self._peers]

    def _post(self, *, sent: Sequence[Tensor], received: Sequence[Tensor], tag: int) -> list[dist.Work]:
        """Sends each peer its tensor of `sent`, and receives into that of `received`."""
        return [*self._receive(received, tag=tag), *self._send(sent, tag=tag)]

    def _receive(self, received: Sequence[Tensor], *, tag: int) -> list[dist.Work]:
        group = self.group.process_group
        return [started(dist.irecv(received[peer], group=group, group_src=peer, tag=tag)) for peer in self._peers]

    def _send(self, sent: Sequence[Tensor], *, tag: int) -> list[dist.Work]:
        group = self.group.process_group
        return [started(dist.isend(sent[peer], group=group, group_dst=peer, tag=tag)) for peer in self._peers]

    @property
    def _peers(self) -> list[int]:
        return [peer for peer in range(self.group.num_ranks) if peer != self.group.rank]

    def _start(self, exchange: Exchange, post: Callable[[], _Posted], thread: Worker) -> Exchange:
        self._posting.submit(exchange.begin, post, thread)
        return exchange


@dataclass(frozen=True, slots=True)
class _Posted:
    """Sends and receives that are under way, and what is to be done when they are complete."""

    works: Sequence[dist.Work]
    finish: Callable[[], object] = int
    is_last: bool = True  # whether the exchange is complete then


class Exchange(FutureHandle):
    """A handle of something that is sent and received over `group`, and completed in a thread."""

    def begin(self, post: Callable[[], _Posted], thread: Worker) -> None:
        """Posts, and has `thread` complete it; whoever waits for the exchange learns of an error."""
        try:
            thread.submit(self.complete, post())
        except BaseException as error:
            self.fail(error)

    def run(self, work: Callable[[], object]) -> None:
        """Calls `work`; whoever waits for the exchange learns of an error, and of the end."""
        self.complete(_Posted((), work))

    def complete(self, posted: _Posted) -> None:
        """Waits for what was posted; whoever waits for the exchange learns of an error, and of the last part's end."""
        try:
            for work in posted.works:
                work.wait()
            with torch.no_grad():
                posted.finish()
        except BaseException as error:
            self.fail(error)
        else:
            if posted.is_last:
                self._done.set_result(None)

    def fail(self, error: BaseException) -> None:
        """Whoever waits for the exchange learns of it."""
        self._done.set_exception(error)


class _Scratch:
    """Memory for what peers send, used again and again: fresh memory costs a page fault for every four KiB."""

    def __init__(self) -> None:
        self._free: dict[tuple[int, torch.dtype, torch.device], list[Tensor]] = {}

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        try:
            return self._free[numel, dtype, device].pop()
        except (KeyError, IndexError):
            return torch.empty(numel, dtype=dtype, device=device)

    def give(self, tensors: Sequence[Tensor]) -> None:
        """From the thread that completes exchanges, while another one takes."""
        for tensor in tensors:
            self._free.setdefault((tensor.numel(), tensor.dtype, tensor.device), []).append(tensor)


def sum_in_order(parts: Sequence[Tensor], *, into: Tensor, rows: Sequence[Sequence[int]] = ()) -> Tensor:
    """A chain of adds: the order within torch.sum depends on the position of an element.

    With `rows` of a mesh, which have the places of ranks, it is one of each row's own.
    """
    if rows:
        parts = [sum_in_order([parts[place] for place in row], into=torch.empty_like(into)) for row in rows]
    first, *rest = parts
    if rest and first.dtype == into.dtype:  # one pass over memory less
        torch.add(first, rest.pop(0), out=into)
    else:
        into.copy_(first)
    for part in rest:
        into.add_(part)
    return into
