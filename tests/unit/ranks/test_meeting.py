"""Meetings in a store: what ranks ask it for, and what they leave there."""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch.distributed as dist

from support.counted_store import CountedStore
from undertow import SyncConfig
from undertow.errors import RankLost, StallTimeout
from undertow.ranks import handshake, meeting
from undertow.ranks.handshake import connect_ring
from undertow.ranks.meeting import meet, meeting_of
from undertow.ranks.watch import NullWatch
from undertow.torch_private import process_groups


class Counted:
    """A store that counts what it is asked for, and knows its keys."""

    def __init__(self) -> None:
        self._store = dist.HashStore()
        self.num_asked, self.longest = Counter[str](), 0
        self.num_written = 0  # bytes of keys and values
        self.answers_after_s = 0.0
        self.keys = set[str]()
        self.clonings = set[threading.Thread]()  # threads that have cloned it
        self._lock = threading.Lock()

    def _ask(self, name: str, key: str, value: str = "") -> None:
        time.sleep(self.answers_after_s)
        with self._lock:
            self.num_asked[name] += 1
            self.longest = max(self.longest, len(key), len(value))
            if name in ("add", "set"):
                self.keys.add(key)
            if name == "set":
                self.num_written += len(key) + len(value)

    def add(self, key: str, number: int) -> int:
        self._ask("add", key)
        self.num_written += len(key) * (number != 0)  # otherwise it is a question
        return self._store.add(key, number)

    def set(self, key: str, value: str) -> None:
        self._ask("set", key, value)
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        self._ask("get", key)
        return self._store.get(key)

    def check(self, keys: list[str]) -> bool:
        self._ask("check", max(keys, key=len))
        return self._store.check(keys)

    def clone(self) -> "Counted":
        self.clonings.add(threading.current_thread())
        return self

    def wait(self, keys: list[str], limit: timedelta) -> None:
        self._ask("wait", max(keys, key=len))
        self._store.wait(keys, limit)

    def delete_key(self, key: str) -> bool:
        self._ask("delete_key", key)
        with self._lock:
            self.keys.discard(key)
        return self._store.delete_key(key)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Counted:
    counted = Counted()
    monkeypatch.setattr(process_groups, "default_store", lambda: counted)
    monkeypatch.setattr(handshake, "own_address", lambda _: "127.0.0.1")
    return counted


def meets(num_ranks: int, rank: int, *, makes_ring: bool = False, **limits: float) -> None:
    ranks, config = tuple(range(num_ranks)), SyncConfig(**limits)
    if not makes_ring:
        meet(ranks, rank, config, NullWatch(), within_s=300.0)
        return
    with meeting_of(ranks, rank, config, NullWatch(), 300.0) as met:
        for neighbor in connect_ring(met):
            neighbor.close()


def all_meet(num_ranks: int, late: Callable[[], object] = int, **how: Any) -> None:
    """All ranks meet; the last one after `late`."""
    with ThreadPoolExecutor(num_ranks) as threads:
        others = [threads.submit(meets, num_ranks, rank, **how) for rank in range(num_ranks - 1)]
        late()
        meets(num_ranks, num_ranks - 1, **how)
        for other in others:
            other.result()


@pytest.mark.parametrize("makes_ring", [True, False])
def test_meetings_leave_a_counter_and_no_texts(makes_ring: bool, store: Counted) -> None:
    num_kept = []
    for _ in range(4):
        all_meet(5, makes_ring=makes_ring)
        num_kept.append(len(store.keys))
    # A counter and an empty text of each place of the last meeting, and the name of its group: a slow rank may still read them.
    # And the number of meetings that each rank has had, and of groups.
    of_last = 4 if makes_ring else 3 + 1
    assert num_kept == [of_last + 5] * 4
    assert store.longest <= 200


def test_ranks_that_wait_for_a_late_one_make_one_request_each(store: Counted) -> None:
    """As long as it takes: 16 ranks."""
    all_meet(16, late=lambda: time.sleep(1.0))
    # Texts, the end and a name; tries, counts and the number of groups; the name.
    at_once = Counter({"set": 18, "add": 33, "delete_key": 16 + 10, "check": 1, "get": 16})
    asked = store.num_asked - at_once
    assert asked["wait"] == 15
    assert sum(asked.values()) <= 60


NUM_NEEDED_OF_16 = 15 * 16 + 27  # requests of a start, if no rank ever asks if the others are there


def all_start(num_ranks: int, late: Callable[[], object] = int) -> None:
    """A model's start: the ring, and the group."""
    all_meet(num_ranks, late, makes_ring=True)
    all_meet(num_ranks)


