"""How a process ends: with which exception, and who is told before."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any


def raised() -> BaseException | None:
    """The exception that this thread is leaving with; none where a script ends as if all were well."""
    error = sys.exc_info()[1]
    if isinstance(error, SystemExit):
        return error.__context__ if error.code else None
    return error


def tell_before_end(leaves: Callable[[BaseException], object], *, trains_in: Callable[[int], bool]) -> None:
    """Has `leaves` called with an exception that ends the process, or a thread in which, by its number, something `trains_in`."""
    of_process, of_threads = sys.excepthook, threading.excepthook

    def process_ends(kind: type[BaseException], error: BaseException, trace: Any) -> object:
        leaves(error)
        return of_process(kind, error, trace)

    def thread_ends(args: Any) -> object:
        if args.exc_value is not None and args.thread is not None and trains_in(args.thread.ident):
            leaves(args.exc_value)
        return of_threads(args)

    sys.excepthook, threading.excepthook = process_ends, thread_ends
