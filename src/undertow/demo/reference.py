"""The reference gradients, and the comparison of a variant with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

__all__ = ["Reference", "gradients_of", "reference_of_first_step"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """Mean gradients over ranks, one per parameter, and the tolerance for other variants."""

    gradients: Sequence[Tensor]
    tolerances: Sequence[Tensor] | None  # None: bit-identical

    def agrees_with(self, gradients: Sequence[Tensor]) -> bool:
        if self.tolerances is None:
            return all(map(torch.equal, self.gradients, gradients))
        rows = zip(self.gradients, gradients, self.tolerances, strict=True)
        return all(bool(((mine - theirs).abs() <= tolerance).all()) for mine, theirs, tolerance in rows)


def gradients_of(model: nn.Module) -> list[Tensor]:
    """Returns copies of the gradients, because buckets reuse their storage."""
    return [param.grad.clone() for param in model.parameters() if param.grad is not None]


def reference_of_first_step(model: nn.Module, batch: Tensor) -> Reference:
    """Returns the mean over ranks of the gradients of `model`, which nothing synchronizes, for this rank's `batch`."""
    num_ranks = dist.get_world_size()
    model(batch).backward()
    gradients = gradients_of(model)
    magnitudes = [gradient.abs() for gradient in gradients]
    for tensor in (*gradients, *magnitudes):
        dist.all_reduce(tensor)
        tensor /= num_ranks
    if num_ranks <= 2:  # a + b is b + a
        return Reference(gradients=gradients, tolerances=None)
    # A bucket is split into chunks at other places than a parameter, and the chunk determines in which order ranks are added. Any
    # order of n - 1 additions and a division is off by at most n eps mean(|g|) (Higham, "Accuracy and Stability of Numerical
    # Algorithms", 2002, 4.2), two orders by twice that.
    scale = 2 * num_ranks * torch.finfo(torch.float32).eps
    return Reference(gradients=gradients, tolerances=[scale * magnitude for magnitude in magnitudes])
