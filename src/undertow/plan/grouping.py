"""Which parameters travel together."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from undertow.errors import ConfigError
from undertow.plan.layout import GroupEntry, Kind, ParamSpec, Piece, member_of, piece_of, unit_numel

_MIB = 1024 * 1024
_SMALLEST, _LARGEST = float(_MIB), 25.0 * _MIB
_GROWTH, _GROWTH_WITH_SHARDS = 1.5, 1.2


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


def default_caps(total_bytes: int, *, has_shards: bool = False) -> SizeCaps:
    """Caps for a model nobody has measured yet: sizes grow from 1 MiB at both ends by a half each, up to 25 MiB.

    By a fifth where gradients are reduced to shards.

    A small first bucket has the link start early, a small last one leaves little that nothing hides; between them few
    large ones cost the fewest latencies. A next bucket half as large again is full before the link is done with the one
    before it, unless gradients come less than one and a half times as fast as they can be sent: then the link idles anyway.
    25 MiB is where measured curves of all common links are flat.

    At the end only the last bucket is left when backward is over, if each takes no longer to send than the gradients of the
    next one, smaller by that factor, take to come. All-reduces are mostly too slow for that on a slow link and never on a fast
    one. A reduce-scatter sends half as much and is often just fast enough: then a fifth keeps up, a half does not.
    """
    growth = _GROWTH_WITH_SHARDS if has_shards else _GROWTH
    ramp: list[float] = []
    size: float = _SMALLEST
    while size < _LARGEST and 2 * (sum(ramp) + size) <= total_bytes:
        ramp.append(size)
        size *= growth
    ends = tuple(ramp) or (_SMALLEST,)
    return SizeCaps(cap_bytes=min(size, _LARGEST), first_bytes=ends, last_bytes=ends)


def group_by_size(params: Sequence[ParamSpec], order: Sequence[int], caps: SizeCaps) -> tuple[tuple[int, ...], ...]:
    """Consecutive parameters of `order`, as many as fit under the caps; a parameter above the cap travels alone.

    Parameters of different dtype or device go to different groups. Groups are sorted by when their last member is
    ready, the order in which they will leave.
    """
    groups = _groups(_Members(params=params, num_ranks=None), order, caps)
    return tuple(tuple(piece.param for piece in group) for group in groups)


def group_in_pieces(
    params: Sequence[ParamSpec], order: Sequence[int], caps: SizeCaps, *, num_ranks: int
) -> tuple[tuple[GroupEntry, ...], ...]:
    """Like `group_by_size`, with a parameter above the cap cut into even pieces that keep to it.

    Its first piece is on the wire while the later ones are packed, and at the end of `order` the pieces shrink with the
    caps. A piece fills up a group that is not half full; elsewhere it begins one, for a sliver is not worth its slot. Pieces
    begin at multiples of 16 bytes and of the number of ranks: one of that size may be above a smaller cap.
    """
    groups = _groups(_Members(params=params, num_ranks=num_ranks), order, caps)
    return tuple(tuple(member_of(piece, params) for piece in group) for group in groups)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Members:
    """What groups are made of: how large it is, and how it is cut."""

    params: Sequence[ParamSpec]
    num_ranks: int | None  # None where parameters stay whole

    def kind(self, piece: Piece) -> Kind:
        return self.params[piece.param].kind

    def num_bytes(self, piece: Piece) -> int:
        return piece.numel * self.params[piece.param].itemsize

    def cut(self, piece: Piece, cap_bytes: float, *, taken_bytes: int, at_end: bool) -> list[Piece]:
        """An even share of `piece` for a group of which some bytes are taken, from its end or its beginning, and the rest.

        They come in order; `piece` alone where it keeps to the cap by itself, or where no cut helps.
        """
        if self.num_ranks is None or self.num_bytes(piece) <= cap_bytes or 2 * taken_bytes > cap_bytes:
            return [piece]
        itemsize = self.params[piece.param].itemsize
        unit = unit_numel(itemsize=itemsize, num_ranks=self.num_ranks)
        num_units = -(-piece.numel // unit)
        if num_units == 1:
            return [piece]
        num_shares = -(-num_units // max(1, int((cap_bytes - taken_bytes) // (unit * itemsize))))
        share = -(-num_units // num_shares)
        middle = piece.first + unit * (num_units - share if at_end else share)
        return [replace(piece, stop=middle), replace(piece, first=middle)]


def _groups(members: _Members, order: Sequence[int], caps: SizeCaps) -> list[tuple[Piece, ...]]:
    pieces = [piece_of(param, members.params) for param in order]
    last_groups = _take_last_groups(members, pieces, caps.last_bytes)
    groups = _next_fit(members, pieces, (*caps.first_bytes, caps.cap_bytes))
    for group, cap in zip(last_groups, reversed(caps.last_bytes[: len(last_groups)]), strict=True):
        first_cap = cap if groups else min((cap, *caps.first_bytes[:1]))
        groups += _next_fit(members, group, (first_cap, cap))
    return groups


def _take_last_groups(members: _Members, pieces: list[Piece], caps_bytes: Sequence[float]) -> list[list[Piece]]:
    """Takes the last groups away from the end of `pieces`, as full as their caps allow."""
    groups: list[list[Piece]] = []
    for cap in caps_bytes:
        group: list[Piece] = []
        size = 0
        while pieces:
            *rest, last = members.cut(pieces[-1], cap, taken_bytes=size, at_end=True)
            if group and size + members.num_bytes(last) > cap:
                break
            pieces[-1:] = rest
            group.append(last)
            size += members.num_bytes(last)
            if rest:
                break
        if group:
            groups.append(group[::-1])
    return groups[::-1]


def _next_fit(members: _Members, pieces: Sequence[Piece], caps_bytes: Sequence[float]) -> list[tuple[Piece, ...]]:
    """Groups under those caps, one after another; the last cap holds for all that follow."""
    position = {piece.param: at for at, piece in enumerate(pieces)}
    closed: list[list[Piece]] = []
    open_groups: dict[Kind, list[Piece]] = defaultdict(list)
    sizes: Counter[Kind] = Counter()
    waiting = deque(pieces)
    while waiting:
        cap = caps_bytes[min(len(closed), len(caps_bytes) - 1)]
        piece = waiting.popleft()
        kind = members.kind(piece)
        first, *rest = members.cut(piece, cap, taken_bytes=sizes[kind], at_end=False)
        if kind not in open_groups or sizes[kind] + members.num_bytes(first) <= cap:
            open_groups[kind].append(first)
            sizes[kind] += members.num_bytes(first)
        else:
            rest = [piece]
        if rest:  # what is left begins another group, which may have another cap
            closed.append(open_groups.pop(kind))
            del sizes[kind]
            waiting.extendleft(rest)
    groups = [*closed, *open_groups.values()]
    return sorted((tuple(group) for group in groups), key=lambda group: (position[group[-1].param], group[-1].first))


def reverse_registration(num_params: int) -> tuple[int, ...]:
    """The order without a profile: backward runs through the layers from the last to the first."""
    return tuple(range(num_params - 1, -1, -1))


def observed(num_params: int, arrivals: Sequence[int]) -> tuple[int, ...]:
    """The order in which gradients arrived; what never arrived follows in reverse order of registration."""
    first_seen = dict.fromkeys(arrivals)
    return (*first_seen, *(i for i in reverse_registration(num_params) if i not in first_seen))


def largest_first(params: Sequence[ParamSpec]) -> tuple[int, ...]:
    """By size in bytes, largest first; equal sizes in order of registration."""
    return tuple(sorted(range(len(params)), key=lambda i: -params[i].num_bytes))
