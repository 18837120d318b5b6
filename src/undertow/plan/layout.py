"""The layout of a bucket's storage, in elements of the bucket's dtype.

    0             numel        trailer.start      storage_numel
    | gradients   | padding    | trailer          |
      one slot                   `undertow.plan.facts`
      per parameter

Gradients with the first part of the padding are cut into equal shards, one per rank. The end of
that part, and the end of the storage, are multiples of the number of ranks and of 16 bytes (vector
loads).
"""

import math
from dataclasses import dataclass
from reprlib import repr as brief
from typing import Any

from undertow.errors import ConfigError

_ALIGN_BYTES = 16
MOST = 2**63 - 1  # largest count: a signed integer of 64 bits
Kind = tuple[str, str, bool, str | None]
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

    def __post_init__(self) -> None:
        texts = (
            self.name,
            self.dtype,
            self.device,
            self.dtype if self.own_dtype is None else self.own_dtype,
        )
        if not all(isinstance(text, str) for text in texts) or not isinstance(self.is_sparse, bool):
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

    @property
    def kind(self) -> Kind:
        """Gradients share a bucket only if these agree.

        Dtype, device, sparse or not, and the dtype of the parameters.
        """
        return self.dtype, self.device, self.is_sparse, self.own_dtype

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values, as in JSON."""
        return {
            name: value for name in self.__slots__ if (value := getattr(self, name)) is not None
        } | {"shape": [*self.shape]}


Groups = tuple[tuple[int, ...], ...]  # the parameters in each bucket of a plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """Place of one parameter's gradient inside a bucket."""

    param: int  # index into Plan.params
    start: int  # elements, inclusive
    stop: int  # elements, exclusive; equal to start for a parameter without elements

    @property
    def numel(self) -> int:
        return self.stop - self.start


def padded_numel(numel: int, *, itemsize: int, num_ranks: int) -> int:
    """Returns the least multiple of the number of ranks and of 16 bytes that holds `numel`
    elements."""
    unit = math.lcm(num_ranks, _ALIGN_BYTES // math.gcd(_ALIGN_BYTES, itemsize))
    return -(-numel // unit) * unit
