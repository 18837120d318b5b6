"""Binds `param.grad` under a sharded optimizer to a placeholder that has this rank's part of the
gradient.

.grad   None ── autograd ──> gradient ── pack ──> None ── reduce-scatter ──> placeholder (part)

placeholder ── zero_grad ──> None
placeholder ── autograd adds ──> .added ── pack, reduce-scatter ──> part += new
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import repeat
from operator import attrgetter
from types import NoneType
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from undertow.buckets.binding import BucketStorage, DenseBinding, has_values
from undertow.buckets.bucket import LiveBucket, Shared
from undertow.errors import ShardedGradientError
from undertow.plan import Bucket
from undertow.ranks.exchanges import accumulation_dtype
from undertow.ranks.transport import OwnGroup
from undertow.schedule import OpKind
from undertow.sharded.groups import ShardGroups
from undertow.sharded.shards import FlatParams
from undertow.torch_private import private

_grad_of = attrgetter("grad")
_ADDING = (torch.ops.aten.add_.Tensor, torch.ops.aten.add.Tensor)
_UNSCALING = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default


class GradientPlaceholder(Tensor):
    """A gradient of the parameter's shape, dtype and device without values; every use of it raises.

    `parts` has this rank's elements by bucket, 1-D. `added` collects the gradients that autograd
    adds in a later backward. `is_cleared` is True if the gradient was set to zero. A GradScaler
    unscales the parts, and all ranks find the same infinities.
    """

    parts: dict[int, Tensor]
    added: Tensor | None
    is_cleared: bool
    param_name: str
    group: OwnGroup | None

    @staticmethod
    def __new__(
        cls, param: Tensor, *, name: str, group: OwnGroup | None = None
    ) -> "GradientPlaceholder":
        made = private.wrapper_tensor(cls, param, dtype=private.gradient_dtype(param))
        made.parts, made.param_name, made.group = {}, name, group
        made.added, made.is_cleared = None, False
        return made

    def bind_to(self, param: Tensor) -> None:
        """Becomes the gradient of `param`; `parts` have its values."""
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
        """Does nothing, because there are no values to share; torch's method would look for their
        memory.

        `module.share_memory()` calls it for gradients too.
        """
        return self

    @classmethod
    @private.left_alone
    def __torch_dispatch__(  # type: ignore[override]  # the signature that torch documents
        cls,
        op: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
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
            if (
                op in _ADDING
                and isinstance(args[1], Tensor)
                and not isinstance(args[1], GradientPlaceholder)
                and not kwargs
            ):
                first.added = args[1].clone() if first.added is None else first.added + args[1]
                return first
        raise _refused(op, args)


def _unscale(grads: Sequence[Tensor], found_inf: Tensor, inv_scale: Tensor) -> None:
    """Does a GradScaler's work on all gradients at once, on every rank, because each sees only its
    shards."""
    group = next(grad.group for grad in grads if isinstance(grad, GradientPlaceholder))
    parts = [
        part
        for grad in grads
        for part in (grad.parts.values() if isinstance(grad, GradientPlaceholder) else [grad])
    ]
    for dtype in {part.dtype for part in parts}:  # parts of 16-bit parameters are wider
        of_dtype = [part for part in parts if part.dtype == dtype]
        _UNSCALING(of_dtype, found_inf, inv_scale)
    if group is not None:
        group.all_reduce(found_inf, "whether gradients are finite", dist.ReduceOp.MAX).wait()


def _refused(op: Any, args: tuple[Any, ...]) -> ShardedGradientError:
    flat = [each for arg in args for each in (arg if isinstance(arg, list | tuple) else [arg])]
    name = next((each.param_name for each in flat if isinstance(each, GradientPlaceholder)), "?")
    return ShardedGradientError(
        f"the gradient of {name!r} is sharded: no rank has all of it.",
        where=str(op),
        remedy="Clip with optimizer.clip_grad_norm_(), look at all of it with "
        "model.full_gradient(param), or zero_grad() first.",
    )


class ShardedBinding(DenseBinding):
    """The `.grad` of a bucket's parameters, whose gradients are reduced to the parts of `flat`.

    `placeholders` belong to the parameters, by position.
    """

    def __init__(
        self,
        bucket: Bucket,
        flat: FlatParams,
        placeholders: Sequence[GradientPlaceholder],
        *,
        shard_numel: int,
    ) -> None:
        dtype, device = getattr(torch, bucket.dtype), torch.device(bucket.device)
        self._own = tuple(zip(placeholders, flat.parts, strict=True))
        self.shard = torch.zeros(shard_numel, dtype=accumulation_dtype(dtype), device=device)
        # `launch` sets it to other memory if `shard` may have values that must be kept.
        self.reduced = self.shard
        self.live: set[int] = set()  # positions with an earlier part, to which the result is added
        self._before: dict[int, GradientPlaceholder] = {}  # by position, the former `.grad`
        super().__init__(BucketStorage(bucket, flat.params), flat.params)
        for placeholder, part in self._own:
            placeholder.parts[bucket.index] = part.of_shard(self.shard)

    def values(self) -> Sequence[Tensor]:
        return (self.reduced,)

    def pack(self, not_arrived: Collection[int] = ()) -> list[int]:
        self._before = {}
        for position, param in enumerate(self.params):
            grad = param.grad
            if isinstance(grad, GradientPlaceholder):
                self._before[position] = grad
                param.grad, grad.added = grad.added, None
        self.live = {position for position, grad in self._before.items() if not grad.is_cleared}
        self.postponed = []
        return super().pack(not_arrived)

    def pack_local(self) -> None:
        self.pack()

    def packing(self) -> Callable[[], None]:
        """Returns a function that copies the taken gradients into the bucket, for another thread,
        so that backward continues."""
        postponed, self.postponed = self.postponed or [], None

        def pack() -> None:
            while postponed:
                postponed.pop(0)()  # popping also frees the gradients

        return pack

    @torch.no_grad()
    def bind(self, used_elsewhere: Collection[int] = ()) -> None:
        """Moves the reduced values to their final place, and puts placeholders into `.grad`."""
        reduced, self.reduced = self.reduced, self.shard
        unused = self.release()
        restored = (unused | self._before) if unused else {}
        for position, (placeholder, part) in enumerate(self._own):
            if position in unused and position not in used_elsewhere:
                self.params[position].grad = restored[position]
                continue
            if reduced is not self.shard:
                own = part.of_shard(self.shard)
                write = own.add_ if position in self.live else own.copy_
                write(part.of_shard(reduced))
            placeholder.added = None
            placeholder.is_cleared = False
            self.params[position].grad = placeholder
        self._before = {}
        if unused:
            self.look()

    @torch.no_grad()
    def bind_local(self) -> None:
        self.packing()()
        super().bind()
        for position, placeholder in self._before.items():
            param = self.params[position]
            param.grad, placeholder.added = placeholder, param.grad

    def has_result(self) -> bool:
        for grad in map(_grad_of, self.params):
            is_cleared = (
                isinstance(grad, GradientPlaceholder) and grad.is_cleared and grad.added is None
            )
            if grad is not None and not is_cleared:
                return True
        return False

    def look(self) -> None:
        with private.as_plain_tensors():  # parameters may be on their way
            grads = list(map(_grad_of, self.params))
        if all(map(isinstance, grads, repeat((GradientPlaceholder, NoneType)))):
            self._known.entries.clear()
        else:
            self._known.look(
                enumerate(None if isinstance(grad, GradientPlaceholder) else grad for grad in grads)
            )

    def is_written(self, position: int) -> bool:
        grad = self.params[position].grad
        if isinstance(grad, GradientPlaceholder):
            return grad.added is not None and has_values(grad.added)
        return grad is not None and not self._known.has(position, grad) and has_values(grad)

    @torch.no_grad()
    def add_late(self, values: Sequence[Tensor]) -> None:
        for param, (placeholder, part) in zip(self.params, self._own, strict=True):
            own = part.of_shard(self.shard)
            if not isinstance(param.grad, GradientPlaceholder):
                placeholder.bind_to(param)
                own.zero_()
            own.add_(part.of_bucket(values[0]))


class ShardedBucket(LiveBucket):
    """One bucket whose reduced gradients are cut into a shard for each rank."""

    reduction: ClassVar = OpKind.REDUCE_SCATTER

    def __init__(
        self, layout: Bucket, binding: ShardedBinding, shared: Shared, groups: ShardGroups
    ) -> None:
        super().__init__(layout, binding, shared)
        self._shards, self._groups = binding, groups
        self._trailer = range(layout.trailer.start, layout.storage_numel)

    def launch(self, *, keeps_own: bool, is_apart: bool, is_awaited_at_once: bool) -> None:
        layout, binding, finite = self.layout, self._shards, self.shared.finite
        binding.reduced = (
            torch.empty_like(binding.shard) if is_apart or binding.live else binding.shard
        )
        self.marks.launched = self.shared.recorder.mark()
        pack = binding.packing()

        def pack_and_look() -> None:
            pack()
            if finite is not None:
                finite.look(binding, layout, self.trailer)

        flat, reduce_scatter = binding.storage.flat, self._groups.shard.reduce_scatter
        self.handles = [
            reduce_scatter(flat, binding.reduced, trailer=self._trailer, pack=pack_and_look)
        ]
        self.shared.recorder.completes(self.marks, self.handles[0])

    def launch_across(self) -> None:
        replicate = self._groups.replicate
        assert replicate is not None  # the schedule of a strategy with two axes
        trailer = self.binding.storage.flat[self._trailer.start : self._trailer.stop]
        self.handles = [
            replicate.all_reduce_behind(self.handles[0], self._shards.reduced, trailer=trailer)
        ]
        self.shared.recorder.completes(self.marks, self.handles[0])
