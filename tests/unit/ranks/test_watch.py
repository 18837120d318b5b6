"""Threads beside the one that trains: what the guard hears, what a rank waits for, and workers."""

import json
import logging
import multiprocessing.util
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch.distributed as dist

from support.errors import text_of
from undertow import ConfigError, PeerFailed, RankLost, StallTimeout, SyncConfig
from undertow.buckets import comm_hook
from undertow.ranks import faults, patience
from undertow.ranks.connections import Connection
from undertow.ranks.guard import Guard
from undertow.ranks.threads import Worker, end_workers
from undertow.ranks.watch import Ring, Watch

WORLD = dist.HashStore()  # a ring ends with it
HERE = Mock(is_left=False)  # the ranks of a group
CANNOT_START = patch.object(threading.Thread, "start", side_effect=RuntimeError("can't start new thread"))


@pytest.fixture
def at_exit(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], object]]:
    """What has been registered to be called when the process ends."""
    calls: list[Callable[[], object]] = []
    # What it returns may be cancelled, as if it had been called.
    monkeypatch.setattr(multiprocessing.util, "Finalize", lambda _owner, call, exitpriority: calls.append(call) or Mock())
    return calls


def test_the_guard_is_started_again_where_it_could_not_start(at_exit: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "register_at_fork", lambda **_: None)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    guard, ring = Guard(), Ring([], rank=0, num_ranks=2)
    with CANNOT_START, pytest.raises(RuntimeError, match="can't start new thread"):
        guard.adopt((0, 1), ring, WORLD)
    assert at_exit == []
    guard.adopt((0, 1), ring, WORLD)
    assert guard._thread.is_alive()
    guard._is_over = True
    guard._thread.join(10.0)


GOOD = {"kind": "tells", "from": 0, "number": 0, "ask": 0, "text": "here"}


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"from": [1]}, id="from no rank"),
        pytest.param({"from": 2}, id="from a rank that does not exist"),
        pytest.param({"kind": "fails", "number": None}, id="of a failure without a text"),
        pytest.param({"kind": "leaves", "number": None, **faults.lost(0).content(), "error": "int"}, id="of a fault of no kind"),
        *("no json", "[1]", "[" * 1500 + "]" * 1500, '{"a":' * 600, "1" * 4400, '{"a": 1, "a": 2}', "\udcff{}", "\ufeff{}"),
    ],
    ids=lambda line: ascii(line)[:9],
)
def test_a_message_that_makes_no_sense_is_dropped_with_a_word(change: Any, caplog: pytest.LogCaptureFixture) -> None:
    ring, source = Ring([], rank=1, num_ranks=2), Mock(spec=Connection, rank=0)
    watch = ring.join(SyncConfig())
    line = change if isinstance(change, str) else json.dumps({**GOOD, **change})
    with caplog.at_level(logging.WARNING, "undertow"):
        ring.hear(source, [line.encode("utf-8", "surrogateescape")], is_connected=True)
    assert (ring.fault, ring.left, watch._texts) == (None, {}, {})
    assert "made no sense" in caplog.messages[0]
    ring.hear(source, [json.dumps(GOOD).encode()], is_connected=True)
    assert watch._texts == {"0": {0: "here"}}


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Watch:
    monkeypatch.setattr(patience, "ANSWERS_S", 0.0)
    monkeypatch.setattr(patience, "VERDICT_S", 0.0)
    return Ring([], rank=1, num_ranks=2).join(SyncConfig())


def test_a_message_goes_both_ways_round_up_to_the_rank_that_has_said_it() -> None:
    ring, before, after = Ring([], rank=1, num_ranks=4), Mock(spec=Connection, rank=0), Mock(spec=Connection, rank=2)
    ring.neighbors = [after, before]
    watch = ring.join(SyncConfig())
    said = {rank: json.dumps({**GOOD, "from": rank}).encode() for rank in (0, 2, 3)}
    ring.hear(before, [said[0], said[3], said[2]], is_connected=True)
    ring.hear(after, [said[2], said[3], said[0]], is_connected=True)
    assert [call.args[0] for call in after.send.call_args_list] == [said[0], said[3]]
    assert [call.args[0] for call in before.send.call_args_list] == [said[2], said[3]]
    assert watch._texts == {"0": dict.fromkeys((0, 2, 3), "here")}


