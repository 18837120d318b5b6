"""The plan: each parameter's bucket, the order of buckets, and the layout of each bucket."""

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from reprlib import repr as brief
from typing import Any

from undertow.errors import ConfigError, require
from undertow.foreign import parsed_json
from undertow.plan.facts import Trailer, trailer_at
from undertow.plan.layout import (
    MOST,
    GroupEntry,
    Groups,
    Kind,
    ParamSpec,
    Piece,
    Slot,
    padded_numel,
    piece_of,
)

_MOST_RANKS = 1 << 20  # a simulation stores times of each rank
_FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Parameters whose gradients travel together."""

    index: int
    dtype: str
    itemsize: int
    device: str
    is_sparse: bool
    slots: tuple[Slot, ...]
    trailer: Trailer
    shard_numel: int  # elements of each rank's equal part of gradients and padding, which lie before the trailer
    storage_numel: int  # gradients, padding and trailer
    own_dtype: str | None = None  # the parameters' dtype, if their gradients have another one

    @property
    def numel(self) -> int:
        """Elements of the gradients alone."""
        return self.slots[-1].stop if self.slots else 0

    @property
    def num_bytes(self) -> int:
        """Bytes of the gradients alone."""
        return self.numel * self.itemsize

    @property
    def wire_bytes(self) -> int:
        """Bytes that are passed to a collective."""
        return self.storage_numel * self.itemsize

    @property
    def kind(self) -> Kind:
        """The kind of its parameters."""
        return self.dtype, self.device, self.is_sparse, self.own_dtype

    @property
    def params(self) -> tuple[int, ...]:
        """The parameter of each slot, including parameters that have only a piece here."""
        return tuple(slot.param for slot in self.slots)

    def shard_range(self, rank: int, *, num_replicas: int = 1) -> range:
        """Returns the range of elements of gradients and padding that `rank` owns; the last shard may hold padding only.

        With `num_replicas`, `rank` counts within one replica, which has fewer ranks by that factor.
        """
        numel = self.shard_numel * num_replicas
        return range(rank * numel, (rank + 1) * numel)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Every parameter in exactly one slot, or in pieces in several; buckets in launch order."""

    params: tuple[ParamSpec, ...]
    buckets: tuple[Bucket, ...]
    num_ranks: int

    def __post_init__(self) -> None:
        _check_each_is_held_once(self.params, self.buckets)
        _check_kinds(self.params, self.buckets)

    @cached_property
    def groups(self) -> Groups:
        """The groups from which `plan_from_groups` makes this plan."""
        return tuple(
            tuple(slot.param if slot.numel == self.params[slot.param].slot_numel else slot.piece for slot in bucket.slots)
            for bucket in self.buckets
        )

    @property
    def split_params(self) -> frozenset[int]:
        """Parameters that are cut into pieces in several buckets."""
        return frozenset(member.param for group in self.groups for member in group if isinstance(member, Piece))

    def to_dict(self) -> dict[str, Any]:
        """Returns the plan as plain values, ready for JSON."""
        return {
            "format": _FORMAT,
            "num_ranks": self.num_ranks,
            "params": [spec.to_dict() for spec in self.params],
            "buckets": [[member_to_json(member) for member in group] for group in self.groups],
        }

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> "Plan":
        """Reads a plan that `to_json` wrote; raises ConfigError for any other text."""
        try:
            data = parsed_json(text)
            if _whole(data["format"]) != _FORMAT:
                raise ValueError(f"format {brief(data['format'])}, expected {_FORMAT}")
            params = tuple(ParamSpec(**{**spec, "shape": tuple(spec["shape"])}) for spec in data["params"])
            groups = [tuple(member_from_json(member) for member in group) for group in data["buckets"]]
            return plan_from_groups(params, groups, num_ranks=_whole(data["num_ranks"]))
        except ConfigError:
            raise
        except (ValueError, KeyError, TypeError, IndexError) as error:
            reason = f"it has no {error}" if isinstance(error, KeyError) else error
            raise ConfigError(
                f"this is not a saved plan: {reason}.", remedy="Use a file that save_plan() has written."
            ) from error


def _whole(value: Any) -> int:
    if type(value) is not int or abs(value) > MOST:
        raise ValueError(f"{brief(value)} is not a whole number of 64 bits")
    return value


def member_to_json(member: GroupEntry) -> int | list[int]:
    """Returns a member as `member_from_json` reads it."""
    return [member.param, member.first, member.stop] if isinstance(member, Piece) else member


def member_from_json(value: Any) -> GroupEntry:
    """Reads a member that `Plan.to_json` wrote; raises ValueError for any other value."""
    if not isinstance(value, list):
        return _whole(value)
    param, first, stop = map(_whole, value)
    return Piece(param=param, first=first, stop=stop)


