"""Threads may start at any moment, also while their process ends."""

from __future__ import annotations

import atexit
import multiprocessing.util
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from undertow.runtime import guard as guards
from undertow.runtime.guard import Guard
from undertow.runtime.ring import Neighbour
from undertow.runtime.worker import Worker


def no_thread_starts(_thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


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


def test_a_process_may_end_while_a_worker_starts(at_exit: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """One worker has another one start, and the script is over."""
    start = threading.Thread.start

    def start_at_exit(thread: threading.Thread) -> None:
        for call in tuple(at_exit):
            call()
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_at_exit)
    worker, done = Worker("undertow-test", is_broken=bool), Future[None]()
    worker.submit(done.set_result, None)
    assert done.result(10.0) is None
    assert len(at_exit) == 2  # and from now on both ways of ending wait for it
    for call in at_exit:
        call()


def test_a_worker_that_cannot_start_is_not_waited_for(at_exit: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading.Thread, "start", no_thread_starts)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        Worker("undertow-test", is_broken=bool).submit(int)
    assert at_exit == []


def test_a_connection_whose_thread_cannot_start_may_be_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    neighbour = Neighbour(None, 0, rank=1)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", no_thread_starts)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            neighbour.listen(lambda *_: None)
    neighbour.close()


def test_the_guard_is_started_again_where_it_could_not_start(at_exit: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "register_at_fork", lambda **_: None)
    monkeypatch.setattr(guards, "tell_before_end", lambda *_, **_calls: None)
    guard, ring = Guard(), FakeRing()
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", no_thread_starts)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            guard.adopt((0, 1), ring)
    assert at_exit == []
    guard.adopt((0, 1), ring)
    assert guard._thread is not None
    assert guard._thread.is_alive()
    guard._is_over = True
    guard.wake()
    guard._thread.join(10.0)


class FakeRing:
    """As much of a ring as a guard looks at when it begins."""

    neighbours: tuple[Any, ...] = ()

    def __init__(self) -> None:
        self.members: dict[int, Any] = {}

    def look(self) -> None:
        """Nobody waits."""
