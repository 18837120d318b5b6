"""Decides which parameters share a bucket before anything is measured, and makes the plan that the
settings request."""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

from undertow.config import SyncConfig
from undertow.errors import require
from undertow.plan.layout import Groups, Kind, ParamSpec
from undertow.plan.plan import Plan, plan_from_groups
from undertow.wire import AUTO

_MIB = 1024 * 1024
_SMALLEST, _LARGEST = float(_MIB), 25.0 * _MIB
_LARGEST_SHARE = 1 / 8  # of all gradients, if that is more
_GROWTH, _GROWTH_WITH_SHARDS = 1.5, 1.2
_CRUMB = 1 / 32  # of the smallest cap


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeCaps:
    """Largest bucket size in bytes, with separate sizes for the first and the last buckets.

    The first buckets are small so that communication starts early. The last ones are small because
    nothing hides them: their gradients are ready when backward ends.
    """

    cap_bytes: float
    first_bytes: tuple[float, ...] = ()  # of the first bucket, the second, and so on
    last_bytes: tuple[float, ...] = ()  # of the last bucket, the one before it, and so on

    def __post_init__(self) -> None:
        require(
            all(size > 0 for size in self.sizes),  # NaN is not above zero either
            f"the size of a bucket must be positive, got {', '.join(map(str, self.sizes))}.",
            where="the largest sizes of buckets",
            remedy="Give a size above zero; math.inf puts everything into one bucket.",
        )

    @property
    def sizes(self) -> tuple[float, ...]:
        """All largest sizes, in bytes."""
        return self.cap_bytes, *self.first_bytes, *self.last_bytes


def default_caps(total_bytes: int, *, has_shards: bool = False) -> SizeCaps:
    """Returns caps for a model without measurements: sizes grow by half each from 1 MiB at both
    ends, up to 25 MiB.

    With shards (`has_shards`) sizes grow by a fifth each.

    A small first bucket starts the link early, and a small last one leaves little exposed
    communication. Between them a few large buckets cost the fewest latencies. If the next bucket is
    half as large again, it is full before the link has sent the previous one, unless gradients
    arrive less than one and a half times as fast as they can be sent; in that case the link idles
    anyway. At 25 MiB the measured curves of all common links are flat.

    At the end of backward only the last bucket remains if each bucket takes no longer to send than
    the gradients of the next one, smaller by that factor, take to arrive. All-reduces are mostly
    too slow for that on a slow link and never on a fast one. A reduce-scatter sends half as much
    and is often just fast enough: then growth by a fifth keeps up, growth by a half does not.
    """
    growth = _GROWTH_WITH_SHARDS if has_shards else _GROWTH
    ramp, size = list[float](), _SMALLEST
    while size < _LARGEST and 2 * (sum(ramp) + size) <= total_bytes:
        ramp.append(size)
        size *= growth
    ends = tuple(ramp) or (_SMALLEST,)
    return SizeCaps(cap_bytes=min(size, _LARGEST), first_bytes=ends, last_bytes=ends)


def by_last_ready(groups: Iterable[Sequence[int]], order: Sequence[int]) -> Groups:
    """Returns the groups by the place of their last parameter in `order`, which is the order of
    launches."""
    place = {param: at for at, param in enumerate(order)}
    return tuple(tuple(group) for group in sorted(groups, key=lambda group: place[group[-1]]))


def group_by_size(
    params: Sequence[ParamSpec],
    order: Sequence[int],
    caps: SizeCaps,
    *,
    num_shards: int = 1,
    crumb_bytes: float = 0.0,
) -> Groups:
    """Groups consecutive parameters of `order`, as many as fit under the caps; a larger parameter
    gets its own bucket. Parameters of less than `crumb_bytes` go with what follows.

    Parameters of different dtype or device go to different groups. Groups are sorted by the time at
    which their last member is ready, which is the launch order.

    A parameter that one of `num_shards` ranks updates counts by that share of its bytes: a bucket
    takes as long as its largest part, so it needs parameters for every rank.
    """
    sizes = [spec.num_bytes / (num_shards if spec.is_whole else 1) for spec in params]
    units = {unit[-1]: unit for unit in _units(params, order, crumb_bytes)}
    for last, unit in units.items():
        sizes[last] = sum(map(sizes.__getitem__, unit))
    rest = list(units)
    last_groups = _take_last_groups(sizes, rest, caps.last_bytes)
    groups = _next_fit(params, sizes, rest, (*caps.first_bytes, caps.cap_bytes))
    for group in last_groups:
        groups += _next_fit(params, sizes, group, (math.inf,))  # one group for each kind
    whole = [tuple(chain.from_iterable(map(units.__getitem__, group))) for group in groups]
    return by_last_ready(whole, order)


