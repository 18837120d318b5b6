"""Connections of neighbors, among threads of one process."""

import contextlib
import errno
import os
import random
import re
import socket
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch.distributed as dist

from support.outsiders import outsiders
from undertow.ranks import connections, handshake, patience
from undertow.ranks.connections import Connection
from undertow.ranks.handshake import connect_ring, host_of, own_address
from undertow.ranks.meeting import Meeting

Made = list[tuple[list[Connection], str]]


@pytest.fixture(autouse=True)
def over_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "own_address", lambda _: "127.0.0.1")


@pytest.fixture
def pair() -> Iterator[tuple[Connection, Connection]]:
    first, second = socket.socketpair()
    connections = Connection(first, 1), Connection(second, 0)
    yield connections
    for connection in connections:
        connection.close()


def made(num_ranks: int, *, ranks: Sequence[int] | None = None, look: Any = lambda _: None) -> Made:
    """What every rank gets that comes, or each of `ranks`."""
    path = Path(tempfile.mkdtemp()) / "store"

    def rank(number: int) -> tuple[list[Connection], str]:
        store = dist.FileStore(str(path), num_ranks)
        try:
            return connect_ring(Meeting(store, "ring", number, num_ranks, Mock(check=look))), ""
        except ConnectionError as error:
            return [], str(error)

    with ThreadPoolExecutor(num_ranks) as threads:
        return list(threads.map(rank, range(num_ranks) if ranks is None else ranks))


def require_rings(rings: Made) -> None:
    """Every rank hears what the one before it says, and connections end."""
    num_ranks = len(rings)
    for rank, (neighbors, reason) in enumerate(rings):
        # Two ranks are neighbors on both sides, by one connection.
        expected = [(rank + 1) % num_ranks, (rank - 1) % num_ranks][: num_ranks - 1]
        assert ([neighbor.rank for neighbor in neighbors], reason) == (expected, "")
        neighbors[0].send(b"%d" % rank)
    for rank, (neighbors, _) in enumerate(rings):
        assert received(neighbors[-1], 1) == [b"%d" % ((rank - 1) % num_ranks)]
    for neighbors, _ in rings:
        for neighbor in neighbors:
            neighbor.close()


def received(connection: Connection, number: int) -> list[bytes]:
    messages = list[bytes]()
    while len(messages) < number:
        parts, is_there = connection.receive()
        assert is_there
        messages += parts
    return messages


def until_the_end(connection: Connection) -> list[bytes]:
    messages, is_there = list[bytes](), True
    while is_there:
        parts, is_there = connection.receive()
        messages += parts
    return messages


@pytest.mark.parametrize("num_ranks", [2, 3, 5])
def test_every_rank_is_connected_to_the_next_and_the_one_before(num_ranks: int) -> None:
    require_rings(made(num_ranks))


def test_ranks_connect_over_ipv6(monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6")
    monkeypatch.setattr(handshake, "own_address", lambda _: "::1")
    require_rings(made(3))


# Where ranks cannot connect, no rank has a ring, and all know why.


def test_a_port_that_cannot_be_opened_leaves_all_without_a_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "_listening", Mock(side_effect=OSError("Address already in use")))
    for neighbors, reason in made(2):
        assert neighbors == []
        assert reason.endswith(" cannot listen for other ranks: Address already in use")


def nobody_listens() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def leads_to(monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    """Whatever port a rank gives, others connect to this one."""
    address = socket.AF_INET, socket.SOCK_STREAM, 0, "", ("127.0.0.1", port)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [address])


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_an_address_that_nobody_listens_at_leaves_all_without_a_ring(num_ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    leads_to(monkeypatch, nobody_listens())
    for neighbors, reason in made(num_ranks):
        assert neighbors == []
        assert re.fullmatch(r"rank (\d) cannot connect to rank \d at 127\.0\.0\.1 port \d+: .*Connection refused", reason)


def test_a_firewall_that_drops_everything_leaves_all_without_a_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "CONNECT_S", 0.5)
    with contextlib.ExitStack() as opened:
        full = opened.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(3):  # the kernel drops what comes to a full queue
            link = opened.enter_context(socket.socket())
            link.setblocking(False)
            link.connect_ex(full.getsockname())
        leads_to(monkeypatch, full.getsockname()[1])
        for neighbors, reason in made(3):
            assert neighbors == []
            assert re.fullmatch(r"rank \d cannot connect to rank \d at 127\.0\.0\.1 port \d+: timed out", reason)


