"""Networks whose all-reduce was measured and published."""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from undertow.cost.curve import CostCurve
from undertow.errors import ConfigError

_MIB = 1024 * 1024
_SIZES = (_MIB // 4, *(_MIB * size for size in (1, 4, 8, 16, 32, 64, 128, 256)))


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedNetwork:
    """An all-reduce over all ranks of one network; a curve says nothing of other numbers of ranks."""

    name: str
    num_ranks: int
    all_reduce: CostCurve


def _published(name: str, num_ranks: int, *times_us: float) -> PublishedNetwork:
    points = tuple(zip(_SIZES, times_us, strict=True))
    return PublishedNetwork(name=name, num_ranks=num_ranks, all_reduce=CostCurve(points=points))


# NCCL all-reduce in microseconds, from Stas Bekman, "Machine Learning Engineering", chapter "Network"
# (github.com/stas00/ml-engineering), as of August 2026. The EFA network has eight 400 Gb/s adapters per node.
_NETWORKS = {
    network.name: network
    for network in (
        _published("8xA100-nvlink3", 8, 61, 102, 102, 134, 277, 424, 685, 1328, 2421),
        _published("8xH200-nvlink4", 8, 39, 46, 68, 94, 134, 213, 339, 584, 1077),
        _published("8xB200-nvlink5", 8, 48, 51, 96, 116, 115, 180, 293, 413, 727),
        _published("4x8xB200-efa", 32, 382, 378, 430, 463, 505, 713, 830, 1314, 2270),
    )
}


def catalogue_names() -> tuple[str, ...]:
    """Names that `published_network` knows."""
    return tuple(_NETWORKS)


def published_network(name: str) -> PublishedNetwork:
    """The network of that name; ConfigError for another one."""
    if name in _NETWORKS:
        return _NETWORKS[name]
    close = closest_name(name)
    raise ConfigError(
        f"there is no published network {name!r}.",
        remedy=f"Did you mean {close!r}?" if close else f"Known networks: {', '.join(_NETWORKS)}.",
    )


def closest_name(name: str) -> str | None:
    """The name that was probably meant, whatever its capitals; None where no name is like it."""
    by_lower = {known.lower(): known for known in _NETWORKS}
    close = difflib.get_close_matches(name.lower(), by_lower, n=1)
    return by_lower[close[0]] if close else None
