"""Queries of ranks for their activity, among rings of one process that no connection connects: messages are counted."""

import json
import logging
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import pytest

from support.levels import some
from undertow import RankLost, SyncConfig
from undertow.ranks import faults, patience
from undertow.ranks.activity import Activity
from undertow.ranks.answers import Alike
from undertow.ranks.watch import Ring, Watch

BUCKET = "bucket 0 ('last.bias')"
LIMITS = SyncConfig(stall_warning_s=30.0, stall_timeout_s=math.inf)


class Link:
    """A connection to a neighbor, whose messages wait in the network."""

    host, is_silent = "", False

    def __init__(self, network: "Network", rank: int, other: int) -> None:
        self.network, self.rank, self._from = network, other, rank

    def send(self, message: bytes, *, about_wait: str = "") -> None:
        self.network.num_sent[self._from] += 1
        self.network.kinds[bool(about_wait)].add(json.loads(message)["kind"])
        self.network.num_bytes += len(message)
        self.network.longest = max(self.network.longest, len(message))
        self.network.on_its_way.append((self._from, self.rank, message))


class Network:
    """A ring of ranks that wait for bucket 0, but for those of `late`."""

    def __init__(self, num_ranks: int, late: Iterable[int] = (), *, limits: SyncConfig = LIMITS) -> None:
        self.num_sent = Counter[int]()
        self.num_bytes = self.longest = 0
        self.kinds = {True: set[str](), False: set[str]()}  # of messages that a neighbor may miss, and that it may not
        self.on_its_way = deque[tuple[int, int, bytes]]()
        self.stopped = set[int]()
        self.rings, self.watches = list[Ring](), list[Watch]()
        since_s = time.monotonic() - 31.0
        for rank in range(num_ranks):
            others = dict.fromkeys(((rank + 1) % num_ranks, (rank - 1) % num_ranks))
            neighbors: list[Any] = [Link(self, rank, other) for other in others]
            ring = Ring(neighbors, rank=rank, num_ranks=num_ranks)
            here = Activity(steps=lambda: (3, True), wait=("", 0.0) if rank in set(late) else (BUCKET, since_s))
            self.watches.append(ring.join(limits, here))
            self.rings.append(ring)

    def deliver(self) -> None:
        """Delivers all messages but those to stopped ranks."""
        held = deque[tuple[int, int, bytes]]()
        while self.on_its_way:
            source, target, message = self.on_its_way.popleft()
            if target in self.stopped:
                held.append((source, target, message))
                continue
            ring = self.rings[target]
            link = next(link for link in ring.neighbors if link.rank == source)
            ring.hear(link, [message], is_connected=True)
        self.on_its_way = held

    def end(self, dead: set[int]) -> None:
        """These ranks die at once. The others hear of it from the kernel, and no message reaches the dead."""
        self.stopped |= dead
        for rank, ring in enumerate(self.rings):
            for link in list(ring.neighbors) if rank not in dead else ():
                if link.rank in dead:
                    ring.hear(link, [], is_connected=False)

    def look(self) -> None:
        for rank, ring in enumerate(self.rings):
            if rank not in self.stopped:
                ring.look()
        self.deliver()


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """A clock that stands still until the test moves it on."""
    now_s = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])

    def move(seconds: float) -> None:
        now_s[0] += seconds

    return move


def report_of(watch: Watch) -> str:
    return watch.inquiry.report(watch.left)


def until_over(network: Network, clock: Callable[[float], None]) -> None:
    """The time for answers passes, and a rank that is far from the asker gives up first."""
    for _ in range(21):
        clock(patience.answers_s(len(network.rings)) / 20)
        network.look()