def plan_from_groups(params: Sequence[ParamSpec], groups: Sequence[Sequence[GroupEntry]], *, num_ranks: int) -> Plan:
    """Lays out `groups` of parameter indices and pieces; each becomes a bucket, and empty groups are skipped.

    Without parameters the plan still has one bucket with a trailer only, through which ranks exchange their verdict. Raises
    ConfigError unless every parameter is held exactly once and `num_ranks` is 1 to 1,048,576.
    """
    got = f"got num_ranks={brief(num_ranks)}."
    require(num_ranks >= 1, f"a plan is for one rank or more, {got}", remedy="Give the size of the process group.")
    require(num_ranks <= _MOST_RANKS, f"a plan is for {_MOST_RANKS:,} ranks at most, {got}", remedy="Give fewer ranks.")
    filled = [[piece_of(member, params) for member in group] for group in groups if group] or [[]]
    return Plan(
        params=tuple(params),
        buckets=tuple(_bucket(params, group, index, len(filled), num_ranks) for index, group in enumerate(filled)),
        num_ranks=num_ranks,
    )


def _bucket(params: Sequence[ParamSpec], group: Sequence[Piece], index: int, num_buckets: int, num_ranks: int) -> Bucket:
    ends = accumulate((piece.numel for piece in group), initial=0)
    slots = tuple(
        Slot(param=piece.param, start=start, stop=stop, first=piece.first)
        for piece, (start, stop) in zip(group, pairwise(ends), strict=True)
    )
    first = params[group[0].param] if group else ParamSpec(name="", shape=(), dtype="float32", itemsize=4)
    of_last = {"num_buckets": num_buckets, "num_ranks": num_ranks} if index == num_buckets - 1 else {}
    trailer_numel = trailer_at(0, num_slots=len(slots), **of_last).stop
    sharded_numel = padded_numel(slots[-1].stop if slots else 0, itemsize=first.itemsize, num_ranks=num_ranks)
    storage_numel = padded_numel(sharded_numel + trailer_numel, itemsize=first.itemsize, num_ranks=num_ranks)
    return Bucket(
        index=index,
        dtype=first.dtype,
        itemsize=first.itemsize,
        device=first.device,
        is_sparse=first.is_sparse,
        slots=slots,
        trailer=trailer_at(storage_numel - trailer_numel, num_slots=len(slots), **of_last),
        shard_numel=sharded_numel // num_ranks,
        storage_numel=storage_numel,
        own_dtype=first.own_dtype,
    )


def _check_each_is_held_once(params: Sequence[ParamSpec], buckets: Sequence[Bucket]) -> None:
    held: dict[int, list[tuple[int, Slot]]] = defaultdict(list)  # by parameter: index of a bucket, and the slot in it
    for bucket in buckets:
        for slot in bucket.slots:
            held[slot.param].append((bucket.index, slot))
    for param in sorted({*range(len(params)), *held}):
        places, is_known = held[param], param in range(len(params))
        if is_known and _is_held_once(places, params[param].slot_numel):
            continue
        name = f"parameter {param} ({params[param].name!r})" if is_known else f"parameter {param}"
        difference, remedy = f"is in {len(places)} slots", "Make the plan from the parameters of this model."
        if is_known and any(slot.piece != piece_of(param, params) for _, slot in places):
            slots = ", ".join(f"[{slot.first}, {slot.first + slot.numel}) in bucket {index}" for index, slot in places)
            difference = f"has elements [0, {params[param].slot_numel}), its slots hold {slots}"
            remedy = "The pieces of a parameter follow each other without gaps, each in a later bucket."
        raise ConfigError(
            f"a plan must hold each of its {len(params)} parameters exactly once.",
            where=f"first difference: {name} {difference}",
            remedy=remedy,
        )


def _is_held_once(places: Sequence[tuple[int, Slot]], numel: int) -> bool:
    """Returns True for one slot, or for pieces from first to last that are each in a later bucket than the one before."""
    if len(places) == 1:  # of thousands
        return places[0][1].first == 0 and places[0][1].numel == numel
    pieces = [slot.piece for _, slot in places]
    follow_each_other = [0, *(piece.stop for piece in pieces)] == [*(piece.first for piece in pieces), numel]
    are_later = all(earlier < later for (earlier, _), (later, _) in pairwise(places))
    return bool(pieces) and follow_each_other and are_later and all(piece.numel for piece in pieces)


def _check_kinds(params: Sequence[ParamSpec], buckets: Sequence[Bucket]) -> None:
    for bucket in buckets:
        for slot in bucket.slots:
            spec = params[slot.param]
            if spec.kind != bucket.kind:
                raise ConfigError(
                    f"parameter {spec.name!r} does not fit its slot [{slot.start}, {slot.stop}) of bucket {bucket.index}.",
                    where=f"it has {spec.slot_numel} elements of {spec.dtype} on {spec.device}; the bucket holds {bucket.dtype} "
                    f"on {bucket.device} and is free from {slot.start}",
                    remedy="Slots do not overlap, and are of one dtype and device.",
                )
