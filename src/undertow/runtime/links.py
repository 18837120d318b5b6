"""Links to other machines that are cut, and such that have become slow, as far as the kernel tells of our connections.

A machine acknowledges what it gets though the process there is stopped or busy, so silence is of the machine or of the
way to it. Of what is sent the kernel also knows how long it was on its way; nothing is sent in order to measure.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Protocol

from undertow.runtime import faults, patience
from undertow.runtime.connections import Connection, Socket, connections

_WINDOW_S = 4.0  # over which speeds are measured
_LEAST_BYTES = 1_000_000  # of a window, for a speed to be worth telling
_BUSY = 0.2  # share of a window; a link that is busy for less holds nobody up
_SETTLES_S = 6.0  # a window and a look later all others have told theirs
_CHANGE = 3.0  # factor from which on a speed is told anew
_SLOW = 10.0  # factor behind the others, or behind what it was


PING = {"kind": "ping"}  # for the kernel there to acknowledge


class End(Protocol):
    """A rank to which this one has a connection."""

    rank: int
    address: str | None  # of its machine

    def send(self, message: dict[str, Any], /) -> object: ...


@dataclass(frozen=True, slots=True)
class Speed:
    """How fast a rank has sent to an address."""

    mb_s: float
    best_mb_s: float  # in an earlier window; 0 where there was none
    is_busy: bool


class Silence:
    """How long machines to which something was sent have acknowledged nothing."""

    def __init__(self) -> None:
        self._since_s: dict[str, float] = {}
        self._pinged_s = -patience.PING_S

    def is_ping_due(self, waited_s: float, now_s: float) -> bool:
        """Whether something is to be sent that is worth nothing, so that it is acknowledged."""
        if waited_s < patience.WAITS_S:
            self._since_s.clear()
            return False
        if now_s < self._pinged_s + patience.PING_S:
            return False
        self._pinged_s = now_s
        return True

    def silent_s(self, address: str, found: list[Connection], now_s: float) -> float:
        """Of the machine at that address, as far back as has been asked; 0 where nothing is to be acknowledged."""
        there = [connection for connection in found if connection.there == address]
        if not any(connection.is_unacknowledged for connection in there):
            self._since_s[address] = now_s
            return 0.0
        last_s = now_s - min(connection.silent_s for connection in there)
        self._since_s[address] = max(self._since_s.get(address, now_s), last_s)
        return now_s - self._since_s[address]


class Speeds:
    """How fast this rank sends to each address, from what its connections have sent since the last look."""

    def __init__(self) -> None:
        self._last: dict[Socket, Connection] = {}
        self._best: dict[str, float] = {}
        self._told: dict[str, float] = {}
        self._looked_s = 0.0

    def news(self, now_s: float) -> dict[str, Any] | None:
        """What other ranks should know; None where that is what they know, and where it is too early to say."""
        if now_s < self._looked_s + _WINDOW_S:
            return None
        window_s, self._looked_s = now_s - self._looked_s, now_s
        found, last = connections(), self._last
        self._last = {connection.socket: connection for connection in found}
        speeds = _speeds(found, last, window_s, self._best) if last else {}
        for address, speed in speeds.items():
            self._best[address] = max(speed.mb_s, self._best.get(address, 0.0))
        if not any(_differ(speed.mb_s, self._told.get(address, 0.0)) for address, speed in speeds.items()):
            return None
        self._told |= {address: speed.mb_s for address, speed in speeds.items()}
        to = {address: [speed.mb_s, speed.best_mb_s, speed.is_busy] for address, speed in speeds.items()}
        return {"at": sorted({connection.here for connection in found}), "to": to}


class Table:
    """What all ranks have told of their links."""

    def __init__(self) -> None:
        self._at: dict[int, list[str]] = {}
        self._speeds: dict[tuple[int, str], Speed] = {}
        self._slow: frozenset[tuple[int, str]] = frozenset()
        self._due_s = math.inf

    def hear(self, rank: int, message: Mapping[str, Any]) -> None:
        """Takes down what a rank tells; ValueError and the like for nonsense."""
        self._at[rank] = [str(address) for address in message["at"]]
        for address, (mb_s, best_mb_s, is_busy) in message["to"].items():
            self._speeds[rank, str(address)] = Speed(float(mb_s), float(best_mb_s), bool(is_busy))
        before, self._slow = self._slow, frozenset(link for link in self._speeds if self._is_slow(link))
        if self._slow - before:
            self._due_s = min(self._due_s, time.monotonic() + _SETTLES_S)

    def warning(self) -> str | None:
        """What there is to be told of links that have become slow; when all ranks that see it have said so, and once."""
        if time.monotonic() < self._due_s:
            return None
        self._due_s = math.inf
        return self._text() if self._slow else None

    def _is_slow(self, link: tuple[int, str]) -> bool:
        speed = self._speeds[link]
        return speed.is_busy and _SLOW * speed.mb_s <= max(speed.best_mb_s, self._of_others(link))

    def _of_others(self, link: tuple[int, str]) -> float:
        """The usual speed of links that do not leave from, nor come to, where this one leaves; 0 where none is known."""
        return median([speed.mb_s for other, speed in self._speeds.items() if other[0] != link[0]] or [0.0])

    def _text(self) -> str:
        links = sorted(self._slow)
        head = "a link is slow" if len(links) == 1 else f"{len(links)} links are slow"
        lines = [f"{head}, and training goes on at that pace: look at the network of rank {_joined(self._common_ranks())}."]
        for rank, address in links:
            speed, others = self._speeds[rank, address], self._of_others((rank, address))
            told = [f"{speed.best_mb_s:.1f} MB/s before"] if speed.best_mb_s > speed.mb_s else []
            told += [f"{others:.1f} MB/s on links of other ranks"] if others > _CHANGE * speed.mb_s else []
            to = f"rank {_joined(self._ranks_at(address))} ({address})" if self._ranks_at(address) else address
            lines.append(f"rank {rank} sends {speed.mb_s:.1f} MB/s to {to}; {', '.join(told)}")
        return "\n  ".join(lines)

    def _common_ranks(self) -> set[int]:
        """Those that all slow links have in common: acknowledgements are slow on the way to a rank that sends slowly."""
        sources = {rank for rank, _ in self._slow}
        common = set.intersection(*({rank, *self._ranks_at(address)} for rank, address in self._slow))
        return common & sources or common or sources

    def _ranks_at(self, address: str) -> list[int]:
        return [rank for rank, addresses in self._at.items() if address in addresses]


class Links:
    """Those of a ring."""

    def __init__(self) -> None:
        self._silence = Silence()
        self._speeds = Speeds()
        self.table = Table()

    def look(self, neighbours: Sequence[End], waited_s: float, *, say: Callable[..., object]) -> None:
        """From time to time, with how long this rank has waited for others; `say` tells all ranks what there is to be told."""
        now_s = time.monotonic()
        if self._silence.is_ping_due(waited_s, now_s):
            for neighbour in neighbours:
                neighbour.send(PING)
        silent = self._silent(neighbours, now_s) if waited_s >= patience.WAITS_S else {}
        if max(silent.values(), default=0.0) >= patience.SILENT_S:
            # Where this machine itself is cut off, others fall silent one shortly after the other.
            gone = sorted({rank for rank, seconds in silent.items() if seconds >= patience.SILENT_S / 2})
            say("unreachable", ranks=gone, seconds=max(silent.values()))
        elif (news := self._speeds.news(now_s)) is not None:
            say("sends", **news)
        if (warning := self.table.warning()) is not None:
            faults.tell(warning)

    def _silent(self, neighbours: Sequence[End], now_s: float) -> dict[int, float]:
        found = connections()
        return {end.rank: self._silence.silent_s(end.address, found, now_s) for end in neighbours if end.address is not None}


def _speeds(
    found: list[Connection], last: Mapping[Socket, Connection], window_s: float, best: Mapping[str, float]
) -> dict[str, Speed]:
    speeds = {}
    for address in {connection.there for connection in found}:
        pairs = [(one, last.get(one.socket)) for one in found if one.there == address]
        sent = sum(now.sent_bytes - (0 if then is None else then.sent_bytes) for now, then in pairs)
        # Connections that are busy at once share the link: the time of the busiest one is the least that it was.
        busy_s = max(now.busy_s - (0.0 if then is None else then.busy_s) for now, then in pairs)
        if sent >= _LEAST_BYTES and busy_s > 0:
            speeds[address] = Speed(1e-6 * sent / busy_s, best.get(address, 0.0), busy_s >= _BUSY * window_s)
    return speeds


def _differ(one: float, other: float) -> bool:
    return one >= _CHANGE * other or other >= _CHANGE * one


def _joined(ranks: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(ranks)))
