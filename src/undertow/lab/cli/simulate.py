"""Implements `undertow simulate`; does not import torch."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from undertow.config import Outer
from undertow.lab.report.comparison import compared, print_steps
from undertow.lab.report.outer import COLUMNS, outer_steps
from undertow.lab.report.sweep import save_sweep, sweep_table, swept
from undertow.lab.report.timeline import require_matplotlib, save_timeline
from undertow.lab.simulate import DEFAULTS
from undertow.lab.what_if import FIXED, PLANNED, WhatIf
from undertow.shown import print_line, table_of

# A standard deviation of computing times above which the line says where it comes from: ranks of
# one kind differ by less, so it may come from other work on a machine.
_NOTABLE_SKEW = 0.05


def show_simulation(what_if: WhatIf, *, out: Path, is_json: bool) -> None:
    """Prints the steps as a table and draws them, or prints them as JSON.

    Raises ConfigError for a network without costs, and if nothing can be drawn.
    """
    steps = compared(what_if)
    if is_json:
        formats = {"wire": what_if.wire, "param_wire": what_if.param_wire}
        _print_json(what_if, **formats, steps=[step.to_dict() for step in steps])
        return
    require_matplotlib()
    lines = []
    if what_if.optimizer is not None:
        lines.append(
            f"Update by {what_if.optimizer}: {what_if.profile.update_us / 1e3:.2f} ms in the "
            f"profile, {_update_ms(what_if):.2f} ms on the rank with the most work"
        )
    lines += _conditions_lines(what_if)
    if what_if.link is None and what_if.profile.is_of_one_size:
        lines.append(
            "Warning: messages of one size were measured, and smaller ones count as no cheaper, "
            "so the times of other buckets "
            "say little. Give --link, or call model.measure_network() before you save the profile."
        )
    console = _console(what_if, what_if.network, lines)
    print_steps(steps, console)
    path = out / "simulate.png"
    save_timeline(
        {step.method: step.record.trace() for step in steps if step.method in (FIXED, PLANNED)},
        path,
        conditions=f"simulated, {what_if.network}",
    )
    print_line(console, f"Picture: {path}")


def show_sweep(what_if: WhatIf, *, out: Path, is_json: bool) -> None:
    """Prints the step over links of many rates as a table and draws it, or prints JSON.

    Raises ConfigError for a single rank, and if nothing can be drawn.
    """
    if not is_json:
        require_matplotlib()
    sweep = swept(what_if)
    if is_json:
        _print_json(what_if, **asdict(sweep))
        return
    console = _console(what_if, sweep.network, _conditions_lines(what_if))
    console.print(sweep_table(sweep))
    path = out / "sweep.png"
    save_sweep(sweep, path)
    print_line(console, f"Picture: {path}")


def show_outer(what_if: WhatIf, settings: Sequence[Outer], *, is_json: bool) -> None:
    """Prints steps with outer synchronization as a table, or as JSON.

    Raises ConfigError for a network of nodes, and for a single rank.
    """
    rows = [asdict(outer_steps(what_if, outer)) for outer in settings]
    wire = settings[0].wire
    if is_json:
        _print_json(what_if, wire=wire, outer=rows)
        return
    network = f"{what_if.network}; differences travel in {wire or 'full width'}"
    _console(what_if, network, []).print(table_of(COLUMNS, rows))


def _print_json(what_if: WhatIf, **answer: Any) -> None:
    update = {}
    if what_if.optimizer is not None:
        update = {"optimizer": what_if.optimizer, "update_ms": _update_ms(what_if)}
    facts = {
        **update,
        "model": what_if.profile.name,
        "strategy": what_if.strategy.name,
        "ranks": what_if.num_ranks,
        "network": what_if.network,
        "conditions": what_if.conditions.of(what_if.profile),
        "profile_skew": what_if.profile.skew,
    }
    print(json.dumps({**facts, **answer}, indent=2))


def _console(what_if: WhatIf, network: str, lines: Iterable[str]) -> Console:
    """Prints the question and returns the console for the answer."""
    params = what_if.profile.params
    is_slowest = what_if.profile.is_measured and what_if.num_ranks > 1
    slowest = " on the slowest rank" if is_slowest else ""
    model = (
        f"{what_if.profile.name or 'a model'}, {what_if.strategy.name}: {len(params)} parameters, "
        f"{sum(spec.num_bytes for spec in params) / 1e6:.1f} MB, "
        f"{what_if.compute_us / 1e3:.1f} ms of computing per step{slowest}"
    )
    console = Console()
    for line in (model, f"Network: {network}", *lines):
        print_line(console, line)
    return console


def _update_ms(what_if: WhatIf) -> float:
    return what_if.divided(what_if.planned).update_us / 1e3


def _conditions_lines(what_if: WhatIf) -> list[str]:
    conditions = what_if.conditions.of(what_if.profile)
    texts = ", ".join(f"{name} {value:g}" for name, value in conditions.items())
    lines = [f"Conditions (given, measured or assumed): {texts}"]
    measured = what_if.profile.skew
    if what_if.num_ranks == 1 or measured is None or measured <= _NOTABLE_SKEW:
        return lines
    if what_if.conditions.skew is None:
        lines.append(
            f"The skew is the profile's: the computing times of its ranks had a standard "
            f"deviation of {measured:.1%}. If something disturbed a rank in that run, give "
            f"another, such as --skew {DEFAULTS['skew']:g}."
        )
    else:
        lines.append(
            f"The profile's skew of {measured:.1%} is not used: --skew "
            f"{what_if.conditions.skew:g} is given."
        )
    return lines
