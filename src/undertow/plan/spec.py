"""What the planner knows of a parameter."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from undertow.errors import ConfigError

Kind = tuple[str, str, bool, str | None]


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
        if not all(isinstance(size, int) and size >= 0 for size in (*self.shape, self.itemsize - 1)):
            raise ConfigError(
                f"parameter {self.name!r} has an impossible size: shape {self.shape}, {self.itemsize} bytes per element.",
                remedy="Sizes are zero or more, and an element has at least one byte.",
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
