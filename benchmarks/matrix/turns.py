"""The steps of a run: systems of one process take turns, so that a machine that drifts drifts for all of them.

    turn            system a                      system b
      0    barrier 4 steps               barrier 4 steps
      1    ...                                                        the order is reversed every other turn

The inner steps of a turn are timed, from the start of one to the start of the next: the first one finds the caches as
another system has left them, and behind the last one nothing hides what it leaves in flight. It is the same for all,
for those too that leave nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.matrix.clock import Clock
from benchmarks.matrix.systems import System

STEPS_PER_TURN = 4
_TIMED = slice(1, -1)
TIMED_PER_TURN = len(range(STEPS_PER_TURN)[_TIMED])
MIN_TURNS = 6
_MEASURED = ("backward_s", "step_s", "cpu_s", "sent_bytes")


@dataclass(slots=True, kw_only=True)
class Player:
    """A system and what its turns have shown, step by step."""

    name: str
    system: System
    backward_s: list[float] = field(default_factory=list)  # until gradients are averaged
    step_s: list[float] = field(default_factory=list)  # with the update
    cpu_s: list[float] = field(default_factory=list)  # of the whole process, all threads; a mean of each turn, as the next
    sent_bytes: list[float] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        return {**{name: getattr(self, name) for name in _MEASURED}, "facts": dict(self.system.facts())}


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Around which the players sit."""

    batch: tuple[Tensor, ...]
    count_sent: Callable[[], int] | None  # None where ranks share the interface
    group: dist.ProcessGroup
    clock: Clock
    beat: Callable[[], None]  # tells the runner that this rank is alive


def play(players: Sequence[Player], table: Table, *, num_turns: int, turn_budget_s: float) -> None:
    """`num_turns` of each; of a slow one as many as there is time for, but MIN_TURNS."""
    for player in players:
        _take_turn(player, table)
    counts = _agreed_counts(players, num_turns, turn_budget_s)
    for turn in range(1, max(counts)):
        seated = list(zip(players, counts, strict=True))
        for player, count in reversed(seated) if turn % 2 else seated:
            if turn < count:
                _take_turn(player, table)


def _take_turn(player: Player, table: Table) -> None:
    system, clock = player.system, table.clock
    starts, backwards = [], []
    dist.barrier(group=table.group)
    sent = table.count_sent() if table.count_sent is not None else 0
    began_cpu_s = time.process_time()
    for _ in range(STEPS_PER_TURN):
        table.beat()
        starts.append(clock.now())
        system.backward(table.batch)
        backwards.append(clock.now())
        system.update()
    starts.append(clock.now())
    system.finish()
    # Before the host waits for a device, which is no work of the system's.
    player.cpu_s.append((time.process_time() - began_cpu_s) / STEPS_PER_TURN)
    clock.settle()
    if table.count_sent is not None:
        player.sent_bytes.append((table.count_sent() - sent) / STEPS_PER_TURN)
    player.step_s += [clock.seconds(start, stop) for start, stop in pairwise(starts)][_TIMED]
    player.backward_s += [clock.seconds(start, stop) for start, stop in zip(starts, backwards, strict=False)][_TIMED]


def _agreed_counts(players: Sequence[Player], num_turns: int, turn_budget_s: float) -> list[int]:
    """Turns per player, the same on all ranks: as many as there is time for, by the slowest rank's first turn."""
    turn_s = torch.tensor([mean(player.step_s) * STEPS_PER_TURN for player in players])
    dist.all_reduce(turn_s, op=dist.ReduceOp.MAX)
    return [max(min(MIN_TURNS, num_turns), min(num_turns, int(turn_budget_s / one_s))) for one_s in turn_s.tolist()]


def sent_bytes_of(interface: str) -> Callable[[], int]:
    """Counts what has left through `interface` of this network namespace, headers included."""
    counters = Path("/proc/self/net/dev")

    def count() -> int:
        for line in counters.read_text(encoding="ascii").splitlines():
            name, _, values = line.partition(":")
            if name.strip() == interface:
                return int(values.split()[8])
        return 0

    return count
