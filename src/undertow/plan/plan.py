"""The plan: each parameter's bucket, the order of buckets, and the layout of each bucket."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from reprlib import repr as brief
from typing import Any

from undertow.errors import ConfigError, require
from undertow.foreign import parsed_json
from undertow.plan.facts import Trailer, trailer_at
from undertow.plan.layout import (
    Groups,
    Kind,
    ParamSpec,
    Slot,
    Wires,
    equal_parts,
    padded_numel,
    slots_of,
)
from undertow.plan.owners import owners_of
from undertow.wire import WIRES, wire_for

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
    # elements of each rank's equal part of gradients and padding, which lie before the trailer
    shard_numel: int
    storage_numel: int  # gradients, padding and trailer
    own_dtype: str | None = None  # the parameters' dtype, if their gradients have another one
    wire: str | None = None  # the format of its gradients between ranks, if it has fewer bytes
    narrow_numel: int = 0  # elements that may travel in a format; all others are in full width
    stepper: int = 0  # the sharded optimizer that updates its parameters, of several
    # The rank that updates all of each slot's parameter, ascending; None: each rank has a part.
    owners: tuple[int, ...] | None = None

    @property
    def numel(self) -> int:
        """Elements of the gradients alone, and of gaps between and after them."""
        return max(self.slots[-1].stop, self.narrow_numel) if self.slots else 0

    @property
    def num_bytes(self) -> int:
        """Bytes of the gradients alone."""
        return sum(slot.numel for slot in self.slots) * self.itemsize

    @property
    def trailer_bytes(self) -> int:
        """Bytes of the trailer."""
        return (self.storage_numel - self.trailer.start) * self.itemsize

    @property
    def wire_bytes(self) -> int:
        """Bytes that are passed to a collective."""
        if self.wire is None:
            return self.storage_numel * self.itemsize
        wide_bytes = (self.numel - self.narrow_numel) * self.itemsize + self.trailer_bytes
        return WIRES[self.wire].num_bytes(self.narrow_numel) + wide_bytes

    @property
    def kind(self) -> Kind:
        """The kind of its parameters."""
        is_whole = self.owners is not None
        return self.dtype, self.device, self.is_sparse, self.own_dtype, self.stepper, is_whole

    @property
    def params(self) -> tuple[int, ...]:
        """The parameter of each slot."""
        return tuple(slot.param for slot in self.slots)

    def parts(self, num_shards: int, *, num_ranks: int, is_padded: bool = False) -> list[range]:
        """Returns the elements of gradients that each rank of a replica owns; a part may be empty.

        `num_shards` is the ranks of a replica, of `num_ranks` in all. `is_padded` makes equal parts
        of equal length, by padding.
        """
        if self.owners is None:
            return self.equal_parts(num_shards, num_ranks=num_ranks, is_padded=is_padded)
        starts = [self.numel] * (num_shards + 1)
        for slot, owner in zip(reversed(self.slots), reversed(self.owners), strict=True):
            starts[: owner + 1] = [slot.start] * (owner + 1)
        starts[0] = 0
        return [range(*ends) for ends in pairwise(starts)]

    def equal_parts(self, num_shards: int, *, num_ranks: int, is_padded: bool) -> list[range]:
        """Returns as many parts of one length, also of a bucket whose parameters have owners."""
        part_numel = self.shard_numel * (num_ranks // num_shards)
        stop = num_shards * part_numel if is_padded else self.numel
        return equal_parts(num_shards, part_numel, stop=stop)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Every parameter in exactly one slot; buckets in launch order. `plan_from_groups` makes it."""

    params: tuple[ParamSpec, ...]
    buckets: tuple[Bucket, ...]
    num_ranks: int
    num_shards: int  # ranks of a replica: of a row of a mesh, or all

    @property
    def groups(self) -> Groups:
        """The groups that `plan_from_groups` makes this plan from."""
        return tuple(bucket.params for bucket in self.buckets)

    @property
    def wires(self) -> Wires:
        """The formats that `plan_from_groups` makes this plan from."""
        return tuple(bucket.wire for bucket in self.buckets)

    @property
    def owners(self) -> Groups:
        """The owner of each parameter of `groups`; empty for a bucket in equal parts."""
        return tuple(bucket.owners or () for bucket in self.buckets)

    def is_alike(self, groups: Groups, wires: Wires) -> bool:
        """Returns True if its buckets hold the same parameters, in any order, in these formats."""
        sets = [frozenset(group) for group in groups]
        return sets == [frozenset(group) for group in self.groups] and wires == self.wires

    def to_dict(self) -> dict[str, Any]:
        """Returns the plan as plain values, ready for JSON."""
        found = {
            "format": _FORMAT,
            "num_ranks": self.num_ranks,
            "params": [spec.to_dict() for spec in self.params],
            "buckets": [list(group) for group in self.groups],
        }
        if any(self.wires):
            found["wires"] = list(self.wires)
        if any(spec.is_whole for spec in self.params):  # to be read only: the specs tell them
            found["owners"] = [bucket.owners for bucket in self.buckets]
        if self.num_shards != self.num_ranks:
            found["num_shards"] = self.num_shards
        return found

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> "Plan":
        """Reads a plan that `to_json` wrote; raises ConfigError for any other text."""
        try:
            data = parsed_json(text)
            if type(data["format"]) is not int or data["format"] != _FORMAT:
                raise ValueError(f"format {brief(data['format'])}, expected {_FORMAT}")
            rows = [{**spec, "shape": tuple(spec["shape"])} for spec in data["params"]]
            params = [ParamSpec(**row) for row in rows]
            groups = groups_from_json(data["buckets"])
            wires = wires_from_json(data.get("wires"), num_buckets=len(groups))
            num_ranks = data["num_ranks"]
            num_shards = data.get("num_shards", num_ranks)
            return plan_from_groups(
                params, groups, num_ranks=num_ranks, num_shards=num_shards, wires=wires
            )
        except ConfigError:
            raise
        except (ValueError, KeyError, TypeError) as error:
            reason = f"it has no {error}" if isinstance(error, KeyError) else error
            raise ConfigError(
                f"this is not a saved plan: {reason}.",
                remedy="Use a file that save_plan() has written.",
            ) from error


