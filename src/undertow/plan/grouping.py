"""Decides which parameters share a bucket before anything is measured, and makes the plan that the settings request."""

import math
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from undertow.config import SyncConfig, bytes_from_mib
from undertow.errors import ConfigError, require
from undertow.plan.layout import (
    GroupEntry,
    Groups,
    Kind,
    ParamSpec,
    Piece,
    member_of,
    num_bytes_of,
    padded_numel,
    piece_of,
    share_numel,
)
from undertow.plan.plan import Plan, plan_from_groups

_MIB = 1024 * 1024
_SMALLEST, _LARGEST = float(_MIB), 25.0 * _MIB
_GROWTH, _GROWTH_WITH_SHARDS = 1.5, 1.2


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeCaps:
    """Largest bucket size in bytes, with separate sizes for the first and the last buckets.

    The first buckets are small so that communication starts early. The last ones are small because nothing hides them: their
    gradients are ready when backward ends.
    """

    cap_bytes: float
    first_bytes: tuple[float, ...] = ()  # of the first bucket, the second, and so on
    last_bytes: tuple[float, ...] = ()  # of the last bucket, the one before it, and so on

    def __post_init__(self) -> None:
        sizes = {"cap_bytes": (self.cap_bytes,), "first_bytes": self.first_bytes, "last_bytes": self.last_bytes}
        for name, value in ((name, value) for name, values in sizes.items() for value in values):
            require(
                value > 0,  # NaN is not above zero either
                f"a bucket size must be positive, got {name}={value}.",
                where="the largest sizes of buckets",
                remedy="Give a size above zero; math.inf puts everything into one bucket.",
            )


def default_caps(total_bytes: int, *, has_shards: bool = False) -> SizeCaps:
    """Returns caps for a model without measurements: sizes grow by half each from 1 MiB at both ends, up to 25 MiB.

    With shards (`has_shards`) sizes grow by a fifth each.

    A small first bucket starts the link early, and a small last one leaves little exposed communication. Between them a few large
    buckets cost the fewest latencies. If the next bucket is half as large again, it is full before the link has sent the previous
    one, unless gradients arrive less than one and a half times as fast as they can be sent; in that case the link idles anyway.
    At 25 MiB the measured curves of all common links are flat.

    At the end of backward only the last bucket remains if each bucket takes no longer to send than the gradients of the next one,
    smaller by that factor, take to arrive. All-reduces are mostly too slow for that on a slow link and never on a fast one. A
    reduce-scatter sends half as much and is often just fast enough: then growth by a fifth keeps up, growth by a half does not.
    """
    growth = _GROWTH_WITH_SHARDS if has_shards else _GROWTH
    ramp, size = list[float](), _SMALLEST
    while size < _LARGEST and 2 * (sum(ramp) + size) <= total_bytes:
        ramp.append(size)
        size *= growth
    ends = tuple(ramp) or (_SMALLEST,)
    return SizeCaps(cap_bytes=min(size, _LARGEST), first_bytes=ends, last_bytes=ends)


def _cut(
    piece: Piece, spec: ParamSpec, num_ranks: int | None, cap_bytes: float, *, taken_bytes: int, at_end: bool
) -> list[Piece]:
    """Cuts an even share of `piece` off its end or its beginning, for a group that already holds `taken_bytes`.

    Returns both parts in order, or `piece` alone if it fits under the cap, if a cut does not help, or if `num_ranks` is None:
    then parameters stay whole.
    """
    if num_ranks is None or piece.numel * spec.itemsize <= cap_bytes or 2 * taken_bytes > cap_bytes:
        return [piece]
    share = share_numel(piece.numel, itemsize=spec.itemsize, num_ranks=num_ranks, most_bytes=cap_bytes - taken_bytes)
    if share >= piece.numel:
        return [piece]
    share = padded_numel(piece.numel, itemsize=spec.itemsize, num_ranks=num_ranks) - share if at_end else share
    return [replace(piece, stop=piece.first + share), replace(piece, first=piece.first + share)]


