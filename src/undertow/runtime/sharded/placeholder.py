"""The placeholder in `.grad` when a rank has only its shard of the gradient."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from undertow.errors import PhaseError, ShardedGradientError
from undertow.runtime.comm.group import OwnGroup
from undertow.runtime.torch_private import private

_ADDING = (torch.ops.aten.add_.Tensor, torch.ops.aten.add.Tensor)
_UNSCALING = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default


class GradientPlaceholder(Tensor):
    """A gradient of the parameter's shape, dtype and device without values; every use of it raises.

    `parts` has this rank's elements by bucket, 1-D. `added` collects the gradients that autograd adds in a later backward.
    `is_cleared` is True if the gradient was set to zero. A GradScaler unscales the parts, and all ranks find the same infinities.
    """

    parts: dict[int, Tensor]
    added: Tensor | None
    is_cleared: bool
    param_name: str
    group: OwnGroup | None

    @staticmethod
    def __new__(cls, param: Tensor, *, name: str, group: OwnGroup | None = None) -> GradientPlaceholder:
        made = private.wrapper_tensor(cls, param, dtype=private.gradient_dtype(param))
        made.parts, made.param_name, made.group = {}, name, group
        made.renew()
        return made

    def renew(self) -> None:
        """Resets it to the state of a new placeholder."""
        self.added, self.is_cleared = None, False

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # torch's method is untyped
        return f"GradientPlaceholder({self.param_name!r}, shape={tuple(self.shape)}, dtype={self.dtype}): a shard of it is here"

    def share_memory_(self) -> GradientPlaceholder:
        """Does nothing, because there are no values to share; torch's method would look for their memory.

        `module.share_memory()` calls it for gradients too.
        """
        return self

    @classmethod
    @private.left_alone
    def __torch_dispatch__(  # type: ignore[override]  # the signature that torch documents
        cls, op: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if op is torch.ops.aten._foreach_zero_.default:
            for each in args[0]:
                each.zero_()
            return None
        if op is _UNSCALING:
            return _unscale(*args)
        first = args[0] if args else None
        if isinstance(first, GradientPlaceholder):
            if op is torch.ops.aten.detach.default:
                return first
            if op is torch.ops.aten.zero_.default:
                first.added, first.is_cleared = None, True
                return first
            if op in _ADDING and isinstance(args[1], Tensor) and not isinstance(args[1], GradientPlaceholder) and not kwargs:
                first.added = args[1].clone() if first.added is None else first.added + args[1]
                return first
        raise _refused(op, args)


def _unscale(grads: Sequence[Tensor], found_inf: Tensor, inv_scale: Tensor) -> None:
    """Does a GradScaler's work on all gradients at once, on every rank, because each sees only its shards."""
    group = next(grad.group for grad in grads if isinstance(grad, GradientPlaceholder))
    parts: dict[torch.dtype, list[Tensor]] = {}  # parts of 16-bit parameters are wider
    for grad in grads:
        for part in grad.parts.values() if isinstance(grad, GradientPlaceholder) else [grad]:
            parts.setdefault(part.dtype, []).append(part)
    for of_dtype in parts.values():
        torch._amp_foreach_non_finite_check_and_unscale_(of_dtype, found_inf, inv_scale)
    if group is not None:
        with group.waiting("whether gradients are finite"):
            group.all_reduce(found_inf, dist.ReduceOp.MAX)


def make_gradients_whole(named_params: Iterable[tuple[str, Tensor]], *, rank: int) -> None:
    """Raises PhaseError if a gradient of which each rank has a part would have to move to a new plan."""
    for name, param in named_params:
        grad = param.grad
        if not isinstance(grad, GradientPlaceholder):
            continue
        if grad.is_cleared:
            cleared = torch.zeros_like(param, dtype=private.gradient_dtype(param))
            param.grad = cleared if grad.added is None else grad.added
        else:
            raise PhaseError(
                "the parameters have changed while sharded gradients are held.",
                where=f"parameter {name!r}, rank {rank}",
                remedy="Call zero_grad() before parameters are frozen, unfrozen, added or replaced.",
            )


def _refused(op: Any, args: tuple[Any, ...]) -> ShardedGradientError:
    flat = [each for arg in args for each in (arg if isinstance(arg, list | tuple) else [arg])]
    name = next((each.param_name for each in flat if isinstance(each, GradientPlaceholder)), "?")
    return ShardedGradientError(
        f"the gradient of {name!r} is sharded: no rank has all of it.",
        where=str(op),
        remedy="Clip with optimizer.clip_grad_norm_(), look at all of it with sync.full_gradient(param), or zero_grad() first.",
    )
