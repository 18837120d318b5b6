"""Runs ranks as processes of this machine.

Starts them, receives their messages, and always ends them.
"""

import contextlib
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Generator, Iterator, Sequence
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any, NamedTuple

from undertow.errors import UndertowError

# for a rank that has sent everything: its garbage collection takes seconds on a busy machine
_EXIT_S = 20.0
_BLAME_S = 1.0  # for other ranks' errors to arrive after one: the cause may not arrive first


class RanksLost(UndertowError):
    """A rank failed, died or stopped reporting; all others have been ended."""


class _Failure(NamedTuple):
    # time.perf_counter, which all processes of a machine share: the first failure is the cause
    failed_s: float
    rank: str
    text: str  # its traceback, or how it ended
    remedy: str = ""


def messages_of_ranks(
    target: Callable[..., None], arguments: Sequence[Any], *, num_ranks: int, silence_s: float
) -> Generator[Any]:
    """Runs `target(rank, *arguments, send)` in processes and yields their messages; closing it ends
    those that still run.

    It ends when all ranks have succeeded. Raises RanksLost if a rank fails, or if none sends a
    message for `silence_s`: then the ranks are assumed to hang. Ctrl-C does not interrupt the ranks
    themselves.
    """
    context = multiprocessing.get_context("spawn")
    ranks: dict[Any, SpawnProcess] = {}  # by connection
    try:
        with _interrupts_held():  # which the processes inherit
            for rank in range(num_ranks):
                ours, theirs = context.Pipe(duplex=False)
                process = context.Process(
                    target=_run, args=(target, rank, arguments, theirs), name=str(rank)
                )
                process.start()
                ranks[ours] = process
                # the rank holds the only writing end: when it ends, this process reads the end of
                # file
                theirs.close()
        yield from _messages(dict(ranks), silence_s)
    finally:
        with _interrupts_held():  # a second Ctrl-C must not leave ranks running
            for process in ranks.values():
                process.kill()
            for process in ranks.values():
                process.join()


def _messages(running: dict[Any, SpawnProcess], silence_s: float) -> Iterator[Any]:
    failures: list[_Failure] = []
    while running and (ready := wait(running, timeout=_BLAME_S if failures else silence_s)):
        for connection in ready:
            try:
                message = connection.recv()  # type: ignore[union-attr,call-arg]
            except (EOFError, OSError):
                message = _death(running.pop(connection))
            if isinstance(message, _Failure):
                failures.append(message)
            elif message is not None and not failures:
                yield message
    if failures:
        # The death of one rank causes errors in all ranks that wait for it.
        cause = min(failures)
        raise RanksLost(
            f"rank {cause.rank} has failed.", where=cause.text.rstrip(), remedy=cause.remedy
        )
    if running:
        raise RanksLost(
            f"no rank has reported for {silence_s:.0f} s.",
            where="ranks that still ran: "
            f"{', '.join(process.name for process in running.values())}",
            remedy="They wait for each other, or the machine is far too busy; try again with "
            "fewer ranks.",
        )


def _death(process: SpawnProcess) -> _Failure | None:
    """Returns the failure of a rank that has closed its connection.

    Its time is 0, because others' errors follow from it.
    """
    process.join(_EXIT_S)
    code = process.exitcode
    if not code:
        return None
    remedy = (
        ("Often the machine has run out of memory: try fewer ranks.")
        if code == -signal.SIGKILL
        else ""
    )
    return _Failure(0.0, process.name, f"It ended with exit code {code}.", remedy)


def _run(
    target: Callable[..., None], rank: int, arguments: Sequence[Any], connection: Connection
) -> None:
    """Runs in the process of a rank."""
    try:
        target(rank, *arguments, connection.send)
    except BaseException:
        try:
            connection.send(_Failure(time.perf_counter(), str(rank), traceback.format_exc()))
            connection.close()
        finally:
            # At once: destructors of groups with a collective in flight would wait for ranks that
            # may be gone.
            os._exit(0)  # the failure is known, or nobody is left to be told


@contextlib.contextmanager
def _interrupts_held() -> Iterator[None]:
    """Context in which Ctrl-C waits until its end; processes started inside never see it."""
    resource_tracker.ensure_running()  # its start would end the hold
    held = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, held)