@pytest.mark.parametrize("num_ranks", [2, 3, 5, 1021, 1024, pytest.param(4096, marks=pytest.mark.deep)])
def test_answers_go_up_the_ring_once(num_ranks: int) -> None:
    late = num_ranks - 2 if num_ranks > 2 else 1
    network = Network(num_ranks, [late])
    network.watches[0].inquiry.ask([])
    network.deliver()
    # The question from both sides, the answer once, and all answers from both sides.
    assert max(network.num_sent.values()) <= 5
    assert network.longest < 4000
    text = report_of(network.watches[0])
    assert all(report_of(network.watches[rank]) == text for rank in (num_ranks // 2, late, num_ranks - 1))
    assert all(watch.inquiry.answers is not None for watch in network.watches)
    waiting = {2: "rank 0", 3: "ranks 0, 2", 5: "ranks 0-2, 4"}.get(num_ranks, f"ranks 0-{late - 1}, {late + 1}")
    verb = "wait" if num_ranks > 2 else "waits"
    assert text.startswith(f"rank 0 has waited 31 s for {BUCKET}: rank {late} has not arrived.\n")
    assert f"\n  {waiting}: synchronization 3, {verb} for {BUCKET}" in text
    assert len(text.split("\n")) <= 24


@pytest.mark.deep
def test_ranks_that_ask_at_the_same_time_send_few_messages() -> None:
    num_ranks = 1024
    network = Network(num_ranks, [17])
    for rank, watch in enumerate(network.watches):
        if rank != 17:
            watch.inquiry.ask([])
    network.deliver()
    assert max(network.num_sent.values()) <= 40  # a few for each power of two; 2 * 1024 if each went round
    texts = {report_of(network.watches[rank]) for rank in (0, 17, 400, 1023)}
    assert len(texts) == 1
    assert f"ranks 0-16, 18-1023: synchronization 3, wait for {BUCKET}" in texts.pop()


@pytest.mark.parametrize("stopped", [[3], [3, 4], [1], [2, 6], [7]], ids=str)
def test_a_stopped_rank_holds_back_no_other_answer(stopped: list[int], clock: Callable[[float], None]) -> None:
    network = Network(8)
    network.stopped.update(stopped)
    network.watches[0].inquiry.ask([])
    network.deliver()
    assert network.watches[0].inquiry.answers is None
    until_over(network, clock)
    reached = [0, 1, 7, 8] if stopped == [2, 6] else [rank for rank in range(9) if rank not in stopped]
    late = sorted(set(range(8)) - set(reached))
    assert network.watches[0].inquiry.answers.late(8) == set(late)
    text = report_of(network.watches[0])
    assert "no answer; " in text
    assert all(report_of(network.watches[rank]) == text for rank in reached if rank < 8)


def test_an_answer_that_is_late_is_passed_on(clock: Callable[[float], None]) -> None:
    network = Network(8)
    network.stopped.add(3)
    network.watches[0].inquiry.ask([])
    network.deliver()
    clock(0.95 * patience.answers_s(8))  # all others have given it up
    network.look()
    network.stopped.clear()
    network.deliver()
    assert network.watches[0].inquiry.answers.late(8) == set()


def test_the_next_query_follows_one_that_was_lost(clock: Callable[[float], None]) -> None:
    network = Network(4)
    network.stopped.add(0)
    network.watches[0].inquiry.ask([])
    network.deliver()  # it asked, and was stopped
    clock(2.1 * patience.answers_s(4))
    network.watches[2].inquiry.ask([])
    network.deliver()
    until_over(network, clock)
    assert network.watches[2].inquiry.answers.late(4) == {0}
    network.stopped.clear()
    network.deliver()
    network.look()
    assert "rank 0: no answer" in report_of(network.watches[2])


def lines_of_a_stall(num_ranks: int, late: Iterable[int], caplog: pytest.LogCaptureFixture) -> int:
    network = Network(num_ranks, late)
    network.watches[0].inquiry.ask([])
    network.deliver()
    with caplog.at_level(logging.WARNING, "undertow"):
        for watch in network.watches:
            watch.judge()
    assert len(caplog.messages) == num_ranks  # each says something
    return sum(len(message.split("\n")) for message in caplog.messages)


@pytest.mark.parametrize("late", [[5], [0], range(1, 32), range(0, 32, 2)], ids=["one", "the first", "all others", "each second"])
def test_a_stall_prints_few_lines(late: Iterable[int], caplog: pytest.LogCaptureFixture) -> None:
    assert lines_of_a_stall(32, late, caplog) <= 80


def test_the_late_rank_and_the_lowest_waiting_one_print_the_report(caplog: pytest.LogCaptureFixture) -> None:
    lines_of_a_stall(8, [5], caplog)
    whole = [rank for rank, message in enumerate(caplog.messages) if "\n" in message]
    head = f"rank 0 has waited 31 s for {BUCKET}: rank 5 has not arrived. The log of rank 0 has the whole report."
    assert whole == [0, 5]
    assert {message for message in caplog.messages if "\n" not in message} == {head}


def test_one_fault_goes_round_however_many_ranks_find_it() -> None:
    network = Network(64)
    for rank in range(64):
        network.watches[rank].fail(faults.stalled("rank 0 has waited."))
    network.deliver()
    assert max(network.num_sent.values()) <= 2
    assert all(watch.fault is not None for watch in network.watches)


@pytest.mark.parametrize(
    ("dead", "named"),
    [
        ({*range(64)} - {17}, {18}),  # the next rank is heard of first
        ({*range(20, 28)}, {20, 27}),  # both ends are found, and one is first on each rank
        ({*range(0, 64, 2)}, {*range(0, 64, 2)}),  # nobody is connected: each names a neighbor
    ],
    ids=["all others", "eight in a row", "each second"],
)
def test_survivors_of_many_lost_ranks_name_one_and_say_little(dead: set[int], named: set[int]) -> None:
    network = Network(64)
    network.end(dead)
    network.deliver()
    found = set()
    for rank in {*range(64)} - dead:
        with pytest.raises(RankLost) as caught:
            network.watches[rank].check()
        assert len(str(caught.value).split("\n")) == 3
        found.add(str(caught.value).split("\n")[0])
    end = "is gone: its process exited or was killed without reporting an error."
    assert found <= {f"rank {rank} {end}" for rank in named}
    assert max(network.num_sent.values()) <= 2


def test_a_rank_without_the_model_passes_a_query_on() -> None:
    network = Network(5)
    network.rings[2].watches.clear()
    network.watches[0].inquiry.ask([])
    network.deliver()
    network.watches[0].inquiry._query.until_s = 0.0
    network.look()
    assert network.watches[0].inquiry.answers.late(5) == {2}


def in_different_calls(num_ranks: int) -> Network:
    network = Network(num_ranks)
    for rank, watch in enumerate(network.watches):
        watch.makes_call("bucket 0", ())
        watch.makes_call("the state" if rank == 0 else "bucket 0", ())
    return network


@pytest.mark.parametrize("num_ranks", some([2, 3, 1024], most=2))
def test_a_deadlock_is_confirmed_by_a_second_query(num_ranks: int) -> None:
    network = in_different_calls(num_ranks)
    asker = network.watches[1].inquiry
    asker.ask([])
    network.deliver()
    found = [asker.answers.are_in_deadlock(num_ranks)]
    asker.ask(asker.calls_to_confirm())
    network.deliver()
    found.append(asker.answers.are_in_deadlock(num_ranks))
    assert found == [False, True]
    assert network.watches[0].inquiry.answers.are_in_deadlock(num_ranks)
    assert network.longest < 2000


def test_a_wait_that_ends_between_two_queries_is_no_deadlock() -> None:
    network = in_different_calls(3)
    asker = network.watches[1].inquiry
    asker.ask([])
    network.deliver()
    network.watches[2].here.wait = BUCKET, time.monotonic()
    asker.ask(asker.calls_to_confirm())
    network.deliver()
    assert not asker.answers.are_in_deadlock(3)


@pytest.mark.deep
def test_calls_of_rows_and_columns_are_told_in_few_bytes() -> None:
    """256 ranks on a mesh with rows of 8, each in its own row and column."""
    network = Network(256)
    for rank, watch in enumerate(network.watches):
        row = tuple(range(rank // 8 * 8, rank // 8 * 8 + 8))
        watch.makes_call("bucket 0", row)
        watch.makes_call("bucket 1", tuple(range(rank % 8, 256, 8)))
    asker = network.watches[0].inquiry
    asker.ask([])
    network.deliver()
    calls = asker.calls_to_confirm()
    assert len(calls) == 32 + 8
    asker.ask(calls)
    network.deliver()
    assert not asker.answers.are_in_deadlock(256)  # nobody lacks one
    assert network.longest < 10_000


@pytest.mark.parametrize(
    "change",
    [{"asker": 9}, {"entries": [[3, "", "here", [[0, 9, 1]], 0.0, 0]]}, {"still": [[0, 1, 0]]}, {"calls": [["a", [], "x", []]]}],
    ids=lambda change: next(iter(change)),
)
@pytest.mark.parametrize("kind", ["does", "asks"])
def test_an_answer_that_makes_no_sense_is_dropped(kind: str, change: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    network = Network(3)
    ring = network.rings[1]
    answers: dict[str, Any] = {"entries": [], "calls": [], "lacked": [], "still": []}
    message = {"kind": kind, "from": 0, "number": 0, "asker": 0, "query": 0, "depth": 0, "about": [], **answers, **change}
    if kind == "asks" and "asker" not in change:
        message |= {"about": [["a", [[1, 0, 1]], 1]]}
    with caplog.at_level(logging.WARNING, "undertow"):
        ring.hear(ring.neighbors[0], [json.dumps(message).encode()], is_connected=True)
    assert "made no sense" in caplog.messages[0]


def asked(network: Network, texts: Mapping[int, str], **how: Any) -> dict[int, list[Alike]]:
    """What each of these ranks is told that asks with its text."""
    with ThreadPoolExecutor(len(texts)) as threads:
        asking = {rank: threads.submit(network.watches[rank].ask, text, **how) for rank, text in texts.items()}
        while not all(each.done() for each in asking.values()):
            network.deliver()
            wait(asking.values(), timeout=0.001)
    return {rank: each.result() for rank, each in asking.items()}


def test_a_text_for_some_ranks_is_not_taken_for_one_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """One data axis of a mesh may ask alone: its next question to all is not the others' second one."""
    monkeypatch.setattr(patience, "answers_s", lambda _num_ranks: 10.0)
    network = Network(4)
    of_axis = asked(network, {rank: f"axis, {rank}" for rank in (0, 2)}, of=(0, 2))
    of_all = asked(network, {rank: f"all, {rank}" for rank in range(4)}, most=4)
    assert list(of_axis.values()) == 2 * [[Alike([rank], f"axis, {rank}") for rank in (0, 2)]]
    assert list(of_all.values()) == 4 * [[Alike([rank], f"all, {rank}") for rank in range(4)]]


def test_of_long_texts_two_go_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a digest of each rank, except of one that has nothing to tell."""
    monkeypatch.setattr(patience, "answers_s", lambda _num_ranks: 10.0)
    network, text = Network(32), "x" * 100_000
    texts = {rank: f"{rank % 3} {text}" if rank else "" for rank in range(32)}
    told = asked(network, texts)
    found = [
        Alike([*range(1, 32, 3)], f"1 {text}"),
        Alike([*range(2, 32, 3)], f"2 {text}"),
        Alike([*range(3, 32, 3)], None),
    ]
    assert list(told.values()) == 32 * [found]
    assert network.num_bytes < 32 * 2 * (2 * len(text) + 32 * 300)  # both ways round


def test_a_stopped_rank_may_miss_queries_and_no_faults() -> None:
    network = Network(5, [3])
    network.watches[0].inquiry.ask([])
    network.deliver()
    network.watches[1].leave(None)
    network.watches[0].fail(faults.lost(2))
    network.deliver()
    assert network.kinds == {True: {"asks", "answers"}, False: {"does", "leaves", "fails"}}
