"""Threads may start at any moment, also while their process ends."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any
from unittest.mock import Mock

import pytest

from undertow.runtime.worker import Worker


def test_a_process_may_end_while_a_worker_starts(at_exit: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    # One worker has another one start, and the script is over.
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
    monkeypatch.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError("can't start new thread")))
    with pytest.raises(RuntimeError, match="can't start new thread"):
        Worker("undertow-test", is_broken=bool).submit(int)
    assert at_exit == []
