"""The steps of a run: systems of one process take turns, so that a machine that drifts drifts for all of them.

    round      system a        system b        system c
      0    barrier step    barrier step    barrier step      warm-up
      1    barrier step    ...                                the order is reversed every other round

A system that carries communication over into its next step has several steps per turn and is timed from the start of
one to the start of the next, without the first: what a turn begins or ends with is not its steady state.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.matrix.clock import Clock
from benchmarks.matrix.systems import System
from benchmarks.matrix.systems.bare import Bare

MIN_TURNS = 5
_MEASURED = ("backward_s", "step_s", "cpu_s", "sent_bytes", "ready_s", "used_s")


@dataclass(slots=True, kw_only=True)
class Player:
    """A system and what its turns have shown, step by step."""

    name: str
    system: System
    steps_per_turn: int
    backward_s: list[float] = field(default_factory=list)  # until gradients are averaged
    step_s: list[float] = field(default_factory=list)  # with the update
    cpu_s: list[float] = field(default_factory=list)  # of the whole process, all threads
    sent_bytes: list[float] = field(default_factory=list)
    ready_s: list[list[float]] = field(default_factory=list)  # of the bare model, by parameter; so is the next
    used_s: list[list[float]] = field(default_factory=list)

    def forget(self) -> None:
        """What came before was warm-up."""
        for measured in _MEASURED:
            getattr(self, measured).clear()

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


def play(players: Sequence[Player], table: Table, *, num_warmup: int, num_turns: int, turn_budget_s: float) -> None:
    """Warm-up turns, then those that count."""
    for _ in range(num_warmup):
        for player in players:
            _take_turn(player, table)
    counts = _agreed_counts(players, num_turns, turn_budget_s)
    for player in players:
        player.forget()
    for turn in range(max(counts)):
        seated = list(zip(players, counts, strict=True))
        for player, count in reversed(seated) if turn % 2 else seated:
            if turn < count:
                _take_turn(player, table)


def _take_turn(player: Player, table: Table) -> None:
    system, clock, starts, backwards = player.system, table.clock, [], []
    table.beat()
    dist.barrier(group=table.group)
    sent = table.count_sent() if table.count_sent is not None else 0
    began_cpu_s = time.process_time()
    for _ in range(player.steps_per_turn):
        starts.append(clock.now())
        system.backward(table.batch)
        backwards.append(clock.now())
        system.update()
    starts.append(clock.now())
    system.finish()
    # Before the host waits for a device, which is no work of the system's.
    player.cpu_s.append((time.process_time() - began_cpu_s) / player.steps_per_turn)
    clock.settle()
    if table.count_sent is not None:
        player.sent_bytes.append((table.count_sent() - sent) / player.steps_per_turn)
    is_steady = slice(None) if player.steps_per_turn == 1 else slice(1, -1)
    player.step_s += [clock.seconds(start, stop) for start, stop in pairwise(starts)][is_steady]
    player.backward_s += [clock.seconds(start, stop) for start, stop in zip(starts, backwards, strict=False)][is_steady]
    if isinstance(system, Bare):
        player.ready_s.append(list(system.ready_s))
        player.used_s.append(list(system.used_s))


def _agreed_counts(players: Sequence[Player], num_turns: int, turn_budget_s: float) -> list[int]:
    """Turns per player, the same on all ranks: as many as the slowest rank's last warm-up turn leaves time for."""
    turn_s = torch.tensor([player.step_s[-1] * player.steps_per_turn for player in players])
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
