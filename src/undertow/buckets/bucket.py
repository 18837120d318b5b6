"""One bucket in training: its memory, the `.grad` of its parameters, trailer and collective.

Between steps `.grad` is a view of the bucket, or if no rank has used it a copy of the previous one.
It is None while the bucket is in flight.

memory.flat         | gradients | padding | trailer |      one allocation, used again in every step
memory.gradients    | gradients |
memory.views          one per gradient, of its shape

A sparse gradient has no place in a flat bucket: it stays a separate tensor, and the memory of its
bucket holds only a trailer.

Reasons: docs/design/buckets.md.
"""

from __future__ import annotations

import contextlib
import weakref
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import repeat
from operator import attrgetter, is_
from sys import getrefcount
from typing import ClassVar

import torch
from torch import Tensor

from undertow.buckets.comm_hook import HookedBucket
from undertow.buckets.finite import bad_slots
from undertow.buckets.recorder import BucketMarks, Recorder
from undertow.buckets.reducer import Reducer
from undertow.buckets.trailer import TrailerCodec
from undertow.errors import listed
from undertow.plan import Bucket, Plan
from undertow.ranks.dither import Stage, Turn
from undertow.ranks.exchanges import Exchanges
from undertow.ranks.handle import Handle
from undertow.ranks.parcels import Encoded, Parcel
from undertow.ranks.transport import OwnGroup
from undertow.schedule import DDP, OpKind, Strategy
from undertow.torch_private import private

# Python's garbage collector runs over young objects after 700 net allocations, and every tensor
# visible to Python is one. Smaller batches keep a bucket of thousands of gradients from triggering
# it.
_MOST_AT_ONCE = 512

# References to an object in a list that no other code holds, as `is_referenced` counts them.
_REFERENCES_OF_OURS = sum(map(getrefcount, [object()]))

_grad_of = attrgetter("grad")


class BucketMemory:
    """The memory of one bucket of a plan, with a view for each of `like`, tensors of the shapes and
    strides of its gradients."""

    def __init__(self, spec: Bucket, like: Sequence[Tensor]) -> None:
        self._spec = spec
        self._device = like[0].device if like else torch.device(spec.device)
        # Fixed now: parameters may be cast or moved later, and new memory must keep the layout of
        # the other ranks.
        self._forms = [(tensor.shape, strides_of_gradient(tensor)) for tensor in like]
        self.starts = [*(slot.start for slot in spec.slots), spec.numel]
        self.reallocate()
        self.row_shape = None if self.gaps else _row_shape(self.views)

    @property
    def gradients(self) -> Tensor:
        """The gradients one after another, and gaps of zeros before some of them. [numel], without
        padding and trailer."""
        return self.flat[: self.starts[-1]]

    def reallocate(self) -> None:
        """Allocates new memory; code that holds the old one keeps its values."""
        dtype = getattr(torch, self._spec.dtype)
        self.flat = torch.empty(self._spec.storage_numel, dtype=dtype, device=self._device)
        # Padding stays zero. Gradients are written first by `pack`, under backward: pages that are
        # new to a process are slow.
        self.flat[self.starts[-1] :].zero_()
        # Views between gradients. A format leaves NaN there after a block with NaN.
        self.gaps: list[Tensor] = []
        for slot, start in zip(self._spec.slots, self.starts[1:], strict=True):
            if slot.stop < start:
                self.gaps.append(self.flat[slot.stop : start].zero_())
        # `.data` gives each view a separate version counter; plain views share one with their base.
        self.views = [view.data for view in self.views_of(self.flat)]
        trailer = self._spec.trailer
        self.trailer = self.flat[trailer.start : trailer.stop]
        self.pointers = list(map(Tensor.data_ptr, self.views))
        self._count_uses = private.counter_of_uses(self.flat)
        self._num_uses = self._count_uses()

    def release(self) -> None:
        """Frees the memory, except what other code holds. It is used no more."""
        self.flat = self.trailer = torch.empty(0)
        self.views = []
        self.gaps = []

    def views_of(self, flat: Tensor) -> list[Tensor]:
        """Returns views like `views` of `flat`, which has the same layout."""
        return [
            flat.as_strided(shape, strides, start)
            for (shape, strides), start in zip(self._forms, self.starts, strict=False)
        ]

    def is_referenced(self, *, num_references: int = 0) -> bool:
        """Returns True if other code refers to a view, so that writing here would change the values
        it sees.

        A view bound as `.grad` counts. `num_references` is the number of references to views that
        the caller holds.
        """
        expected = _REFERENCES_OF_OURS * len(self.views) + num_references
        return sum(map(getrefcount, self.views)) > expected or self._count_uses() > self._num_uses


