"""Ways of training data-parallel, one small module each, with one entry point: `build(setting) -> System`.

A worker imports the module by name inside that system's virtual environment: it may import torch, its own package and
this file, nothing else of the project.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

# SGD with momentum everywhere: a few steps show the gradients, and there is a state to be sharded.
LEARNING_RATE, MOMENTUM = 1e-2, 0.9


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
        """One step of SGD with LEARNING_RATE and MOMENTUM."""

    def finish(self) -> None:
        """Completes what a step has left in flight (gathers under the next forward)."""

    def parameters(self) -> Mapping[str, Tensor]:
        """All parameters in full, by the bare model's names; all ranks call it together."""

    def facts(self) -> Mapping[str, Any]:
        """What the row should say: `collectives` per step where known, `version`, `state_mb` of the optimizer on this rank."""

    def close(self) -> None:
        """Lets go of groups and hooks."""


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Over all parameters of `model`."""
    return torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)


def megabytes(state: Any) -> float:
    """What the tensors in an optimizer's state take on this rank; of what is sharded, the part that is here."""
    if isinstance(state, Mapping):
        return sum(megabytes(value) for value in state.values())
    if isinstance(state, list | tuple):
        return sum(megabytes(value) for value in state)
    if not isinstance(state, Tensor):
        return 0.0
    local: Tensor = state.to_local() if hasattr(state, "to_local") else state
    return local.numel() * local.element_size() / 1e6
