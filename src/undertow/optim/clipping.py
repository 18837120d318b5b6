"""Clips by the norm of all gradients as one vector, across shards, experts and ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from undertow.errors import ConfigError, NonFiniteGradient, WrongType
from undertow.runtime.comm.group import OwnGroup
from undertow.runtime.sharded.layout import Sharding
from undertow.runtime.step.sharded_steps import finish_before_look, require_synchronized
from undertow.runtime.torch_private import private
from undertow.sync import GradientSync


@private.untraced
@torch.no_grad()
def clip_grad_norm_(
    target: GradientSync | nn.Module, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False
) -> Tensor:
    """Scales all gradients of `target` so that their total norm is at most `max_norm`; returns the norm before scaling.

    A collective call, after backward. Each parameter counts once: a replicated one, an expert on whichever rank it lives, and the
    shards of a ShardedOptimizer.

        loss.backward()
        undertow.clip_grad_norm_(model, 1.0)
        optimizer.step()

    - `target`: the result of `attach` or `DistributedDataParallel`.
    - `max_norm`: upper limit of the norm.
    - `norm_type`: order of the norm; infinity takes the largest element.
    - `error_if_nonfinite`: raise if the norm is not finite.

    Returns an fp32 scalar, the same on every rank, because powers are summed in fp64 and rounded once.

    Raises NonFiniteGradient if `error_if_nonfinite` is true and the norm is not finite, and PhaseError if accumulated gradients
    are not synchronized yet.
    """
    sync = getattr(target, "sync", target)
    if not isinstance(sync, GradientSync):
        raise WrongType(
            f"target must be what attach() or DistributedDataParallel returned, got {type(target).__name__}.",
            where="clip_grad_norm_",
            remedy="For a bare model use torch.nn.utils.clip_grad_norm_.",
        )
    norm_type = checked_norm_type(norm_type)
    for each in (sync, *sync.experts):
        finish_before_look(each, [param for _, param in each.named_parameters()])
        require_synchronized(each)
    parts = [_Gradients(each) for each in (sync, *sync.experts)]
    sharding = parts[0].sharding
    # Without experts, sum over the ranks that hold shards of the same parameters: on a mesh, each row has all of them.
    group = sync.own_group if sharding is None or sync.experts else sharding.group
    counted = [grad for part in parts for grad in part.counted]
    total = total_norm(counted, norm_type, device=sync.device, group=group)
    if error_if_nonfinite:
        require_finite(total, norm_type, rank=sync.rank)
    scale = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for part in parts:
        part.multiply(scale)
    return total


class _Gradients:
    """This rank's gradients of one group of ranks; `counted` holds the ones that it adds to the norm."""

    def __init__(self, sync: GradientSync) -> None:
        self.sharding: Sharding | None = None if sync.steps is None else sync.steps.begin_clipping()
        self._whole: list[Tensor] = []
        if self.sharding is not None:
            shards = map(self.sharding.gradient, self.sharding.parts)
            self.counted = [shard for shard in shards if shard is not None]
        else:
            self._whole = [param.grad for _, param in sync.named_parameters() if param.grad is not None]
            self.counted = self._whole if sync.rank == 0 else []  # the same gradients on every rank of the group

    def multiply(self, scale: Tensor) -> None:
        if self.sharding is not None:
            self.sharding.scale_gradients(self.sharding.parts, scale)
        for grad in self._whole:
            grad.mul_(scale.to(grad.device))


def total_norm(grads: Sequence[Tensor], norm_type: float, *, device: torch.device, group: OwnGroup) -> Tensor:
    """Returns the norm of the gradients of all ranks of `group` as one vector: a 0-dim fp32 tensor on `device`."""
    is_largest = math.isinf(norm_type)
    total = torch.zeros((), dtype=torch.float64, device=device)
    for grad in map(_values, grads):
        norm = torch.linalg.vector_norm(grad, norm_type, dtype=_double(grad.dtype)).to(total)
        total = torch.maximum(total, norm) if is_largest else total + norm**norm_type
    if group.num_ranks > 1:
        with group.waiting("the norm of all gradients"):
            group.all_reduce(total, dist.ReduceOp.MAX if is_largest else dist.ReduceOp.SUM)
    return (total if is_largest else total ** (1.0 / norm_type)).to(torch.float32)


def checked_norm_type(norm_type: float) -> float:
    """Returns `norm_type` as a float; raises ConfigError unless it is above zero."""
    norm_type = float(norm_type)
    if not norm_type > 0:
        raise ConfigError(
            f"norm_type must be above zero, got {norm_type}.",
            where="clip_grad_norm_",
            remedy="Give 2.0, another power, or infinity for the largest element.",
        )
    return norm_type


def require_finite(total: Tensor, norm_type: float, *, rank: int) -> None:
    """Raises NonFiniteGradient unless `total` is finite."""
    if not total.isfinite():
        raise NonFiniteGradient(
            f"the total norm of order {norm_type} of the gradients is {total.item()}.",
            where=f"clip_grad_norm_, rank {rank}",
            remedy="Look for the cause, skip this step, or pass error_if_nonfinite=False.",
        )


def _values(grad: Tensor) -> Tensor:
    """Returns the elements that may be nonzero, each once."""
    return grad.coalesce().values() if grad.is_sparse else grad


def _double(dtype: torch.dtype) -> torch.dtype:
    return torch.complex128 if dtype.is_complex else torch.float64
