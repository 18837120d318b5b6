"""Clips by the norm of all gradients as one vector, across shards, experts and ranks."""

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from undertow.errors import ConfigError, NonFiniteGradient, WrongType
from undertow.runtime.comm.group import OwnGroup
from undertow.runtime.sharded.layout import Sharding
from undertow.runtime.sharded.shards import ShardPart
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
    clipping, syncs = Clipping(norm_type, sync.rank), (sync, *sync.experts)
    for each in syncs:
        finish_before_look(each, [param for _, param in each.named_parameters()])
        require_synchronized(each)
    shardings = [None if each._steps is None else each._steps.begin_clipping() for each in syncs]
    for each, sharding in zip(syncs, shardings, strict=True):
        if sharding is not None:
            clipping.add_shards(sharding, sharding.parts)
        else:
            clipping.add_whole((param.grad for _, param in each.named_parameters()), counts=each.rank == 0)
    # Without experts, sum over the ranks that hold shards of the same parameters: on a mesh, each row has all of them.
    group = sync._own_group if shardings[0] is None or sync.experts else shardings[0].group
    return clipping.clip(max_norm, group, error_if_nonfinite=error_if_nonfinite)


class Clipping:
    """This rank's gradients, and those among them that it adds to the norm."""

    def __init__(self, norm_type: float, rank: int) -> None:
        self._norm_type, self._rank = float(norm_type), rank
        self._counted: list[Tensor] = []
        self._whole: list[Tensor] = []
        self._shards: list[tuple[Sharding, list[ShardPart]]] = []
        if not self._norm_type > 0:
            raise ConfigError(
                f"norm_type must be above zero, got {self._norm_type}.",
                where="clip_grad_norm_",
                remedy="Give 2.0, another power, or infinity for the largest element.",
            )

    def add_shards(self, sharding: Sharding, parts: list[ShardPart]) -> None:
        """Adds the gradients of these parts."""
        self._counted += [grad for part in parts if (grad := sharding.gradient(part)) is not None]
        self._shards.append((sharding, parts))

    def add_whole(self, grads: Iterable[Tensor | None], *, counts: bool) -> None:
        """Adds gradients that are the same on all ranks of a group; they count on one of these ranks."""
        whole = [grad for grad in grads if grad is not None]
        self._counted += whole if counts else []
        self._whole += whole

    def clip(self, max_norm: float, group: OwnGroup, *, error_if_nonfinite: bool) -> Tensor:
        """Scales the gradients by the norm over all ranks of `group`, which it returns: a 0-dim fp32 tensor."""
        is_largest = math.isinf(self._norm_type)
        total = torch.zeros((), dtype=torch.float64, device=group.device)
        for grad in self._counted:
            values = grad.coalesce().values() if grad.is_sparse else grad  # the elements that may be nonzero, each once
            wide = torch.complex128 if grad.dtype.is_complex else torch.float64
            norm = torch.linalg.vector_norm(values, self._norm_type, dtype=wide).to(total)
            total = torch.maximum(total, norm) if is_largest else total + norm**self._norm_type
        if group.num_ranks > 1:
            with group.waiting("the norm of all gradients"):
                group.all_reduce(total, dist.ReduceOp.MAX if is_largest else dist.ReduceOp.SUM)
        total = (total if is_largest else total ** (1.0 / self._norm_type)).to(torch.float32)
        if error_if_nonfinite and not total.isfinite():
            raise NonFiniteGradient(
                f"the total norm of order {self._norm_type} of the gradients is {total.item()}.",
                where=f"clip_grad_norm_, rank {self._rank}",
                remedy="Look for the cause, skip this step, or pass error_if_nonfinite=False.",
            )
        scale = (max_norm / (total + 1e-6)).clamp(max=1.0)
        for sharding, parts in self._shards:
            sharding.scale_gradients(parts, scale)
        for grad in self._whole:
            grad.mul_(scale.to(grad.device))
        return total
