"""Implements `undertow simulate`; does not import torch.

A sweep varies one quantity and keeps the others: ranks, or the rate of their links.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from undertow.cost import link_from_text
from undertow.errors import ConfigError, checked_writing, make_directory, require
from undertow.profile import profile_from_file
from undertow.report.comparison import Outcome, Sweep, print_outcomes, print_sweep
from undertow.report.timeline import require_matplotlib, save_timeline
from undertow.report.what_if import FIXED, PLANNED, NetworkOptions, WhatIf, require_rank
from undertow.shown import print_line
from undertow.simulate import Conditions

_WHERE = "undertow simulate"
_RATE_FACTORS = (1 / 8, 1 / 4, 1 / 2, 1, 2, 4, 8)
# The parts of a link's text, as link_from_text reads it.
_RATE = re.compile(r"(?P<rate>[\d.]+)\s*(?P<unit>[a-zA-Z/]+)(?P<latency>.*)")


def show_simulation(  # noqa: PLR0913  # one argument per option
    file: Path,
    *,
    strategy: str | None,
    num_ranks: int | None,
    network: NetworkOptions,
    conditions: Conditions,
    sweep: str | None,
    out: Path,
    is_json: bool,
) -> None:
    """Prints the requested simulation as a table and draws it.

    Raises ConfigError for impossible values.
    """
    require_rank(num_ranks, of="a step has", where=_WHERE)
    require(
        sweep is None or sweep in SWEEPS,
        f"there is no --sweep {sweep!r}.",
        where=_WHERE,
        remedy=f"Choose one of: {', '.join(map(repr, SWEEPS))}.",
    )
    draws = sweep is None and not is_json
    if draws:
        require_matplotlib()
    profile = profile_from_file(file)
    what_if = WhatIf.of(profile, strategy, num_ranks, network, conditions)
    console, source = Console(), what_if.network.source
    if is_json:
        print(
            json_of(
                what_if,
                SWEEPS[sweep](what_if).points
                if sweep
                else {str(what_if.num_ranks): what_if.outcomes()},
            )
        )
        return
    if draws:
        make_directory(out, where=_WHERE)
    print_line(
        console,
        f"{profile.name or file.name}, {what_if.strategy.name}: {len(profile.params)} parameters, "
        f"{sum(spec.num_bytes for spec in profile.params) / 1e6:.1f} MB, "
        f"{what_if.compute_us / 1e3:.1f} ms of computing per step",
    )
    print_line(console, f"Network: {source}")
    print_assumptions(what_if, console)
    if sweep is not None:
        print_sweep(SWEEPS[sweep](what_if), console)
        return
    path = out / "simulate.png"
    outcomes = what_if.outcomes()
    print_outcomes(outcomes, console)
    with checked_writing(path, where=_WHERE):
        save_timeline(
            {
                outcome.method: outcome.trace
                for outcome in outcomes
                if outcome.method in (FIXED, PLANNED)
            },
            path,
            conditions=f"simulated, {source}",
            limit_us=what_if.limit_us,
        )
    print_line(console, f"Picture: {path}")


def print_assumptions(what_if: WhatIf, console: Console) -> None:
    """Prints the numbers that are neither measured nor given, and that the forward was guessed."""
    effects, profile = what_if.conditions.of(what_if.profile), what_if.profile
    assumed = [
        name
        for name in effects
        if getattr(what_if.conditions, name) is None and getattr(profile, name) is None
    ]
    if assumed and not profile.is_measured:
        print_line(
            console,
            f"Assumed, not measured: {', '.join(f'{name} {effects[name]:g}' for name in assumed)}",
        )
    if what_if.options.link is None and profile.is_of_one_size:
        print_line(
            console,
            "Warning: messages of one size were measured, and smaller ones count as no cheaper, "
            "so the times of other buckets "
            "say little. Give --link, or call model.measure_network() before you save the profile.",
        )
    if profile.is_forward_guessed:
        print_line(
            console, "Warning: the share of forward is a guess, half of backward; give forward_us."
        )


def json_of(what_if: WhatIf, points: Mapping[str, Sequence[Outcome]]) -> str:
    """Returns outcomes as JSON, by the value of the swept option."""
    return json.dumps(
        {
            "model": what_if.profile.name,
            "strategy": what_if.strategy.name,
            "ranks": what_if.num_ranks,
            "network": what_if.network.source,
            "conditions": what_if.conditions.of(what_if.profile),
            "outcomes": {
                value: [outcome.to_dict() for outcome in of_value]
                for value, of_value in points.items()
            },
        },
        indent=2,
    )


def swept_ranks(num_ranks: int, per_node: int | None) -> list[int]:
    """Returns powers of two, of ranks on one node and of full nodes, up to `num_ranks`, and
    `num_ranks` itself."""
    per_node = min(per_node or 1, num_ranks)
    powers = [2**power for power in range(num_ranks.bit_length())]
    candidates = {num_ranks, *(size for power in powers for size in (power, power * per_node))}
    counts = [size for size in candidates if min(2, num_ranks) <= size <= num_ranks]
    return sorted(size for size in counts if size <= per_node or size % per_node == 0)


def _sweep_ranks(what_if: WhatIf) -> Sweep:
    points = {
        str(size): replace(what_if, num_ranks=size).outcomes()
        for size in swept_ranks(what_if.num_ranks, what_if.options.per_node)
    }
    return Sweep(axis="data-parallel size", unit="ranks", points=points)


def _sweep_bandwidth(what_if: WhatIf) -> Sweep:
    """Varies the rate of --link from an eighth to eight times; its latency stays."""
    link = what_if.options.link
    match = None if link is None or link_from_text(link).is_free else _RATE.fullmatch(link)
    if match is None:
        raise ConfigError(
            "--sweep bandwidth varies the rate of --link.",
            where=_WHERE,
            remedy='Give a rate, such as --link "100gbit,5us".',
        )
    rates = [
        f"{float(match['rate']) * factor:.6f}".rstrip("0").rstrip(".") for factor in _RATE_FACTORS
    ]
    options = {
        rate: replace(what_if.options, link=f"{rate}{match['unit']}{match['latency']}")
        for rate in rates
    }
    points = {
        rate: replace(what_if, options=changed).outcomes() for rate, changed in options.items()
    }
    unit = match["unit"]
    # "Gb/s", "GbE"
    return Sweep(
        axis="rate of every link", unit=unit if unit[-1] in "seE" else f"{unit}/s", points=points
    )


SWEEPS: Mapping[str, Callable[[WhatIf], Sweep]] = {
    "ranks": _sweep_ranks,
    "bandwidth": _sweep_bandwidth,
}