def test_ranks_that_start_together_ask_the_store_few_times(store: Counted) -> None:
    all_start(16)
    assert sum(store.num_asked.values()) <= NUM_NEEDED_OF_16 + 3 * 60  # three places, where each may wait for a slow one


@pytest.mark.waits
def test_ranks_meet_in_a_store_that_answers_slowly(store: Counted) -> None:
    """After longer than the first pauses of a rank that waits."""
    store.answers_after_s = 0.15
    all_meet(4, makes_ring=True)
    assert sum(store.num_asked.values()) <= 4 * 23 + 10


@pytest.mark.parametrize("num_ranks", [16, pytest.param(64, marks=pytest.mark.deep)])
def test_the_start_of_a_model_writes_little_for_each_rank(num_ranks: int, store: Counted) -> None:
    """Addresses and texts, whose bytes do not grow with the ranks."""
    all_start(num_ranks)
    assert store.num_written <= 600 * num_ranks
    assert len(store.keys) == num_ranks + 4  # the number of meetings of each rank and of groups; the last place and name


def requests_of_a_start(num_ranks: int, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int, int]:
    """Bytes that all ranks send to the store: for a group of torch's `new_group`, and to meet for a model and for its group."""
    counted, here, ranks = CountedStore(), threading.local(), range(num_ranks)
    stores = [dist.PrefixStore("default_pg", counted.client()) for _ in ranks]
    monkeypatch.setattr(process_groups, "default_store", lambda: here.store)
    groups = list[dist.ProcessGroupGloo]()

    def connect(rank: int, name: str) -> None:
        store = dist.PrefixStore("cpu/", dist.PrefixStore(f"{name}/", stores[rank]))  # as torch names them
        groups.append(dist.ProcessGroupGloo(store, rank, num_ranks, timedelta(seconds=60)))

    def agree(rank: int) -> str:
        here.store = stores[rank]
        meets(num_ranks, rank, makes_ring=True)
        return meet(tuple(ranks), rank, SyncConfig(), NullWatch(), within_s=60.0)

    with ThreadPoolExecutor(num_ranks) as threads:
        at = [counted.num_bytes]
        list(threads.map(connect, ranks, num_ranks * ["1"]))
        at.append(counted.num_bytes)
        names = list(threads.map(agree, ranks))
        at.append(counted.num_bytes)
        list(threads.map(connect, ranks, names))
        at.append(counted.num_bytes)
    return at[1] - at[0], at[2] - at[1], at[3] - at[2]


def test_a_model_of_64_ranks_asks_the_store_little_more_than_a_group_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """From 4 and 8 ranks. Gloo's bytes of a rank grow with the number of ranks, and those of a meeting do not."""
    monkeypatch.setattr(handshake, "own_address", lambda _: "127.0.0.1")
    few, many = (requests_of_a_start(num_ranks, monkeypatch) for num_ranks in (4, 8))
    of_torch, of_group = (many[of] / 8 + 14 * (many[of] / 8 - few[of] / 4) for of in (0, 2))
    of_meeting = many[1] / 8
    assert of_meeting + of_group <= 1.5 * of_torch


def test_a_fault_ends_a_wait_in_the_store(store: Counted) -> None:
    """The watch of the ring knows of it, and no rank arrives."""

    class Faulty(NullWatch):
        fault: Any = None

        def check(self) -> None:
            if self.fault is not None:
                raise RankLost("rank 1 is gone.", where="here", remedy="")

    watch = Faulty()
    threading.Timer(0.5, lambda: setattr(watch, "fault", "gone")).start()
    started_s = time.monotonic()
    with pytest.raises(RankLost), meeting_of((0, 1), 0, SyncConfig(), watch, 300.0) as met:
        met.arrive("group")
    assert time.monotonic() - started_s < 5.0


def waiting_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "undertow-meets"]


def test_no_thread_waits_in_the_store_for_a_rank_that_has_left(store: Counted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "_REQUEST_S", 0.2)
    # Ctrl-C, when the rank has looked a few times while the thread waits.
    monkeypatch.setattr(meeting.Lateness, "is_due", Mock(side_effect=[False, False, False, KeyboardInterrupt]))
    with pytest.raises(KeyboardInterrupt):
        meets(2, 0)
    (thread,) = store.clonings  # it has a connection of its own, and the rank does not wait for that
    assert thread.name == "undertow-meets"
    assert store.num_asked["wait"] > 1
    thread.join(5.0)
    assert not waiting_threads()


