"""Rings of connections, among threads of one process."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from undertow.runtime import ring
from undertow.runtime.ring import Neighbour, close_all, make_ring


@pytest.fixture
def pair() -> Iterator[tuple[Neighbour, Neighbour]]:
    first, second = socket.socketpair()
    neighbours = Neighbour(first, 1), Neighbour(second, 0, os.getpid())
    yield neighbours
    close_all(neighbours)


def made(num_ranks: int, **changed: Any) -> list[list[Neighbour] | int | None]:
    """What every rank gets."""
    path = Path(tempfile.mkdtemp()) / "store"

    def rank(number: int) -> list[Neighbour] | int | None:
        store = dist.FileStore(str(path), num_ranks)
        how = {"is_gone": lambda _: False, "each": lambda _: None, **changed}
        return make_ring(store, "ring", rank=number, num_ranks=num_ranks, **how)

    with ThreadPoolExecutor(num_ranks) as threads:
        return list(threads.map(rank, range(num_ranks)))


@pytest.mark.parametrize("num_ranks", [2, 3, 5])
def test_every_rank_is_connected_to_the_next_and_the_one_before(num_ranks: int) -> None:
    rings = made(num_ranks)
    for rank, neighbours in enumerate(rings):
        assert isinstance(neighbours, list)
        assert [neighbour.rank for neighbour in neighbours] == [(rank + 1) % num_ranks, (rank - 1) % num_ranks]
        neighbours[0].send({"from": rank})
    for rank, neighbours in enumerate(rings):
        assert neighbours[1].read() == ([{"from": (rank - 1) % num_ranks}], True)
        close_all(neighbours)


def test_the_interface_that_gloo_is_given_is_ours_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert ring._addresses() == ["127.0.0.1"]


def test_without_an_interface_the_route_to_the_master_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.5")
    assert ring._addresses()[0] == "127.0.0.1"


def test_a_rank_that_cannot_be_reached_leaves_all_without_a_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    connected = ring._connected
    monkeypatch.setattr(ring, "_ACCEPT_S", 0.1)
    monkeypatch.setattr(ring, "_connected", lambda theirs, hello: None if hello["rank"] == 1 else connected(theirs, hello))
    assert made(3) == [None, None, None]


def test_a_rank_that_is_gone_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring, "_PROBE_S", 0.0)
    store = dist.FileStore(str(Path(tempfile.mkdtemp()) / "store"), 3)
    found = make_ring(store, "ring", rank=0, num_ranks=3, is_gone=lambda rank: rank == 2, each=lambda _: None)
    assert found == 2


def test_ranks_that_have_not_come_are_named_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring, "_PROBE_S", 0.0)
    store = dist.FileStore(str(Path(tempfile.mkdtemp()) / "store"), 3)

    def each(late: Sequence[int]) -> None:
        raise TimeoutError(str(list(late)))

    with pytest.raises(TimeoutError, match=r"\[1, 2\]"):
        make_ring(store, "ring", rank=0, num_ranks=3, is_gone=lambda _: False, each=each)


@pytest.mark.parametrize(
    "hello", [b"", b"no json\n", b"[]\n", b'{"token": "guessed", "rank": 1}\n', b'{"token": "right", "rank": 2}\n']
)
def test_a_stranger_is_not_taken_for_a_neighbour(hello: bytes) -> None:
    theirs, ours = socket.socketpair()
    with theirs, ours:
        theirs.sendall(hello)
        theirs.shutdown(socket.SHUT_WR)
        assert not ring._is_expected(ours, "right", 1)


def test_a_neighbour_with_the_token_is() -> None:
    theirs, ours = socket.socketpair()
    with theirs, ours:
        theirs.sendall(json.dumps({"token": "right", "rank": 1}).encode() + b"\n")
        assert ring._is_expected(ours, "right", 1)
        assert theirs.recv(1) == b"+"


def test_messages_come_whole_and_in_order(pair: tuple[Neighbour, Neighbour]) -> None:
    first, second = pair
    sent = [{"number": number, "text": "ü" * 1000} for number in range(10)]
    for message in sent:
        first.send(message)
    received = []
    while len(received) < len(sent):
        received += second.read()[0]
    assert received == sent


def test_what_is_no_message_is_dropped(pair: tuple[Neighbour, Neighbour]) -> None:
    first, second = pair
    first._socket.sendall(b'no json\n[1]\n{"a": 1}\n')
    assert second.read() == ([{"a": 1}], True)


def test_a_message_that_is_too_long_is_not_sent(pair: tuple[Neighbour, Neighbour]) -> None:
    first, second = pair
    first.send({"text": "x" * (1 << 17)})
    first.send({"text": "short"})
    assert second.read() == ([{"text": "short"}], True)


def test_the_end_of_a_connection_is_read(pair: tuple[Neighbour, Neighbour]) -> None:
    first, second = pair
    first.close()
    assert second.read() == ([], False)
    second.send({"a": 1})  # is dropped


def test_a_process_that_is_stopped_is_seen_to_be() -> None:
    sleeping = subprocess.Popen([sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)"])
    try:
        os.waitpid(sleeping.pid, os.WUNTRACED)
        first, second = socket.socketpair()
        with first, second:
            assert Neighbour(first, 1, sleeping.pid).is_stopped()
            assert not Neighbour(second, 1, os.getpid()).is_stopped()
            assert not Neighbour(second, 1).is_stopped()
    finally:
        sleeping.kill()
        sleeping.wait()


def test_a_store_is_asked_for_nothing_that_waits() -> None:
    """A rank that waits inside of the store cannot be woken when another one is gone."""
    asked = []

    class Store:
        def __getattr__(self, name: str) -> Any:
            asked.append(name)
            return partial(int, 3)

    with pytest.raises((TypeError, ValueError)):
        make_ring(Store(), "ring", rank=0, num_ranks=3, is_gone=lambda _: False, each=lambda _: None)
    assert set(asked) <= {"set", "add", "check", "get"}
