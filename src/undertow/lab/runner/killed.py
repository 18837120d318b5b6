"""The end of a process of `undertow run` by a signal.

The default action of SIGTERM ends a process at once: no report is printed, and no file is written.
Launchers send it to all ranks if they are stopped, and to the remaining ranks if one is lost. So a
process with a model handles it: it writes what it has measured, and then dies of the signal.
"""

import contextlib
import functools
import os
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from undertow.ranks.guard import GUARD
from undertow.sync.tracing import write_traces

_SIGNALS = [
    getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)
]  # that launchers pass on, and whose default action ends a process; Windows lacks some
# torchrun, Slurm and Kubernetes kill a process 30 s after the signal, by default. The files take a
# fraction of a second; a wait for a device after a fault may never end.
_LIMIT_S = 10.0


class Killed:
    """The handler of the signals that end this process, and the ends of its models.

    A program's own handler, earlier or later, is left alone: such a program ends by itself.
    """

    only_ends = True  # for `stop_on_signal`, which stops the program instead

    def __init__(self) -> None:
        self.name = ""  # of the signal that ends this process
        self._process = os.getpid()
        self._ends: list[weakref.finalize[..., Any]] = []
        self._is_writing = False  # in the training thread
        self._due: int | None = None  # a signal that arrived meanwhile

    def follow(self, ends: "weakref.finalize[..., Any]") -> None:
        """Calls `ends` before a signal ends the process."""
        if self._process != os.getpid():  # a forked one, which has none of the parent's models
            self._process, self._ends = os.getpid(), []
        self._ends = [earlier for earlier in self._ends if earlier.alive]
        self._ends.append(ends)
        if threading.current_thread() is not threading.main_thread():
            return
        for number in _SIGNALS:
            if signal.getsignal(number) == signal.SIG_DFL:
                signal.signal(number, self)

    @contextlib.contextmanager
    def postponed(self) -> Iterator[None]:
        """Context for the end of a model, which a signal does not interrupt."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        self._is_writing = True
        try:
            yield
        finally:
            self._is_writing = False
        if self._due is not None:
            self._write_and_end(self._due)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self._process != os.getpid():
            die(number)
            return
        signal.signal(number, signal.SIG_DFL)  # a second one ends the process at once
        self.name = signal.Signals(number).name
        if self._is_writing:
            self._due = number
        else:
            self._write_and_end(number)

    def _write_and_end(self, number: int) -> None:
        self._due = None
        # In a thread, because the interrupted one may hold a lock that is needed.
        writer = threading.Thread(target=self._write, name="undertow-ends", daemon=True)
        try:
            writer.start()
            writer.join(_LIMIT_S)
        except RuntimeError:  # the interpreter is about to end, and starts no thread
            self._write()
        die(number)

    def _write(self) -> None:
        # The others are told first: they may wait for this rank, and have files to write too.
        told = functools.partial(GUARD.say_killed, self.name)
        calls: list[Callable[[], object]] = [told, *self._ends, write_traces]
        for call in calls:
            # The process must die of its signal, whatever fails in its last moment.
            with contextlib.suppress(Exception):
                call()


def die(number: int) -> None:
    """Ends this process by the signal, as without a handler."""
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


KILLED = Killed()  # one for the process, like its handlers