@pytest.mark.deep
def test_a_rank_that_is_woken_early_asks_now_and_then(store: Counted) -> None:
    key = f"undertow/ring/{process_groups.name_of((0, 1))}/1/group"
    store.set(f"{key}/all", "")
    all_meet(2, late=lambda: time.sleep(1.0))
    assert store.num_asked["add"] < 40


@pytest.mark.deep
def test_a_file_is_not_read_all_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file_store = dist.FileStore(str(tmp_path / "store"), 2)
    threads = list[threading.Thread]()
    monkeypatch.setattr(process_groups, "default_store", lambda: dist.PrefixStore("a", dist.PrefixStore("b", file_store)))
    all_meet(2, late=lambda: (time.sleep(0.5), threads.extend(waiting_threads())))
    assert not threads


class Clock:
    """Time that passes when a rank sleeps."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.at_s: list[tuple[float, Callable[[], object]]] = []

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        for event in [event for event in self.at_s if event[0] <= self.now_s]:
            self.at_s.remove(event)
            event[1]()


@pytest.fixture
def cannot_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that answers at once only, as a user's own may be."""
    monkeypatch.delattr(Counted, "clone")


@pytest.mark.usefixtures("cannot_wait")
@pytest.mark.parametrize(("num_ranks", "most_adds"), [(2, 45), (16, 30), (1024, 24), (16_384, 24)])
def test_a_rank_that_waits_for_a_late_one_asks_for_one_counter(
    num_ranks: int, most_adds: int, store: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seven seconds. All others are here, and each of them asks as often."""
    clock = Clock()
    monkeypatch.setattr(meeting, "time", clock)
    key = f"undertow/ring/{process_groups.name_of(tuple(range(num_ranks)))}/1/group"
    clock.at_s.append((7.0, lambda: store._store.add(key, num_ranks - 1)))
    meets(num_ranks, 0)
    assert store.num_asked["check"] == 1  # at the end, for counters of reports
    assert store.num_asked["add"] <= most_adds
    assert 7.0 <= clock.now_s < 9.5


@pytest.mark.usefixtures("cannot_wait")
def test_one_rank_asks_who_is_late_and_says_so(
    store: Counted, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One of 1,024 ranks is late by more than the limit for a warning; two of the others wait here."""
    clock, num_ranks, late = Clock(), 1024, 777
    monkeypatch.setattr(meeting, "time", clock)
    ranks = tuple(range(num_ranks))
    key = f"undertow/ring/{process_groups.name_of(ranks)}/1/group"
    for other in range(1, num_ranks):
        if other != late:
            store._store.set(f"{key}/{other}", "")
    for rank in (0, 5):
        clock.at_s = [(clock.now_s + 40.0, lambda: store._store.add(key, num_ranks))]
        with caplog.at_level(logging.WARNING, "undertow"):
            meets(num_ranks, rank, stall_warning_s=30.0)
        store._store.delete_key(key)
        store._store.delete_key(f"undertow/ring/{process_groups.name_of(ranks)}/tries/0")
    (told,) = caplog.messages
    assert told.endswith(f" s for rank {late} to synchronize a model.")
    assert store.num_asked["check"] <= 25  # 1,022 if each key were asked for


@pytest.mark.usefixtures("cannot_wait")
def test_counters_of_reports_go_with_the_next_meeting(store: Counted, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, name = Clock(), f"undertow/ring/{process_groups.name_of((0, 1))}"
    monkeypatch.setattr(meeting, "time", clock)
    clock.at_s.append((100.0, lambda: store._store.add(f"{name}/1/group", 1)))
    meets(2, 0, stall_warning_s=30.0)
    assert {f"{name}/1/over/{number}" for number in (1, 2, 3)} <= store.keys
    store._store.add(f"{name}/2/group", 1)
    meets(2, 0)
    assert not [key for key in store.keys if "/over/" in key]


@pytest.mark.usefixtures("cannot_wait")
def test_a_rank_that_comes_after_the_others_have_given_up_is_told(store: Counted, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(meeting, "time", clock)
    for rank in (0, 1):
        with pytest.raises(StallTimeout, match=r"rank 1 has made no such wrapper or ShardedOptimizer within 10 s"):
            meets(2, rank, stall_timeout_s=10.0)
    assert clock.now_s < 13.0  # the second one has not waited


@pytest.mark.usefixtures("cannot_wait")
def test_ranks_of_which_many_are_late_are_named_in_ranges(store: Counted, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(meeting, "time", clock)
    with pytest.raises(StallTimeout, match=r"ranks 1-1023 have made no such wrapper"):
        meets(1024, 0, stall_timeout_s=10.0)
    assert store.longest <= 200
