"""What the planner knows of a parameter."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from reprlib import repr as brief
from typing import Any

from undertow.errors import ConfigError

MOST = 2**63 - 1  # of what is counted: what an integer of 64 bits holds
Kind = tuple[str, str, bool, str | None]
# Bytes per element of the dtypes that have gradients, by torch's names.
ITEMSIZES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "complex64": 8, "complex128": 16}


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamSpec:
    """One parameter, as the pure half sees it; `dtype` and `device` are those of its gradient."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # torch's name without "torch.": "float32"
    itemsize: int  # bytes per element
    device: str = "cpu"
    is_sparse: bool = False  # its gradient lists rows in place of holding all of them
    own_dtype: str | None = None  # the parameter's, where its gradient has another one

    def __post_init__(self) -> None:
        texts = (self.name, self.dtype, self.device, self.dtype if self.own_dtype is None else self.own_dtype)
        if not all(isinstance(text, str) for text in texts) or not isinstance(self.is_sparse, bool):
            raise ConfigError(
                f"parameter {brief(self.name)} has a description that cannot be: dtype {brief(self.dtype)}, "
                f"device {brief(self.device)}, sparse {brief(self.is_sparse)}.",
                remedy="Name, dtype and device are texts; whether it is sparse is true or false.",
            )
        sizes = (*self.shape, self.itemsize)
        is_whole = all(isinstance(size, int) and not isinstance(size, bool) and size >= 0 for size in sizes)
        if not is_whole or self.itemsize == 0 or self.numel * self.itemsize > MOST:
            raise ConfigError(
                f"parameter {self.name!r} has an impossible size: shape {brief(self.shape)}, "
                f"{brief(self.itemsize)} bytes per element.",
                remedy="Sizes are zero or more, an element has at least one byte, and all of them fit into 64 bits.",
            )

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def slot_numel(self) -> int:
        """Elements of its slot: a sparse gradient has a flag in the bucket's trailer only and travels beside it."""
        return 0 if self.is_sparse else self.numel

    @property
    def num_bytes(self) -> int:
        """Bytes of its slot."""
        return self.slot_numel * self.itemsize

    @property
    def kind(self) -> Kind:
        """Gradients share a bucket only if they are of one kind: dtype, device, sparse or not, and of parameters of one dtype."""
        return self.dtype, self.device, self.is_sparse, self.own_dtype

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as JSON has them."""
        values = {**asdict(self), "shape": list(self.shape)}
        if self.own_dtype is None:
            del values["own_dtype"]
        return values
