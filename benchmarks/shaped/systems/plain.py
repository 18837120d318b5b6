"""What most systems share: a module, torch's SGD with momentum, parameters as they are."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from benchmarks.shaped.systems import sgd


class PlainSystem:
    """Trains `wrapped`, whose backward leaves averaged gradients; `bare` has the parameters and their names."""

    def __init__(self, wrapped: nn.Module, bare: nn.Module) -> None:
        self.wrapped = wrapped
        self.bare = bare
        self.optimizer: torch.optim.Optimizer = sgd(bare)

    def backward(self, batch: tuple[Tensor, ...]) -> None:
        self.optimizer.zero_grad()
        self.wrapped(*batch).backward()

    def update(self) -> None:
        self.optimizer.step()

    def finish(self) -> None:
        pass

    def parameters(self) -> Mapping[str, Tensor]:
        return dict(self.bare.named_parameters())

    def is_settled(self) -> bool:
        return True

    def told(self) -> Mapping[str, str]:
        return {}