def strides_of_gradient(param: Tensor) -> tuple[int, ...]:
    """Returns the strides that autograd and optimizers expect of a gradient.

    The parameter's, such as channels-last.
    """
    if param.is_contiguous():
        return param.stride()
    # A tensor without gaps gives its strides to a new one like it.
    return torch.empty_like(param, device="meta").stride()


def _row_shape(tensors: Sequence[Tensor]) -> torch.Size | None:
    """Returns the shape of a row if all of several tensors have the same."""
    if len(tensors) < 2 or not all(each.dim() > 0 and each.is_contiguous() for each in tensors):
        return None
    row_shape = tensors[0].shape[1:]
    is_same = all(tensor.shape[1:] == row_shape for tensor in tensors)
    return row_shape if is_same and row_shape.numel() > 0 else None


@dataclass(frozen=True, slots=True)
class Shared:
    """The parts that all buckets of a plan share."""

    plan: Plan
    params: Sequence[Tensor]
    reducer: Reducer
    recorder: Recorder


class Layout:
    """Where the parameters and the reduced gradients of a plan lie: whole on every rank of `group`.

    `Sharding` is a layout of shards. Reductions wait for the ranks of `group`.
    """

    strategy: Strategy = DDP
    # that reduce or gather its shards
    exchanges: tuple[Exchanges, ...] = ()

    def __init__(self, group: OwnGroup) -> None:
        self.group = group

    @property
    def holds_shards(self) -> bool:
        """True if ranks have shards of a gradient that was not set to zero."""
        return False

    def live_buckets(self, shared: Shared) -> Sequence[LiveBucket]:
        """Returns the buckets of the plan, in its order."""
        return [
            SparseBucket(bucket, shared) if bucket.is_sparse else DenseBucket(bucket, shared)
            for bucket in shared.plan.buckets
        ]

    def wait_for_parameters(self) -> None:
        """Waits until all parameters that an optimizer has updated have arrived."""

    def make_gradients_whole(self, named_params: Iterable[tuple[str, Tensor]]) -> None:
        """Called before gradients move to another plan.

        Raises PhaseError if ranks have shards of one of them.
        """


