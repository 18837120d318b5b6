"""A torch.distributed backend that puts an emulated link around gloo.

Everything that talks to the group is delayed alike, be it this library, torch's C++ reducer or a plain loop:

    caller         launch ──────────────────────────────── wait
    group thread     └ last rank's launch · gloo · sleep until due ┘
    link                                [ started ── cost ── done )   one collective at a time, whatever its group

A collective is done no earlier than the link allows: `max(link free, launch of the last rank) + cost`, the cost being
that of a ring (`cost.collective_seconds`). Sends and receives pass without delay.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from queue import SimpleQueue
from typing import Any, final
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from undertow.cost import Link, collective_seconds
from undertow.errors import PhaseError

__all__ = ["BACKEND", "EmulatedLink", "Transfer", "emulated_backend"]

BACKEND = "emulated"
_LOG_LENGTH = 65_536  # a training run that never asks for its log must not grow without end
_GRACE_S = 5.0  # that a closing group waits for collectives in flight; one whose peer is dead never ends
_log = logging.getLogger("undertow")


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """One collective as the link saw it; times in seconds of `time.perf_counter`."""

    kind: str
    num_bytes: int  # the whole payload, as the full tensor has it
    launched_s: float  # on this rank
    started_s: float  # the link was free and the last rank had launched
    done_s: float


@final
class EmulatedLink:
    """The link of this process, shared by all groups that are made over it while it is registered."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self._lock = threading.Lock()
        self._free_at_s = 0.0
        self._log: deque[Transfer] = deque(maxlen=_LOG_LENGTH)
        self._groups: WeakSet[_EmulatedGroup] = WeakSet()  # weak: a group that torch destroys may go at once
        self._is_closed = False

    def register(self) -> None:
        """Makes `backend="emulated"` known to torch.distributed; the link registered last gets the groups."""
        dist.Backend.register_backend(BACKEND, self._make_group, devices=["cpu"])

    def take_log(self) -> tuple[Transfer, ...]:
        """All collectives that are done and were not taken before, in the order in which they were done."""
        with self._lock:
            taken = tuple(self._log)
            self._log.clear()
        return taken

    def close(self) -> None:
        """Ends the threads of all groups. Destroy the process groups before."""
        self._is_closed = True
        for group in tuple(self._groups):
            group.shutdown()

    def reserve(self, *, ready_s: float, cost_s: float) -> tuple[float, float]:
        """Start and end of the link's next free stretch of `cost_s` that does not begin before `ready_s`."""
        with self._lock:
            started_s = max(self._free_at_s, ready_s)
            self._free_at_s = started_s + cost_s
            return started_s, self._free_at_s

    def record(self, transfer: Transfer) -> None:
        with self._lock:
            self._log.append(transfer)

    def _make_group(self, store: Store, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroup:
        if self._is_closed:
            raise PhaseError(
                f"the emulated link {self.link.name!r} is closed.",
                where='init_process_group or new_group with backend="emulated"',
                remedy="Make process groups inside `with emulated_backend(link):`.",
            )
        group = _EmulatedGroup(self, store, rank, size, timeout)
        self._groups.add(group)
        return group


@contextmanager
def emulated_backend(link: Link) -> Iterator[EmulatedLink]:
    """Inside, `dist.init_process_group("emulated", ...)` and `dist.new_group(..., backend="emulated")` use `link`."""
    emulated = EmulatedLink(link)
    emulated.register()
    try:
        yield emulated
    finally:
        emulated.close()


def _num_bytes(payload: Any) -> int:
    """Bytes of a tensor, or of all tensors in (nested) lists."""
    if isinstance(payload, torch.Tensor):
        return payload.numel() * payload.element_size()
    return sum(_num_bytes(part) for part in payload)


@final
class _LinkWork(dist.Work):
    """Handle of a collective that a group's thread carries over the link.

    Written out because torch's own handle of a future cannot wait with a timeout.
    """

    def __init__(self, result: Any) -> None:
        super().__init__()
        self._result = result
        self._error: Exception | None = None
        self._future: torch.futures.Future[Any] = torch.futures.Future()
        self._is_finished = threading.Event()

    def finish(self, error: Exception | None = None) -> None:
        self._error = error
        if error is None:
            self._future.set_result(self._result)
        else:
            self._future.set_exception(error)
        # Last, so that whoever has waited sees a future that is done as well.
        self._is_finished.set()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Blocks until the collective is done; a timeout of zero means none (as in torch)."""
        if not self._is_finished.wait(timeout.total_seconds() or None):
            raise RuntimeError(f"Operation timed out! The collective is not done after {timeout.total_seconds()} s.")
        if self._error is not None:
            raise self._error
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        return self._future

    def is_completed(self) -> bool:
        return self._is_finished.is_set()

    def is_success(self) -> bool:
        return self.is_completed() and self._error is None

    def exception(self) -> Exception | None:
        return self._error

    def result(self) -> Any:
        self.wait()
        return self._result


@dataclass(frozen=True, slots=True, kw_only=True)
class _Launch:
    """What a group's thread needs to carry out one collective."""

    kind: str
    num_bytes: int
    launched_s: float
    start: Callable[[], dist.Work]
    work: _LinkWork


def _identity(work: dist.Work) -> dist.Work:
    return work


def _collective(kind: str, name: str, *, payload: int | None, is_per_rank: bool = False) -> Callable[..., dist.Work]:
    """The group method `name`; its argument `payload` tells the bytes (times the ranks where it holds one rank's part)."""

    def method(self: _EmulatedGroup, *args: Any, **kwargs: Any) -> dist.Work:
        num_bytes = 0 if payload is None else _num_bytes(args[payload]) * (self.size() if is_per_rank else 1)
        return self.launch(kind, num_bytes, name, args, kwargs)

    method.__name__ = method.__qualname__ = name
    return method


def _pass_through(name: str) -> Callable[..., dist.Work]:
    def method(self: _EmulatedGroup, *args: Any, **kwargs: Any) -> dist.Work:
        work: dist.Work = getattr(self.inner, name)(*args, **kwargs)
        return work

    method.__name__ = method.__qualname__ = name
    return method


@final
class _EmulatedGroup(dist.ProcessGroup):
    """A process group whose collectives run on an inner gloo group and take as long as the link needs.

    One thread per group keeps the order of launches inside the group, which every rank has alike. Groups must not
    wait for each other: ranks may use two groups in different orders, and one thread for both would deadlock.
    """

    def __init__(self, link: EmulatedLink, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        # Python subclasses have this constructor only, which the stub does not know.
        super().__init__(rank, size)  # type: ignore[call-arg]
        gloo = dist.ProcessGroupGloo(PrefixStore("gloo/", store), rank, size, timeout)
        self.inner: dist.ProcessGroup = dist.ProcessGroup(store, rank, size)
        for group in (self.inner, self):  # torch asks a group for its devices and for what is not overridden here
            group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
            group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        self._link = link
        self._launches: SimpleQueue[_Launch | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def getBackendName(self) -> str:  # noqa: N802  # torch calls it so
        return BACKEND

    allreduce = _collective("all_reduce", "allreduce", payload=0)
    allreduce_coalesced = _collective("all_reduce", "allreduce_coalesced", payload=0)
    broadcast = _collective("broadcast", "broadcast", payload=0)
    reduce = _collective("reduce", "reduce", payload=0)
    allgather = _collective("all_gather", "allgather", payload=0)
    allgather_coalesced = _collective("all_gather", "allgather_coalesced", payload=0)
    all_gather_single = _collective("all_gather", "all_gather_single", payload=0)
    all_gather_single_coalesced = _collective("all_gather", "all_gather_single_coalesced", payload=0)
    reduce_scatter = _collective("reduce_scatter", "reduce_scatter", payload=1)
    reduce_scatter_single = _collective("reduce_scatter", "reduce_scatter_single", payload=1)
    reduce_scatter_single_coalesced = _collective("reduce_scatter", "reduce_scatter_single_coalesced", payload=1)
    alltoall = _collective("all_to_all", "alltoall", payload=1)
    all_to_all_single = _collective("all_to_all", "all_to_all_single", payload=1)
    gather = _collective("gather", "gather", payload=1, is_per_rank=True)
    scatter = _collective("scatter", "scatter", payload=0, is_per_rank=True)
    barrier = _collective("barrier", "barrier", payload=None)
    # The names of torch < 2.13 for the same.
    _allgather_base = _collective("all_gather", "_allgather_base", payload=0)
    allgather_into_tensor_coalesced = _collective("all_gather", "allgather_into_tensor_coalesced", payload=0)
    _reduce_scatter_base = _collective("reduce_scatter", "_reduce_scatter_base", payload=1)
    reduce_scatter_tensor_coalesced = _collective("reduce_scatter", "reduce_scatter_tensor_coalesced", payload=1)
    alltoall_base = _collective("all_to_all", "alltoall_base", payload=1)
    send = _pass_through("send")
    recv = _pass_through("recv")
    recv_anysource = _pass_through("recv_anysource")

    def launch(self, kind: str, num_bytes: int, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dist.Work:
        """Hands a collective to the group's thread, or straight to gloo where the link is free."""
        launched_s = time.perf_counter()
        start: Callable[[], dist.Work] = partial(getattr(self.inner, name), *args, **kwargs)
        if self._link.link.is_free:
            running = start()
            if self._record_when_done(running, kind, num_bytes, launched_s):
                return running
            start = partial(_identity, running)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=f"undertow-link-{self.rank()}", daemon=True)
            self._thread.start()
        work = _LinkWork(args[0] if args else None)
        self._launches.put(_Launch(kind=kind, num_bytes=num_bytes, launched_s=launched_s, start=start, work=work))
        return work

    def shutdown(self) -> None:
        """Ends the group's thread once what is in flight is done; torch calls it when the group is destroyed."""
        if self._thread is None:
            return
        self._launches.put(None)
        self._thread.join(_GRACE_S)
        if self._thread.is_alive():
            # The thread keeps the inner group alive: gloo would block in its destructor for the same collective.
            _log.warning("an emulated group of rank %d was closed with a collective in flight.", self.rank())
        self._thread = None

    def abort(self) -> None:
        self.shutdown()

    def _run(self) -> None:
        while (launch := self._launches.get()) is not None:
            try:
                self._carry(launch)
            except Exception as error:
                launch.work.finish(error)
            else:
                launch.work.finish()
            # Or the tensors of this collective would stay alive until the next one.
            del launch

    def _carry(self, launch: _Launch) -> None:
        """Runs one collective on gloo and returns when the link would have carried it."""
        link = self._link.link
        ready_s = launch.launched_s if link.is_free else self._last_launch_s(launch.launched_s)
        launch.start().wait()
        cost_s = collective_seconds(link, launch.kind, num_bytes=launch.num_bytes, num_ranks=self.size())
        started_s, due_s = self._link.reserve(ready_s=ready_s, cost_s=cost_s)
        while (now_s := time.perf_counter()) < due_s:
            time.sleep(due_s - now_s)
        self._link.record(
            Transfer(
                kind=launch.kind,
                num_bytes=launch.num_bytes,
                launched_s=launch.launched_s,
                started_s=started_s,
                done_s=now_s,
            )
        )

    def _last_launch_s(self, launched_s: float) -> float:
        """When the last rank launched: ranks are processes of one machine, whose monotonic clock is the same for all."""
        latest = torch.tensor([launched_s], dtype=torch.float64)
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MAX  # type: ignore[assignment]  # the stub forgets the implicit conversion
        self.inner.allreduce([latest], options).wait()
        return latest.item()

    def _record_when_done(self, work: dist.Work, kind: str, num_bytes: int, launched_s: float) -> bool:
        """Lets gloo's own work tell when it is done; False where it cannot (2.13: reduce_scatter)."""
        try:
            future = work.get_future()
        except RuntimeError:
            return False
        link = self._link  # not self: the callback would keep the group alive

        def record(_: object) -> None:
            done_s = time.perf_counter()
            link.record(Transfer(kind=kind, num_bytes=num_bytes, launched_s=launched_s, started_s=launched_s, done_s=done_s))

        future.add_done_callback(record)
        return True
