"""A model of middle size: 150 parameters, 20 MB, 9 buckets, some 80 ms of one processor per step."""

from __future__ import annotations

import torch
from torch import Tensor, nn

NUM_LAYERS, WIDTH, BATCH = 75, 256, 160


def middle_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(NUM_LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())))


def batch_of(rank: int) -> Tensor:
    return torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(rank))
