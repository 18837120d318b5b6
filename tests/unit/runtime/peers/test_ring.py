"""Rings of pairs, among threads of one process."""

import os
import signal
import socket
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch.distributed as dist

from undertow.runtime.peers import neighbor as connections
from undertow.runtime.peers import patience
from undertow.runtime.peers.neighbor import Neighbor, make_ring
from undertow.runtime.torch_private import private


@pytest.fixture(autouse=True)
def over_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


@pytest.fixture
def pair(over_loopback: None) -> Iterator[tuple[Neighbor, Neighbor]]:
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as threads:
        groups = list(
            threads.map(lambda place: private.pair(store, "pair", place, private.gloo_device(), timedelta(seconds=30)), range(2))
        )
    neighbors = Neighbor(groups[0], 0, 1), Neighbor(groups[1], 1, 0, os.getpid())
    yield neighbors
    for neighbor in neighbors:
        neighbor.close()


def made(num_ranks: int, *, ranks: Sequence[int] | None = None, look: Any = lambda _: None) -> list[list[Neighbor] | None]:
    """What every rank gets that comes, or each of `ranks`."""
    path = Path(tempfile.mkdtemp()) / "store"

    def rank(number: int) -> list[Neighbor] | None:
        return make_ring(dist.FileStore(str(path), num_ranks), "ring", rank=number, num_ranks=num_ranks, look=look)

    with ThreadPoolExecutor(num_ranks) as threads:
        return list(threads.map(rank, range(num_ranks) if ranks is None else ranks))


@pytest.mark.parametrize("num_ranks", [2, 3, 5])
def test_every_rank_is_connected_to_the_next_and_the_one_before(num_ranks: int) -> None:
    rings = made(num_ranks)
    for rank, neighbors in enumerate(rings):
        # Two ranks are neighbors on both sides, by one connection.
        assert [neighbor.rank for neighbor in neighbors] == [(rank + 1) % num_ranks, (rank - 1) % num_ranks][: num_ranks - 1]
        neighbors[0].send(b"%d" % rank)
    for rank, neighbors in enumerate(rings):
        assert neighbors[-1].read() == ([b"%d" % ((rank - 1) % num_ranks)], True)
        for neighbor in neighbors:
            neighbor.close()


@pytest.mark.slow
def test_ranks_that_cannot_be_connected_leave_all_without_a_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    connect = private.pair

    def broken(store: Any, key: str, place: int, *args: Any) -> Any:
        if (key, place) == ("ring/line/1", 0):
            raise RuntimeError("Gloo connectFullMesh failed")
        return connect(store, key, place, *args)

    monkeypatch.setattr(patience, "CONNECT_S", 1.0)
    monkeypatch.setattr(private, "pair", broken)
    assert made(3) == [None, None, None]


def test_a_descriptor_that_is_used_again_is_left_open_in_a_child() -> None:
    """Another thread may close a socket after it was listed, and open something else, which gets its number."""
    neighbor = Neighbor.__new__(Neighbor)
    ours, other = (end.detach() for end in socket.socketpair())
    neighbor._sockets = frozenset([(str(other), "socket:[1]"), (str(ours), os.readlink(f"/proc/self/fd/{ours}"))])
    with patch.object(private, "keep_for_ever"):
        neighbor.forget()
    os.close(other)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.close(ours)


def test_a_torch_without_gloo_leaves_all_without_a_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_gloo_available", lambda: False)
    assert made(2) == [None, None]


def give_up(late: Sequence[int]) -> None:
    raise TimeoutError(str(list(late)))


def test_ranks_that_have_not_come_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "PROBE_S", 0.0)
    with pytest.raises(TimeoutError, match=r"\[1, 2\]"):  # now and then
        made(3, ranks=[0], look=give_up)


def test_messages_come_whole_and_in_order(pair: tuple[Neighbor, Neighbor]) -> None:
    sent = [b"%d" % number * 5000 for number in range(10)]
    for line in (b"x" * (1 << 17), *sent):  # one that is too long is not sent
        pair[0].send(line)
    received = []
    while len(received) < len(sent):
        received += pair[1].read()[0]
    assert received == sent