def _groups(
    params: Sequence[ParamSpec], order: Sequence[int], caps: SizeCaps, num_ranks: int | None = None
) -> list[tuple[Piece, ...]]:
    pieces = [piece_of(param, params) for param in order]
    last_groups = _take_last_groups(params, num_ranks, pieces, caps.last_bytes)
    groups = _next_fit(params, num_ranks, pieces, (*caps.first_bytes, caps.cap_bytes))
    for group, cap in zip(last_groups, reversed(caps.last_bytes[: len(last_groups)]), strict=True):
        first_cap = cap if groups else min((cap, *caps.first_bytes[:1]))
        groups += _next_fit(params, num_ranks, group, (first_cap, cap))
    return groups


def _take_last_groups(
    params: Sequence[ParamSpec], num_ranks: int | None, pieces: list[Piece], caps_bytes: Sequence[float]
) -> list[list[Piece]]:
    """Takes the last groups from the end of `pieces`, as full as their caps allow."""
    groups: list[list[Piece]] = []
    for cap in caps_bytes:
        # `rest` is of a parameter whose end is in this group.
        group, rest, size = list[Piece](), list[Piece](), 0
        while pieces and not rest:
            *rest, last = _cut(pieces[-1], params[pieces[-1].param], num_ranks, cap, taken_bytes=size, at_end=True)
            if group and size + num_bytes_of(last, params) > cap:
                break
            pieces[-1:] = rest
            group.append(last)
            size += num_bytes_of(last, params)
        groups.append(group[::-1])
    return [group for group in reversed(groups) if group]


def _next_fit(
    params: Sequence[ParamSpec], num_ranks: int | None, pieces: Sequence[Piece], caps_bytes: Sequence[float]
) -> list[tuple[Piece, ...]]:
    """Fills groups under those caps, one after another; the last cap holds for all that follow."""
    position = {piece.param: at for at, piece in enumerate(pieces)}
    open_groups: dict[Kind, list[Piece]] = defaultdict(list)
    sizes: Counter[Kind] = Counter()
    closed, waiting = list[list[Piece]](), deque(pieces)
    while waiting:
        cap = caps_bytes[min(len(closed), len(caps_bytes) - 1)]
        piece = waiting.popleft()
        kind = params[piece.param].kind
        first, *rest = _cut(piece, params[piece.param], num_ranks, cap, taken_bytes=sizes[kind], at_end=False)
        size = sizes[kind] + num_bytes_of(first, params)
        if kind not in open_groups or size <= cap:
            open_groups[kind].append(first)
            sizes[kind] = size
        else:
            rest = [piece]
        if rest:  # the rest begins another group, which may have another cap
            closed.append(open_groups.pop(kind))
            del sizes[kind]
            waiting.extendleft(rest)
    filled = map(tuple, (*closed, *open_groups.values()))
    return sorted(filled, key=lambda group: (position[group[-1].param], group[-1].first))


def group_by_size(params: Sequence[ParamSpec], order: Sequence[int], caps: SizeCaps) -> tuple[tuple[int, ...], ...]:
    """Groups consecutive parameters of `order`, as many as fit under the caps; a larger parameter gets its own bucket.

    Parameters of different dtype or device go to different groups. Groups are sorted by the time at which their last member is
    ready, which is the launch order.
    """
    return tuple(tuple(piece.param for piece in group) for group in _groups(params, order, caps))


def group_in_pieces(
    params: Sequence[ParamSpec], order: Sequence[int], caps: SizeCaps, *, num_ranks: int
) -> tuple[tuple[GroupEntry, ...], ...]:
    """Groups like `group_by_size`, but cuts a parameter above the cap into even pieces that fit.

    The first piece is sent while later ones are packed. At the end of `order` the pieces shrink with the caps. A piece joins a
    group that is less than half full; otherwise it starts a group, because a sliver is not worth a slot. Pieces
    begin at multiples of 16 bytes and of the number of ranks; a piece of exactly one such unit may exceed a smaller cap.
    """
    return tuple(tuple(member_of(piece, params) for piece in group) for group in _groups(params, order, caps, num_ranks))


def reverse_registration(num_params: int) -> tuple[int, ...]:
    """Returns the order used without a profile: backward runs through the layers from the last to the first."""
    return tuple(range(num_params - 1, -1, -1))


