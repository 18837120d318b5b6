"""Detects how a process ends: with which exception, and what is called before it ends."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any


def raised() -> BaseException | None:
    """Returns the exception that this thread is leaving with, or None if the script ends normally."""
    error = sys.exc_info()[1]
    if isinstance(error, SystemExit):
        return error.__context__ if error.code else None
    return error


def tell_before_end(leaves: Callable[[BaseException], object], *, trains_in: Callable[[int], bool]) -> None:
    """Calls `leaves` with an exception that ends the process or one of the threads (by number) for which `trains_in` is true."""
    of_process, of_threads = sys.excepthook, threading.excepthook

    def process_ends(kind: type[BaseException], error: BaseException, trace: Any) -> object:
        leaves(error)
        return of_process(kind, error, trace)

    def thread_ends(args: Any) -> object:
        if args.exc_value is not None and args.thread is not None and trains_in(args.thread.ident):
            leaves(args.exc_value)
        return of_threads(args)

    sys.excepthook, threading.excepthook = process_ends, thread_ends
