"""Clips by the norm of all gradients as one vector, across shards, experts and ranks."""

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from undertow.errors import NonFiniteGradient, require
from undertow.runtime.comm.group import OwnGroup
from undertow.runtime.sharded.binding import GradientPlaceholder
from undertow.runtime.sharded.layout import Sharding
from undertow.runtime.step.sharded_steps import finish_before_look, require_synchronized
from undertow.runtime.torch_private import private
from undertow.sync import GradientSync, sync_of


@private.untraced
@torch.no_grad()
def clip_grad_norm_(
    target: GradientSync | nn.Module, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False
) -> Tensor:
    """Scales all gradients of `target` so that their total norm is at most `max_norm`.

    A collective call, after backward. Each parameter counts once: a replicated one, an expert on
    whichever rank it lives, and the shards of a ShardedOptimizer. A frozen parameter with a gradient
    counts, as in torch; an ignored one does not, because each rank has its own gradient of it.

        loss.backward()
        undertow.clip_grad_norm_(model, 1.0)
        optimizer.step()

    Args:
        target: The result of `attach` or `DistributedDataParallel`.
        max_norm: Upper limit of the norm.
        norm_type: Order of the norm; infinity takes the largest element.
        error_if_nonfinite: True raises if the norm is not finite.

    Returns:
        The norm before scaling, an fp32 scalar: the same on every rank, because powers are summed in
        fp64 and rounded once.

    Raises:
        NonFiniteGradient: If `error_if_nonfinite` is true and the norm is not finite.
        PhaseError: If accumulated gradients are not synchronized yet.
    """
    sync = sync_of(target, where="clip_grad_norm_", remedy="For a bare model use torch.nn.utils.clip_grad_norm_.")
    syncs = (sync, *sync.experts)
    for each in syncs:
        finish_before_look(each._engine, [param for _, param in each.named_parameters()])
        require_synchronized(each._engine)
    shardings = [None if each._steps is None else each._steps.begin() for each in syncs]
    counted: list[Tensor | None] = []
    scaled: list[Tensor] = []
    for each, sharding in zip(syncs, shardings, strict=True):
        if sharding is not None:
            counted += sharding.gradients(sharding.parts)
        parts, whole = gradients_apart((param for _, param in each.named_parameters()), sharding)
        counted += parts if (each if sharding is None else sharding.group).rank else parts + whole  # the same on all ranks
        scaled += parts + whole
    # Without experts, sum over the ranks that hold shards of the same parameters: on a mesh, each row has all of them.
    group = sync._group if shardings[0] is None or sync.experts else shardings[0].group
    norm, scale = norm_and_scale(counted, max_norm, norm_type, group, rank=sync.rank, error_if_nonfinite=error_if_nonfinite)
    for sharding in filter(None, shardings):
        sharding.scale_gradients(sharding.parts, scale)
    for grad in scaled:
        grad.mul_(scale.to(grad.device))
    return norm


def gradients_apart(params: Iterable[Tensor], sharding: Sharding | None) -> tuple[list[Tensor], list[Tensor]]:
    """Returns the gradients that `params` have outside of the layout: this rank's parts, and whole ones.

    Frozen parameters have them: parts from an earlier layout, or a whole gradient, which is the same on all ranks.
    """
    parts: list[Tensor] = []
    whole: list[Tensor] = []
    known = set() if sharding is None else set(map(id, sharding.params))
    for grad in (param.grad for param in params if id(param) not in known):
        if isinstance(grad, GradientPlaceholder):
            parts += () if grad.is_cleared else grad.parts.values()
        elif grad is not None:
            whole.append(grad)
    return parts, whole


def norm_and_scale(
    counted: Iterable[Tensor | None],
    max_norm: float,
    norm_type: float,
    group: OwnGroup,
    *,
    rank: int,
    error_if_nonfinite: bool,
) -> tuple[Tensor, Tensor]:
    """Returns the norm of the gradients that the ranks of `group` count, and the factor that limits it; both 0-dim fp32."""
    norm_type = float(norm_type)
    require(
        norm_type > 0,
        f"norm_type must be above zero, got {norm_type}.",
        where="clip_grad_norm_",
        remedy="Give 2.0, another power, or infinity for the largest element.",
    )
    is_largest, norm = math.isinf(norm_type), torch.zeros((), dtype=torch.float64, device=group.device)
    for grad in (each for each in counted if each is not None):
        values = grad.coalesce().values() if grad.is_sparse else grad  # the elements that may be nonzero, each once
        wide = torch.complex128 if grad.dtype.is_complex else torch.float64
        own = torch.linalg.vector_norm(values, norm_type, dtype=wide).to(norm)
        norm = torch.maximum(norm, own) if is_largest else norm + own**norm_type
    if group.num_ranks > 1:
        with group.waiting("the norm of all gradients"):
            group.all_reduce(norm, dist.ReduceOp.MAX if is_largest else dist.ReduceOp.SUM)
    norm = (norm if is_largest else norm ** (1.0 / norm_type)).to(torch.float32)
    if error_if_nonfinite and not norm.isfinite():
        raise NonFiniteGradient(
            f"the total norm of order {norm_type} of the gradients is {norm.item()}.",
            where=f"clip_grad_norm_, rank {rank}",
            remedy="Look for the cause, skip this step, or pass error_if_nonfinite=False.",
        )
    return norm, (max_norm / (norm + 1e-6)).clamp(max=1.0)
