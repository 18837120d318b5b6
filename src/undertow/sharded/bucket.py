"""Binds `param.grad` under a sharded optimizer to a placeholder that has this rank's part of the
gradient.

.grad   None ── autograd ──> gradient ── pack ──> None ── reduce-scatter ──> placeholder (part)

placeholder ── zero_grad ──> None
placeholder ── autograd adds ──> .added ── pack, reduce-scatter ──> part += new
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from undertow.buckets.bucket import DenseBucket, Shared, has_values
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
        cls, param: Tensor, *, name: str, group: OwnGroup | None = None
    ) -> "GradientPlaceholder":
        made = private.wrapper_tensor(cls, param, private.gradient_dtype(param))
        made.part, made.param_name, made.group = torch.empty(0), name, group
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
    parts = [grad.part if isinstance(grad, GradientPlaceholder) else grad for grad in grads]
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


class ShardedBucket(DenseBucket):
    """A bucket whose reduced gradients are cut into a shard for each rank, with the parts of
    `flat`.

    `placeholders` belong to the parameters of the plan.
    """

    reduction: ClassVar = OpKind.REDUCE_SCATTER

    def __init__(
        self,
        spec: Bucket,
        shared: Shared,
        flat: FlatParams,
        placeholders: Sequence[GradientPlaceholder],
        groups: ShardGroups,
    ) -> None:
        self._groups = groups
        super().__init__(spec, shared)
        dtype = accumulation_dtype(self.memory.flat.dtype)
        device = self.memory.flat.device
        self.shard = torch.zeros(groups.shard_numel(spec), dtype=dtype, device=device)
        # `launch` sets it to other memory if `shard` may have values that must be kept.
        self._reduced = self.shard
        own = [placeholders[index] for index in spec.params]
        self._own_parts = tuple(zip(own, flat.parts, strict=True))
        for placeholder, part in self._own_parts:
            placeholder.part = part.of_shard(self.shard)
        self._before: dict[int, GradientPlaceholder] = {}  # by position, the former `.grad`
        # copies of gradients into the bucket, for another thread, so that backward continues
        self._copies: list[Callable[[], None]] = []

    def _make_parcels(self) -> None:
        self._parcels = parcel, crossing = self._groups.parcels_of(self.spec)
        num_bytes = self._groups.wire_bytes(self.spec, parcel, crossing)
        self._travels_in([parcel, crossing], num_bytes)

    def keep_gradients(self) -> None:
        grads = map(_grad_of, self.params)
        self._keep(it.added if isinstance(it, GradientPlaceholder) else it for it in grads)

    def pack(self, not_arrived: Collection[int] = ()) -> list[int]:
        self._copies = []
        self._before = {}
        live: set[int] = set()  # positions with an earlier part
        for position, param in enumerate(self.params):
            grad = param.grad
            if isinstance(grad, GradientPlaceholder):
                self._before[position] = grad
                param.grad, grad.added = grad.added, None
                if not grad.is_cleared:
                    live.add(position)
        self.live = live
        return super().pack(not_arrived)

    def _copy_in(self, start: int, grads: Sequence[Tensor | None], *, are_new: bool) -> None:
        self._copies.append(partial(super()._copy_in, start, grads, are_new=are_new))

    def launch(self, *, keeps_own: bool, is_apart: bool) -> None:
        memory = self.memory
        self._reduced = torch.empty_like(self.shard) if is_apart or self.live else self.shard
        self.marks.launched = self.shared.recorder.mark()
        copies = self._copies

        def pack() -> None:
            _make(copies)
            for gap in memory.gaps:
                gap.zero_()
            self._mark_nonfinite((memory.gradients,))

        parcel, _ = self._parcels
        handle = self._groups.shard.reduce_scatter(
            memory.flat, self._reduced, parcel, trailer=memory.trailer, pack=pack
        )
        self.handles = [handle]

    def launch_across(self) -> None:
        replicate = self._groups.replicate
        _, crossing = self._parcels
        # the schedule of a strategy with two axes
        assert replicate is not None
        assert crossing is not None
        handle = replicate.all_reduce_behind(
            self.handles[0], self._reduced, crossing, trailer=self.memory.trailer
        )
        self.handles = [handle]

    def values(self) -> Sequence[Tensor]:
        return (self._reduced,)

    @torch.no_grad()
    def bind(self, used_elsewhere: Collection[int] = ()) -> None:
        """Moves the reduced values to their final place, and puts placeholders into `.grad`."""
        reduced, self._reduced = self._reduced, self.shard
        unused, self._kept = self._kept, {}
        for position, (placeholder, part) in enumerate(self._own_parts):
            if position in unused and position not in used_elsewhere:
                self.params[position].grad = self._before.get(position, unused[position])
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
            self.note_known()

    def has_result(self) -> bool:
        grads = map(_grad_of, self.params)
        return any(grad is not None and not _is_dropped(grad) for grad in grads)

    def is_written(self, position: int) -> bool:
        grad = self.params[position].grad
        if isinstance(grad, GradientPlaceholder):
            return grad.added is not None and has_values(grad.added)
        return super().is_written(position)

    @torch.no_grad()
    def _add_late(self, values: Sequence[Tensor]) -> None:
        for param, (placeholder, part) in zip(self.params, self._own_parts, strict=True):
            own = part.of_shard(self.shard)
            if not isinstance(param.grad, GradientPlaceholder):
                placeholder.bind_to(param)
                own.zero_()
            own.add_(part.of_bucket(values[0]))


def _is_dropped(grad: Tensor) -> bool:
    return isinstance(grad, GradientPlaceholder) and grad.is_cleared and grad.added is None


def _make(copies: list[Callable[[], None]]) -> None:
    while copies:
        copies.pop(0)()  # popping also frees the gradients
