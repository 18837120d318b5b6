"""Implements `undertow simulate`; does not import torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from undertow.cli.network import NetworkOptions
from undertow.cli.sweep import SWEEPS
from undertow.cli.what_if import FIXED, OPTIMAL, WhatIf
from undertow.errors import ConfigError
from undertow.profile import profile_from_file
from undertow.report.comparison import print_outcomes, print_sweep
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
    """The options of the command. Raises ConfigError for impossible values."""

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
        if self.sweep is not None and self.sweep not in SWEEPS:
            names = ", ".join(map(repr, SWEEPS))
            raise ConfigError(f"there is no --sweep {self.sweep!r}.", where=_WHERE, remedy=f"Choose one of: {names}.")


def show_simulation(request: SimulateRequest) -> None:
    """Prints the requested simulation as a table and draws it."""
    require_matplotlib()
    profile = profile_from_file(request.file)
    what_if = WhatIf(
        profile=profile,
        strategy=strategy_named(profile.strategy if request.strategy is None else request.strategy),
        num_ranks=profile.num_ranks if request.num_ranks is None else request.num_ranks,
        options=request.network,
        conditions=request.conditions,
    )
    console, network = Console(), what_if.network
    make_directory(request.out, where=_WHERE)
    print_line(
        console,
        f"{profile.name or request.file.name}, {what_if.strategy.name}: {len(profile.params)} parameters, "
        f"{sum(spec.num_bytes for spec in profile.params) / 1e6:.1f} MB, {what_if.compute_us / 1e3:.1f} ms of computing per step",
    )
    print_line(console, f"Network: {network.source}")
    if request.sweep is None:
        outcomes, path = what_if.outcomes(), request.out / "simulate.png"
        print_outcomes(outcomes, console)
        with checked_writing(path, where=_WHERE):
            save_timeline({outcome.method: outcome.trace for outcome in outcomes if outcome.method in (FIXED, OPTIMAL)}, path)
    else:
        sweep, path = SWEEPS[request.sweep](what_if), request.out / f"simulate-{request.sweep}.png"
        print_sweep(sweep, console)
        with checked_writing(path, where=_WHERE):
            save_curves(sweep, path)
    print_line(console, f"Picture: {path}")