class LiveBucket(ABC):
    """One bucket of a plan. Positions count its slots.

    `pack` takes its gradients, `launch` sends them, `wait` ends the collective, and `bind` puts the
    result into `.grad`.
    """

    reduction: ClassVar = OpKind.ALL_REDUCE
    # positions whose results of earlier synchronizations are added to this one's
    live: Collection[int] = ()
    marks: BucketMarks  # of the last reduction; the round sets them

    def __init__(self, spec: Bucket, shared: Shared) -> None:
        self.spec = spec
        self.shared = shared
        self.params = tuple([shared.params[index] for index in spec.params])
        self.memory = BucketMemory(spec, () if spec.is_sparse else self.params)
        group = shared.reducer.group
        # A separate message, in full width, is summed and not averaged.
        is_summed = spec.wire is not None or self.reduction is OpKind.REDUCE_SCATTER
        divisor = 1 if is_summed else group.num_ranks
        self.trailer = TrailerCodec(
            spec, self.memory.trailer, divisor=divisor, rank=group.rank, names=group.names
        )
        # bytes that are passed to collectives; 0 if a communication hook sends them
        self.wire_bytes = spec.wire_bytes if shared.reducer.hook is None else 0
        self.encoded: list[Encoded] = []  # how its values travel, if in a format
        self.handles: list[Handle] = []
        self._is_packed = False  # by a round that only accumulates
        # by position, gradients that arrived after the bucket was launched
        self._late: dict[int, Tensor] = {}
        # these, on their way in a second collective
        self._late_sent: tuple[Sequence[Tensor], list[Handle]] | None = None
        # `.grad` and its version when the step began, by position
        self._known: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        self.note_known()

    @cached_property
    def label(self) -> str:
        """Its name in messages."""
        params = self.shared.plan.params
        names = [repr(params[index].name) for index in dict.fromkeys(self.spec.params)]
        return f"bucket {self.spec.index} ({listed(names) or 'flags only'})"

    def keep_gradients(self) -> None:
        """Keeps new gradients, which other streams have made, until the current one has packed."""
        self._keep(map(_grad_of, self.params))

    def _keep(self, grads: Iterable[Tensor | None]) -> None:
        hardware = self.shared.reducer.group.hardware
        for grad in grads:
            if grad is not None and grad.is_sparse:
                for part in private.parts_of_sparse(grad):
                    hardware.keep(part)
            elif grad is not None:
                hardware.keep(grad)

    @abstractmethod
    def pack(self, not_arrived: Collection[int]) -> list[int]:
        """Moves every gradient out of `.grad`, leaving None, and returns the positions unused on
        this rank.

        Because of the None, a gradient that arrives while the bucket is in flight becomes a
        separate tensor. A parameter in `not_arrived` contributes its current `.grad`, or zeros if
        that is None; `bind` can restore it.
        """

    @abstractmethod
    def launch(self, *, is_discarded: bool, turn: Turn) -> None:
        """Sends the packed gradients and the trailer.

        Args:
            is_discarded: An earlier result must stay; only shards have memory for both.
            turn: The offsets of this synchronization, for formats that take them.
        """

    def launch_across(self) -> None:
        """Reduces the shard over the second axis of a mesh; only a sharded bucket can."""
        raise NotImplementedError

    @abstractmethod
    def values(self) -> Sequence[Tensor]:
        """Returns the reduced values: of a dense bucket in one tensor, or each sparse gradient."""

    @abstractmethod
    def bind(self, used_elsewhere: Collection[int]) -> None:
        """Binds `.grad` to the reduced values.

        Positions unused here are bound too if they are in `used_elsewhere`; the others get their
        previous `.grad` back, unchanged.
        """

    def wait(self) -> None:
        """Waits for the collective."""
        recorder, handles = self.shared.recorder, self.handles
        self.handles = []
        self.marks.wait_start = recorder.mark()
        for handle in handles:
            handle.wait()
        self.marks.wait_stop = recorder.mark()
        for parcel in self.encoded:
            self.marks.take_codings(parcel.codings)

    def pack_local(self) -> None:
        """Packs in a backward that only accumulates.

        Not if a gradient can be differentiated again (`create_graph=True`), which a copy could not.
        """
        self._is_packed = not any(
            param.grad is not None and param.grad.requires_grad for param in self.params
        )
        if self._is_packed:
            self.pack(())

    def bind_local(self) -> None:
        """Binds `.grad` to values of `pack_local`, if it has packed."""
        if self._is_packed:
            self._is_packed = False
            self.bind(())

    def note_known(self) -> None:
        """Called when a step begins: whatever is in `.grad` now is not a new gradient.

        Hooks report every gradient that autograd adds. But a function of the user's may write
        `.grad` itself, as fused weight gradients do, or a loop may assign the result of
        `torch.autograd.grad`: `is_written` finds these.
        """
        with private.as_plain_tensors():  # faster, and parameters may be on their way
            grads = list(map(_grad_of, self.params))
            if all(map(is_, grads, repeat(None))):  # the usual case
                self._known = {}
                return
            self._known = {
                position: (weakref.ref(grad), private.version_of(grad))
                for position, grad in enumerate(grads)
                if grad is not None
            }

    def is_written(self, position: int) -> bool:
        """Returns True if `.grad` was written since `bind` and `note_known`.

        Called for positions without a gradient from autograd.
        """
        grad = self.params[position].grad
        if grad is None:
            return False
        ref, version = self._known.get(position, (None, -1))
        is_known = ref is not None and ref() is grad and version == private.version_of(grad)
        return not is_known and has_values(grad)

    def has_result(self) -> bool:
        """Returns True if some `.grad` exists that has not been zeroed since `bind`.

        On a device, the host may wait.
        """
        return any(grad is not None and has_values(grad) for grad in map(_grad_of, self.params))

    def catch_late(self) -> bool:
        """Takes gradients that arrived after the bucket was launched out of `.grad`.

        Returns True if there are any.
        """
        for position, param in enumerate(self.params):
            if param.grad is not None:
                self._late[position], param.grad = param.grad, None
        return bool(self._late)

    def launch_late(self) -> None:
        """Reduces, in a second round, the gradients that arrived after the launch, on any rank."""
        values = self._late_values()
        self._late.clear()
        self._late_sent = values, self._reduce(values)

    def bind_late(self, *, rescale: float) -> frozenset[int]:
        """Waits for these gradients, if there are any, and adds them times `rescale`.

        Returns the positions that are not finite on some rank, if the settings ask for that.
        """
        if self._late_sent is None:
            return frozenset()
        (values, handles), self._late_sent = self._late_sent, None
        reducer = self.shared.reducer
        with reducer.group.waiting(f"what came late for {self.label}"):
            for handle in handles:
                handle.wait()
        # They have no trailer, but their reduced values are the same on all ranks.
        bad = None
        if reducer.finite is not None:
            largest = torch.finfo(values[0].dtype).max
            bad = bad_slots(values, self.spec, largest, is_host=reducer.finite.is_host)
        if rescale != 1.0:
            for value in values:
                value.mul_(rescale)
        self._add_late(values)
        return frozenset() if bad is None else frozenset(bad.nonzero().flatten().tolist())

    @abstractmethod
    def _late_values(self) -> Sequence[Tensor]:
        """Returns the late gradients of this rank, laid out like `values`, with zeros for positions
        without one."""

    @abstractmethod
    def _add_late(self, values: Sequence[Tensor]) -> None:
        """Adds the reduced late values."""

    def release(self) -> None:
        """Frees the memory, except what other code holds. The bucket is used no more."""
        self.shared.reducer.group.hardware.keep(self.memory.flat)  # another stream may have made it
        self.memory.release()
        self.trailer.place(self.memory.trailer)

    def _reduce(self, values: Sequence[Tensor]) -> list[Handle]:
        """Starts to reduce values that lie outside of the bucket, or are for the hook alone."""
        reducer, spec, params = self.shared.reducer, self.spec, self.params
        if reducer.hook is None:
            return [reducer.reduce(value) for value in values]
        of_values = [[param] for param in params] if spec.is_sparse else [params]
        last = len(values) - 1 if spec.trailer.facts else None
        return [
            reducer.hook.start(
                HookedBucket(spec.index, value, of_value, is_last=place == last), reducer.group
            )
            for place, (value, of_value) in enumerate(zip(values, of_values, strict=True))
        ]

    def _reduce_with_trailer(self, values: Sequence[Tensor]) -> list[Handle]:
        """Like `_reduce`; a small collective has the trailer."""
        return [*self._reduce(values), self.shared.reducer.reduce(self.memory.trailer)]

    def _mark_nonfinite(self, values: Sequence[Tensor]) -> None:
        """Looks at values to be sent, if anybody asks."""
        finite = self.shared.reducer.finite
        if finite is not None:
            largest = torch.finfo(getattr(torch, self.spec.dtype)).max
            for parcel in self.encoded[:1]:  # the first message that has these values
                largest = min(largest, parcel.wire.largest)
            finite.check(values, self.spec, self.trailer, largest)

    def _count_lost(self, values: Tensor, parcel: Parcel | None) -> None:
        """Counts values to be sent that arrive as zero, or not at all, if it is time for that."""
        if self.shared.reducer.lost.is_counting and isinstance(parcel, Encoded):
            self.shared.reducer.lost.count(values, self.spec, self.shared.plan, parcel)

    def _travels_in(self, parcels: Sequence[Parcel | None], wire_bytes: int) -> None:
        self.encoded = [parcel for parcel in parcels if isinstance(parcel, Encoded)]
        self.wire_bytes = wire_bytes


