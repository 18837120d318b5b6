"""How a process ends, as tests see it."""

from __future__ import annotations

import atexit
import multiprocessing.util
from collections.abc import Callable

import pytest


@pytest.fixture
def at_exit(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], object]]:
    """What has been registered to be called when the process ends, by either way of ending."""
    calls: list[Callable[[], object]] = []

    class Finalize:
        def __init__(self, _owner: object, call: Callable[[], object], exitpriority: int) -> None:
            calls.append(call)

        def cancel(self) -> None:
            """As of one that has been called."""

    monkeypatch.setattr(atexit, "register", calls.append)
    monkeypatch.setattr(atexit, "unregister", lambda _call: None)
    monkeypatch.setattr(multiprocessing.util, "Finalize", Finalize)
    return calls
