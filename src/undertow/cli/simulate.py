"""Implements `undertow simulate`; does not import torch.

A sweep varies one quantity and keeps the others: ranks, the rate of their links, or the size of buckets.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from undertow.cli.what_if import FIXED, OPTIMAL, PER_PARAMETER, NetworkOptions, WhatIf, caps_of, require_rank
from undertow.cost import link_from_text
from undertow.errors import ConfigError, require
from undertow.profile import profile_from_file
from undertow.report.comparison import Sweep, print_outcomes, print_sweep, save_curves
from undertow.report.timeline import checked_writing, make_directory, require_matplotlib, save_timeline
from undertow.shown import print_line
from undertow.simulate import Conditions

_WHERE = "undertow simulate"
_RATE_FACTORS = (1 / 8, 1 / 4, 1 / 2, 1, 2, 4, 8)
_BUCKET_MIBS = (0.25, 0.5, 1, 2, 4, 8, 16, 25, 50, 100, 200, 400, 800, 1600)
_RATE = re.compile(r"(?P<rate>[\d.]+)(?P<unit>\w+)(?P<latency>.*)")  # splits a text that link_from_text reads


def show_simulation(  # noqa: PLR0913  # one argument per option
    file: Path,
    *,
    strategy: str | None,
    num_ranks: int | None,
    network: NetworkOptions,
    conditions: Conditions,
    sweep: str | None,
    out: Path,
) -> None:
    """Prints the requested simulation as a table and draws it. Raises ConfigError for impossible values."""
    require_rank(num_ranks, of="a step has", where=_WHERE)
    require(
        sweep is None or sweep in SWEEPS,
        f"there is no --sweep {sweep!r}.",
        where=_WHERE,
        remedy=f"Choose one of: {', '.join(map(repr, SWEEPS))}.",
    )
    require_matplotlib()
    profile = profile_from_file(file)
    what_if = WhatIf.of(profile, strategy, num_ranks, network, conditions)
    console, source = Console(), what_if.network.source
    make_directory(out, where=_WHERE)
    print_line(
        console,
        f"{profile.name or file.name}, {what_if.strategy.name}: {len(profile.params)} parameters, "
        f"{sum(spec.num_bytes for spec in profile.params) / 1e6:.1f} MB, {what_if.compute_us / 1e3:.1f} ms of computing per step",
    )
    print_line(console, f"Network: {source}")
    path = out / ("simulate.png" if sweep is None else f"simulate-{sweep}.png")
    with checked_writing(path, where=_WHERE):
        if sweep is None:
            outcomes = what_if.outcomes()
            print_outcomes(outcomes, console)
            save_timeline({outcome.method: outcome.trace for outcome in outcomes if outcome.method in (FIXED, OPTIMAL)}, path)
        else:
            swept = SWEEPS[sweep](what_if)
            print_sweep(swept, console)
            save_curves(swept, path)
    print_line(console, f"Picture: {path}")


def swept_ranks(num_ranks: int, per_node: int | None) -> list[int]:
    """Returns powers of two, of ranks on one node and of full nodes, up to `num_ranks`, and `num_ranks` itself."""
    per_node = min(per_node or 1, num_ranks)
    powers = [2**power for power in range(num_ranks.bit_length())]
    candidates = {num_ranks, *(size for power in powers for size in (power, power * per_node))}
    counts = [size for size in candidates if min(2, num_ranks) <= size <= num_ranks]
    return sorted(size for size in counts if size <= per_node or size % per_node == 0)


def _sweep_ranks(what_if: WhatIf) -> Sweep:
    sizes = swept_ranks(what_if.num_ranks, what_if.options.per_node)
    points = {str(size): replace(what_if, num_ranks=size).outcomes() for size in sizes}
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
    rates = [f"{float(match['rate']) * factor:.6f}".rstrip("0").rstrip(".") for factor in _RATE_FACTORS]
    options = {rate: replace(what_if.options, link=f"{rate}{match['unit']}{match['latency']}") for rate in rates}
    points = {rate: replace(what_if, options=changed).outcomes() for rate, changed in options.items()}
    return Sweep(axis="rate of every link", unit=f"{match['unit']}/s", points=points)


def _sweep_bucket(what_if: WhatIf) -> Sweep:
    """Varies sizes up to the first one that holds all gradients; other methods are listed too, the same at every size."""
    total_mib = sum(spec.num_bytes for spec in what_if.profile.params) / 2**20
    others = {outcome.method: outcome for outcome in what_if.outcomes()}
    sizes = [size for size, smaller in zip(_BUCKET_MIBS, (0, *_BUCKET_MIBS), strict=False) if smaller < total_mib]
    fixed = {f"{size:g}": what_if.outcome("fixed size", what_if.plan_of_size(caps_of(size))) for size in sizes}
    points = {size: (others[PER_PARAMETER], outcome, others[OPTIMAL]) for size, outcome in fixed.items()}
    return Sweep(axis="largest bucket", unit="MiB", points=points)


SWEEPS: Mapping[str, Callable[[WhatIf], Sweep]] = {
    "ranks": _sweep_ranks,
    "bandwidth": _sweep_bandwidth,
    "bucket": _sweep_bucket,
}