def _units(params: Sequence[ParamSpec], order: Sequence[int], crumb_bytes: float) -> Groups:
    """Returns consecutive parameters of a kind that travel as one: those that have `crumb_bytes`
    together.

    So a crumb, with less than that, goes with what follows: a bias arrives with the weight of its
    layer. In a bucket that is full without it, it would hold up the others until then. Alone, its
    messages would take more processor time than its bytes.
    """
    units: list[list[int]] = []
    last_of: dict[Kind, list[int]] = {}
    waiting: dict[Kind, list[int]] = {}
    num_waiting: defaultdict[Kind, int] = defaultdict(int)  # bytes
    for param in order:
        kind = params[param].kind
        waiting.setdefault(kind, []).append(param)
        num_waiting[kind] += params[param].num_bytes
        if num_waiting[kind] >= crumb_bytes:
            last_of[kind] = waiting.pop(kind)
            units.append(last_of[kind])
            num_waiting[kind] = 0
    for kind, crumbs in waiting.items():  # nothing follows them
        if kind in last_of:
            last_of[kind].extend(crumbs)
        else:
            units.append(crumbs)
    return by_last_ready(units, order)


def _take_last_groups(
    sizes: Sequence[float], rest: list[int], caps_bytes: Sequence[float]
) -> list[list[int]]:
    """Takes the last groups from the end of `rest`, as full as their caps allow."""
    groups: list[list[int]] = []
    for cap in caps_bytes:
        group: list[int] = []
        size = 0.0
        while rest and (not group or size + sizes[rest[-1]] <= cap):
            size += sizes[rest[-1]]
            group.append(rest.pop())
        groups.append(group[::-1])
    return groups


def _next_fit(
    params: Sequence[ParamSpec],
    sizes: Sequence[float],
    order: Sequence[int],
    caps_bytes: Sequence[float],
) -> list[list[int]]:
    """Fills groups under those caps, one after another; the last cap holds for all that follow."""
    open_groups: dict[Kind, list[int]] = {}
    filled: defaultdict[Kind, float] = defaultdict(float)
    closed: list[list[int]] = []
    for param in order:
        cap = caps_bytes[min(len(closed), len(caps_bytes) - 1)]
        kind, size = params[param].kind, sizes[param]
        if kind in open_groups and filled[kind] + size > cap:
            closed.append(open_groups.pop(kind))
            filled[kind] = 0.0
        open_groups.setdefault(kind, []).append(param)
        filled[kind] += size
    return [*closed, *open_groups.values()]


def reverse_registration(num_params: int) -> tuple[int, ...]:
    """Returns the order used without a profile.

    Backward runs through the layers from the last to the first.
    """
    return tuple(range(num_params - 1, -1, -1))


def observed(num_params: int, arrivals: Sequence[int]) -> tuple[int, ...]:
    """Returns the gradients' order of arrival.

    Missing ones follow in reverse order of registration.
    """
    first_seen = dict.fromkeys(arrivals)
    return (*first_seen, *(i for i in reverse_registration(num_params) if i not in first_seen))


def largest_first(params: Sequence[ParamSpec]) -> tuple[int, ...]:
    """Returns parameters by size in bytes, largest first; equal sizes in order of registration."""
    return tuple(sorted(range(len(params)), key=lambda i: -params[i].num_bytes))


def first_plan(
    params: Sequence[ParamSpec],
    config: SyncConfig,
    *,
    num_ranks: int,
    num_shards: int | None = None,
    has_shards: bool = False,
) -> Plan:
    """Makes the plan of the first step, before any measurement.

    Raises ConfigError if a pinned plan does not fit.
    """
    if config.plan is not None:
        return _pinned_plan(
            params, str(config.plan), config, num_ranks=num_ranks, num_shards=num_shards
        )
    order = reverse_registration(len(params))
    return plan_in_order(
        params,
        order,
        config,
        num_ranks=num_ranks,
        num_shards=num_shards,
        has_shards=has_shards,
    )


def plan_in_order(
    params: Sequence[ParamSpec],
    order: Sequence[int],
    config: SyncConfig,
    *,
    num_ranks: int,
    num_shards: int | None = None,
    has_shards: bool = False,
) -> Plan:
    """Makes buckets of the configured size over `order`."""
    total_bytes = sum(spec.num_bytes for spec in params)
    caps = _caps(config.bucket_cap_mb, total_bytes=total_bytes, has_shards=has_shards)
    groups = group_by_size(
        params,
        order,
        caps,
        num_shards=num_shards or num_ranks,
        crumb_bytes=_CRUMB * min(caps.sizes),
    )
    return plan_from_groups(
        params,
        groups,
        num_ranks=num_ranks,
        num_shards=num_shards,
        wires=config.plan_wire,
        block=config.block,
    )


