"""Remembers known contents of `.grad`, to detect writes from outside of autograd.

Hooks report every gradient that autograd adds. But a function of the user's may write `.grad` itself (fused weight gradients), or
a loop may assign the result of `torch.autograd.grad`.
"""

import weakref
from collections.abc import Iterable

from torch import Tensor


class Known:
    """The `.grad` of some parameters at the last look, by position; holds the tensors."""

    def __init__(self) -> None:
        self.entries: dict[int, tuple[weakref.ref[Tensor], int]] = {}

    def look(self, grads: Iterable[tuple[int, Tensor | None]]) -> None:
        """Makes these the only known gradients."""
        self.entries = {position: (weakref.ref(grad), grad._version) for position, grad in grads if grad is not None}

    def has(self, position: int, grad: Tensor) -> bool:
        """Returns True if it is the same tensor, without writes since."""
        ref, version = self.entries.get(position, (None, -1))
        return ref is not None and ref() is grad and version == grad._version


def has_values(grad: Tensor) -> bool:
    """Returns True if there are nonzero values; a zeroed gradient has been discarded. On a device, the host waits."""
    return bool(grad.coalesce().values().any() if grad.is_sparse else grad.any())
