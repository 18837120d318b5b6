"""What `undertow simulate` does; imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from undertow.cli.network import NetworkOptions
from undertow.cli.sweep import sweep_named
from undertow.cli.what_if import FIXED, OPTIMAL, Question, WhatIf
from undertow.errors import ConfigError
from undertow.profile import profile_from_file
from undertow.report.comparison import Sweep, print_outcomes, print_sweep
from undertow.report.curves import save_curves
from undertow.report.directory import checked_writing, make_directory
from undertow.report.shown import print_line
from undertow.report.timeline import require_matplotlib, save_timeline
from undertow.schedule import strategy_named
from undertow.simulate import Conditions

__all__ = ["SimulateRequest", "show_simulation"]

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
        if self.sweep is not None:
            sweep_named(self.sweep)


def show_simulation(request: SimulateRequest) -> None:
    """Prints what is asked for as a table and draws it."""
    require_matplotlib()
    profile = profile_from_file(request.file)
    num_ranks = profile.num_ranks if request.num_ranks is None else request.num_ranks
    question = Question(
        profile=profile,
        strategy=strategy_named(profile.strategy if request.strategy is None else request.strategy),
        options=request.network,
        conditions=request.conditions,
    )
    console = Console()
    what_if = question.at(num_ranks)
    make_directory(request.out, where=_WHERE)
    print_line(
        console,
        f"{profile.name or request.file.name}, {question.strategy.name}: {len(profile.params)} parameters, "
        f"{sum(spec.num_bytes for spec in profile.params) / 1e6:.1f} MB, {what_if.compute_us / 1e3:.1f} ms of computing per step",
    )
    print_line(console, f"Network: {what_if.network.source}")
    if request.sweep is None:
        path = request.out / "simulate.png"
        _show_step(what_if, path, console)
    else:
        path = request.out / f"simulate-{request.sweep}.png"
        _show_sweep(sweep_named(request.sweep)(question, num_ranks), path, console)
    print_line(console, f"Picture: {path}")


def _show_step(what_if: WhatIf, path: Path, console: Console) -> None:
    outcomes = what_if.outcomes()
    print_outcomes(outcomes, console)
    with checked_writing(path, where=_WHERE):
        save_timeline({outcome.method: outcome.trace for outcome in outcomes if outcome.method in (FIXED, OPTIMAL)}, path)


def _show_sweep(sweep: Sweep, path: Path, console: Console) -> None:
    print_sweep(sweep, console)
    with checked_writing(path, where=_WHERE):
        save_curves(sweep, path)
