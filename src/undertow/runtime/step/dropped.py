"""What becomes of a model that nobody holds any more."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

from undertow.runtime.step.engine import Engine

_NOT_THE_USERS = ("undertow-", "Dummy-")  # names of threads: ours, and those that Python has not started


def let_go_when_dropped(owner: object, engine: Engine, close: Callable[[], object]) -> weakref.finalize[..., Any]:
    """Has `close` called when `owner` is gone, but not at exit; or before, when what it returns is called.

    It is called when the parameters of the engine's last step, and of its companions, have come: other ranks wait for this one's
    shards as well. Nobody learns of an error. Where the garbage collector finds that a model was dropped in a thread that may
    itself be what brings parameters, or in a child process, which has no such threads, nothing is waited for.
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
