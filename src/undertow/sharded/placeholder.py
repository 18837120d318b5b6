"""The gradient of a parameter, on a rank that has only a shard of it.

Reasons: docs/design/sharded-optimizer.md.
"""

from collections.abc import Collection, Mapping, Sequence
from operator import attrgetter
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from undertow.errors import ShardedGradientError
from undertow.mesh.local_tensors import parameter_of
from undertow.ranks.transport import OwnGroup
from undertow.torch_private import private, unscaling

_grad_of = attrgetter("grad")
_ADDING = (torch.ops.aten.add_.Tensor, torch.ops.aten.add.Tensor)


class GradientPlaceholder(Tensor):
    """A gradient of the parameter's shape, dtype and device without values; every use of it raises.

    `part` has this rank's elements, 1-D. `added` collects the gradients that autograd
    adds in a later backward. `is_cleared` is True if the gradient was set to zero. A GradScaler
    unscales the parts, and all ranks find the same infinities.
    """

    part: Tensor
    added: Tensor | None
    is_cleared: bool
    param_name: str
    group: OwnGroup | None

    @staticmethod
    def __new__(
        cls, param: Tensor, part: Tensor, *, name: str, group: OwnGroup | None = None
    ) -> "GradientPlaceholder":
        made = private.wrapper_tensor(cls, param, private.gradient_dtype(param))
        made.part, made.param_name, made.group = part, name, group
        made.added, made.is_cleared = None, False
        return made

    def bind_to(self, param: Tensor) -> None:
        """Becomes the gradient of `param`; `part` has its values."""
        self.added = None
        self.is_cleared = False
        param.grad = self

    # torch's method is untyped
    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return (
            f"GradientPlaceholder({self.param_name!r}, shape={tuple(self.shape)}, "
            f"dtype={self.dtype}): a shard of it is here"
        )

    def share_memory_(self) -> "GradientPlaceholder":
        """Does nothing, because it has no values to share; torch's method would look for their
        memory.

        `module.share_memory()` calls it for gradients too.
        """
        return self

    # Without these, torch's errors would be about subclasses, or about pickling.

    def numpy(self, *, force: bool = False) -> NoReturn:
        raise _refused("numpy()", (self,))

    def tolist(self) -> NoReturn:
        raise _refused("tolist()", (self,))

    def __reduce_ex__(self, proto: object) -> NoReturn:
        raise _refused("torch.save or pickle", (self,))

    @classmethod
    @private.left_alone
    def __torch_dispatch__(  # type: ignore[override]  # the signature that torch documents
        cls,
        op: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if op is unscaling.zero_each:
            for each in args[0]:
                each.zero_()
            return None
        if op is unscaling.unscale_each:
            return _unscale(*args)
        first = args[0] if args else None
        if isinstance(first, GradientPlaceholder):
            if op is torch.ops.aten.detach.default:
                return first
            if op is torch.ops.aten.zero_.default:
                first.added, first.is_cleared = None, True
                return first
            if (
                op in _ADDING
                and private.graph_task_id() != -1  # by autograd, not by a program between steps
                and isinstance(args[1], Tensor)
                and not isinstance(args[1], GradientPlaceholder)
                and not kwargs
            ):
                first.added = args[1].clone() if first.added is None else first.added + args[1]
                return first
        raise _refused(op, args)


def gradients_of(
    params: Sequence[Tensor], *, except_of: Collection[int] = ()
) -> dict[int, Tensor | None]:
    """Returns the gradients that were not cleared, by parameter: None for a shard of a mean, or a
    whole gradient, such as one that a program has written.

    Leaves out whole gradients of the parameters `except_of`, by id.
    """
    found: dict[int, Tensor | None] = {}
    for index, (param, grad) in enumerate(zip(params, map(_grad_of, params), strict=True)):
        if isinstance(grad, GradientPlaceholder):
            if not grad.is_cleared:
                found[index] = None
        elif grad is not None and id(parameter_of(param)) not in except_of:
            found[index] = grad
    return found


def _unscale(grads: Sequence[Tensor], found_inf: Tensor, inv_scale: Tensor) -> None:
    """Does a GradScaler's work on all gradients at once, on every rank, because each sees only its
    shards."""
    group = next(grad.group for grad in grads if isinstance(grad, GradientPlaceholder))
    parts = [grad.part if isinstance(grad, GradientPlaceholder) else grad for grad in grads]
    for dtype in {part.dtype for part in parts}:  # parts of 16-bit parameters are wider
        of_dtype = [part for part in parts if part.dtype == dtype]
        unscaling.unscale_each(of_dtype, found_inf, inv_scale)
    if group is not None:
        group.all_reduce(found_inf, "whether gradients are finite", dist.ReduceOp.MAX).wait()


def _refused(op: Any, args: tuple[Any, ...]) -> ShardedGradientError:
    flat = [each for arg in args for each in (arg if isinstance(arg, list | tuple) else [arg])]
    name = next((each.param_name for each in flat if isinstance(each, GradientPlaceholder)), "?")
    return ShardedGradientError(
        f"the gradient of {name!r} is sharded: no rank has all of it.",
        where=str(op),
        remedy="Clip with optimizer.clip_grad_norm_(), read it with model.full_gradient(param), "
        "or call zero_grad() before writing.",
    )
