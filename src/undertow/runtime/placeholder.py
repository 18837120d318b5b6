"""What stands in `.grad` where a rank has only its shard of the gradient."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from undertow.errors import ShardedGradientError
from undertow.runtime import private

_ADDING = (torch.ops.aten.add_.Tensor, torch.ops.aten.add.Tensor)


class GradientPlaceholder(Tensor):
    """A gradient of the parameter's shape, dtype and device without values: every use of them raises.

    What autograd adds to it in a later backward is kept in `added`; `is_cleared` says whether it was set to zero.
    """

    added: Tensor | None
    is_cleared: bool
    param_name: str

    @staticmethod
    def __new__(cls, param: Tensor, *, name: str) -> GradientPlaceholder:
        made = private.wrapper_tensor(cls, param)
        made.added, made.is_cleared, made.param_name = None, False, name
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # torch's has no types
        return f"GradientPlaceholder({self.param_name!r}, shape={tuple(self.shape)}, dtype={self.dtype}): a shard of it is here"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # as torch documents it
        cls, op: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if op is torch.ops.aten._foreach_zero_.default:
            for each in args[0]:
                each.zero_()
            return None
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


def _refused(op: Any, args: tuple[Any, ...]) -> ShardedGradientError:
    flat = [each for arg in args for each in (arg if isinstance(arg, list | tuple) else [arg])]
    name = next((each.param_name for each in flat if isinstance(each, GradientPlaceholder)), "?")
    return ShardedGradientError(
        f"the gradient of {name!r} is sharded: no rank has all of it.",
        where=str(op),
        remedy="Clip with optimizer.clip_grad_norm_(); look at all of it with sync.full_gradient(param).",
    )
