"""Tells whether a system trains right, from its parameters after a few steps.

They are compared with those of a blocking reduction per parameter and torch's SGD. The first step shows the gradients. The
second forward reads the parameters that it has sent, and the third one reads them at the places that an observing system
has found in the second: a system that reads a parameter too early is wrong then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.shaped.systems import System, sgd

NUM_STEPS = 3
# Of the length of the steps. The order of a sum over ranks makes 1e-6; replayed layers that read one step late 3e-3.
TOLERANCE = 5e-4
# Times the difference that another order makes to a model that amplifies rounding: a residual network with batch norm on 4 ranks,
# of small images, has 2e-3 after three steps, and other orders are as likely to make more as less.
_ORDERS = 4.0

Parameters = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """The parameters after right steps, the length of their way, and how far from there each may be."""

    right: Parameters
    lengths: Mapping[str, float]
    bounds: Mapping[str, float]

    def wrong_parameters(self, system: System, *, rounding: float) -> list[str]:
        """Returns the names of parameters that are not where right steps lead; all ranks call it together.

        `rounding` is the part of its way by which a parameter may be off more, if gradients are rounded.
        """
        found = system.parameters()
        return [
            name
            for name, right in self.right.items()
            if name not in found or _distance(found[name].detach(), right) > self.bounds[name] + rounding * self.lengths[name]
        ]


def reference_of(make_model: Callable[[], nn.Module], batch: tuple[Tensor, ...], group: dist.ProcessGroup) -> Reference:
    """Returns the reference of every model that `make_model` makes; all ranks call it together."""
    model = make_model()
    start = {name: param.detach().clone() for name, param in model.named_parameters()}
    right = right_parameters(model, batch, group)
    reordered = right_parameters(make_model(), batch, group, is_reversed=True)
    lengths = {name: _distance(right[name], start[name]) for name in right}
    return Reference(right=right, lengths=lengths, bounds=bounds_of(start, right, reordered))


def right_parameters(
    model: nn.Module, batch: tuple[Tensor, ...], group: dist.ProcessGroup, *, is_reversed: bool = False
) -> Parameters:
    """Returns the parameters of `model` after NUM_STEPS right steps; `is_reversed` adds up the last rank's gradients first."""
    optimizer = sgd(model)
    for _ in range(NUM_STEPS):
        optimizer.zero_grad()
        model(*batch).backward()
        for param in model.parameters():
            assert param.grad is not None  # every workload uses all of its parameters
            if is_reversed:
                of_ranks = [torch.empty_like(param.grad) for _ in range(group.size())]
                dist.all_gather(of_ranks, param.grad, group=group)
                param.grad = sum(reversed(of_ranks), start=torch.zeros_like(param.grad))
            else:
                dist.all_reduce(param.grad, group=group)
            param.grad /= group.size()
        optimizer.step()
    return {name: param.detach() for name, param in model.named_parameters()}


def bounds_of(start: Parameters, right: Parameters, reordered: Parameters) -> Mapping[str, float]:
    """Returns how far from `right` each parameter may be after steps from `start`; `reordered` follows another order of sums."""
    return {name: _bound(start[name], right[name], reordered[name]) for name in right}


def _bound(start: Tensor, right: Tensor, reordered: Tensor) -> float:
    # fp32 keeps no more than 6e-8 of the parameter itself, whatever the step.
    of_itself = 2e-7 * float(torch.linalg.vector_norm(right))
    return TOLERANCE * _distance(right, start) + of_itself + _ORDERS * _distance(reordered, right)


def _distance(one: Tensor, other: Tensor) -> float:
    return float(torch.linalg.vector_norm(one - other))
