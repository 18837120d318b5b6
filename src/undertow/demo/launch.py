"""Runs ranks as processes of this machine: starts them, receives their messages, and always ends them."""

import contextlib
import multiprocessing
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any

from undertow.demo.results import Message, RankFailed
from undertow.errors import UndertowError

_END_S = 2.0  # seconds that a rank has to end after it was asked to
_EXIT_S = 20.0  # seconds for a rank that succeeded: the final garbage collection takes seconds on a busy machine
_BLAME_S = 1.0  # seconds for other ranks' errors to arrive after the first one: the cause may not arrive first


class RanksLost(UndertowError):
    """A rank failed, died or stopped reporting; all others have been ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rank:
    """A process and the connection over which it sends. Its end of file is the end of the process: nothing has to poll."""

    rank: int
    process: SpawnProcess
    connection: Connection


_Running = dict[Any, _Rank]  # by connection


@contextlib.contextmanager
def local_ranks(
    target: Callable[..., None], arguments: Sequence[Any], *, num_ranks: int, silence_s: float
) -> Iterator[Iterator[Message]]:
    """Runs `target(rank, *arguments, connection)` in processes; leaving the `with` block ends the ones that still run.

    Yields their messages until all of them have succeeded. These raise RanksLost if a rank fails, or if none sends a message for
    `silence_s`: then the ranks are assumed to hang.
    """
    resource_tracker.ensure_running()  # first: when it starts with the first process, it unblocks Ctrl-C in this process
    ranks: list[_Rank] = []
    try:
        with _interrupts_postponed():
            for rank in range(num_ranks):
                ranks.append(_started(target, rank, arguments))  # those started must end if one fails to start
        yield _messages({rank.connection: rank for rank in ranks}, silence_s)
    finally:
        with _interrupts_postponed():  # a second Ctrl-C must not leave ranks running
            for end in (SpawnProcess.terminate, SpawnProcess.kill):
                _end(ranks, end)
            for it in ranks:
                it.connection.close()


def _started(target: Callable[..., None], rank: int, arguments: Sequence[Any]) -> _Rank:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=target, args=(rank, *arguments, theirs), name=f"rank {rank}")
    process.start()
    theirs.close()  # the rank holds the only writing end: when it ends, this process reads the end of file
    return _Rank(rank=rank, process=process, connection=ours)


def _end(ranks: Sequence[_Rank], end: Callable[[SpawnProcess], None]) -> None:
    deadline = time.monotonic() + _END_S
    for rank in ranks:
        if rank.process.is_alive():
            end(rank.process)
    for rank in ranks:
        rank.process.join(max(0.0, deadline - time.monotonic()))


def _messages(running: _Running, silence_s: float) -> Iterator[Message]:
    while running:
        ready = wait(running, timeout=silence_s)
        if not ready:
            raise RanksLost(
                f"no rank has reported for {silence_s:.0f} s.",
                where=f"ranks that still ran: {', '.join(str(rank.rank) for rank in running.values())}",
                remedy="They wait for each other, or the machine is far too busy; try again with fewer ranks.",
            )
        for message in _received(ready, running):
            if isinstance(message, RankFailed):
                cause = _cause(message, running)
                raise RanksLost(f"rank {cause.rank} has failed.", where=cause.traceback.rstrip(), remedy=cause.remedy)
            yield message


def _received(ready: Iterable[Any], running: _Running) -> Iterator[Message]:
    """Yields the next message of each connection; RankFailed for a process that has ended without success."""
    for connection in ready:
        try:
            yield connection.recv()
        except (EOFError, OSError):
            ended = running.pop(connection)
            ended.process.join(_EXIT_S)
            if ended.process.exitcode != 0:
                yield _death(ended.rank, ended.process.exitcode)


def _cause(first: RankFailed, running: _Running) -> RankFailed:
    """Returns the earliest failure: the death of one rank causes errors in all ranks that wait for it."""
    failures = {first.rank: first}
    deadline = time.monotonic() + _BLAME_S
    while (remaining := deadline - time.monotonic()) > 0 and (ready := wait(running, timeout=remaining)):
        for message in _received(ready, running):
            if isinstance(message, RankFailed):
                failures.setdefault(message.rank, message)
    # A death without a message has time 0: it causes the errors of the others.
    return min(failures.values(), key=lambda failure: failure.failed_s)


def _death(rank: int, code: int | None) -> RankFailed:
    ending, remedy = f"It ended with exit code {code}.", ""
    if code is None:
        ending = "It closed its connection and went on running."
    elif code == -signal.SIGKILL:
        ending, remedy = "It was killed.", "Often the machine has run out of memory: try fewer ranks."
    elif code < 0:
        ending = f"It was ended by signal {-code} ({signal.strsignal(-code)})."
    return RankFailed(rank=rank, failed_s=0.0, traceback=ending, remedy=remedy)


@contextlib.contextmanager
def _interrupts_postponed() -> Iterator[None]:
    """Raises KeyboardInterrupt at the end of the block if Ctrl-C was pressed inside: no process is left half started.

    Ctrl-C does not interrupt processes started inside at all, because they inherit the blocked signal.
    """
    if threading.current_thread() is not threading.main_thread():  # signals arrive only there
        yield
        return
    pressed = threading.Event()
    handler = signal.signal(signal.SIGINT, lambda *_: pressed.set())  # because another thread may take the signal
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGINT, handler)
    if pressed.is_set():
        raise KeyboardInterrupt
