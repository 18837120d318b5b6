"""A model that replays timed layers: real gradients of the right size, waits instead of arithmetic.

Several ranks share the processors of one machine, and real arithmetic would be slowed by the others; waits are not. What
hooks and copies cost on the host is added to a layer's time, as on a device that waits for its host.
"""

from __future__ import annotations

import time
from typing import Any, final

import torch
from torch import Tensor, nn

from benchmarks.shaped.workloads.profiles import Layer, Layers


@final
class _Sleeper:
    """Waits that add up to the times asked for: a sleep that was too long shortens the next one."""

    def __init__(self) -> None:
        self._debt_s = 0.0

    def wait_until(self, due_s: float) -> None:
        left_s = due_s - time.perf_counter()
        if left_s <= 0:
            return  # what the host took is real: it is not made up for
        paid_s = min(left_s, self._debt_s)
        self._debt_s -= paid_s
        if left_s > paid_s:
            time.sleep(left_s - paid_s)
            self._debt_s += max(0.0, time.perf_counter() - (due_s - paid_s))


_NUM_READ = 16  # elements of each parameter: some of every shard


class _TimedLayer(torch.autograd.Function):
    """Passes a number on; a parameter's gradient is the parameter times the batch's number times what the forward read.

    The forward reads a few elements of every parameter: a system whose parameters arrive later has wrong gradients.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: _ReplayLayer, *params: Tensor) -> Tensor:
        due_s = time.perf_counter() + layer.times.forward_us / 1e6
        ctx.layer = layer
        read = torch.cat([param.view(-1)[:: -(-param.numel() // _NUM_READ)] for param in params]).abs().mean()
        ctx.save_for_backward(x, read, *params)
        result = x.clone()
        layer.sleeper.wait_until(due_s)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        due_s = time.perf_counter() + ctx.layer.times.backward_us / 1e6
        x, read, *params = ctx.saved_tensors
        factor = x * grads[0] * read
        of_params = [param * factor for param in params]
        ctx.layer.sleeper.wait_until(due_s)
        return (grads[0], None, *of_params)


class _ReplayLayer(nn.Module):
    def __init__(self, times: Layer, sleeper: _Sleeper) -> None:
        super().__init__()
        self.times = times
        self.sleeper = sleeper
        self.params = nn.ParameterList(torch.randn(numel) for numel in times.numels)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = _TimedLayer.apply(x, self, *self.params)
        return result


class Replay(nn.Module):
    """The layers, in the order of the forward."""

    def __init__(self, layers: Layers) -> None:
        super().__init__()
        sleeper = _Sleeper()
        self.blocks = nn.Sequential(*(_ReplayLayer(layer, sleeper) for layer in layers))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x).sum()


def batch_of(rank: int) -> tuple[Tensor, ...]:
    return (torch.full((1,), rank + 1.0),)