def groups_from_json(rows: object) -> Groups:
    """Reads the buckets of a plan or a profile.

    Raises ConfigError for anything but lists of indices.
    """
    groups = []
    for index, row in enumerate(rows if isinstance(rows, list) else [rows]):
        require(
            isinstance(row, list) and all(type(param) is int for param in row),
            f"buckets[{index}] must be a list of parameters' indices, got {brief(row)}.",
            remedy="Give each bucket the indices of its parameters, such as [2, 0].",
        )
        groups.append(tuple(row))
    return tuple(groups)


def wires_from_json(rows: object, *, num_buckets: int) -> Wires | None:
    """Reads the formats of a plan's buckets; None if it names none.

    Raises ConfigError for anything but a known name or null for each bucket.
    """
    if rows is None:
        return None
    require(
        isinstance(rows, list)
        and len(rows) == num_buckets
        and all(row is None or (isinstance(row, str) and row in WIRES) for row in rows),
        f"wires must have the format of each of {num_buckets} buckets, got {brief(rows)}.",
        remedy=f"Formats are null (full width), {', '.join(WIRES)}.",
    )
    return tuple(rows)  # type: ignore[arg-type]  # a list


def plan_from_groups(
    params: Sequence[ParamSpec],
    groups: Sequence[Sequence[int]],
    *,
    num_ranks: int,
    num_shards: int | None = None,
    wires: str | Sequence[str | None] | None = None,
    block: int = 1,
) -> Plan:
    """Lays out `groups` of indices of parameters; each becomes a bucket, and empty groups are
    skipped.

    `wires` has the format of each group, or one name for all; None is full width. A bucket whose
    elements have no more bytes than the format stays in full width. Parameters of a `block` or more
    start at a multiple of it, as the format of updated parameters needs it. `num_shards` is the
    ranks of a replica, which own whole parameters; None is all ranks.

    Without parameters the plan still has one bucket with a trailer only, for the facts of ranks.
    Raises ConfigError unless every parameter is in one group, with parameters of its kind, and
    `num_ranks` is 1 to 1,048,576.
    """
    require(
        type(num_ranks) is int and 1 <= num_ranks <= _MOST_RANKS,
        f"a plan is for 1 to {_MOST_RANKS:,} ranks, got num_ranks={brief(num_ranks)}.",
        remedy="Give the size of the process group.",
    )
    num_shards = num_ranks if num_shards is None else num_shards
    require(
        type(num_shards) is int and num_shards > 0 and num_ranks % num_shards == 0,
        f"a replica has a part of the {num_ranks} ranks, got num_shards={brief(num_shards)}.",
        remedy="Give the length of a row of the mesh.",
    )
    of_groups = [wires] * len(groups) if wires is None or isinstance(wires, str) else wires
    filled = [(group, wire) for group, wire in zip(groups, of_groups, strict=True) if group]
    _require_each_once(params, [group for group, _ in filled])
    _require_kinds(params, [group for group, _ in filled])
    if not filled:
        filled = [((), None)]
    owners = _owners(params, [group for group, _ in filled], num_shards)
    buckets = []
    for index, (group, wire) in enumerate(filled):
        num_buckets = len(filled) if index == len(filled) - 1 else 0  # 0: it is not the last
        made = _bucket(
            params,
            group,
            index=index,
            wire=wire,
            block=block,
            owners=owners,
            num_buckets=num_buckets,
            num_ranks=num_ranks,
        )
        buckets.append(made)
    return Plan(
        params=tuple(params), buckets=tuple(buckets), num_ranks=num_ranks, num_shards=num_shards
    )


