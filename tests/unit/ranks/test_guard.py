"""The ring of ranks alone, among processes without a process group: it does not depend on any backend."""

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from unittest.mock import Mock, patch

import pytest
import torch.distributed as dist

from support.levels import some
from support.outsiders import outsiders
from support.processes import Ended, Rank, run_ranks
from undertow import SyncConfig
from undertow.errors import StallTimeout
from undertow.ranks import faults, handshake
from undertow.ranks.guard import GUARD
from undertow.ranks.handshake import connect_ring
from undertow.ranks.meeting import Meeting, meet
from undertow.ranks.watch import NullWatch, Ring, Watch
from undertow.torch_private import process_groups

WITHIN_S = 5.0  # on a machine that does much else; some hundredths of a second otherwise
GONE = ["RankLost", "rank 1 is gone: its process exited or was killed without reporting an error."]


def joined(rank: Rank, **limits: float) -> Watch:
    """This rank's watch in a ring with the others."""
    store = dist.FileStore(str(rank.directory / "store"), rank.num_ranks)
    meeting = Meeting(store, "ring", rank.number, rank.num_ranks, Mock())
    neighbors = connect_ring(meeting)
    ring = Ring(neighbors, rank=rank.number, num_ranks=rank.num_ranks)
    GUARD.adopt(tuple(range(rank.num_ranks)), ring, store)
    watch = ring.join(SyncConfig(**limits))
    meeting.arrive("group")
    vars(watch)["store"] = store  # with which the ring would end
    return watch


def found_by(watch: Watch) -> list[str]:
    """The fault that this rank learns of."""
    with watch.ring.condition:
        watch.ring.condition.wait_for(lambda: watch.fault, timeout=10.0)
    return [] if watch.fault is None else [watch.fault.kind.__name__, watch.fault.what]


def in_the_ring(act: Callable[[Rank, Watch], object], limits: dict[str, float], rank: Rank) -> list[str]:
    """Rank 1 acts, and the other ranks wait for it."""
    watch = joined(rank, **limits)
    if rank.number != 1:
        with watch.waiting("bucket 3"):
            found = found_by(watch)
        rank.tell("knows")
        return found
    rank.say(fault=time.monotonic())
    act(rank, watch)
    return []


def told_of(
    act: Callable[[Rank, Watch], object], num_ranks: int, *, stays: Sequence[int] = (), **limits: float
) -> Iterator[list[str]]:
    """The fault that each other rank has learned of, in time."""
    ends: list[Ended] = run_ranks(partial(in_the_ring, act, limits), num_ranks, stays=stays)
    for rank in (*ends[:1], *ends[2:]):
        assert rank.words["at"] - ends[1].words["fault"] < WITHIN_S
        yield rank.words["value"]


def is_killed(_rank: Rank, _watch: Watch) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("num_ranks", some([2, 5, 3], most=2))  # of five, rank 3 and 4 are no neighbors of rank 1
def test_a_killed_rank_is_named_on_every_other_rank(num_ranks: int) -> None:
    assert list(told_of(is_killed, num_ranks)) == [GONE] * (num_ranks - 1)


def is_killed_on_one_of_the_hosts(hosts: Sequence[str], rank: Rank) -> list[str]:
    with patch.object(socket, "gethostname", lambda: hosts[rank.number]):
        return in_the_ring(is_killed, {}, rank)


@pytest.mark.parametrize(
    ("hosts", "name"),
    [
        (("node-a", "node-b"), "rank 1 (host node-b)"),
        # Its neighbors are on the same host, and a rank that is no neighbor is on another one.
        (("node-a", "node-a", "node-a", "node-a", "node-b"), "rank 1 (host node-a)"),
        (("node-a", "node-a", "node-a"), "rank 1"),
    ],
    ids=["two hosts", "neighbors on one of them", "one host"],
)
def test_a_lost_rank_is_named_with_its_host_if_there_are_several(hosts: Sequence[str], name: str) -> None:
    ends: list[Ended] = run_ranks(partial(is_killed_on_one_of_the_hosts, hosts), len(hosts))
    gone = ["RankLost", f"{name} is gone: its process exited or was killed without reporting an error."]
    assert [rank.words.get("value") for rank in (*ends[:1], *ends[2:])] == [gone] * (len(hosts) - 1)


def in_the_ring_with_outsiders(rank: Rank) -> list[str]:
    """As `is_killed` in the ring, where every port is visited before the ranks know of it."""
    listen = handshake._listening

    def listening(address: str) -> socket.socket:
        listener = listen(address)
        visit(listener.getsockname())
        return listener

    slow, silent, garbage = b"0", b"", b"GET / HTTP/1.1\r\n\r\n" * 4
    with outsiders(9, words=[slow, silent, garbage]) as visit, patch.object(handshake, "_listening", listening):
        return in_the_ring(is_killed, {}, rank)


def test_a_killed_rank_is_named_although_outsiders_were_at_every_port() -> None:
    ends: list[Ended] = run_ranks(in_the_ring_with_outsiders, 3)
    for rank in (ends[0], ends[2]):
        assert rank.words.get("value") == GONE, rank.log
        assert rank.words["at"] - ends[1].words["fault"] < WITHIN_S


def is_killed_and_has_a_child(rank: Rank, watch: Watch) -> None:
    neighbors, thread = list(watch.ring.neighbors), threading.current_thread()
    if os.fork() == 0:
        is_clean = [neighbor.fileno() for neighbor in neighbors] == [-1, -1]
        is_clean &= threading.enumerate() == [thread] and GUARD._thread is None
        if is_clean:  # otherwise it ends, and no rank is told of the killed one in time
            rank.tell("is clean")
            rank.waits_for("knows", [0, 2])
        os._exit(0)
    rank.waits_for("is clean", [1])
    is_killed(rank, watch)


@pytest.mark.deep
def test_a_forked_child_keeps_no_connection_and_runs_no_thread() -> None:
    assert list(told_of(is_killed_and_has_a_child, 3)) == [GONE] * 2


def test_a_rank_that_gives_up_for_a_fault_tells_those_that_arrive_later(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    monkeypatch.setattr(process_groups, "default_store", lambda: store)
    watch = Ring([], rank=0, num_ranks=2).join(SyncConfig())
    late = threading.Timer(0.05, setattr, (watch, "fault", faults.stalled("rank 0 has waited.")))
    late.start()
    with pytest.raises(StallTimeout, match=r"rank 0 has waited\."):
        meet((0, 1), 0, SyncConfig(), watch, within_s=5.0)
    # the fault was of a watch that this rank never had; alone it would go on, to make the group
    with pytest.raises(StallTimeout, match="rank 1 has made no such wrapper"):
        meet((0, 1), 1, SyncConfig(), NullWatch(), within_s=5.0)
