"""One thing varied, all else the same: ranks, the rate of their links, or the size of buckets."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from undertow.cli.what_if import OPTIMAL, PER_PARAMETER, Question, caps_of
from undertow.cost import link_from_text
from undertow.errors import ConfigError
from undertow.report.comparison import Point, Sweep

__all__ = ["SWEEPS", "sweep_named"]

_RATE_FACTORS = (1 / 8, 1 / 4, 1 / 2, 1, 2, 4, 8)
_BUCKET_MIBS = (0.25, 0.5, 1, 2, 4, 8, 16, 25, 50, 100, 200, 400, 800, 1600)
_RATE = re.compile(r"(?P<rate>[\d.]+)(?P<unit>\w+)(?P<latency>.*)")  # of what link_from_text reads


def sweep_named(name: str) -> Callable[[Question, int], Sweep]:
    """The sweep of that name, over a question and a number of ranks; ConfigError for another one."""
    if name not in SWEEPS:
        raise _refused(f"there is no --sweep {name!r}.", f"Choose one of: {', '.join(map(repr, SWEEPS))}.")
    return SWEEPS[name]


def _sweep_ranks(question: Question, num_ranks: int) -> Sweep:
    """Powers of two, of ranks on one node and of full nodes, up to that number, and that number."""
    per_node = min(question.options.per_node or 1, num_ranks)
    powers = [2**power for power in range(num_ranks.bit_length())]
    candidates = {num_ranks, *(size for power in powers for size in (power, power * per_node))}
    counts = [size for size in candidates if min(2, num_ranks) <= size <= num_ranks]
    counts = sorted(size for size in counts if size <= per_node or size % per_node == 0)
    points = [Point(value=size, label=str(size), outcomes=question.at(size).outcomes()) for size in counts]
    return Sweep(axis="data-parallel size", unit="ranks", points=tuple(points))


def _sweep_bandwidth(question: Question, num_ranks: int) -> Sweep:
    """Rates from an eighth of that of --link to eight times it; its latency stays."""
    link = question.options.link
    has_rate = link is not None and not link_from_text(link).is_free
    match = _RATE.fullmatch(link) if link is not None and has_rate else None
    if match is None:
        raise _refused("--sweep bandwidth varies the rate of --link.", 'Give a rate, such as --link "100gbit,5us".')
    rates = [float(match["rate"]) * factor for factor in _RATE_FACTORS]
    labels = [f"{rate:.6f}".rstrip("0").rstrip(".") for rate in rates]
    links = [f"{label}{match['unit']}{match['latency']}" for label in labels]
    points = [
        Point(value=rate, label=label, outcomes=question.at(num_ranks, link=link).outcomes())
        for rate, label, link in zip(rates, labels, links, strict=True)
    ]
    return Sweep(axis="rate of every link", unit=f"{match['unit']}/s", points=tuple(points))


def _sweep_bucket(question: Question, num_ranks: int) -> Sweep:
    """Sizes up to the first one that holds all gradients; other methods stand beside it, the same at every size."""
    what_if = question.at(num_ranks)
    total_mib = sum(spec.num_bytes for spec in question.profile.params) / 2**20
    sizes = [size for size, smaller in zip(_BUCKET_MIBS, (0, *_BUCKET_MIBS), strict=False) if smaller < total_mib]
    others = {outcome.method: outcome for outcome in what_if.outcomes()}
    points = []
    for size in sizes:
        fixed = what_if.outcome("fixed size", what_if.plan_of_size(caps_of(size)))
        points.append(Point(value=size, label=f"{size:g}", outcomes=(others[PER_PARAMETER], fixed, others[OPTIMAL])))
    return Sweep(axis="largest bucket", unit="MiB", points=tuple(points))


def _refused(what: str, remedy: str) -> ConfigError:
    return ConfigError(what, where="undertow simulate", remedy=remedy)


SWEEPS: Mapping[str, Callable[[Question, int], Sweep]] = {
    "ranks": _sweep_ranks,
    "bandwidth": _sweep_bandwidth,
    "bucket": _sweep_bucket,
}