class DenseBucket(LiveBucket):
    """A bucket that holds its gradients."""

    def __init__(self, spec: Bucket, shared: Shared) -> None:
        super().__init__(spec, shared)
        self._make_parcels()
        self._is_hooked = shared.reducer.hook is not None and bool(spec.slots)
        self._reduce_flat = shared.reducer.reducing(getattr(torch, spec.dtype))
        # The previous `.grad` of positions that are unused on this rank; of those that lie in the
        # bucket copies, because the reduction overwrites them.
        self._kept: dict[int, Tensor | None] = {}
        # versions of the views when they were bound; in-place writes increment them
        self._versions = [-1] * len(self.params)

    def _make_parcels(self) -> None:
        """Decides how its values travel."""
        parcel = self._parcel = self.shared.reducer.parcel_of(self.spec)
        if parcel is not None:
            self._travels_in([parcel], sum(parcel.sizes) + self.spec.trailer_bytes)

    def pack(self, not_arrived: Collection[int]) -> list[int]:
        if torch.is_grad_enabled():  # not in a usual backward, and setting it takes time
            with torch.no_grad():
                return DenseBucket.pack(self, not_arrived)
        memory = self.memory
        # True if a view was given other memory, as casts do: `param.grad.data = ...`
        is_rebased = list(map(Tensor.data_ptr, memory.views)) != memory.pointers
        if not_arrived or is_rebased or memory.is_referenced():
            return self._pack_any(not_arrived, is_rebased=is_rebased)
        # The usual case: `.grad` was cleared before backward, and every gradient is a new tensor.
        unused: list[int] = []
        for start in range(0, len(self.params), _MOST_AT_ONCE):
            params = self.params[start : start + _MOST_AT_ONCE]
            grads = list(map(_grad_of, params))
            has_none = any(map(is_, grads, repeat(None)))
            if has_none:
                unused += [start + place for place, grad in enumerate(grads) if grad is None]
            self._copy_in(start, grads, are_new=not has_none)
            with private.as_plain_tensors():
                for param in params:
                    param.grad = None
        self._kept = dict.fromkeys(unused)
        return unused

    def _pack_any(self, not_arrived: Collection[int], *, is_rebased: bool) -> list[int]:
        memory = self.memory
        grads = [param.grad for param in self.params]
        unused = _unused(grads, not_arrived)
        self._kept = {}
        for position in unused:  # and no reference to a view is left
            self._kept[position] = grads[position]
            if grads[position] is memory.views[position]:
                self._kept[position] = memory.views[position].clone()
        for param in self.params:
            param.grad = None
        num_in_place = sum(map(is_, grads, memory.views))
        if num_in_place == len(grads) and not is_rebased:
            return unused
        # Other code may still hold the last step's gradients, which must not change.
        if is_rebased or memory.is_referenced(num_references=num_in_place):
            memory.reallocate()
            self.trailer.place(memory.trailer)
        self._copy_in(0, grads, are_new=False)
        return unused

    def _copy_in(self, start: int, grads: Sequence[Tensor | None], *, are_new: bool) -> None:
        """Copies gradients, from position `start` on, into their views.

        `are_new` is False if some may be None, or in place already.
        """
        memory, stop = self.memory, start + len(grads)
        try:
            if not are_new:
                self._copy_some_in(start, grads)
            elif memory.row_shape is None:
                private.copy_each(memory.views[start:stop], grads)  # type: ignore[arg-type]
            else:
                # Rows of one shape are adjacent: one concatenation costs a third of as many small
                # copies.
                target = memory.flat[memory.starts[start] : memory.starts[stop]]
                torch.cat(grads, out=target.view(-1, *memory.row_shape))  # type: ignore[arg-type]
        except RuntimeError:
            # A layer may make sparse gradients without declaring it. Checked only here, because it
            # costs nothing here.
            is_sparse = [grad is not None and grad.layout is not torch.strided for grad in grads]
            if not any(is_sparse):
                raise
            self._copy_some_in(start, [None if grad is None else grad.to_dense() for grad in grads])

    def _copy_some_in(self, start: int, grads: Sequence[Tensor | None]) -> None:
        """Copies the gradients that are not in place already, and writes zeros for None."""
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        absent: list[Tensor] = []
        views = self.memory.views[start : start + len(grads)]
        for view, grad in zip(views, grads, strict=True):
            if grad is None:
                absent.append(view)
            elif grad is not view:
                targets.append(view)
                sources.append(grad)
        if targets:
            private.copy_each(targets, sources)
        for view in absent:
            view.zero_()

    def launch(self, *, is_discarded: bool, turn: Turn) -> None:
        reducer, flat = self.shared.reducer, self.memory.flat
        for gap in self.memory.gaps:
            gap.zero_()
        if reducer.finite is not None:
            self._mark_nonfinite(self.values())
        self.marks.launched = self.shared.recorder.mark()
        if self._is_hooked:
            self.handles = self._reduce_with_trailer(self.values())
        elif self._parcel is None:
            self.handles = [self._reduce_flat(flat)]
        else:
            assert reducer.exchanges is not None  # which send the parcel
            parcel = self._parcel.dithered(
                turn, Stage.OWN, rank=reducer.group.rank, device=flat.device
            )
            self._count_lost(flat, parcel)
            self.handles = [reducer.exchanges.all_reduce(flat, parcel, trailer=self.memory.trailer)]

    def values(self) -> Sequence[Tensor]:
        return (self.memory.gradients,)

    def bind(self, used_elsewhere: Collection[int]) -> None:
        if self._kept:
            self._bind_some(used_elsewhere)
        else:
            with private.as_plain_tensors():  # a third faster
                for param, view in zip(self.params, self.memory.views, strict=True):
                    param.grad = view
        self._versions = list(map(private.version_of, self.memory.views))

    def _bind_some(self, used_elsewhere: Collection[int]) -> None:
        """Binds used positions, and gives the others their previous `.grad` back."""
        for position, (param, view) in enumerate(zip(self.params, self.memory.views, strict=True)):
            is_restored = position in self._kept and position not in used_elsewhere
            param.grad = self._kept[position] if is_restored else view
        self._kept = {}
        self.note_known()

    def is_written(self, position: int) -> bool:
        return not self._is_bound(position) and super().is_written(position)

    def has_result(self) -> bool:
        # A mean of zeros is a result. For gradients that are as they were bound, nothing is read.
        return any(map(self._is_bound, range(len(self.params)))) or super().has_result()

    def _is_bound(self, position: int) -> bool:
        """Returns True if that `.grad` is as `bind` has left it."""
        view = self.memory.views[position]
        return (
            self.params[position].grad is view
            and private.version_of(view) == self._versions[position]
        )

    @torch.no_grad()
    def _late_values(self) -> Sequence[Tensor]:
        values = torch.zeros_like(self.memory.gradients)
        views = self.memory.views_of(values)
        self._keep(self._late.values())
        for position, grad in self._late.items():
            views[position].add_(grad)  # which may be sparse
        return (values,)

    @torch.no_grad()
    def _add_late(self, values: Sequence[Tensor]) -> None:
        # The mean of a sum is the sum of the means, so the earlier result stays as it is.
        self.memory.gradients.add_(values[0])


