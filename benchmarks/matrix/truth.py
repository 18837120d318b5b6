"""Whether a system trains right: its parameters after one step, beside a plain reduction per parameter and plain SGD."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.matrix.systems import LEARNING_RATE, System

# Of the length of the step: the order of a sum over ranks, and fp32 parameters that a small step was added to.
TOLERANCE = 2e-3


def steps_of_reference(model: nn.Module, batch: tuple[Tensor, ...], group: dist.ProcessGroup) -> Mapping[str, Tensor]:
    """What one right step adds to each parameter of `model`, which is left with gradients."""
    model(*batch).backward()
    steps = {}
    for name, param in model.named_parameters():
        assert param.grad is not None  # every workload uses all of its parameters
        dist.all_reduce(param.grad, group=group)
        steps[name] = param.grad * (-LEARNING_RATE / group.size())
    return steps


def wrong_parameters(system: System, start: Mapping[str, Tensor], steps: Mapping[str, Tensor]) -> list[str]:
    """Names of parameters that are not where one right step from `start` leads; all ranks call it together."""
    found = system.parameters()
    return [
        name for name, step in steps.items() if name not in found or not _is_near(found[name].detach(), start[name] + step, step)
    ]


def _is_near(found: Tensor, expected: Tensor, step: Tensor) -> bool:
    # fp32 keeps no more than 6e-8 of the parameter itself, whatever the step.
    bound = TOLERANCE * float(torch.linalg.vector_norm(step)) + 2e-7 * float(torch.linalg.vector_norm(expected))
    return float(torch.linalg.vector_norm(found - expected)) <= bound