def test_the_end_of_a_connection_is_a_lost_rank_unless_it_has_left() -> None:
    ring, source = Ring([], rank=1, num_ranks=2), Mock(spec=Connection, rank=0, host="", has_unsent=False, is_silent=False)
    for has_left in (True, False):
        ring.neighbors, ring.left = [source], {0: faults.left(0, None, 7)} if has_left else {}
        ring.hear(source, [], is_connected=False)
        assert (ring.fault, ring.neighbors) == (None if has_left else faults.lost(0), [])


def test_a_machine_that_does_not_answer_is_a_lost_rank_with_a_reason() -> None:
    ring, source = Ring([], rank=1, num_ranks=2), Mock(spec=Connection, rank=0, host="", is_silent=True)
    ring.neighbors = [source]
    ring.hear(source, [], is_connected=False)
    assert ring.fault is not None
    assert ring.fault.what == "rank 0 is gone: its machine has not answered for 10 s."


def test_a_rank_that_raises_an_error_of_the_library_leaves_with_it_once(alone: Watch) -> None:
    """The others may be about to raise the same: nothing is a fault before one of them waits."""
    error = ConfigError("a gradient is elsewhere.", where="weight", remedy="Move it.")
    what = "rank 1 has failed: undertow.errors.ConfigError: a gradient is elsewhere."
    alone.fail(error)
    for _ in range(2):
        assert text_of(PeerFailed, alone.check).startswith(what)
    alone.leave(None)
    assert (alone.fault, list(alone.left)) == (None, [1])
    assert alone.left[1].what.startswith(what)


def test_a_rank_that_has_left_without_an_error_may_still_evaluate(alone: Watch) -> None:
    """Its process group may be destroyed before its model is used for the last time."""
    alone.ring.leave(None)
    alone.check()
    assert list(alone.left) == [1]


def test_the_end_of_a_rank_is_known_to_models_that_are_made_later() -> None:
    ring = Ring([], rank=1, num_ranks=2)
    ring._tell_watches({"kind": "leaves", "from": 0, **faults.left(0, None, 7).content()})
    ring._tell_watches({"kind": "fails", "from": 0, **faults.lost(0).content()})
    watch = ring.join(SyncConfig())
    assert (watch.fault, watch.left) == (faults.lost(0), {0: faults.left(0, None, 7)})


# Words of gloo and the stores for a time that is over, and of the kernel for a connection that is lost.
WORDS = {
    "[unbound_buffer.cc:78] Timed out waiting 2000ms for recv operation to complete": True,
    "Operation timed out!": True,
    "Operation timed out! The link has not carried it after 0.001 s.": True,
    "Timeout waiting for key: default_pg/0//cpu//0/0 after 2000 ms": True,
    "Connection closed by peer [127.0.0.1]:4711": False,
    "Operation timed out": False,
}


@pytest.mark.parametrize("text", WORDS)
def test_a_time_that_is_over_is_told_from_a_lost_connection(text: str, alone: Watch) -> None:
    fault = alone.reason_of(RuntimeError(text))
    assert fault == alone.fault or not WORDS[text]
    expected = (StallTimeout, "rank 1 has waited for the whole timeout of the process group.")
    assert (fault and (fault.kind, fault.what)) == (expected if WORDS[text] else None)


@pytest.mark.parametrize(
    ("waits_for", "since_s", "told"),
    [("bucket 3", 70.0, "rank 1 has waited 30 s."), ("", 0.0, "")],
    ids=["this wait", "no wait"],
)
def test_the_last_report_is_told_with_the_wait_that_it_is_about(waits_for: str, since_s: float, told: str, alone: Watch) -> None:
    alone.inquiry._told = 100.0, "rank 1 has waited 30 s."
    alone.here.wait = waits_for, since_s
    assert alone.reason_of(RuntimeError("Operation timed out!")).told == told


