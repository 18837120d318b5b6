"""Varies one quantity and keeps the others: ranks, the rate of their links, or the size of buckets."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace

from undertow.cli.what_if import OPTIMAL, PER_PARAMETER, WhatIf, caps_of
from undertow.cost import link_from_text
from undertow.errors import ConfigError
from undertow.report.comparison import Sweep

__all__ = ["SWEEPS", "swept_ranks"]

_RATE_FACTORS = (1 / 8, 1 / 4, 1 / 2, 1, 2, 4, 8)
_BUCKET_MIBS = (0.25, 0.5, 1, 2, 4, 8, 16, 25, 50, 100, 200, 400, 800, 1600)
_RATE = re.compile(r"(?P<rate>[\d.]+)(?P<unit>\w+)(?P<latency>.*)")  # splits a text that link_from_text reads


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
            where="undertow simulate",
            remedy='Give a rate, such as --link "100gbit,5us".',
        )
    points = {}
    for factor in _RATE_FACTORS:
        rate = f"{float(match['rate']) * factor:.6f}".rstrip("0").rstrip(".")
        options = replace(what_if.options, link=f"{rate}{match['unit']}{match['latency']}")
        points[rate] = replace(what_if, options=options).outcomes()
    return Sweep(axis="rate of every link", unit=f"{match['unit']}/s", points=points)


def _sweep_bucket(what_if: WhatIf) -> Sweep:
    """Varies sizes up to the first one that holds all gradients; other methods are listed too, the same at every size."""
    total_mib = sum(spec.num_bytes for spec in what_if.profile.params) / 2**20
    others = {outcome.method: outcome for outcome in what_if.outcomes()}
    points = {}
    for size, smaller in zip(_BUCKET_MIBS, (0, *_BUCKET_MIBS), strict=False):
        if smaller < total_mib:
            fixed = what_if.outcome("fixed size", what_if.plan_of_size(caps_of(size)))
            points[f"{size:g}"] = (others[PER_PARAMETER], fixed, others[OPTIMAL])
    return Sweep(axis="largest bucket", unit="MiB", points=points)


SWEEPS: Mapping[str, Callable[[WhatIf], Sweep]] = {
    "ranks": _sweep_ranks,
    "bandwidth": _sweep_bandwidth,
    "bucket": _sweep_bucket,
}
