"""Clips by the norm of all gradients as one vector, across shards, experts and ranks."""

import math
from collections.abc import Iterable, Iterator, Sequence
from numbers import Real

import torch
import torch.distributed as dist
from torch import Tensor, nn

from undertow.errors import NonFiniteGradient, PhaseError, WrongType, require
from undertow.mesh.axes import num_pieces
from undertow.mesh.local_tensors import local_gradient
from undertow.ranks.transport import OwnGroup
from undertow.sharded.placeholder import GradientPlaceholder
from undertow.sync.gradient_sync import GradientSync, sync_of
from undertow.torch_private import private


@private.untraced
def clip_grad_norm_(
    target: GradientSync | nn.Module,
    max_norm: float,
    norm_type: float = 2.0,
    *,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scales all gradients of `target` so that their total norm is at most `max_norm`.

    A collective call, after backward. Each parameter counts once: a replicated one, an expert on
    whichever rank it lives, and the shards of a ShardedOptimizer. A frozen parameter with a
    gradient counts, as in torch; an ignored one does not, because each rank has its own gradient of
    it.

        loss.backward()
        undertow.clip_grad_norm_(model, 1.0)
        optimizer.step()

    Args:
        target: The result of `attach` or `DistributedDataParallel`.
        max_norm: Upper limit of the norm.
        norm_type: Order of the norm; infinity takes the largest element.
        error_if_nonfinite: True raises if the norm is not finite.

    Returns:
        The norm before scaling, an fp32 scalar: the same on every rank, because powers are summed
        in fp64 and rounded once.

    Raises:
        NonFiniteGradient: If `error_if_nonfinite` is true and the norm is not finite.
        PhaseError: If accumulated gradients are not synchronized yet.
    """
    sync = sync_of(
        target,
        where="clip_grad_norm_",
        remedy="For a bare model use torch.nn.utils.clip_grad_norm_.",
    )
    members: list[tuple[GradientSync, list[Tensor]]] = []
    for each in (sync, *sync.experts):
        members.append((each, [param for _, param in each.named_parameters()]))
    return clip_members(members, max_norm, norm_type, error_if_nonfinite=error_if_nonfinite)


@torch.no_grad()
def clip_members(
    members: Sequence[tuple[GradientSync, Sequence[Tensor]]],
    max_norm: float,
    norm_type: float,
    *,
    error_if_nonfinite: bool,
) -> Tensor:
    """Clips the gradients of some parameters of a model, and of its experts; returns their norm."""
    require(
        isinstance(max_norm, Real | Tensor),
        f"max_norm must be a number, got {type(max_norm).__name__}.",
        where="clip_grad_norm_",
        remedy="Write optimizer.clip_grad_norm_(1.0) or undertow.clip_grad_norm_(model, 1.0): both "
        "know the parameters.",
        error=WrongType,
    )
    for sync, params in members:
        sync._own.before_steps.finish_before_look(params, reader="clip_grad_norm_", is_by_all=True)
        require(
            not sync._engine.current_plan.hooks.arrived_before,
            "gradients were accumulated and are not synchronized: each rank would compute a "
            "different norm.",
            where=f"clip_grad_norm_, rank {sync.rank}",
            remedy="Clip outside of accumulate() and no_sync(): gradients are averaged there.",
            error=PhaseError,
        )
    group = members[0][0]._group
    if group.is_on_mesh:
        group = group.everyone
    counted: list[tuple[Tensor, int]] = []  # with the number of ranks that count the same elements
    scaled: list[Tensor] = []
    for sync, params in members:
        own = sync._group
        steps = sync._own.sharded_steps
        if steps is not None:
            steps.require_open("Step before close(), or make a new wrapper and a new optimizer.")
            own = steps.group
            if len(members) == 1 and not sync._group.is_on_mesh:
                group = own  # on a mesh of two data-parallel axes, each row has all shards
        num_places = group.num_ranks // own.num_ranks if sync._group.is_on_mesh else 1
        for param, grad, is_part in _gradients_of(params):
            scaled.append(grad)
            if is_part or own.rank == 0:  # a whole gradient is the same on all ranks
                counted.append((grad, _num_copies(param, num_places)))
    norm = _norm_over_ranks(counted, float(norm_type), group)
    if error_if_nonfinite and not norm.isfinite():
        raise NonFiniteGradient(
            f"the total norm of order {float(norm_type)} of the gradients is {norm.item()}.",
            where=f"clip_grad_norm_, rank {members[0][0].rank}",
            remedy="Look for the cause, skip this step, or pass error_if_nonfinite=False.",
        )
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for grad in scaled:
        grad.mul_(scale.to(grad.device))
    return norm


def _num_copies(param: Tensor, num_places: int) -> int:
    """Returns the number of places of the other axes of a mesh that have the same part."""
    pieces = num_pieces(param)
    require(
        num_places % pieces == 0,
        f"a parameter of shape {tuple(param.shape)} is cut into {pieces} parts, on ranks that this "
        "model does not know.",
        where="clip_grad_norm_",
        remedy='Make one mesh, and give device_mesh=mesh["dp"] and mesh["tp"] of it.',
    )
    return num_places // pieces


def _gradients_of(params: Iterable[Tensor]) -> Iterator[tuple[Tensor, Tensor, bool]]:
    """Yields parameters and this rank's gradients, each with True if it is a part.

    Parameters outside of the layout have some too: those that were frozen.
    """
    for param in params:
        grad = local_gradient(param)
        if isinstance(grad, GradientPlaceholder):
            if not grad.is_cleared:
                yield param, grad.part, True
        elif grad is not None:
            yield param, grad, False


def _norm_over_ranks(
    counted: Iterable[tuple[Tensor, int]], norm_type: float, group: OwnGroup
) -> Tensor:
    """Returns the norm of the gradients that the ranks of `group` count, 0-dim fp32.

    Each comes with the number of ranks that count the same elements.
    """
    require(
        norm_type > 0,
        f"norm_type must be above zero, got {norm_type}.",
        where="clip_grad_norm_",
        remedy="Give 2.0, another power, or infinity for the largest element.",
    )
    is_largest = math.isinf(norm_type)
    norm = torch.zeros((), dtype=torch.float64, device=group.device)
    for grad, num_copies in counted:
        if grad.numel() == 0:
            continue
        # the elements that may be nonzero, each once
        values = grad.coalesce().values() if grad.is_sparse else grad
        wide = torch.complex128 if grad.dtype.is_complex else torch.float64
        own = torch.linalg.vector_norm(values, norm_type, dtype=wide).to(norm)
        norm = torch.maximum(norm, own) if is_largest else norm + own**norm_type / num_copies
    if group.num_ranks > 1:
        op = dist.ReduceOp.MAX if is_largest else dist.ReduceOp.SUM
        group.all_reduce(norm, "the norm of all gradients", op).wait()
    if not is_largest:
        norm = norm ** (1.0 / norm_type)
    return norm.to(torch.float32)