def test_a_rank_whose_process_has_ended_is_the_reason(alone: Watch) -> None:
    alone.ring._tell_watches({"kind": "leaves", "from": 0, **faults.left(0, None, 7).content()})
    fault: Any = alone.reason_of(RuntimeError("Connection closed by peer"))
    left = "rank 0 has left: it has finished after 7 synchronizations, and others wait for it."
    assert (fault.kind, fault.what) == (RankLost, left)


@pytest.fixture
def watch() -> Watch:
    return Ring([], rank=1, num_ranks=2).join(SyncConfig())


def wait_here(watch: Watch, name: str, begins: threading.Event, ends: threading.Event) -> None:
    with watch.waiting(name):
        begins.set()
        assert ends.wait(10.0)


@pytest.mark.parametrize("which_ends_first", ["the worker's", "the trainer's"])
def test_a_thread_of_ours_takes_no_name(which_ends_first: str, watch: Watch) -> None:
    begins, ends, is_over = threading.Event(), threading.Event(), Future[None]()
    worker = Worker("undertow-test", HERE)
    worker.submit(wait_here, watch, "the sum of all ranks' weights", begins, ends)
    worker.submit(is_over.set_result, None)
    worker.shutdown()
    assert begins.wait(10.0)
    said = [watch.here.wait[0]]
    with watch.waiting("bucket 3"):
        said.append(watch.here.wait[0])
        if which_ends_first == "the worker's":
            ends.set()
            is_over.result(10.0)
        said.append(watch.here.wait[0])
    ends.set()
    is_over.result(10.0)
    assert (said, watch.here.wait) == (["", "bucket 3", "bucket 3"], ("", 0.0))


def test_any_other_thread_may_be_the_one_that_trains(watch: Watch) -> None:
    begins, ends = threading.Event(), threading.Event()
    with ThreadPoolExecutor() as threads:
        threads.submit(wait_here, watch, "bucket 3", begins, ends)
        assert (begins.wait(10.0), watch.here.wait[0]) == (True, "bucket 3")
        ends.set()
    assert watch.here.wait[0] == ""


def test_a_rank_waits_until_it_is_known_why_its_wait_has_failed(watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    # Others would count it as late.
    waits_for = []
    monkeypatch.setattr(watch, "reason_of", lambda _error: waits_for.append(watch.here.wait[0]))
    with pytest.raises(RuntimeError, match="Connection closed"), watch.waiting("bucket 3"):
        raise RuntimeError("Connection closed by peer")
    assert (waits_for, watch.here.wait[0]) == (["bucket 3"], "")


def test_a_process_waits_at_its_end_for_tasks_and_for_workers_that_these_start() -> None:
    one, other = Worker("undertow-test", HERE), Worker("undertow-test", HERE)
    begins, done = threading.Event(), list[str]()

    def task() -> None:
        assert begins.wait(10.0)
        other.submit(done.append, "the task of another worker")

    one.submit(task)
    threading.Timer(0.05, begins.set).start()
    end_workers()
    assert done == ["the task of another worker"]


def test_a_process_waits_at_its_end_for_tasks_that_a_worker_gives_itself() -> None:
    worker = Worker("undertow-test", HERE)
    begins, done = threading.Event(), list[str]()

    def task() -> None:
        assert begins.wait(10.0)
        worker.submit(worker.submit, done.append, "the last task of three")

    worker.submit(task)
    threading.Timer(0.05, begins.set).start()
    end_workers()
    assert done == ["the last task of three"]


def test_a_process_does_not_wait_at_its_end_for_a_worker_that_is_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "EXIT_S", 0.0)
    ends = threading.Event()
    worker = Worker("undertow-test")  # of no group any more
    worker.submit(ends.wait, 10.0)
    end_workers()
    ends.set()


def test_a_worker_that_cannot_start_is_not_waited_for() -> None:
    with CANNOT_START, pytest.raises(RuntimeError, match="can't start new thread"):
        Worker("undertow-test", HERE).submit(int)
    end_workers()


class Lost:
    is_left = True


def test_hooks_are_not_called_behind_one_that_may_be_stuck() -> None:
    first, lost = comm_hook._thread_beside_this_one(), Lost()
    first.groups.add(HERE)
    assert comm_hook._thread_beside_this_one() is first
    first.groups.add(lost)
    assert comm_hook._thread_beside_this_one() is not first
