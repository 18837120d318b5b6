"""Runs ranks as processes of this machine: starts them, receives their messages, and always ends them."""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from types import TracebackType
from typing import Any, Self

from undertow.demo.results import Message, RankFailed
from undertow.errors import UndertowError

__all__ = ["LocalRanks", "RanksLost"]

_END_S = 2.0  # seconds that a rank has to end after it was asked to
_EXIT_S = 20.0  # seconds for a rank that succeeded: the final garbage collection takes seconds on a busy machine
_BLAME_S = 1.0  # seconds for other ranks' errors to arrive after the first one: the cause may not arrive first


class RanksLost(UndertowError):
    """A rank failed, died or stopped reporting; all others have been ended."""


class LocalRanks:
    """Processes that run `target(rank, *arguments, connection)`; leaving the `with` block ends the ones that still run.

    Each sends messages over its connection. The end of file of the connection is the end of the process, so nothing has to poll.
    """

    def __init__(self, target: Callable[..., None], arguments: Sequence[Any], *, num_ranks: int, silence_s: float) -> None:
        self._target = target
        self._arguments = tuple(arguments)
        self._num_ranks = num_ranks
        self._silence_s = silence_s  # without any message for this long, the ranks are assumed to hang
        self._processes: list[SpawnProcess] = []
        self._open: dict[Connection, int] = {}

    def __enter__(self) -> Self:
        resource_tracker.ensure_running()  # first: when it starts with the first process, it unblocks Ctrl-C in this process
        try:
            with _interrupts_postponed():
                for rank in range(self._num_ranks):
                    self._start(rank)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        with _interrupts_postponed():  # a second Ctrl-C must not leave ranks running
            self._end()

    def messages(self) -> Iterator[Message]:
        """Yields the messages of the ranks until all of them have succeeded. Raises RanksLost if one fails."""
        while self._open:
            ready = wait(self._open, timeout=self._silence_s)
            if not ready:
                raise RanksLost(
                    f"no rank has reported for {self._silence_s:.0f} s.",
                    where=f"ranks that still ran: {', '.join(str(rank) for rank in sorted(self._open.values()))}",
                    remedy="They wait for each other, or the machine is far too busy; try again with fewer ranks.",
                )
            for connection in ready:
                message = self._receive(connection)
                if isinstance(message, RankFailed):
                    cause = self._cause(message)
                    raise RanksLost(f"rank {cause.rank} has failed.", where=cause.traceback.rstrip(), remedy=cause.remedy)
                if message is not None:
                    yield message

    def _start(self, rank: int) -> None:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=self._target, args=(rank, *self._arguments, theirs), name=f"rank {rank}")
        process.start()
        theirs.close()  # the rank holds the only writing end: when it ends, this process reads the end of file
        self._processes.append(process)
        self._open[ours] = rank

    def _receive(self, connection: Any) -> Message | None:
        """Returns the next message; None if the rank has succeeded, RankFailed if it has failed."""
        try:
            message: Message = connection.recv()
        except (EOFError, OSError):
            rank = self._open.pop(connection)
            connection.close()
            process = self._processes[rank]
            process.join(_EXIT_S)
            return None if process.exitcode == 0 else _death(rank, process.exitcode)
        return message

    def _cause(self, first: RankFailed) -> RankFailed:
        """Returns the earliest failure: the death of one rank causes errors in all ranks that wait for it."""
        failures = {first.rank: first}
        deadline = time.monotonic() + _BLAME_S
        while (remaining := deadline - time.monotonic()) > 0 and (ready := wait(self._open, timeout=remaining)):
            for connection in ready:
                message = self._receive(connection)
                if isinstance(message, RankFailed):
                    failures.setdefault(message.rank, message)
        # A death without a message has time 0: it causes the errors of the others.
        return min(failures.values(), key=lambda failure: failure.failed_s)

    def _end(self) -> None:
        with _interrupts_postponed():
            for end in (SpawnProcess.terminate, SpawnProcess.kill):
                deadline = time.monotonic() + _END_S
                for process in self._processes:
                    if process.is_alive():
                        end(process)
                for process in self._processes:
                    process.join(max(0.0, deadline - time.monotonic()))
            for connection in self._open:
                connection.close()
            self._open.clear()


def _death(rank: int, code: int | None) -> RankFailed:
    if code is None:
        ending, remedy = "It closed its connection and went on running.", ""
    elif code == -signal.SIGKILL:
        ending, remedy = "It was killed.", "Often the machine has run out of memory: try fewer ranks."
    elif code < 0:
        ending, remedy = f"It was ended by signal {-code} ({signal.strsignal(-code)}).", ""
    else:
        ending, remedy = f"It ended with exit code {code}.", ""
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
