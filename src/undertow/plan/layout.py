"""The layout of a bucket's storage, in elements of the bucket's dtype.

    0             numel        trailer.start      storage_numel
    | gradients   | padding    | trailer          |
      one slot                   `undertow.plan.facts`
      per parameter

Gradients with the first part of the padding are cut into equal shards, one per rank. The end of
that part, and the end of the storage, are multiples of the number of ranks and of 16 bytes (vector
loads).

If a bucket travels in a format with blocks, parameters of a block or more come first, each at a
multiple of a block. The smaller ones, which travel in full width, follow at `narrow_numel`. A shard
ends at a multiple of a block too.

If one rank updates all of a parameter, a rank's part has the parameters that it owns, side by side
in the order of ranks, each at a multiple of 64 bytes. Parts differ in length then, and small
parameters travel in the format too.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from reprlib import repr as brief
from typing import Any

from undertow.errors import ConfigError
from undertow.wire import WIRES, wire_for

_ALIGN_BYTES = 16
_ALLOCATION_BYTES = 64  # memory that torch allocates begins at a multiple
MOST = 2**63 - 1  # largest count: a signed integer of 64 bits
Kind = tuple[str, str, bool, str | None, int, bool]
# Bytes per element of the dtypes that have gradients, by torch's names.
ITEMSIZES = {
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "complex64": 8,
    "complex128": 16,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamSpec:
    """One parameter as the planner sees it; `dtype` and `device` are its gradient's."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # torch's name without "torch.": "float32"
    itemsize: int  # bytes per element
    device: str = "cpu"
    is_sparse: bool = False  # its gradient lists rows instead of holding all of them
    own_dtype: str | None = None  # the parameter's dtype, if its gradient has another one
    stepper: int = 0  # the sharded optimizer that updates it, of several
    is_whole: bool = False  # one rank updates all of it, and not each rank a part

    def __post_init__(self) -> None:
        texts = (
            self.name,
            self.dtype,
            self.device,
            self.dtype if self.own_dtype is None else self.own_dtype,
        )
        flags = (self.is_sparse, self.is_whole)
        if (
            not all(isinstance(text, str) for text in texts)
            or not all(isinstance(flag, bool) for flag in flags)
            or type(self.stepper) is not int
        ):
            raise ConfigError(
                f"parameter {brief(self.name)} has an impossible description: dtype "
                f"{brief(self.dtype)}, device {brief(self.device)}, sparse "
                f"{brief(self.is_sparse)}.",
                remedy="Name, dtype and device are texts; whether it is sparse is true or false.",
            )
        sizes = (*self.shape, self.itemsize)
        is_whole = set(map(type, sizes)) == {int} and min(sizes) >= 0
        if not is_whole or self.itemsize == 0 or self.numel * self.itemsize > MOST:
            raise ConfigError(
                f"parameter {self.name!r} has an impossible size: shape {brief(self.shape)}, "
                f"{brief(self.itemsize)} bytes per element.",
                remedy="Sizes are zero or more, an element has at least one byte, and all of "
                "them fit into 64 bits.",
            )

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def slot_numel(self) -> int:
        """Elements of its slot.

        A sparse gradient only has a flag in the bucket's trailer and travels separately.
        """
        return 0 if self.is_sparse else self.numel

    @property
    def num_bytes(self) -> int:
        """Bytes of its slot."""
        return self.slot_numel * self.itemsize

    def encoded_numel(self, wire: str | None) -> int:
        """Returns the elements of its slot that travel in a format, with the gap to the next block.

        0 if it travels in full width: sparse, with fewer elements than a block, or of a dtype that
        has no more bytes than the format.
        """
        if wire is None or self.is_sparse:
            return 0
        found = wire_for(wire, self.dtype, self.itemsize)
        if found is None or self.numel < found.block:
            return 0
        return round_up(self.numel, found.block)

    def sent_bytes(self, wire: str | None) -> int:
        """Returns the bytes of its slot in a format. A bucket adds its trailer, and padding."""
        num_encoded = self.encoded_numel(wire)
        if wire is None or num_encoded == 0:
            return self.num_bytes
        return WIRES[wire].num_bytes(num_encoded)

    @property
    def kind(self) -> Kind:
        """Gradients share a bucket only if these agree.

        Dtype, device, sparse or not, the dtype of the parameters, and how they are updated.
        """
        return (
            self.dtype,
            self.device,
            self.is_sparse,
            self.own_dtype,
            self.stepper,
            self.is_whole,
        )

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values, as in JSON."""
        found = {
            name: value for name in self.__slots__ if (value := getattr(self, name)) is not None
        }
        for name in ("stepper", "is_whole"):
            if not found[name]:
                del found[name]
        return found | {"shape": [*self.shape]}


Groups = tuple[tuple[int, ...], ...]  # the parameters in each bucket of a plan
Wires = tuple[str | None, ...]  # the format of each bucket; None: full width


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """Place of one parameter's gradient inside a bucket."""

    param: int  # index into Plan.params
    start: int  # elements, inclusive
    stop: int  # elements, exclusive; equal to start for a parameter without elements

    @property
    def numel(self) -> int:
        return self.stop - self.start


def padded_numel(numel: int, *, itemsize: int, num_ranks: int, block: int = 1) -> int:
    """Returns the least number of elements that holds `numel`, and is a multiple of the number of
    ranks times `block` and of 16 bytes."""
    unit = math.lcm(num_ranks * block, _ALIGN_BYTES // math.gcd(_ALIGN_BYTES, itemsize))
    return round_up(numel, unit)


def equal_parts(num_parts: int, part_numel: int, *, stop: int) -> list[range]:
    """Returns parts of `part_numel` elements each, of [0, stop); the last ones may be shorter."""
    return [
        range(min(index * part_numel, stop), min((index + 1) * part_numel, stop))
        for index in range(num_parts)
    ]


def round_up(number: int, unit: int) -> int:
    """Returns the least multiple of `unit` that is not below `number`."""
    return -(-number // unit) * unit


def slots_of(
    params: Sequence[ParamSpec], group: Sequence[int], *, block: int
) -> tuple[list[Slot], int]:
    """Returns the slots of a bucket, and the number of elements at its start that are in blocks."""
    slots = []
    small = []
    stop = 0
    for param in group:
        spec = params[param]
        # One rank's part has no second place for those that travel in full width.
        if 0 < spec.slot_numel < block and not spec.is_whole:
            small.append(param)
            continue
        unit = block
        if spec.is_whole:  # as torch allocates: the bits of products may depend on it
            unit = math.lcm(block, _ALLOCATION_BYTES // math.gcd(_ALLOCATION_BYTES, spec.itemsize))
        start = round_up(stop, unit)
        stop = start + spec.slot_numel
        slots.append(Slot(param=param, start=start, stop=stop))
    stop = narrow_numel = round_up(stop, block)
    for param in small:
        start, stop = stop, stop + params[param].slot_numel
        slots.append(Slot(param=param, start=start, stop=stop))
    return slots, narrow_numel
