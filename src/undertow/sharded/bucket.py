"""A bucket under a sharded optimizer: the memory of its parameters, and this rank's shard of its
gradients.

The memory holds the whole parameters and the shard:

flat        | parameter | parameter | parameter | padding |      one allocation for all
own                     |   own shard   |                        a rank's part, gathered in place
parts                   | part  | part  |                        a parameter's elements in it
exact                   |   own shard   |                        in fp32, if `own` is rounded

A placeholder in `param.grad` has this rank's part of the gradient:

.grad   None ── autograd ──> gradient ── pack ──> None ── reduce-scatter ──> placeholder (part)

placeholder ── zero_grad ──> None
placeholder ── autograd adds ──> .added ── pack, reduce-scatter ──> part += new

Reasons: docs/design/sharded-optimizer.md.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any, ClassVar, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from undertow.buckets.bucket import DenseBucket, Shared, has_values, strides_of_gradient
from undertow.device import device_of
from undertow.errors import ShardedGradientError
from undertow.plan import Bucket, Slot
from undertow.ranks.dither import Turn
from undertow.ranks.exchanges import accumulation_dtype
from undertow.ranks.parcels import Encoded
from undertow.ranks.transport import OwnGroup
from undertow.schedule import OpKind
from undertow.sharded.groups import ShardGroups
from undertow.torch_private import private
from undertow.wire import wire_for

_grad_of = attrgetter("grad")
_ADDING = (torch.ops.aten.add_.Tensor, torch.ops.aten.add.Tensor)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardPart:
    """A rank's part of one parameter in one bucket.

    Elements [start, stop) of the parameter in memory order.
    """

    param: int  # index into Plan.params
    bucket: int
    owner: int | None  # the rank that has all of the parameter; None: each rank has a part
    start: int
    stop: int
    in_bucket: int  # its start in the bucket
    in_shard: int  # its start in the rank's shard

    @property
    def numel(self) -> int:
        return self.stop - self.start

    def of_shard(self, shard: Tensor) -> Tensor:
        return shard[self.in_shard : self.in_shard + self.numel]

    def of_bucket(self, flat: Tensor) -> Tensor:
        return flat[self.in_bucket : self.in_bucket + self.numel]


@dataclass(frozen=True, slots=True, eq=False)
class _ParamMemory:
    """One parameter in `flat`."""

    part: ShardPart
    param: Tensor
    memory: Tensor  # [param.numel()] of `flat`
    strides: tuple[int, ...]  # of the parameter's memory order

    def read(self, elements: slice) -> None:
        """Copies elements from the parameter, which has separate memory."""
        self.memory[elements].copy_(in_memory_order(self.param, self.strides)[elements])

    def write(self) -> None:
        """Copies all of it to the parameter, which has separate memory."""
        values = in_memory_order(self.param, self.strides)
        values.copy_(self.memory)
        if self.param.stride() != self.strides:  # `values` is a copy
            self.param.copy_(values.as_strided(self.param.shape, self.strides))

    def moves_in(self) -> bool:
        """Gives the whole parameter its place in `flat`, unless other code refers to its memory.

        Returns True if it is there.
        """
        param = self.param
        if param.data_ptr() == self.memory.data_ptr():
            return True
        storage = param.untyped_storage()
        # on GPUs this is always True
        is_of_processes = param.device.type == "cpu" and storage.is_shared()
        if is_of_processes or private.are_shared(private.addresses_of([storage])):
            return False
        self.memory.as_strided(param.shape, self.strides).copy_(device_of(param.device).keep(param))
        # A storage of exactly its size over the same memory, which it keeps alive: savers write
        # whole storages, and safetensors refuses tensors that cover only part of theirs. As bytes,
        # because DLPack does not support every dtype.
        memory = from_dlpack(self.memory.view(torch.uint8)).view(self.memory.dtype)
        # This keeps the version counter: the values have not changed, and autograd must not see a
        # change.
        param.data = memory.as_strided(param.shape, self.strides)
        return True


class FlatParams:
    """Moves the parameters of one bucket into one allocation.

    Parameters keep their memory if other code refers to it (a kept `state_dict()`, `param.data`,
    another process), because that code must see every step. Gathered values are copied to it.

    `exact` has the values of this rank's shard that an optimizer updates, if all ranks hold rounded
    ones: of 16-bit parameters, and of parameters that travel in a format. It is None if the
    optimizer updates the parameters in place. In a format the differences `exact` - `own` travel,
    and every rank adds them as they arrive, the owner too. So all ranks hold the same, and the
    next difference contains the error of the one before.
    """

    def __init__(
        self,
        bucket: Bucket,
        params: Sequence[Tensor],
        *,
        rank: int,
        num_ranks: int,
        num_shards: int,
        param_wire: str | None = None,
    ) -> None:
        self.params = tuple(params)
        # The parameters' dtype; the bucket has the gradients' dtype.
        dtype = params[0].dtype if params else getattr(torch, bucket.dtype)
        # [ranks * shard]
        self.flat = torch.zeros(num_ranks * bucket.shard_numel, dtype=dtype, device=bucket.device)
        parts = bucket.parts(num_shards, num_ranks=num_ranks)
        shard = parts[rank]
        owners = bucket.owners or [None] * len(params)
        self._slots = [
            _ParamMemory(
                _part_of(bucket, slot, shard, owner),
                param,
                self.flat[slot.start : slot.stop],
                strides_of_gradient(param),
            )
            for slot, param, owner in zip(bucket.slots, params, owners, strict=True)
        ]
        self.parts = tuple(slot.part for slot in self._slots)  # empty ones too
        self._apart = self._slots  # parameters with separate memory
        self._pointers: list[int] = []  # of the parameters, at the last look
        self._storages: list[torch.UntypedStorage] = []  # held, so that their addresses stay valid
        # Of the parameters' memory, for `private.are_shared`; `copy_out` shares it too.
        self.addresses: list[int] = []
        wide = accumulation_dtype(dtype)
        wire = wire_for(param_wire, str(dtype).removeprefix("torch."), dtype.itemsize)
        self.parcel: Encoded | None = None
        if wire is not None and num_shards > 1:
            is_host = device_of(self.flat.device).is_host
            self.parcel = Encoded(wire, wide, bucket.narrow_numel, parts, is_host=is_host)
        self.follow()
        self._own = self.flat[shard.start : shard.stop]
        self.exact: Tensor | None = None
        if dtype != wide or self.parcel is not None:
            self.exact = self._own.to(wide, copy=True)
        # the shard as all ranks have it, if differences travel
        self._held = None if self.parcel is None else self._own.clone()
        self._gaps = [] if self.parcel is None else _gaps_in(self.flat, bucket.slots, shard)

    @torch.no_grad()
    def follow(self) -> None:
        """Takes over values written from outside, in new memory (`param.data = ...`) or in the
        separate memory of parameters."""
        # Other code may have released the memory of those that are apart.
        if self._apart or list(map(Tensor.data_ptr, self.params)) != self._pointers:
            self._apart = [slot for slot in self._slots if not slot.moves_in()]
            self._pointers = list(map(Tensor.data_ptr, self.params))
            self._storages = [param.untyped_storage() for param in self.params]
            self.addresses = private.addresses_of(self._storages)
        for slot in self._apart:
            # The next gather brings the other ranks' parts, or differences to add to these.
            own = slice(slot.part.start, slot.part.stop)
            slot.read(own if self.parcel is None else slice(None))

    @torch.no_grad()
    def read_moved(self) -> None:
        """Reads this rank's part of parameters that lie in other memory by now, and leaves them
        there."""
        for slot in self._slots:
            param, part = slot.param, slot.part
            is_there = param.data_ptr() == slot.memory.data_ptr()
            if not is_there and param.numel() == slot.memory.numel():
                slot.read(slice(part.start, part.stop))

    def follow_writes(self) -> None:
        """Takes values over into `exact` that were written into this rank's shard from outside,
        such as by a load."""
        assert self.exact is not None  # else the shard itself is exact
        held = self.exact.to(self._own.dtype) if self._held is None else self._held
        self.exact.copy_(torch.where(self._own != held, self._own.to(self.exact.dtype), self.exact))
        if self._held is not None:
            self._held.copy_(self._own)

    def accept(self, part: ShardPart, exact: Tensor) -> None:
        """Takes over loaded values of a part of `exact`, which belong to the parameter's values."""
        assert self.exact is not None  # else there is nothing to load
        part.of_shard(self.exact).copy_(exact)
        if self._held is not None:
            part.of_shard(self._held).copy_(part.of_shard(self._own))

    def publish(self) -> None:
        """Rounds `exact` into this rank's shard, if no differences travel."""
        assert self.exact is not None  # else the shard itself is exact
        self._own.copy_(self.exact)

    def write_difference(self, into: Tensor) -> None:
        """Writes `exact` minus the shard as all ranks have it. [elements] of the wide dtype"""
        # differences travel
        assert self.exact is not None
        assert self._held is not None
        torch.sub(self.exact, self._held, out=into)

    def copy_out(self) -> None:
        """Copies gathered values to parameters with separate memory, maybe from another thread.

        All of `flat` must be there.
        """
        if self._held is not None:
            for gap in self._gaps:
                gap.zero_()
            self._held.copy_(self._own)
        with private.as_plain_tensors():  # the parameters are in flight until this returns
            for slot in self._apart:
                slot.write()


