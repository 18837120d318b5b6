"""The plan: each parameter's bucket, the order of buckets, and the layout of each bucket."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from reprlib import repr as brief
from typing import Any

from undertow.errors import ConfigError, require
from undertow.foreign import parsed_json
from undertow.plan.facts import Trailer, trailer_at
from undertow.plan.layout import Groups, Kind, ParamSpec, Slot, padded_numel

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
        """The parameter of each slot."""
        return tuple(slot.param for slot in self.slots)

    def shard_range(self, rank: int, *, num_replicas: int = 1) -> range:
        """Returns the range of elements of gradients and padding that `rank` owns; the last shard
        may hold padding only.

        With `num_replicas`, `rank` counts within one replica, which has fewer ranks by that factor.
        """
        numel = self.shard_numel * num_replicas
        return range(rank * numel, (rank + 1) * numel)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Every parameter in exactly one slot; buckets in launch order. `plan_from_groups` makes it."""

    params: tuple[ParamSpec, ...]
    buckets: tuple[Bucket, ...]
    num_ranks: int

    @property
    def groups(self) -> Groups:
        """The groups from which `plan_from_groups` makes this plan."""
        return tuple(bucket.params for bucket in self.buckets)

    def to_dict(self) -> dict[str, Any]:
        """Returns the plan as plain values, ready for JSON."""
        return {
            "format": _FORMAT,
            "num_ranks": self.num_ranks,
            "params": [spec.to_dict() for spec in self.params],
            "buckets": [list(group) for group in self.groups],
        }

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
            return plan_from_groups(params, groups, num_ranks=data["num_ranks"])
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


def plan_from_groups(
    params: Sequence[ParamSpec],
    groups: Sequence[Sequence[int]],
    *,
    num_ranks: int,
) -> Plan:
    """Lays out `groups` of indices of parameters; each becomes a bucket, and empty groups are
    skipped.

    Without parameters the plan still has one bucket with a trailer only, through which ranks
    exchange facts. Raises ConfigError unless every parameter is in one group, with
    parameters of its kind, and `num_ranks` is 1 to 1,048,576.
    """
    require(
        type(num_ranks) is int and 1 <= num_ranks <= _MOST_RANKS,
        f"a plan is for 1 to {_MOST_RANKS:,} ranks, got num_ranks={brief(num_ranks)}.",
        remedy="Give the size of the process group.",
    )
    filled = [group for group in groups if group]
    _require_each_once(params, filled)
    _require_kinds(params, filled)
    if not filled:
        filled = [()]
    buckets = [
        _bucket(params, group, index, len(filled), num_ranks) for index, group in enumerate(filled)
    ]
    return Plan(params=tuple(params), buckets=tuple(buckets), num_ranks=num_ranks)


def _bucket(
    params: Sequence[ParamSpec],
    group: Sequence[int],
    index: int,
    num_buckets: int,
    num_ranks: int,
) -> Bucket:
    ends = accumulate((params[param].slot_numel for param in group), initial=0)
    slots = []
    for param, (start, stop) in zip(group, pairwise(ends), strict=True):
        slots.append(Slot(param=param, start=start, stop=stop))
    first = params[group[0]] if group else ParamSpec(name="", shape=(), dtype="float32", itemsize=4)
    of_last = (
        {"num_buckets": num_buckets, "num_ranks": num_ranks} if index == num_buckets - 1 else {}
    )
    trailer_numel = trailer_at(0, num_slots=len(slots), **of_last).stop
    numel = slots[-1].stop if slots else 0
    sharded_numel = padded_numel(numel, itemsize=first.itemsize, num_ranks=num_ranks)
    storage_numel = padded_numel(
        sharded_numel + trailer_numel,
        itemsize=first.itemsize,
        num_ranks=num_ranks,
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
                remedy="A bucket is of one dtype and device, and sparse gradients are apart.",
            )


def _kind_text(spec: ParamSpec) -> str:
    own = f" of {spec.own_dtype} parameters" if spec.own_dtype else ""
    return f"{'sparse ' if spec.is_sparse else ''}{spec.dtype}{own} on {spec.device}"
