"""Implements `undertow simulate`; does not import torch."""

import json
from pathlib import Path

from rich.console import Console

from undertow.report.comparison import print_steps
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
            "model": profile.name,
            "strategy": what_if.strategy.name,
            "ranks": what_if.num_ranks,
            "network": what_if.network,
            "conditions": what_if.conditions.of(profile),
            "steps": [step.to_dict() for step in steps],
        }
        print(json.dumps(facts, indent=2))
        return
    require_matplotlib()
    console = Console()
    print_line(
        console,
        f"{profile.name or 'a model'}, {what_if.strategy.name}: {len(profile.params)} parameters, "
        f"{sum(spec.num_bytes for spec in profile.params) / 1e6:.1f} MB, "
        f"{what_if.compute_us / 1e3:.1f} ms of computing per step",
    )
    print_line(console, f"Network: {what_if.network}")
    conditions = what_if.conditions.of(profile)
    texts = ", ".join(f"{name} {value:g}" for name, value in conditions.items())
    print_line(console, f"Conditions, as given or measured, else assumed: {texts}")
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
