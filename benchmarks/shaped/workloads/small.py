"""A model of thousands of small parameters: nearly nothing to compute, and little to send."""

from __future__ import annotations

import torch
from torch import Tensor, nn

NUM_PARAMS, NUMEL = 3000, 64


class ManySmall(nn.Module):
    """Its forward is a sum over all parameters, times the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.many = nn.ParameterList(torch.randn(NUMEL) for _ in range(NUM_PARAMS))

    def forward(self, x: Tensor) -> Tensor:
        total = torch.zeros(NUMEL)
        for param in self.many:
            total = total + param
        return (total * x).sum()


def batch_of(rank: int) -> tuple[Tensor, ...]:
    return (torch.full((NUMEL,), rank + 1.0),)
