"""Reduce-scatter, all-gather and an ordered all-reduce, built from the backend's own collectives, such as NCCL's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor

from undertow.errors import ConfigError
from undertow.runtime.comm.cast import cast_for_wire, travels_narrower
from undertow.runtime.comm.group import OwnGroup
from undertow.runtime.comm.handles import Handle, started
from undertow.runtime.comm.p2p import Collectives, P2PCollectives, accumulation_dtype, sum_in_order
from undertow.runtime.torch_private import private


def exchanges_over(
    group: OwnGroup, *, in_order: bool, divisor: float | None = None, wire: torch.dtype | None = None
) -> Collectives:
    """Returns the fastest exchanges for the group's backend; with `in_order`, reductions add in rank order.

    `divisor` is the divisor of means, by default the number of ranks. Reductions are sent in `wire` if that is narrower.
    """
    if group.is_over_gloo:
        if group.device.type != "cpu":
            raise ConfigError(
                f"{group.backend} sends and receives from the host's memory only, and parameters are on {group.device}.",
                where='ShardedOptimizer, or reduction="ordered"',
                remedy='Initialize torch.distributed with "nccl" to train on GPUs.',
            )
        return P2PCollectives(group, in_order=in_order, divisor=divisor, wire=wire)
    return BackendCollectives(group, in_order=in_order, divisor=divisor, wire=wire)


class BackendCollectives:
    """Exchanges by collectives. With `in_order`, ranks exchange their parts, and each rank adds its part itself."""

    may_differ_in_order = False

    def __init__(self, group: OwnGroup, *, in_order: bool, divisor: float | None = None, wire: torch.dtype | None = None) -> None:
        self.group = group
        self._wire = wire
        self._in_order = in_order
        self.divides_first = not in_order
        self._divisor = group.num_ranks if divisor is None else divisor
        self._rows = group.user.row_places
        # A stream on which one collective waits for another, so that the host waits for neither.
        self._behind: torch.cuda.Stream | None = None

    def reduce_scatter(self, storage: Tensor, shard: Tensor, *, trailer: range, pack: Callable[[], object]) -> Handle:
        with torch.no_grad():
            pack()
        num_ranks, pg = self.group.num_ranks, self.group.process_group
        values = storage[: num_ranks * shard.numel()]
        # The backend would add these values in 16 bits, and their sum may overflow.
        is_divided = self.divides_first and travels_narrower(storage.dtype, self._wire)
        parts = cast_for_wire(values.div(self._divisor) if is_divided else values, self._wire)
        own_trailer = storage[trailer.start : trailer.stop]
        if self._in_order:
            work, add_up = self._exchanged(parts, into=shard)
        else:
            narrow = shard if shard.dtype == parts.dtype else torch.empty_like(shard, dtype=parts.dtype)
            work = private.reduce_scatter_async(narrow, parts, pg)

            def add_up() -> None:
                if narrow is not shard:
                    shard.copy_(_used_here(narrow))

        def finish() -> None:
            add_up()
            if self._divisor != 1 and not is_divided:
                shard.div_(self._divisor)
            _used_here(parts)  # held until now, because NCCL reads it

        return _NativeExchange([work, started(dist.all_reduce(own_trailer, group=pg, async_op=True))], finish)

    def all_reduce(self, tensor: Tensor) -> _NativeExchange:
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
        gathering = private.all_gather_async(padded, own, pg)

        def finish() -> None:
            tensor.copy_(_used_here(padded)[: tensor.numel()])
            _used_here(own)  # held until now, because NCCL reads it

        return _NativeExchange([gathering], finish)

    def all_reduce_behind(self, before: Handle, tensor: Tensor, *, trailer: Tensor) -> Handle:
        pg = self.group.process_group
        with self._stream_behind(tensor):
            before.wait()
            trailers = started(dist.all_reduce(trailer, group=pg, async_op=True))
            if self._in_order:
                mean = self.all_reduce(tensor)
                return _NativeExchange([trailers, *mean.works], mean.wait)
            sent = cast_for_wire(tensor.div(self._divisor).to(trailer.dtype), self._wire)
            work = started(dist.all_reduce(sent, group=pg, async_op=True))
        return _NativeExchange([work, trailers], lambda: tensor.copy_(_used_here(sent)))

    def all_gather(self, flat: Tensor, *, number: int, then: Callable[[], object], first: Callable[[], object] = int) -> Handle:
        first()
        own = flat.view(self.group.num_ranks, -1)[self.group.rank]
        return _NativeExchange([private.all_gather_async(flat, own, self.group.process_group)], then)

    def close(self) -> None:
        """Does nothing: there is nothing to close."""

    def _stream_behind(self, tensor: Tensor) -> AbstractContextManager[object]:
        """Returns the context to wait for a collective in, without blocking the compute stream."""
        if tensor.device.type != "cuda":
            return nullcontext()
        if self._behind is None:
            self._behind = torch.cuda.Stream(tensor.device)  # type: ignore[no-untyped-call]
        return torch.cuda.stream(self._behind)

    def _exchanged(self, parts: Tensor, *, into: Tensor) -> tuple[dist.Work, Callable[[], object]]:
        received = torch.empty_like(parts)
        work = dist.all_to_all_single(received, parts, group=self.group.process_group, async_op=True)
        rows = list(received.view(self.group.num_ranks, -1))

        def add_up() -> None:
            sum_in_order([_used_here(row) for row in rows], into=into, rows=self._rows)
            _used_here(parts)  # held until now, because NCCL reads it

        return started(work), add_up


class _NativeExchange:
    """A handle of collectives, and of the work that follows them.

    `finish` holds the collectives' inputs. A backend releases them as soon as any stream, such as a clock's, waits for the
    collective; a stream that has not waited could then overwrite the memory.
    """

    def __init__(self, works: Sequence[dist.Work], finish: Callable[[], object]) -> None:
        self.works = works
        self._finish: Callable[[], object] | None = finish
        self._callbacks: list[Callable[[object], None]] = []

    def wait(self) -> None:
        """Waits until it is complete; on CUDA, makes the current stream wait."""
        finish, self._finish = self._finish, None
        if finish is None:
            return
        for work in self.works:
            work.wait()
        with torch.no_grad():
            finish()
        for callback in self._callbacks:
            callback(None)

    def is_completed(self) -> bool:
        return self._finish is None

    def block_stream(self) -> None:
        """Makes the current CUDA stream wait for the collectives; `wait` must still be called."""
        for work in self.works:
            work.wait()

    def on_done(self, callback: Callable[[object], None]) -> None:
        """Calls `callback` after the first wait, or now if there was one."""
        if self._finish is None:
            callback(None)
        else:
            self._callbacks.append(callback)


def _used_here(tensor: Tensor) -> Tensor:
    """Keeps the tensor's memory until the current stream, which may differ from the one it was allocated on, is done with it."""
    if tensor.device.type == "cuda":
        tensor.record_stream(torch.cuda.current_stream())
    return tensor