def test_a_line_without_an_end_is_cut(pair: tuple[Neighbor, Neighbor]) -> None:
    for _ in range(17):
        pair[0]._send(b"x" * 4000)
    assert [len(line) for _ in range(17) for line in pair[1].read()[0]] == [17 * 4000]


def test_the_end_of_a_connection_is_read_after_its_last_words(pair: tuple[Neighbor, Neighbor]) -> None:
    first, second = pair
    first.send(b"x" * 3 * connections._FRAME)
    first.flush(30.0)
    first.close()
    heard = []
    while (said := second.read())[1]:
        heard += said[0]
    assert (heard, second.read()) == ([b"x" * 3 * connections._FRAME], ([], False))
    second.send(b"a")  # is dropped


def test_a_thread_that_listens_ends_with_the_connection(pair: tuple[Neighbor, Neighbor]) -> None:
    first, second = pair
    heard: list[tuple[Any, ...]] = []
    second.listen(lambda *said: heard.append(said))
    first.listen(lambda *_: None)
    first.close()
    second._thread.join(30.0)
    assert heard == [(second, [], False)]
    assert not any(thread.name.startswith("undertow-hears") for thread in threading.enumerate())


def test_a_connection_whose_thread_cannot_start_may_be_closed() -> None:
    neighbor, no_more = Neighbor(None, 0, rank=1), RuntimeError("can't start new thread")
    with patch.object(threading.Thread, "start", side_effect=no_more), pytest.raises(RuntimeError, match="start new thread"):
        neighbor.listen(lambda *_: None)
    neighbor.close()


def test_a_neighbor_that_reads_is_told_any_number_of_messages(pair: tuple[Neighbor, Neighbor]) -> None:
    first, second = pair
    for number in range(1, 3 * connections._MAX_SENT):
        first.send(b"%d" % number)
        assert second.read() == ([b"%d" % number], True)
        if number % connections._NUM_UNTOLD == 0:  # it says that it has them
            assert (first.read(), bool(first._sent)) == (([], True), False)


def test_a_neighbor_that_is_stopped_misses_messages_and_no_more(pair: tuple[Neighbor, Neighbor]) -> None:
    first, second = pair
    for number in range(connections._MAX_SENT + 5):
        first.send(b"%d" % number)
    assert [second.read()[0] for _ in range(connections._MAX_SENT)] == [
        [b"%d" % number] for number in range(connections._MAX_SENT)
    ]
    told = [first.read() for _ in range(connections._MAX_SENT // connections._NUM_UNTOLD)]
    assert (told, bool(first._sent)) == ([([], True)] * len(told), False)
    first.send(b"-1")
    assert second.read() == ([b"-1"], True)


def test_a_process_that_is_stopped_is_seen_to_be(pair: tuple[Neighbor, Neighbor]) -> None:
    sleeping = subprocess.Popen(["sleep", "600"])
    first, second = pair
    try:
        sleeping.send_signal(signal.SIGSTOP)
        os.waitpid(sleeping.pid, os.WUNTRACED)
        first._process = sleeping.pid
        assert (first.is_stopped(), second.is_stopped()) == (True, False)  # the second is this process
        second._process = None
        assert not second.is_stopped()
    finally:
        sleeping.kill()
        sleeping.wait()


def test_a_store_is_asked_for_nothing_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    # A rank that waits inside of the store cannot be woken when another one is gone.
    stores, file_store = list[Mock](), dist.FileStore
    monkeypatch.setattr(patience, "PROBE_S", 0.0)
    monkeypatch.setattr(dist, "FileStore", lambda *given: stores.append(Mock(wraps=file_store(*given))) or stores[-1])
    # A pair, which is torch's, would ask as well.
    monkeypatch.setattr(private, "pair", Mock(side_effect=RuntimeError("Gloo connectFullMesh failed")))
    with pytest.raises(TimeoutError):  # all may come at once below, and nobody look who is missing
        made(2, ranks=[0], look=give_up)
    assert (made(3), {name for store in stores for name, *_ in store.method_calls}) == (
        [None, None, None],
        {"set", "add", "check", "get"},
    )