class SparseBucket(LiveBucket):
    """A bucket of sparse gradients, such as of the weight of nn.Embedding(sparse=True).

    On the host: on a device, dense buckets take them.
    """

    def __init__(self, spec: Bucket, shared: Shared) -> None:
        super().__init__(spec, shared)
        self._values: list[Tensor] = []
        self._are_dense: list[bool] = []
        self._kept: dict[int, Tensor | None] = {}

    @torch.no_grad()
    def pack(self, not_arrived: Collection[int]) -> list[int]:
        grads = [param.grad for param in self.params]
        unused = _unused(grads, not_arrived)
        self._kept = {position: grads[position] for position in unused}
        self._values = list(map(_rows, self.params, grads))
        self._are_dense = [grad is not None and not grad.is_sparse for grad in grads]
        for param in self.params:
            param.grad = None
        return unused

    def launch(self, *, is_discarded: bool, turn: Turn) -> None:
        self._mark_nonfinite(self._values)
        self.marks.launched = self.shared.recorder.mark()
        self.handles = self._reduce_with_trailer(self._values)

    def values(self) -> Sequence[Tensor]:
        return self._values

    def bind(self, used_elsewhere: Collection[int]) -> None:
        restored = self._kept.keys() - set(used_elsewhere)
        for position, (param, value) in enumerate(zip(self.params, self._values, strict=True)):
            if position in restored:
                param.grad = self._kept[position]
            else:  # dense again if it was dense, because the weight is tied to a dense layer
                param.grad = value.to_dense() if self._are_dense[position] else value
        self._values = []
        self._kept = {}
        self.note_known()

    @torch.no_grad()
    def _late_values(self) -> Sequence[Tensor]:
        return list(map(_rows, self.params, map(self._late.get, range(len(self.params)))))

    @torch.no_grad()
    def _add_late(self, values: Sequence[Tensor]) -> None:
        for param, value in zip(self.params, values, strict=True):
            param.grad = value if param.grad is None else param.grad + value