def _owners(
    params: Sequence[ParamSpec], groups: Sequence[Sequence[int]], num_shards: int
) -> dict[int, int]:
    """Returns the owner of each parameter that one rank updates, for any order in a group."""
    whole = [sorted(param for param in group if params[param].is_whole) for group in groups]
    owners = dict[int, int]()
    for group, ranks in zip(whole, owners_of(params, whole, num_ranks=num_shards), strict=True):
        owners.update(zip(group, ranks, strict=True))
    return owners


def _bucket(  # noqa: PLR0913  # the arguments of a plan, and the group
    params: Sequence[ParamSpec],
    group: Sequence[int],
    *,
    index: int,
    wire: str | None,
    block: int,
    owners: Mapping[int, int],
    num_buckets: int,
    num_ranks: int,
) -> Bucket:
    """Lays out a bucket; `num_buckets` is 0 unless it is the last one."""
    first = params[group[0]] if group else ParamSpec(name="", shape=(), dtype="float32", itemsize=4)
    found = None if first.is_sparse else wire_for(wire, first.dtype, first.itemsize)
    if found is not None:
        block = max(block, found.block)
    if first.is_whole:
        group = sorted(group, key=owners.__getitem__)
    slots, narrow_numel = slots_of(params, group, block=block)
    of_last = {"num_buckets": num_buckets, "num_ranks": num_ranks} if num_buckets else {}
    trailer_numel = trailer_at(0, num_slots=len(slots), **of_last).stop
    numel = max(slots[-1].stop, narrow_numel) if slots else 0
    sharded_numel = padded_numel(numel, itemsize=first.itemsize, num_ranks=num_ranks, block=block)
    storage_numel = padded_numel(
        sharded_numel + trailer_numel, itemsize=first.itemsize, num_ranks=num_ranks
    )
    return Bucket(
        index=index,
        dtype=first.dtype,
        itemsize=first.itemsize,
        device=first.device,
        is_sparse=first.is_sparse,
        slots=tuple(slots),
        trailer=trailer_at(storage_numel - trailer_numel, num_slots=len(slots), **of_last),
        shard_numel=sharded_numel // num_ranks,
        storage_numel=storage_numel,
        own_dtype=first.own_dtype,
        wire=None if found is None else wire,
        narrow_numel=narrow_numel,
        stepper=first.stepper,
        owners=tuple(owners[param] for param in group) if first.is_whole else None,
    )


def _require_each_once(params: Sequence[ParamSpec], groups: Sequence[Sequence[int]]) -> None:
    num_slots = dict.fromkeys(range(len(params)), 0)
    for group in groups:
        for param in group:
            num_slots[param] = num_slots.get(param, 0) + 1
    for param, num in num_slots.items():
        is_known = param in range(len(params))
        name = f"{param} ({params[param].name!r})" if is_known else brief(param)
        require(
            is_known and num == 1,
            f"a plan must hold each of its {len(params)} parameters exactly once.",
            where=f"first difference: parameter {name} is in {num} slots",
            remedy="Make the plan from the parameters of this model.",
        )


def _require_kinds(params: Sequence[ParamSpec], groups: Sequence[Sequence[int]]) -> None:
    for index, group in enumerate(groups):
        first = params[group[0]]
        for param in group:
            spec = params[param]
            require(
                spec.kind == first.kind,
                f"parameter {spec.name!r} does not fit bucket {index}.",
                where=f"it is {_kind_text(spec)}; the bucket holds {_kind_text(first)}",
                remedy="A bucket is of one dtype, device and optimizer, and sparse gradients are "
                "apart.",
            )


def _kind_text(spec: ParamSpec) -> str:
    own = f" of {spec.own_dtype} parameters" if spec.own_dtype else ""
    kept = ", whole" if spec.is_whole else ""
    stepper = f", of optimizer {spec.stepper}" if spec.stepper else ""
    sparse = "sparse " if spec.is_sparse else ""
    return f"{sparse}{spec.dtype}{own} on {spec.device}{kept}{stepper}"
