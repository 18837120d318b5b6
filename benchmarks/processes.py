"""Ranks end with their runner, and a runner that is interrupted cleans up first."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

_PR_SET_PDEATHSIG = 1


def interruptible(measure: Callable[[], int]) -> int:
    """Returns the exit code of `measure`; 130 if Ctrl-C, SIGTERM or SIGHUP interrupts it."""
    for ending in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(ending, _stop)  # as Ctrl-C: everything that has been set up is torn down
    try:
        return measure()
    except KeyboardInterrupt:
        print("interrupted; what was measured before is kept", file=sys.stderr)
        return 130


def _stop(_signum: int, _frame: object) -> None:
    raise KeyboardInterrupt


@contextmanager
def interrupts_postponed() -> Iterator[None]:
    """Delays Ctrl-C, SIGTERM and SIGHUP until the block ends, so that a cleanup is complete."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    late: list[int] = []
    kept: dict[int, Callable[..., object] | int | None] = {
        number: signal.signal(number, lambda signum, _frame: late.append(signum))
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }
    try:
        yield
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)
        if late:
            signal.raise_signal(late[0])


def end(ranks: Sequence[subprocess.Popen[Any]]) -> None:
    """Kills ranks that were started in sessions of their own, and the processes that they have started."""
    for rank in ranks:
        with suppress(ProcessLookupError):
            os.killpg(rank.pid, signal.SIGKILL)  # its children may be there when the rank is not any more
    for rank in ranks:
        rank.wait()


def die_with(runner_pid: int) -> None:
    """Has this process killed when its runner is (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != runner_pid:  # killed before we had asked for it
            sys.exit("the runner is gone")
