"""Closes a model that user code has dropped."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

from undertow.runtime.step.engine import Engine

_NOT_THE_USERS = ("undertow-", "Dummy-")  # names of Undertow's threads, and of threads that Python has not started


def let_go_when_dropped(owner: object, engine: Engine, close: Callable[[], object]) -> weakref.finalize[..., Any]:
    """Calls `close` when `owner` is gone, except at exit, or earlier if the returned finalizer is called.

    It waits for the parameters of the engine's last step, and of its siblings' last steps, because other ranks wait for this
    rank's shards. Errors are dropped. It does not wait if the garbage collector runs in one of Undertow's threads, which may
    be the one that gathers parameters, or in a child process, which has no such threads.
    """
    made = weakref.finalize(owner, _let_go, engine, close, os.getpid())
    made.atexit = False
    return made


def _let_go(engine: Engine, close: Callable[[], object], process: int) -> None:
    try:
        if os.getpid() == process and not threading.current_thread().name.startswith(_NOT_THE_USERS):
            engine.siblings.wait_for_parameters()
    finally:
        close()
