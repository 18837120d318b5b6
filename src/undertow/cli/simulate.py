"""Implements `undertow simulate`; does not import torch."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from undertow.config import Outer
from undertow.report.comparison import print_steps
from undertow.report.outer import as_dicts, outer_steps, outer_table
from undertow.report.sweep import save_sweep, sweep_table, swept
from undertow.report.timeline import require_matplotlib, save_timeline
from undertow.report.what_if import FIXED, PLANNED, WhatIf
from undertow.shown import print_line


def show_simulation(what_if: WhatIf, *, out: Path, is_json: bool) -> None:
    """Prints the steps as a table and draws them, or prints them as JSON.

    Raises ConfigError for a network without costs, and if nothing can be drawn.
    """
    profile = what_if.profile
    steps = what_if.steps()
    if is_json:
        facts = {
            **_facts(what_if),
            "wire": what_if.wire,
            "param_wire": what_if.param_wire,
            "steps": [step.to_dict() for step in steps],
        }
        print(json.dumps(facts, indent=2))
        return
    require_matplotlib()
    console = Console()
    print_line(console, _model_text(what_if))
    print_line(console, f"Network: {what_if.network}")
    if what_if.optimizer is not None:
        update_us = what_if.divided(what_if.planned).update_us
        print_line(
            console,
            f"Update by {what_if.optimizer}: {what_if.profile.update_us / 1e3:.2f} ms in the "
            f"profile, {update_us / 1e3:.2f} ms on the rank with the most work",
        )
    print_line(console, _conditions_text(what_if))
    if what_if.link is None and profile.is_of_one_size:
        print_line(
            console,
            "Warning: messages of one size were measured, and smaller ones count as no cheaper, "
            "so the times of other buckets "
            "say little. Give --link, or call model.measure_network() before you save the profile.",
        )
    print_steps(steps, console)
    path = out / "simulate.png"
    save_timeline(
        {step.method: step.trace for step in steps if step.method in (FIXED, PLANNED)},
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
        print(
            json.dumps({**_facts(what_if), "network": sweep.network, **sweep.to_dict()}, indent=2)
        )
        return
    console = Console()
    print_line(console, _model_text(what_if))
    print_line(console, f"Network: {sweep.network}")
    print_line(console, _conditions_text(what_if))
    console.print(sweep_table(sweep))
    path = out / "sweep.png"
    save_sweep(sweep, path)
    print_line(console, f"Picture: {path}")


def show_outer(what_if: WhatIf, settings: Sequence[Outer], *, is_json: bool) -> None:
    """Prints steps with outer synchronization as a table, or as JSON.

    Raises ConfigError for a network of nodes, and for a single rank.
    """
    rows = [outer_steps(what_if, outer) for outer in settings]
    wire = settings[0].wire
    if is_json:
        print(json.dumps({**_facts(what_if), "wire": wire, "outer": as_dicts(rows)}, indent=2))
        return
    console = Console()
    print_line(console, _model_text(what_if))
    print_line(console, f"Network: {what_if.network}; differences travel in {wire or 'full width'}")
    console.print(outer_table(rows))


def _facts(what_if: WhatIf) -> dict[str, Any]:
    update = {}
    if what_if.optimizer is not None:
        update_us = what_if.divided(what_if.planned).update_us
        update = {"optimizer": what_if.optimizer, "update_ms": update_us / 1e3}
    return {
        **update,
        "model": what_if.profile.name,
        "strategy": what_if.strategy.name,
        "ranks": what_if.num_ranks,
        "network": what_if.network,
        "conditions": what_if.conditions.of(what_if.profile),
    }


def _model_text(what_if: WhatIf) -> str:
    params = what_if.profile.params
    return (
        f"{what_if.profile.name or 'a model'}, {what_if.strategy.name}: {len(params)} parameters, "
        f"{sum(spec.num_bytes for spec in params) / 1e6:.1f} MB, "
        f"{what_if.compute_us / 1e3:.1f} ms of computing per step"
    )


def _conditions_text(what_if: WhatIf) -> str:
    conditions = what_if.conditions.of(what_if.profile)
    texts = ", ".join(f"{name} {value:g}" for name, value in conditions.items())
    return f"Conditions, as given or measured, else assumed: {texts}"
