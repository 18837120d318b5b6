"""What a rank is said to wait for, if threads of ours wait beside the one that trains."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from undertow.runtime.waiting import Waiting
from undertow.runtime.worker import Worker


@pytest.fixture
def member() -> Any:
    """As much of one as is asked for."""
    return SimpleNamespace(waits_for="", since_s=0.0, known_fault=None, reason=lambda _error: None)


def wait_here(member: Any, name: str, begins: threading.Event, ends: threading.Event) -> None:
    with Waiting(member, name):
        begins.set()
        assert ends.wait(10.0)


@pytest.mark.parametrize("which_ends_first", ["the worker's", "the trainer's"])
def test_a_thread_of_ours_takes_no_name(which_ends_first: str, member: Any) -> None:
    begins, ends, is_over = threading.Event(), threading.Event(), Future[None]()
    worker = Worker("undertow-test", is_broken=bool)
    worker.submit(wait_here, member, "the sum of all ranks' weights", begins, ends)
    worker.submit(is_over.set_result, None)
    worker.shutdown()
    assert begins.wait(10.0)
    said = [member.waits_for]
    with Waiting(member, "bucket 3"):
        said.append(member.waits_for)
        if which_ends_first == "the worker's":
            ends.set()
            is_over.result(10.0)
        said.append(member.waits_for)
    ends.set()
    is_over.result(10.0)
    assert [*said, member.waits_for, member.since_s] == ["", "bucket 3", "bucket 3", "", 0.0]


def test_any_other_thread_may_be_the_one_that_trains(member: Any) -> None:
    begins, ends = threading.Event(), threading.Event()
    with ThreadPoolExecutor() as threads:
        threads.submit(wait_here, member, "bucket 3", begins, ends)
        assert begins.wait(10.0)
        assert member.waits_for == "bucket 3"
        ends.set()
    assert member.waits_for == ""


def test_a_rank_waits_until_it_is_known_why_its_wait_has_failed(member: Any) -> None:
    # Others would count it as late.
    waits_for = []
    member.reason = lambda _error: waits_for.append(member.waits_for)
    with pytest.raises(RuntimeError, match="Connection closed"), Waiting(member, "bucket 3"):
        raise RuntimeError("Connection closed by peer")
    assert (waits_for, member.waits_for) == (["bucket 3"], "")
