"""A model that replays timed layers: real gradients of the right size, waits in place of arithmetic.

Several ranks share the processors of one machine, and real arithmetic would be slowed by the others; waits are not.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn

NUM_LAYERS = 24
LAYER_SHAPES = ((700, 700), (10_000,))  # 0.5 M elements
FORWARD_S, BACKWARD_S = 0.120, 0.240  # of all layers


class _TimedLayer(torch.autograd.Function):
    """Passes a number on; each parameter's gradient is the parameter times that number."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *params: Tensor) -> Tensor:
        due_s = time.perf_counter() + FORWARD_S / NUM_LAYERS
        ctx.save_for_backward(x, *params)
        result = x.clone()
        _wait_until(due_s)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        due_s = time.perf_counter() + BACKWARD_S / NUM_LAYERS
        x, *params = ctx.saved_tensors
        of_params = [param * (x * grads[0]) for param in params]
        _wait_until(due_s)
        return (grads[0], *of_params)


class Replay(nn.Module):
    """24 layers of 0.5 M parameters, 48 MB."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ParameterList(torch.randn(shape) for shape in LAYER_SHAPES) for _ in range(NUM_LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for params in self.layers:
            x = _TimedLayer.apply(x, *params)
        return x


def _wait_until(due_s: float) -> None:
    while (left_s := due_s - time.perf_counter()) > 0:
        time.sleep(left_s)
