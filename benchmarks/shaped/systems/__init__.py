"""Ways of training data-parallel, one small module each, with one entry point: `build(setting) -> System`.

A rank imports the module by name inside that system's virtual environment: it may import torch, its own package and
this folder, nothing else of the project.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

# SGD with momentum everywhere: a few steps show the gradients, and there is a state to be sharded.
LEARNING_RATE = 1e-2
MOMENTUM = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A fresh model, and the group over which a system trains it (the world)."""

    model: nn.Module  # its forward returns the loss; `model.blocks` are its layers
    group: dist.ProcessGroup
    options: Mapping[str, Any]  # of the contender


class System(Protocol):
    """A model in training. One step is `backward` and `update`; nothing may be in flight after both, or see `finish`."""

    def backward(self, batch: tuple[Tensor, ...]) -> None:
        """Clears the gradients, runs forward and backward, and returns when gradients are the mean over ranks."""

    def update(self) -> None:
        """Makes one step of SGD with LEARNING_RATE and MOMENTUM."""

    def finish(self) -> None:
        """Completes what a step has left in flight (gathers under the next forward)."""

    def parameters(self) -> Mapping[str, Tensor]:
        """Returns all parameters in full, by the bare model's names; all ranks call it together."""

    def is_settled(self) -> bool:
        """Says whether later steps will be like the last one: False while the system still looks for a plan."""

    def told(self) -> Mapping[str, str]:
        """Returns texts that the system has about itself, such as its plan."""


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Returns torch's optimizer over all parameters of `model`."""
    return torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)
