"""A handshake in one thread, with outsiders whose every byte the test sends."""

import contextlib
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest

from undertow.ranks import handshake as module
from undertow.ranks import patience
from undertow.ranks.handshake import Handshake, Place

TOKEN = "a token"


@pytest.fixture
def opened() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


@pytest.fixture
def entrance(opened: contextlib.ExitStack) -> tuple[Handshake, Any]:
    """The handshake of rank 1, which only waits for rank 0, and its address."""
    listener = opened.enter_context(socket.create_server(("127.0.0.1", 0)))
    listener.setblocking(False)
    address, port = listener.getsockname()
    handshake = opened.enter_context(contextlib.closing(Handshake(Place(1, address, port, TOKEN), 0)))
    handshake.accept(listener)
    return handshake, (address, port)


def serve_until_closed(handshake: Handshake, link: socket.socket, *, words: bytes = b"") -> float:
    """Serves until the link is closed; returns after how long. `words` are sent before every look."""
    began_s, is_closed = time.monotonic(), False
    link.settimeout(0.001)
    while not is_closed:
        assert time.monotonic() < began_s + 10.0, "nobody closes it"
        with contextlib.suppress(TimeoutError):
            try:
                link.send(words)
                assert not handshake.is_done_within(0.01)
                is_closed = not link.recv(1)
            except ConnectionError:
                is_closed = True
    return time.monotonic() - began_s


def require_done(handshake: Handshake, at: Any, opened: contextlib.ExitStack) -> None:
    """Rank 0 comes, and is connected."""
    rank = opened.enter_context(socket.create_connection(at))
    rank.sendall(TOKEN.encode())
    assert handshake.is_done_within(10.0)
    ((number, link),) = handshake.taken().items()
    rank.sendall(b"here")
    link.settimeout(10.0)
    assert (number, link.recv(4)) == (0, b"here")
    link.close()


@pytest.mark.parametrize("words", [b"", b"a"], ids=["nothing", "a byte at a time"])
def test_the_limit_is_for_the_whole_token(
    words: bytes, entrance: Any, opened: contextlib.ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patience, "PROOF_S", 0.1)
    monkeypatch.setattr(entrance[0], "_token", b"a" * 10_000)
    link = opened.enter_context(socket.create_connection(entrance[1]))
    assert serve_until_closed(entrance[0], link, words=words) < 5.0
    assert entrance[0]._unproven == {}


def test_the_first_bytes_of_a_token_tell_nothing(entrance: Any, opened: contextlib.ExitStack) -> None:
    right, wrong = (opened.enter_context(socket.create_connection(entrance[1])) for _ in range(2))
    right.sendall(b"a tok")
    wrong.sendall(b"A TOK")
    assert not entrance[0].is_done_within(0.1)
    assert len(entrance[0]._unproven) == 2


def test_a_rank_is_found_among_many_who_say_nothing(
    entrance: Any, opened: contextlib.ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MAX_UNPROVEN", 3)
    links = [opened.enter_context(socket.create_connection(entrance[1])) for _ in range(5)]
    assert not entrance[0].is_done_within(0.1)
    assert len(entrance[0]._unproven) == 3
    for link in links[:2]:  # the oldest have gone
        serve_until_closed(entrance[0], link)
    require_done(*entrance, opened)
    for link in links[2:]:  # and the others with the end of the handshake
        link.settimeout(10.0)
        assert link.recv(1) == b""


def test_a_token_may_come_in_parts(entrance: Any, opened: contextlib.ExitStack) -> None:
    rank = opened.enter_context(socket.create_connection(entrance[1]))
    for byte in TOKEN[:-1]:
        rank.sendall(byte.encode())
        assert not entrance[0].is_done_within(0.01)
    rank.sendall(TOKEN[-1:].encode())
    assert entrance[0].is_done_within(10.0)