def observed(num_params: int, arrivals: Sequence[int]) -> tuple[int, ...]:
    """Returns the gradients' order of arrival; missing ones follow in reverse order of registration."""
    first_seen = dict.fromkeys(arrivals)
    return (*first_seen, *(i for i in reverse_registration(num_params) if i not in first_seen))


def largest_first(params: Sequence[ParamSpec]) -> tuple[int, ...]:
    """Returns parameters by size in bytes, largest first; equal sizes in order of registration."""
    return tuple(sorted(range(len(params)), key=lambda i: -params[i].num_bytes))


def first_plan(params: Sequence[ParamSpec], config: SyncConfig, *, num_ranks: int, splits: bool = False) -> Plan:
    """Makes the plan of the first step, before any measurement; raises ConfigError if a pinned plan does not fit.

    With `splits` a large parameter may be spread over several buckets. This is for sharded gradients, which need no view.
    """
    if config.plan is not None:
        return _pinned_plan(params, str(config.plan), num_ranks=num_ranks, splits=splits)
    order = reverse_registration(len(params))
    return plan_in_order(params, order, config, num_ranks=num_ranks, splits=splits)


def plan_in_order(
    params: Sequence[ParamSpec], order: Sequence[int], config: SyncConfig, *, num_ranks: int, splits: bool = False
) -> Plan:
    """Makes buckets of the configured size over `order`; with `splits`, larger parameters are cut."""
    return plan_from_groups(
        params, groups_in_order(params, order, config, num_ranks=num_ranks, splits=splits), num_ranks=num_ranks
    )


def groups_in_order(
    params: Sequence[ParamSpec], order: Sequence[int], config: SyncConfig, *, num_ranks: int, splits: bool = False
) -> Groups:
    """Returns the groups of `plan_in_order`."""
    caps = _caps(config.bucket_cap_mb, total_bytes=sum(spec.num_bytes for spec in params), has_shards=splits)
    return group_in_pieces(params, order, caps, num_ranks=num_ranks) if splits else group_by_size(params, order, caps)


def _caps(bucket_cap_mb: float | tuple[float, ...] | None, *, total_bytes: int, has_shards: bool) -> SizeCaps:
    if bucket_cap_mb is None:
        return default_caps(total_bytes, has_shards=has_shards)
    if isinstance(bucket_cap_mb, tuple):
        *first, rest = (bytes_from_mib(cap, name="bucket_cap_mb") for cap in bucket_cap_mb)
        return SizeCaps(cap_bytes=rest, first_bytes=tuple(first))
    cap = bytes_from_mib(bucket_cap_mb, name="bucket_cap_mb")
    small = min(cap, math.ceil(bytes_from_mib(1.0, name="first bucket")))
    return SizeCaps(cap_bytes=cap, first_bytes=(small,), last_bytes=(small,))


def _pinned_plan(params: Sequence[ParamSpec], text: str, *, num_ranks: int, splits: bool) -> Plan:
    pinned = Plan.from_json(text)
    difference = next(_differences(params, pinned.params), "")
    require(
        not difference,
        "the saved plan is for another model.",
        where=difference,
        remedy="Save a plan of this model with save_plan(), or leave SyncConfig(plan=...) out.",
    )
    if pinned.split_params and not splits:
        raise ConfigError(
            f"the saved plan cuts parameter {params[min(pinned.split_params)].name!r} into pieces.",
            where="a gradient that is not sharded lies in one bucket as a whole",
            remedy="Use this plan with a sharded optimizer, or leave SyncConfig(plan=...) out.",
        )
    return plan_from_groups(params, pinned.groups, num_ranks=num_ranks)


def _differences(params: Sequence[ParamSpec], planned: Sequence[ParamSpec]) -> Iterator[str]:
    for mine, other in zip(params, planned, strict=False):
        if mine.is_sparse != other.is_sparse:
            yield f"gradients of {mine.name!r} are sparse in {'the model' if mine.is_sparse else 'the plan'} only"
        if (mine.name, mine.shape, mine.dtype) != (other.name, other.shape, other.dtype):
            yield f"it has {other.name!r} {other.shape} {other.dtype} where the model has {mine.name!r} {mine.shape} {mine.dtype}"
    if len(params) != len(planned):
        yield f"it has {len(planned)} parameters, the model {len(params)}"