def _caps(
    bucket_cap_mb: float | tuple[float, ...] | None, *, total_bytes: int, has_shards: bool
) -> SizeCaps:
    if bucket_cap_mb is None:
        return default_caps(total_bytes, has_shards=has_shards)
    if isinstance(bucket_cap_mb, tuple):
        *first, rest = (cap * _MIB for cap in bucket_cap_mb)
        return SizeCaps(cap_bytes=rest, first_bytes=tuple(first))
    cap = bucket_cap_mb * _MIB
    small = min(cap, _MIB)
    return SizeCaps(cap_bytes=cap, first_bytes=(small,), last_bytes=(small,))


def _pinned_plan(
    params: Sequence[ParamSpec],
    text: str,
    config: SyncConfig,
    *,
    num_ranks: int,
    num_shards: int | None,
) -> Plan:
    pinned = Plan.from_json(text)
    difference = _difference(params, pinned.params)
    require(
        not difference,
        "the saved plan is for another model.",
        where=difference,
        remedy="Save a plan of this model with save_plan(), or leave SyncConfig(plan=...) out.",
    )
    groups: list[list[int]] = []
    wires: list[str | None] = []
    for group, wire in zip(pinned.groups, pinned.wires, strict=True):
        # Parameters may have got different optimizers since the plan was saved.
        of_kinds = _next_fit(params, [0.0] * len(params), group, (math.inf,))
        groups += of_kinds
        wires += [wire] * len(of_kinds)
    return plan_from_groups(
        params,
        groups,
        num_ranks=num_ranks,
        num_shards=num_shards,
        wires=wires if config.wire == AUTO else config.plan_wire,
        block=config.block,
    )


def _difference(params: Sequence[ParamSpec], planned: Sequence[ParamSpec]) -> str:
    """Returns the first difference between the parameters of a model and of a plan.

    Empty if they are equal.
    """
    for mine, other in zip(params, planned, strict=False):
        if _text(mine) != _text(other):
            return f"it has {_text(other)} where the model has {_text(mine)}"
    if len(params) != len(planned):
        return f"it has {len(planned)} parameters, the model {len(params)}"
    return ""


def _text(spec: ParamSpec) -> str:
    return f"{spec.name!r} {spec.shape} {spec.dtype}{' sparse' if spec.is_sparse else ''}"


def equal_groups(
    params: Sequence[ParamSpec],
    order: Sequence[int],
    *,
    num_buckets: int,
    last_share: float = 1.0,
    joins_crumbs: bool = False,
) -> Groups:
    """Returns about `num_buckets` groups of consecutive parameters of `order`, of about equal
    bytes. With `joins_crumbs`, crumbs go with what follows.

    The last one has `last_share` of the bytes of another one. Parameters of different dtype, device
    or optimizer go to different groups: each kind gets its share of `num_buckets`, and one at
    least.
    """
    of_kind: defaultdict[Kind, list[int]] = defaultdict(list)
    for param in order:
        of_kind[params[param].kind].append(param)
    total_bytes = sum(spec.num_bytes for spec in params) or 1
    groups: list[list[int]] = []
    for members in of_kind.values():
        num_bytes = sum(params[param].num_bytes for param in members)
        number = max(1, round(num_buckets * num_bytes / total_bytes))
        target = num_bytes / (number - 1 + last_share) or 1
        stretches: list[list[int]] = [[] for _ in range(number)]
        sent_bytes = 0
        crumb_bytes = _CRUMB * min(target, _SMALLEST) if joins_crumbs else 0.0
        for unit in _units(params, members, crumb_bytes):
            unit_bytes = sum(params[param].num_bytes for param in unit)
            middle = sent_bytes + unit_bytes / 2
            stretch = min(int(middle / target), number - 1)
            stretches[stretch].extend(unit)
            sent_bytes += unit_bytes
        groups += filter(None, stretches)
    return by_last_ready(groups, order)


def is_too_large(plan: Plan) -> bool:
    """Returns True if a bucket of several parameters is larger than 25 MiB and an eighth of all
    gradients.

    Larger buckets cost memory: a packed bucket holds its gradients twice.
    """
    total_bytes = sum(spec.num_bytes for spec in plan.params)
    cap_bytes = max(_LARGEST, _LARGEST_SHARE * total_bytes)
    return any(len(bucket.params) > 1 and bucket.num_bytes > cap_bytes for bucket in plan.buckets)
