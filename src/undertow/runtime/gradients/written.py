"""What `.grad` is known to be, so that it shows where somebody else than autograd has written it.

Autograd tells of every gradient that it adds, by a hook. A function of the user's may write one itself (fused weight
gradients), or a loop assign what `torch.autograd.grad` has returned.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable

from torch import Tensor


class Known:
    """The `.grad` of some parameters as it was when it was last looked at, by position; held by whoever has it."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[Tensor], int]] = {}

    def look(self, grads: Iterable[tuple[int, Tensor | None]]) -> None:
        """From now on these are what is known, and nothing else is."""
        self._known = {position: (weakref.ref(grad), grad._version) for position, grad in grads if grad is not None}

    def has(self, position: int, grad: Tensor) -> bool:
        """Whether it is the same tensor, and nobody has written into it since."""
        ref, version = self._known.get(position, (None, -1))
        return ref is not None and ref() is grad and version == grad._version


def has_values(grad: Tensor) -> bool:
    """Whether anything but zeros is there: else a gradient has been thrown away. On a device the host waits."""
    return bool(grad.coalesce().values().any() if grad.is_sparse else grad.any())
