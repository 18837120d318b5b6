"""Ways of training data-parallel, one small module each, with one entry point: `build(setting) -> System`.

A worker imports the module by name inside that system's virtual environment: it may import torch, its own package and
this file, nothing else of the project.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor, nn

LEARNING_RATE = 1e-2  # plain SGD everywhere, so that one step shows the gradient


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What a system is given: a fresh model, and the group over which to train it (the world)."""

    model: nn.Module  # its forward returns the loss; `model.blocks` are its layers
    group: dist.ProcessGroup
    options: Mapping[str, Any]  # from the catalog


class System(Protocol):
    """A model in training. One step is `backward` and `update`; nothing may be in flight after both, or see `finish`."""

    def backward(self, batch: tuple[Tensor, ...]) -> None:
        """Clears the gradients, runs forward and backward, and returns when gradients are the mean over ranks."""

    def update(self) -> None:
        """One step of plain SGD with LEARNING_RATE."""

    def finish(self) -> None:
        """Completes what a step has left in flight (gathers under the next forward)."""

    def parameters(self) -> Mapping[str, Tensor]:
        """All parameters in full, by the bare model's names; all ranks call it together."""

    def facts(self) -> Mapping[str, Any]:
        """What the row should say: `collectives` per step where known, `version`, settings."""

    def close(self) -> None:
        """Lets go of groups and hooks."""
