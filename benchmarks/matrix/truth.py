"""Whether a system trains right: its parameters after a few steps, beside a plain reduction per parameter and torch's SGD.

The first step shows the gradients. What it has sent is read by the second forward, by a third one at the places that an
observing system has found in the second: one that reads a parameter too early is wrong then.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.matrix.systems import System, sgd

NUM_STEPS = 3
# Of the length of the steps. The order of a sum over ranks makes 1e-6; replayed layers that read one step late 3e-3.
TOLERANCE = 5e-4

Parameters = Mapping[str, Tensor]


def right_parameters(model: nn.Module, batch: tuple[Tensor, ...], group: dist.ProcessGroup) -> Parameters:
    """What NUM_STEPS right steps make of `model`, which takes them."""
    optimizer = sgd(model)
    for _ in range(NUM_STEPS):
        optimizer.zero_grad()
        model(*batch).backward()
        for param in model.parameters():
            assert param.grad is not None  # every workload uses all of its parameters
            dist.all_reduce(param.grad, group=group)
            param.grad /= group.size()
        optimizer.step()
    return {name: param.detach() for name, param in model.named_parameters()}


def wrong_parameters(system: System, start: Parameters, right: Parameters) -> list[str]:
    """Names of parameters that are not where right steps from `start` lead; all ranks call it together."""
    found = system.parameters()
    return [name for name in right if name not in found or not _is_near(found[name].detach(), start[name], right[name])]


def _is_near(found: Tensor, start: Tensor, right: Tensor) -> bool:
    length = torch.linalg.vector_norm(right - start)
    # fp32 keeps no more than 6e-8 of the parameter itself, whatever the step.
    bound = TOLERANCE * float(length) + 2e-7 * float(torch.linalg.vector_norm(right))
    return float(torch.linalg.vector_norm(found - right)) <= bound
