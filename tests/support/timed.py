"""A model that takes time and no processor: for what is measured on a busy machine."""

import time
from typing import Any

import torch
from torch import nn


class Timed(nn.Sequential):
    """Layers whose gradients come `pause_s` apart, each with `numel` parameters; the forward of each takes half of that."""

    def __init__(self, *, numel: int, pause_s: float, num_layers: int = 4) -> None:
        super().__init__(*(_Layer(numel, pause_s) for _ in range(num_layers)))


class _Layer(nn.Module):
    def __init__(self, numel: int, pause_s: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(numel))
        self._pause_s = pause_s

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Pause.apply(x + self.weight.sum(), self._pause_s)


class _Pause(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, pause_s: float) -> torch.Tensor:  # type: ignore[override]
        ctx.pause_s = pause_s
        time.sleep(pause_s / 2)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        time.sleep(ctx.pause_s)
        return grad, None
