"""Which parameters travel together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from undertow.errors import ConfigError
from undertow.plan.spec import ParamSpec

_MIB = 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeCaps:
    """Largest size in bytes of a bucket, of the first ones and of the last one.

    The first bucket is small so that communication starts early, the last one because nothing hides it: its
    gradients arrive when backward is over.
    """

    cap_bytes: float
    first_bytes: tuple[float, ...] = ()  # of the first bucket, the second, ...
    last_bytes: float | None = None  # None: like the others

    def __post_init__(self) -> None:
        sizes = {"cap_bytes": (self.cap_bytes,), "first_bytes": self.first_bytes, "last_bytes": (self.last_bytes,)}
        for name, values in sizes.items():
            for value in values:
                if value is not None and not value > 0:  # NaN is not above zero either
                    raise ConfigError(
                        f"a bucket size must be positive, got {name}={value}.",
                        where="the largest sizes of buckets",
                        remedy="Give a size above zero; math.inf puts everything into one bucket.",
                    )


def default_caps(total_bytes: int) -> SizeCaps:
    """Caps for a model nobody has measured yet.

    About twenty buckets, of 1 to 25 MiB: enough that the last one, which nothing hides, is a small part of the
    whole, few enough that latencies do not add up; 25 MiB is where measured curves of all common links are flat.
    """
    cap = min(max(total_bytes / 20, _MIB), 25 * _MIB)
    return SizeCaps(cap_bytes=cap, first_bytes=(min(cap, _MIB),), last_bytes=min(cap, _MIB))


def group_by_size(params: Sequence[ParamSpec], order: Sequence[int], caps: SizeCaps) -> tuple[tuple[int, ...], ...]:
    """Consecutive parameters of `order`, as many as fit under the caps; a parameter above the cap travels alone.

    Parameters of different dtype or device go to different groups. Groups are sorted by when their last member is
    ready, the order in which they will leave.
    """
    split = len(order) - _num_in_last_group(params, order, caps)
    last_cap = caps.cap_bytes if caps.last_bytes is None else caps.last_bytes
    first_cap = (*caps.first_bytes, last_cap)[0]
    return (
        *_next_fit(params, order[:split], (*caps.first_bytes, caps.cap_bytes)),
        *_next_fit(params, order[split:], (last_cap if split else min(first_cap, last_cap), last_cap)),
    )


def _num_in_last_group(params: Sequence[ParamSpec], order: Sequence[int], caps: SizeCaps) -> int:
    """How many parameters at the end of `order` fit into the last bucket; none where it is like the others."""
    if caps.last_bytes is None or not order:
        return 0
    size, count = 0, 0
    for index in reversed(order):
        size += params[index].num_bytes
        if count and size > caps.last_bytes:
            break
        count += 1
    return count


def _next_fit(params: Sequence[ParamSpec], order: Sequence[int], caps_bytes: Sequence[float]) -> list[tuple[int, ...]]:
    """Groups under those caps, one after another; the last cap holds for all that follow."""
    position = {index: at for at, index in enumerate(order)}
    closed: list[list[int]] = []
    open_groups: dict[tuple[str, str, bool], list[int]] = {}
    sizes: dict[tuple[str, str, bool], int] = {}
    for index in order:
        kind, num_bytes = params[index].kind, params[index].num_bytes
        cap = caps_bytes[min(len(closed), len(caps_bytes) - 1)]
        group = open_groups.get(kind)
        if group is not None and sizes[kind] + num_bytes > cap:
            closed.append(group)
            group = None
        if group is None:
            group = open_groups[kind] = []
            sizes[kind] = 0
        group.append(index)
        sizes[kind] += num_bytes
    groups = [*closed, *open_groups.values()]
    return sorted((tuple(group) for group in groups), key=lambda group: position[group[-1]])
