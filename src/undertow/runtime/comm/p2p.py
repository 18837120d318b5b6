"""Reduce-scatter, all-gather and an ordered all-reduce, built from sends and receives that are all posted at once.

They are for gloo, whose own reduce-scatter sends as much as an all-reduce, and whose single all-gather does not fill a link. Each
rank adds the received values itself, in rank order, and in fp32 if the gradients are narrower. The result has the same bits
whatever bucket a gradient is sent in.
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
from undertow.runtime.peers.threads import Worker

_GATHER_TAG = 1 << 24  # gathers may start in a different order on another rank, so a number identifies each
_NUM_TAGS = 1 << 20


class Collectives(Protocol):
    """Moves tensors from one placement to another over a group."""

    group: OwnGroup
    may_differ_in_order: bool  # True if ranks may start gathers in different orders
    divides_first: bool  # True if values are divided before they are cast for a narrower wire

    def reduce_scatter(self, storage: Tensor, shard: Tensor, *, trailer: range, pack: Callable[[], object]) -> Handle:
        """Starts to write the mean or sum over ranks of this rank's part of `storage` into `shard`; `pack` fills `storage` first.

        With a custom divisor, the result is the sum over ranks divided by it.

        storage: [number of ranks * shard.numel() or more], the parts one after another. The range `trailer` becomes its sum over
        ranks on every rank. shard: of `wide_dtype(storage.dtype)`. Every rank starts its reduce-scatters and all-reduces in the
        same order.
        """
        ...

    def all_reduce(self, tensor: Tensor) -> Handle:
        """Starts to replace `tensor` by its mean or sum over ranks, added in rank order. [any number of elements]

        Ranks of a mesh are added row by row, like exchanges inside and across its rows.
        """
        ...

    def all_reduce_behind(self, before: Handle, tensor: Tensor, *, trailer: Tensor) -> Handle:
        """Starts an all-reduce of a tensor that is ready when `before` is complete; `trailer` becomes its sum over ranks.

        `before` are reduce-scatters over other ranks, each followed by one of these, in the same order. If no order is required,
        `tensor` is sent in the trailer's dtype, as in an all-reduce of the backend's.
        """
        ...

    def all_gather(self, flat: Tensor, *, number: int, then: Callable[[], object], first: Callable[[], object] = int) -> Handle:
        """Starts to fill `flat`, which has this rank's part, with the parts of all ranks, and calls `then` at the end.

        flat: [number of ranks * part]. `number` identifies a gather among those in flight. `first` is called before anything of
        `flat` is sent, and may block.
        """
        ...

    def close(self) -> None: ...


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype that values of `dtype` are added in."""
    return torch.float32 if dtype.itemsize == 2 else dtype


class P2PCollectives:
    """Exchanges by sends and receives; threads post and complete them in the order of their start.

    `divisor` is the divisor of means, by default the number of ranks. `in_order` sends sums in full width; the order of additions
    is the same in any case. Reductions are sent in `wire` if that is narrower, and added in `accumulation_dtype`. `close` ends
    the threads.
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
        # Not in the backward's thread, which would wait for the copy into the bucket and for gloo's send: that copies into the
        # socket, or blocks while gloo reads from that peer.
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
            before.wait()  # it has ended; this raises if it failed
            return post_both()

        def start(_before: object) -> None:
            try:
                self._start(exchange, post, self._adding)
            except RuntimeError as error:  # closed in the meantime
                exchange.fail(error)

        before.on_done(start)
        return exchange

    def all_gather(self, flat: Tensor, *, number: int, then: Callable[[], object], first: Callable[[], object] = int) -> Exchange:
        def post() -> _Posted:
            first()
            return self._post_all_gather(flat, then, _GATHER_TAG + number)

        return self._start(Exchange(self.group), post, self._gathering)

    def after_reductions(self, work: Callable[[], object]) -> Exchange:
        """Runs `work` after all reductions started so far are complete or have failed; one call at a time."""
        return self._start(Exchange(self.group), lambda: _Posted((), work), self._adding)

    def close(self) -> None:
        self._posting.shutdown()
        self._adding.shutdown()
        self._gathering.shutdown()

    def _post_reduce_scatter(self, storage: Tensor, shard: Tensor, trailer: range, tag: int) -> _Posted:
        num_ranks = self.group.num_ranks
        parts = list(cast_for_wire(storage[: num_ranks * shard.numel()], self._wire).view(num_ranks, -1))
        own_trailer = storage[trailer.start : trailer.stop]
        # Separate messages: combining the two would halve their number but require adjacent memory.
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
        # Received into the sent parts: a peer returns a part's result only after it has received the part.
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
        # Sums over the inner ranks that are not divided yet may be too large for 16 bits, so divide before the cast.
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
        """Returns memory for every peer's tensor of the same kind as `parts`; this rank's own tensor is used as is."""
        return [
            part if peer == self.group.rank else self._scratch.take(part.numel(), part.dtype, part.device)
            for peer, part in enumerate(parts)
        ]

    def _of_peers(self, received: Sequence[Tensor]) -> list[Tensor]:
        return [received[peer] for peer in self._peers]

    def _post(self, *, sent: Sequence[Tensor], received: Sequence[Tensor], tag: int) -> list[dist.Work]:
        """Sends `sent[peer]` to each peer and receives `received[peer]` from it."""
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
    """Sends and receives in flight, and the function to call after them."""

    works: Sequence[dist.Work]
    finish: Callable[[], object] = int
    is_last: bool = True  # True if the exchange is complete after that


class Exchange(FutureHandle):
    """A handle of sends and receives over `group`, which a thread completes."""

    def begin(self, post: Callable[[], _Posted], thread: Worker) -> None:
        """Posts, and lets `thread` complete the exchange; an error is passed to its waiters."""
        try:
            thread.submit(self.complete, post())
        except BaseException as error:
            self.fail(error)

    def run(self, work: Callable[[], object]) -> None:
        """Runs `work` and completes the exchange; an error is passed to its waiters."""
        self.complete(_Posted((), work))

    def complete(self, posted: _Posted) -> None:
        """Waits for the posted messages; completes the exchange after the last of them, and passes an error to its waiters."""
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
        """Passes `error` to the waiters."""
        self._done.set_exception(error)


class _Scratch:
    """Reused memory for messages from peers, because fresh memory costs a page fault for every 4 KiB."""

    def __init__(self) -> None:
        self._free: dict[tuple[int, torch.dtype, torch.device], list[Tensor]] = {}

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        try:
            return self._free[numel, dtype, device].pop()
        except (KeyError, IndexError):
            return torch.empty(numel, dtype=dtype, device=device)

    def give(self, tensors: Sequence[Tensor]) -> None:
        """Called from the thread that completes exchanges, while another one takes."""
        for tensor in tensors:
            self._free.setdefault((tensor.numel(), tensor.dtype, tensor.device), []).append(tensor)


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