def test_a_rank_that_nobody_reaches_waits_no_longer_than_that(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "CONNECT_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as other:  # it is taken, and never arrives
        leads_to(monkeypatch, other.getsockname()[1])
        for neighbors, reason in made(2):
            assert neighbors == []
            assert re.fullmatch(r"rank 1 is not reached at 127\.0\.0\.1 port \d+ by the rank before it", reason)


# What is not a rank of this run, and reaches a port that a rank has opened, or is found where a rank should be.


@contextlib.contextmanager
def visited(visit: Callable[[tuple[str, int]], object]) -> Iterator[list[object]]:
    """Calls `visit` with the address of each socket that listens, before a rank knows of it."""
    listen, kept = handshake._listening, list[object]()

    def listening(address: str) -> socket.socket:
        listener = listen(address)
        kept.append(visit(listener.getsockname()))
        return listener

    with patch.object(handshake, "_listening", listening):
        yield kept


def says(words: bytes, at: tuple[str, int]) -> socket.socket:
    link = socket.create_connection(at)
    link.sendall(words)
    return link


def says_and_leaves(words: bytes, at: tuple[str, int]) -> None:
    says(words, at).close()


def require_closed(link: socket.socket) -> None:
    link.settimeout(10.0)
    with contextlib.suppress(ConnectionError):
        assert link.recv(100) == b""
    link.close()


@pytest.mark.parametrize("words", [b"", b"GET / HTTP/1.1\r\n\r\n", b"x" * 32, random.Random(0).randbytes(100)], ids=repr)
@pytest.mark.parametrize("stranger", [says, says_and_leaves])
def test_a_stranger_is_dropped_and_keeps_nobody(
    stranger: Callable[..., Any], words: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patience, "PROOF_S", 0.05)
    with visited(partial(stranger, words)) as kept:
        require_rings(made(3))
    for link in filter(None, kept):
        require_closed(link)


@pytest.mark.parametrize("num_links", [1, 20, 100], ids="{} outsiders".format)
def test_outsiders_who_send_a_byte_at_a_time_hold_up_nobody(num_links: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "CONNECT_S", 3.0)
    with outsiders(num_links, words=[b"0"]) as visit, visited(visit):
        require_rings(made(3))


@pytest.mark.slow
def test_outsiders_who_fill_the_queue_of_every_rank_hold_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    # Ranks that connect before they accept would wait for each other in a circle.
    monkeypatch.setattr(handshake, "_BACKLOG", 2)

    def visit(at: tuple[str, int]) -> None:
        for _ in range(8):
            link = opened.enter_context(socket.socket())
            link.setblocking(False)
            link.connect_ex(at)

    with contextlib.ExitStack() as opened, visited(visit):
        require_rings(made(3))


# How ranks meet.


def give_up(late: Sequence[int]) -> None:
    raise TimeoutError(str(list(late)))


def test_a_file_store_is_asked_for_nothing_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    # It has no server: a rank that waits reads the file all the time. `test_meeting` has the waits in other stores.
    stores, file_store = list[Mock](), dist.FileStore

    def counted(*given: Any) -> Mock:
        store = file_store(*given)
        stores.append(Mock(spec=store, wraps=store))
        return stores[-1]

    monkeypatch.setattr(dist, "FileStore", counted)
    with pytest.raises(TimeoutError):  # all may come at once below, and nobody look who is missing
        made(2, ranks=[0], look=give_up)
    require_rings(made(3))
    assert {name for store in stores for name, *_ in store.method_calls} == {"set", "add", "check", "get"}


def test_the_ports_are_closed_when_all_have_connected() -> None:
    ports = list[tuple[str, int]]()
    with visited(ports.append):
        require_rings(made(2))
    for port in ports:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(port)


# Which address a rank gives.


ROUTES = {"": "", "node-0": "10.0.0.7", "own-name": "127.0.1.1", "localhost": "127.0.0.1", "127.0.0.1": "127.0.0.1"}


@pytest.mark.parametrize(
    ("host", "default", "expected"),
    [
        pytest.param("node-0", "192.168.1.7", "10.0.0.7", id="on the way to the store"),
        pytest.param("own-name", "192.168.1.7", "192.168.1.7", id="a name of its own that only it reaches"),
        pytest.param("own-name", "", "127.0.0.1", id="without a network"),
        pytest.param("127.0.0.1", "192.168.1.7", "127.0.0.1", id="one machine"),
    ],
)
def test_the_address_is_the_one_on_the_way_to_the_store(
    host: str, default: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshake, "_address_towards", lambda name: ROUTES.get(name, default))
    assert own_address(host) == expected


def test_the_host_of_a_store_is_found_behind_prefixes(monkeypatch: pytest.MonkeyPatch) -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_ADDR", "node-0")
    assert host_of(dist.PrefixStore("a", dist.PrefixStore("b", server))) == "127.0.0.1"
    assert host_of(dist.HashStore()) == "node-0"


# Messages.


def test_messages_come_whole_and_in_order(pair: tuple[Connection, Connection]) -> None:
    sent = [b"%d" % number * 5000 for number in range(10)]
    for message in sent:
        pair[0].send(message)
    assert received(pair[1], len(sent)) == sent
    assert pair[1].receive() == ([], True)


def test_the_end_of_a_connection_is_read_after_its_last_words(pair: tuple[Connection, Connection]) -> None:
    first, second = pair
    first.send(b"x" * 60_000)
    first.finish(30.0)
    assert until_the_end(second) == [b"x" * 60_000]
    assert second.receive() == ([], False)
    second.send(b"a")  # is dropped
    assert not second.has_unsent


def test_a_neighbor_that_does_not_read_misses_messages_and_no_more(pair: tuple[Connection, Connection]) -> None:
    first, second = pair
    sent = [b"%d" % number * 10_000 for number in range(100, 1100)]
    for message in sent:
        first.send(message)
    assert len(first._unsent) < connections._MAX_UNSENT + 100_000
    messages = list[bytes]()
    while first.has_unsent:
        first.flush()
        messages += second.receive()[0]
    first.send(b"the last")
    while messages[-1:] != [b"the last"]:
        messages += second.receive()[0]
    assert messages[:-1] == sent[: len(messages) - 1]
    assert len(messages) < len(sent)


def test_queries_leave_room_in_the_memory_of_a_paused_process(pair: tuple[Connection, Connection]) -> None:
    """If it were full, Linux would end the connection. Faults are sent, and queries again once the neighbor runs."""
    first, second = pair
    for _ in range(100):
        first.send(b"q" * 1000, about_wait="asks")
    first.send(b"q" * 60_000, about_wait="asks")
    first.send(b"fails")
    queries = received(second, 9)
    assert queries == [b"q" * 1000] * 8 + [b"fails"]
    second.send(b"does")
    received(first, 1)
    first.send(b"q" * 60_000, about_wait="asks")
    assert received(second, 1) == [b"q" * 60_000]


def test_long_answers_keep_no_query_back(pair: tuple[Connection, Connection]) -> None:
    """Nobody replies to answers: a rank that waits alone asks again all the same."""
    first, second = pair
    first.send(b"a" * 60_000, about_wait="answers")
    first.send(b"more", about_wait="answers")
    first.send(b"asks", about_wait="asks")
    assert received(second, 2) == [b"a" * 60_000, b"asks"]


def test_a_message_in_the_middle_of_another_one_follows_it(pair: tuple[Connection, Connection]) -> None:
    """As where a garbage collection in the middle of a send frees a group, whose ring says that it leaves."""
    first, second = pair
    link = first._link
    first._link = Mock(wraps=link)

    def send(data: bytearray) -> int:
        first._link.send.side_effect = link.send
        num_sent = link.send(bytes(data[:3]))
        first.send(b"in between")
        return num_sent

    first._link.send.side_effect = send
    first.send(b"first")
    assert received(second, 2) == [b"first", b"in between"]


def test_a_child_that_closes_its_copy_leaves_the_connection_open(pair: tuple[Connection, Connection]) -> None:
    first, second = pair
    if (child := os.fork()) == 0:
        first.close()
        os._exit(0)
    os.waitpid(child, 0)
    first.send(b"still here")
    assert received(second, 1) == [b"still here"]


def test_the_kernel_asks_a_silent_connection_and_gives_it_up_after_ten_seconds() -> None:
    for neighbors, _ in made(2):
        link = neighbors[0]._link
        idle_s, pause_s, number = (
            link.getsockopt(socket.IPPROTO_TCP, option)
            for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        )
        assert link.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert idle_s + number * pause_s == connections.SILENCE_S == 10
        assert link.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 10_000
        neighbors[0].close()


@pytest.mark.parametrize(("code", "is_silent"), [(errno.ETIMEDOUT, True), (errno.EHOSTUNREACH, True), (errno.ECONNRESET, False)])
def test_a_machine_that_does_not_answer_is_told_from_a_process_that_ended(
    code: int, is_silent: bool, pair: tuple[Connection, Connection]
) -> None:
    first = pair[0]
    link, first._link = first._link, Mock(recv=Mock(side_effect=OSError(code, os.strerror(code))))
    assert first.receive() == ([], False)
    assert first.is_silent == is_silent
    first._link = link


@pytest.mark.parametrize(
    ("gloo", "nccl", "expected"),
    [
        ("lo", "", "127.0.0.1"),
        ("", "lo", "127.0.0.1"),
        ("", "^lo,docker0", "10.0.0.7"),
        ("", "", "10.0.0.7"),
    ],
)
def test_a_variable_names_the_interface(gloo: str, nccl: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", gloo)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", nccl)
    monkeypatch.setattr(handshake, "_address_towards", lambda _: "10.0.0.7")
    assert own_address("node-0") == expected
