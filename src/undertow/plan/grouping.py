"""Which parameters travel together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from undertow.errors import ConfigError
from undertow.plan.spec import ParamSpec

_MIB = 1024 * 1024
_SMALLEST, _LARGEST, _GROWTH = float(_MIB), 25.0 * _MIB, 1.5


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeCaps:
    """Largest size in bytes of a bucket, of the first ones and of the last ones.

    The first buckets are small so that communication starts early, the last ones because nothing hides them: their
    gradients arrive when backward is over.
    """

    cap_bytes: float
    first_bytes: tuple[float, ...] = ()  # of the first bucket, the second, ...
    last_bytes: tuple[float, ...] = ()  # of the last bucket, the one before it, ...

    def __post_init__(self) -> None:
        sizes = {"cap_bytes": (self.cap_bytes,), "first_bytes": self.first_bytes, "last_bytes": self.last_bytes}
        for name, values in sizes.items():
            for value in values:
                if not value > 0:  # NaN is not above zero either
                    raise ConfigError(
                        f"a bucket size must be positive, got {name}={value}.",
                        where="the largest sizes of buckets",
                        remedy="Give a size above zero; math.inf puts everything into one bucket.",
                    )


def default_caps(total_bytes: int) -> SizeCaps:
    """Caps for a model nobody has measured yet: sizes grow from 1 MiB at both ends by a half each, up to 25 MiB.

    A small first bucket has the link start early, a small last one leaves little that nothing hides; between them few
    large ones cost the fewest latencies. A next bucket half as large again is full before the link is done with the one
    before it, unless gradients come less than one and a half times as fast as they can be sent: then the link idles anyway.
    25 MiB is where measured curves of all common links are flat.
    """
    ramp: list[float] = []
    size: float = _SMALLEST
    while size < _LARGEST and 2 * (sum(ramp) + size) <= total_bytes:
        ramp.append(size)
        size *= _GROWTH
    ends = tuple(ramp) or (_SMALLEST,)
    return SizeCaps(cap_bytes=min(size, _LARGEST), first_bytes=ends, last_bytes=ends)


def group_by_size(params: Sequence[ParamSpec], order: Sequence[int], caps: SizeCaps) -> tuple[tuple[int, ...], ...]:
    """Consecutive parameters of `order`, as many as fit under the caps; a parameter above the cap travels alone.

    Parameters of different dtype or device go to different groups. Groups are sorted by when their last member is
    ready, the order in which they will leave.
    """
    cuts = _cuts_of_last_groups(params, order, caps.last_bytes)
    groups = _next_fit(params, order[: cuts[0]], (*caps.first_bytes, caps.cap_bytes))
    for (start, stop), cap in zip(pairwise(cuts), reversed(caps.last_bytes[: len(cuts) - 1]), strict=True):
        first_cap = min(cap, *caps.first_bytes[:1]) if start == 0 and caps.first_bytes else cap
        groups += _next_fit(params, order[start:stop], (first_cap, cap))
    return tuple(groups)


def _cuts_of_last_groups(params: Sequence[ParamSpec], order: Sequence[int], caps_bytes: Sequence[float]) -> list[int]:
    """Where the last groups start in `order`, as full as their caps allow, and the end of the last one."""
    cuts = [len(order)]
    for cap in caps_bytes:
        start, size = cuts[0], 0
        while start > 0 and (start == cuts[0] or size + params[order[start - 1]].num_bytes <= cap):
            start -= 1
            size += params[order[start]].num_bytes
        if start == cuts[0]:
            break
        cuts.insert(0, start)
    return cuts


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