def _gaps_in(flat: Tensor, slots: Sequence[Slot], shard: range) -> list[Tensor]:
    """Returns views of the elements of a shard that belong to no parameter.

    A format leaves NaN there after a block with NaN, and the next scale would be NaN too.
    """
    starts = [shard.start, *(slot.stop for slot in slots)]
    stops = [*(slot.start for slot in slots), shard.stop]
    gaps = []
    for start, stop in zip(starts, stops, strict=True):
        first, last = max(start, shard.start), min(stop, shard.stop)
        if first < last:
            gaps.append(flat[first:last])
    return gaps


def _part_of(bucket: Bucket, slot: Slot, shard: range, owner: int | None) -> ShardPart:
    """Returns the part of a slot within a rank's shard, which may be empty."""
    first = min(max(slot.start, shard.start), slot.stop)
    last = max(first, min(slot.stop, shard.stop))
    return ShardPart(
        param=slot.param,
        bucket=bucket.index,
        owner=owner,
        start=first - slot.start,
        stop=last - slot.start,
        in_bucket=first,
        in_shard=max(0, first - shard.start),
    )


def in_memory_order(tensor: Tensor, strides: tuple[int, ...]) -> Tensor:
    """Returns the elements of `tensor` in the memory order of a dense tensor with these strides.

    [numel]
    """
    if tensor.layout is torch.strided and tensor.stride() == strides:
        return tensor.detach().as_strided((tensor.numel(),), (1,))
    flat = torch.empty(tensor.numel(), dtype=tensor.dtype, device=tensor.device)
    flat.as_strided(tensor.shape, strides).copy_(tensor.detach())
    return flat


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

    # Without these, torch would speak of subclasses, or of what cannot be pickled.

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
        if op is private.zero_each:
            for each in args[0]:
                each.zero_()
            return None
        if op is private.unscale_each:
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