def _unused(grads: Sequence[Tensor | None], not_arrived: Collection[int]) -> list[int]:
    absent = [position for position, grad in enumerate(grads) if grad is None]
    return sorted({*not_arrived, *absent})


def _rows(param: Tensor, grad: Tensor | None) -> Tensor:
    """Returns a new sparse tensor with `grad`'s rows merged, or without rows if it is None.

    [rows, *] of param's shape
    """
    if grad is None:
        indices = torch.empty(1, 0, dtype=torch.int64, device=param.device)
        values = param.new_empty(0, *param.shape[1:], dtype=private.gradient_dtype(param))
        return torch.sparse_coo_tensor(
            indices, values, param.shape, is_coalesced=True, check_invariants=False
        )
    if not grad.is_sparse:
        return grad.to_sparse(1).coalesce()
    merged = grad.coalesce()
    return merged.clone() if merged is grad else merged


def has_values(grad: Tensor) -> bool:
    """Returns True if there are nonzero values; a zeroed gradient has been discarded.

    On a device, the host waits.
    """
    return bool(grad.coalesce().values().any() if grad.is_sparse else grad.any())


@contextlib.contextmanager
def gradients_aside(params: Sequence[Tensor]) -> Iterator[None]:
    """Context that sets every `.grad` to None, and restores all at its end."""
    kept = [param.grad for param in params]
    for param in params:
        param.grad = None
    try:
        yield
    finally:
        for param, grad in zip(params, kept, strict=True):
            param.grad = grad
