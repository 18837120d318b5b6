"""What a rank is said to wait for, where threads of ours wait beside the one that trains."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any

import pytest

from undertow import RankLost, StallTimeout, SyncConfig
from undertow.runtime import member as members
from undertow.runtime import patience
from undertow.runtime.guard import GUARD, Ring
from undertow.runtime.waiting import Waiting
from undertow.runtime.worker import Worker


class World:
    """As much of a process group as a ring looks at."""


WORLD = World()  # a ring ends with it


class Member:
    """As much of one as is asked for."""

    waits_for = ""
    since_s = 0.0
    known_fault = None


def wait_here(member: Any, name: str, begins: threading.Event, ends: threading.Event) -> None:
    with Waiting(member, name):
        begins.set()
        assert ends.wait(10.0)


@pytest.mark.parametrize("which_ends_first", ["the worker's", "the trainer's"])
def test_a_thread_of_ours_takes_no_name(which_ends_first: str) -> None:
    member: Any = Member()
    begins, ends, is_over = threading.Event(), threading.Event(), Future[None]()
    worker = Worker("undertow-test", is_broken=bool)
    worker.submit(wait_here, member, "the sum of all ranks' weights", begins, ends)
    worker.submit(is_over.set_result, None)
    worker.shutdown()
    assert begins.wait(10.0)
    assert member.waits_for == ""
    with Waiting(member, "bucket 3"):
        assert member.waits_for == "bucket 3"
        if which_ends_first == "the worker's":
            ends.set()
            is_over.result(10.0)
        assert member.waits_for == "bucket 3"
    ends.set()
    is_over.result(10.0)
    assert (member.waits_for, member.since_s) == ("", 0.0)


def test_any_other_thread_may_be_the_one_that_trains() -> None:
    member: Any = Member()
    begins, ends = threading.Event(), threading.Event()
    trainer = threading.Thread(target=wait_here, args=(member, "bucket 3", begins, ends))
    trainer.start()
    assert begins.wait(10.0)
    assert member.waits_for == "bucket 3"
    ends.set()
    trainer.join()
    assert member.waits_for == ""


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> members.Member:
    """Rank 1 of two, whom nobody tells anything."""
    monkeypatch.setattr(patience, "ANSWERS_S", 0.0)
    monkeypatch.setattr(patience, "VERDICT_S", 0.0)
    monkeypatch.setattr(GUARD, "interrupts", lambda _members: None)
    return Ring([], rank=1, num_ranks=2, world=WORLD).join(SyncConfig())


@pytest.mark.parametrize(
    "text",
    [
        "[unbound_buffer.cc:78] Timed out waiting 2000ms for recv operation to complete",
        "Application timeout caused pair closure",
        "Operation timed out!",
        "Operation timed out! The link has not carried it after 0.001 s.",
        "wait timeout after 2000ms, keys: /1//cpu//0",
        "Timeout waiting for key: default_pg/0//cpu//0/0 after 2000 ms",
        "Socket Timeout",
        "[pair.h:311] Connect timeout [127.0.0.1]:4711",
    ],
)
def test_words_of_gloo_and_the_stores_for_a_time_that_is_over(text: str, alone: members.Member) -> None:
    fault = alone.reason(RuntimeError(text))
    assert fault is not None
    assert (fault.kind, fault.what) == (StallTimeout, "rank 1 has waited for as long as the process group's timeout lets it.")
    assert alone.known_fault == fault


@pytest.mark.parametrize(
    "text", ["Connection closed by peer [127.0.0.1]:4711", "readv: Connection timed out", "Operation timed out"]
)
def test_words_of_the_kernel_for_a_connection_that_is_lost(text: str, alone: members.Member) -> None:
    assert alone.reason(RuntimeError(text)) is None


def test_the_last_report_is_told_with_the_wait_that_it_is_about(alone: members.Member) -> None:
    alone.told = 0, 100.0, "rank 1 has waited 30 s."
    alone.waits_for, alone.since_s = "bucket 3", 70.0
    fault = alone.reason(RuntimeError("Operation timed out!"))
    assert fault is not None
    assert fault.told == "rank 1 has waited 30 s."


@pytest.mark.parametrize(("step", "waits_for", "since_s"), [(0, "bucket 4", 101.0), (1, "bucket 3", 70.0), (0, "", 0.0)])
def test_the_last_report_of_another_wait_is_not_told(step: int, waits_for: str, since_s: float, alone: members.Member) -> None:
    alone.told = 0, 100.0, "rank 1 has waited 30 s."
    alone.waits_for, alone.since_s, alone.num_steps = waits_for, since_s, lambda: step
    fault = alone.reason(RuntimeError("Operation timed out!"))
    assert fault is not None
    assert fault.told == ""


def test_a_rank_waits_until_it_is_known_why_its_wait_has_failed(alone: members.Member, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others would count it as late."""
    waits_for = []

    def reason(_error: BaseException) -> None:
        waits_for.append(alone.waits_for)

    monkeypatch.setattr(alone, "reason", reason)
    with pytest.raises(RuntimeError, match="Connection closed"), Waiting(alone, "bucket 3"):
        raise RuntimeError("Connection closed by peer")
    assert (waits_for, alone.waits_for) == (["bucket 3"], "")


def test_a_rank_whose_process_has_ended_is_the_reason(alone: members.Member) -> None:
    alone.ring.hear({"kind": "ended", "from": 0, "steps": 7, "text": ""})
    fault = alone.reason(RuntimeError("Connection closed by peer"))
    assert fault is not None
    assert (fault.kind, fault.what) == (
        RankLost,
        "rank 0 has left: it has finished after 7 synchronisations, and others wait for it.",
    )
