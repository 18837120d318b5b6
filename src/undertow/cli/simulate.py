"""What `undertow simulate` does; imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from undertow.cli.network import NetworkOptions
from undertow.cli.what_if import FIXED, OPTIMAL, WhatIf
from undertow.errors import ConfigError
from undertow.profile import profile_from_file
from undertow.report.comparison import print_outcomes, print_sweep
from undertow.report.directory import checked_writing, make_directory
from undertow.report.shown import print_line
from undertow.report.timeline import require_matplotlib, save_timeline
from undertow.schedule import strategy_named
from undertow.simulate import Conditions

__all__ = ["SimulateRequest", "show_simulation", "swept_ranks"]

_WHERE = "undertow simulate"


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateRequest:
    """The options of the command. Raises ConfigError for what cannot be."""

    file: Path
    strategy: str | None
    num_ranks: int | None
    network: NetworkOptions
    conditions: Conditions
    sweep: str | None
    out: Path

    def __post_init__(self) -> None:
        if self.num_ranks is not None and self.num_ranks < 1:
            raise ConfigError(
                f"a step has one rank or more, got --ranks {self.num_ranks}.",
                where=_WHERE,
                remedy="Give one or more, or leave it out.",
            )
        if self.sweep not in (None, "ranks"):
            raise ConfigError(f"there is no --sweep {self.sweep!r}.", where=_WHERE, remedy="Give --sweep ranks, or leave it out.")


def show_simulation(request: SimulateRequest) -> None:
    """Prints the answer as a table, and draws the step if there is no sweep."""
    profile = profile_from_file(request.file)
    what_if = WhatIf(
        profile=profile,
        strategy=strategy_named(profile.strategy if request.strategy is None else request.strategy),
        num_ranks=profile.num_ranks if request.num_ranks is None else request.num_ranks,
        options=request.network,
        conditions=request.conditions,
    )
    console, network = Console(), what_if.network
    if request.sweep is None:
        require_matplotlib()
        make_directory(request.out, where=_WHERE)
    print_line(
        console,
        f"{profile.name or request.file.name}, {what_if.strategy.name}: {len(profile.params)} parameters, "
        f"{sum(spec.num_bytes for spec in profile.params) / 1e6:.1f} MB, {what_if.compute_us / 1e3:.1f} ms of computing per step",
    )
    print_line(console, f"Network: {network.source}")
    if request.sweep is not None:
        sizes = swept_ranks(what_if.num_ranks, request.network.per_node)
        print_sweep({size: replace(what_if, num_ranks=size).outcomes() for size in sizes}, console)
        return
    outcomes = what_if.outcomes()
    print_outcomes(outcomes, console)
    path = request.out / "simulate.png"
    with checked_writing(path, where=_WHERE):
        save_timeline({outcome.method: outcome.trace for outcome in outcomes if outcome.method in (FIXED, OPTIMAL)}, path)
    print_line(console, f"Picture: {path}")


def swept_ranks(num_ranks: int, per_node: int | None) -> list[int]:
    """Powers of two, of ranks on one node and of full nodes, up to that number, and that number."""
    per_node = min(per_node or 1, num_ranks)
    powers = [2**power for power in range(num_ranks.bit_length())]
    candidates = {num_ranks, *(size for power in powers for size in (power, power * per_node))}
    counts = [size for size in candidates if min(2, num_ranks) <= size <= num_ranks]
    return sorted(size for size in counts if size <= per_node or size % per_node == 0)
