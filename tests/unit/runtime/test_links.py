"""What is concluded from the kernel's account of connections."""

from __future__ import annotations

import os
import socket
from typing import Any

import pytest

from support.pages import snippets
from support.project import ROOT
from undertow.runtime import links, patience
from undertow.runtime.connections import Connection, address_of_peers, connections, open_sockets
from undertow.runtime.links import Silence, Speeds, Table

THERE = "10.0.0.2"


def connection(**changed: Any) -> Connection:
    like = {"socket": (3, 7), "here": "10.0.0.1", "there": THERE, "is_unacknowledged": True, "silent_s": 0.0}
    return Connection(**{**like, "sent_bytes": 0, "busy_s": 0.0, **changed})


ALIVE = connection(socket=(4, 8), is_unacknowledged=False, silent_s=1.0)
# What is found at a time, and for how long there is silence.
SILENCES: dict[str, list[tuple[float, list[Connection], float]]] = {
    "counts from the last acknowledgement since it was asked": [
        (100.0, [connection(silent_s=60.0)], 0.0),  # nothing may have been sent for a minute
        (104.0, [connection(silent_s=64.0)], 4.0),
        (106.0, [connection(silent_s=0.5)], 0.5),
        (112.0, [connection(silent_s=5.5)], 5.5),
    ],
    "any connection to a machine shows that it is there": [
        (100.0, [connection(silent_s=60.0), ALIVE], 0.0),
        (110.0, [connection(silent_s=60.0), ALIVE], 1.0),
    ],
    "there is none if nothing is to be acknowledged": [
        (100.0, [connection(silent_s=60.0)], 0.0),
        (130.0, [connection(is_unacknowledged=False, silent_s=90.0)], 0.0),
    ],
}


@pytest.mark.parametrize("looks", SILENCES.values(), ids=SILENCES)
def test_silence(looks: list[tuple[float, list[Connection], float]]) -> None:
    silence = Silence()
    assert [silence.silent_s(THERE, found, now_s) for now_s, found, _ in looks] == [silent_s for _, _, silent_s in looks]
    assert 5.0 <= patience.SILENT_S < 5.5


def test_a_ping_is_due_every_three_seconds_of_waiting() -> None:
    silence = Silence()
    due = [waited_s for waited_s in (0.5, 1.5, 2.5, 4.5, 5.0) if silence.is_ping_due(waited_s, 100.0 + waited_s)]
    assert due == [1.5, 4.5]


def test_a_speed_is_told_when_it_is_known_and_when_it_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    speeds = Speeds()

    def look(now_s: float, sent_bytes: int, busy_s: float) -> dict[str, Any] | None:
        monkeypatch.setattr(links, "connections", lambda: [connection(sent_bytes=sent_bytes, busy_s=busy_s)])
        return speeds.news(now_s)

    told = [
        look(100.0, 0, 0.0),
        look(102.0, 9_000_000, 0.1),  # too early
        look(105.0, 10_000_000, 0.1),
        look(110.0, 20_000_000, 0.3),  # half as fast
        look(115.0, 20_500_000, 4.3),  # too little to be told
        look(120.0, 24_500_000, 8.3),
    ]
    first, last = [100.0, 0.0, False], [pytest.approx(1.0), 100.0, True]  # a division by a difference
    assert told == [None, None, {"at": ["10.0.0.1"], "to": {THERE: first}}, None, None, {"at": ["10.0.0.1"], "to": {THERE: last}}]


def heard(*told: tuple[int, dict[str, list[Any]]], network: str = "10.0.0", first: int = 0) -> Table:
    """What ranks have told, whose addresses in the network count from `first`."""
    table = Table()
    for rank, to in told:
        table.hear(rank, {"at": [f"{network}.{rank + first}"], "to": to})
    table._due_s = min(table._due_s, 0.0) if table._slow else table._due_s
    return table


def test_a_slow_link_is_told_once_with_its_rank_and_figures() -> None:
    table = heard((0, {"10.0.0.1": [110.0, 0.0, True]}), (1, {"10.0.0.0": [1.2, 117.0, True]}))
    assert table.warning() == (
        "a link is slow, and training goes on at that pace: look at the network of rank 1.\n"
        "  rank 1 sends 1.2 MB/s to rank 0 (10.0.0.0); 117.0 MB/s before, 110.0 MB/s on links of other ranks"
    )
    assert table.warning() is None


def test_the_warning_of_docs_reliability_md_is_ours() -> None:
    there = {"10.77.0.1": [0.7, 57.9, True], "10.77.0.2": [0.7, 59.0, True]}
    table = heard((0, {"10.77.0.2": [28.6, 0.0, True]}), (1, {}), (2, there), network="10.77.0", first=1)
    assert table.warning() in [snippet.code.rstrip("\n") for snippet in snippets(ROOT / "docs" / "reliability.md")]


def test_the_rank_that_all_slow_links_have_in_common_is_named() -> None:
    # Acknowledgements go the slow way too.
    fast, slow = [110.0, 110.0, True], [2.0, 110.0, True]
    table = heard(
        (0, {"10.0.0.1": fast, "10.0.0.2": slow}),
        (1, {"10.0.0.0": fast, "10.0.0.2": slow}),
        (2, {"10.0.0.0": slow, "10.0.0.1": slow}),
    )
    assert str(table.warning()).startswith(
        "4 links are slow, and training goes on at that pace: look at the network of rank 2.\n"
    )


@pytest.mark.parametrize("speed", [[20.0, 117.0, True], [1.0, 117.0, False]], ids=["a sixth", "hardly used"])
def test_other_links_are_not_slow(speed: list[Any]) -> None:
    assert heard((0, {"10.0.0.1": [110.0, 0.0, True]}), (1, {"10.0.0.0": speed})).warning() is None


def test_nonsense_is_refused() -> None:
    with pytest.raises((KeyError, TypeError, ValueError)):
        Table().hear(0, {"at": [], "to": {"10.0.0.1": "fast"}})


def test_connections_within_this_machine_are_no_links() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        assert client.fileno() in [number for number, _ in open_sockets()]
        assert connections() == []


@pytest.mark.parametrize("kind", ["a pipe", "a socket"])
def test_a_descriptor_that_is_used_again_is_left_alone(kind: str) -> None:
    """Another thread may close a socket after it was listed, and open something else, which gets its number."""
    listener = socket.create_server(("127.0.0.1", 0))
    first, second = (socket.create_connection(listener.getsockname()) for _ in range(2))
    (listed,) = (found for found in open_sockets() if found[0] == first.fileno())
    assert address_of_peers(frozenset([listed])) == "127.0.0.1"
    read, write = os.pipe()
    os.dup2(read if kind == "a pipe" else second.fileno(), first.fileno())
    before = os.listdir("/proc/self/fd")
    assert address_of_peers(frozenset([listed])) is None
    assert os.listdir("/proc/self/fd") == before
    for each in (first, second, listener):
        each.close()
    os.close(read)
    os.close(write)