def _unscale(grads: Sequence[Tensor], found_inf: Tensor, inv_scale: Tensor) -> None:
    """Does a GradScaler's work on all gradients at once, on every rank, because each sees only its
    shards."""
    group = next(grad.group for grad in grads if isinstance(grad, GradientPlaceholder))
    parts = [grad.part if isinstance(grad, GradientPlaceholder) else grad for grad in grads]
    for dtype in {part.dtype for part in parts}:  # parts of 16-bit parameters are wider
        of_dtype = [part for part in parts if part.dtype == dtype]
        private.unscale_each(of_dtype, found_inf, inv_scale)
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
        self._crossing = crossing  # of the reduction under way
        num_bytes = self._groups.wire_bytes(self.spec, parcel, crossing)
        self._travels_in([parcel, crossing], num_bytes)

    def keep_gradients(self) -> None:
        grads = map(_grad_of, self.params)
        self._keep(it.added if isinstance(it, GradientPlaceholder) else it for it in grads)

    def pack(self, not_arrived: Collection[int]) -> list[int]:
        """Takes the gradients; `launch` copies them, over gloo in the thread that sends."""
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

    def launch(self, *, is_discarded: bool, turn: Turn) -> None:
        memory = self.memory
        self._reduced = torch.empty_like(self.shard) if is_discarded or self.live else self.shard
        self.marks.launched = self.shared.recorder.mark()
        copies = self._copies

        def fill() -> None:
            _make(copies)
            for gap in memory.gaps:
                gap.zero_()
            self._mark_nonfinite((memory.gradients,))
            # If only rows exchange in a format, values are counted as if they did within rows.
            self._count_lost(memory.flat, parcel if isinstance(parcel, Encoded) else self._crossing)

        parcel, self._crossing = self._groups.dithered(
            self._parcels, turn, device=memory.flat.device
        )
        self.handles = [
            self._groups.shard.reduce_scatter(
                memory.flat, self._reduced, parcel, trailer=memory.trailer, fill=fill
            )
        ]

    def launch_across(self) -> None:
        replicate = self._groups.replicate
        crossing = self._crossing
        # the schedule of a strategy with two axes
        assert replicate is not None
        assert crossing is not None
        self.handles = [
            replicate.all_reduce_behind(
                self.handles[0], self._reduced, crossing, trailer=self.memory.trailer
            )
        ]

    def values(self) -> Sequence[Tensor]:
        return (self._reduced,)

    @torch.no_grad()
    def bind(self, used_elsewhere: Collection[int]) -> None:
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

    @torch.no_grad()
    def bind_local(self) -> None:
        if not self._is_packed:
            return
        self._is_packed = False
        _make(self._copies)
        super().bind(())
        for position, placeholder in self._before.items():
            param = self.params[position]
            param.grad, placeholder.added = placeholder, param.grad

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
