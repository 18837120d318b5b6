"""How a process ends, as tests see it."""

from __future__ import annotations

import atexit
import multiprocessing.util
from collections.abc import Callable
from unittest.mock import Mock

import pytest


@pytest.fixture
def at_exit(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], object]]:
    """What has been registered to be called when the process ends, by either way of ending."""
    calls: list[Callable[[], object]] = []
    monkeypatch.setattr(atexit, "register", calls.append)
    monkeypatch.setattr(atexit, "unregister", lambda _call: None)
    # What it returns may be cancelled, as if it had been called.
    monkeypatch.setattr(multiprocessing.util, "Finalize", lambda _owner, call, exitpriority: calls.append(call) or Mock())
    return calls
