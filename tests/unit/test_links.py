"""What is concluded from the kernel's account of connections."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from undertow.runtime import links, patience
from undertow.runtime.connections import Connection, connections, open_sockets
from undertow.runtime.links import Silence, Speeds, Table

THERE = "10.0.0.2"


def connection(**changed: Any) -> Connection:
    like = {"socket": (3, 7), "here": "10.0.0.1", "there": THERE, "is_unacknowledged": True, "silent_s": 0.0}
    return Connection(**{**like, "sent_bytes": 0, "busy_s": 0.0, **changed})


def test_silence_counts_from_the_last_acknowledgement_since_it_was_asked() -> None:
    silence = Silence()
    assert silence.silent_s(THERE, [connection(silent_s=60.0)], 100.0) == 0.0  # nothing may have been sent for a minute
    assert silence.silent_s(THERE, [connection(silent_s=64.0)], 104.0) == 4.0
    assert silence.silent_s(THERE, [connection(silent_s=0.5)], 106.0) == 0.5
    assert silence.silent_s(THERE, [connection(silent_s=5.5)], 112.0) == 5.5 > patience.SILENT_S


def test_any_connection_to_a_machine_shows_that_it_is_there() -> None:
    silence = Silence()
    found = [connection(silent_s=60.0), connection(socket=(4, 8), is_unacknowledged=False, silent_s=1.0)]
    assert silence.silent_s(THERE, found, 100.0) == 0.0
    assert silence.silent_s(THERE, found, 110.0) == 1.0


def test_where_nothing_is_to_be_acknowledged_there_is_no_silence() -> None:
    silence = Silence()
    silence.silent_s(THERE, [connection(silent_s=60.0)], 100.0)
    assert silence.silent_s(THERE, [connection(is_unacknowledged=False, silent_s=90.0)], 130.0) == 0.0


def test_a_ping_is_due_every_three_seconds_of_waiting() -> None:
    silence = Silence()
    assert [silence.is_ping_due(waited_s, 100.0 + waited_s) for waited_s in (0.5, 1.5, 2.5, 4.5, 5.0)] == [
        False,
        True,
        False,
        True,
        False,
    ]


def test_a_speed_is_told_when_it_is_known_and_when_it_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    speeds = Speeds()

    def look(now_s: float, sent_bytes: int, busy_s: float) -> dict[str, Any] | None:
        monkeypatch.setattr(links, "connections", lambda: [connection(sent_bytes=sent_bytes, busy_s=busy_s)])
        return speeds.news(now_s)

    assert look(100.0, 0, 0.0) is None
    assert look(102.0, 9_000_000, 0.1) is None  # too early
    assert look(105.0, 10_000_000, 0.1) == {"at": ["10.0.0.1"], "to": {THERE: [100.0, 0.0, False]}}
    assert look(110.0, 20_000_000, 0.3) is None  # half as fast
    assert look(115.0, 20_500_000, 4.3) is None  # too little to be told
    later = look(120.0, 24_500_000, 8.3)
    assert later == {"at": ["10.0.0.1"], "to": {THERE: [pytest.approx(1.0), 100.0, True]}}  # a division by a difference


def heard(*told: tuple[int, dict[str, list[Any]]]) -> Table:
    table = Table()
    for rank, to in told:
        table.hear(rank, {"at": [f"10.0.0.{rank}"], "to": to})
    table._due_s = min(table._due_s, 0.0) if table._slow else table._due_s
    return table


def test_a_slow_link_is_told_once_with_its_rank_and_figures() -> None:
    table = heard((0, {"10.0.0.1": [110.0, 0.0, True]}), (1, {"10.0.0.0": [1.2, 117.0, True]}))
    assert table.warning() == (
        "a link is slow, and training goes on at that pace: look at the network of rank 1.\n"
        "  rank 1 sends 1.2 MB/s to rank 0 (10.0.0.0); 117.0 MB/s before, 110.0 MB/s on links of other ranks"
    )
    assert table.warning() is None


def test_the_rank_that_all_slow_links_have_in_common_is_named() -> None:
    """Acknowledgements go the slow way too."""
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
