"""The gradients of a bucket: their memory, and the `.grad` of its parameters.

flat       | gradients | padding | trailer |      one allocation, used again in every step
values     | gradients |
views        one per gradient, of its shape

Between steps `.grad` is a view of the bucket, or if no rank has used it a copy of the previous one.
It is None while the bucket is in flight.

.grad   None ── autograd ──> gradient ── pack ──> None ── the transfer ends, bind ──> view

Reasons: docs/design/buckets.md.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import repeat
from operator import attrgetter, is_
from sys import getrefcount
from typing import Any, Protocol, TypeAlias

import torch
from numpy.typing import NDArray
from torch import Tensor

from undertow.device import device_of
from undertow.plan import Bucket
from undertow.torch_private import private

# Python's garbage collector runs over young objects after 700 net allocations, and every tensor
# visible to Python is one. Smaller batches keep a bucket of thousands of gradients from triggering
# it.
_MOST_AT_ONCE = 512

# References to an object in a list that no other code holds, as `_is_referenced` counts them.
_REFERENCES_OF_OURS = sum(map(getrefcount, [object()]))

# Dtypes that numpy does not have, and those that hold the same values.
WIDER_IN_NUMPY = {torch.bfloat16: torch.float32, torch.complex32: torch.complex64}

_grad_of = attrgetter("grad")

# Gradients to be copied, from a position on, and True if all of them are new tensors.
Copy: TypeAlias = tuple[int, Sequence[Tensor | None], bool]

# The `.grad` of parameters at some moment, and its version, by position.
Known: TypeAlias = dict[int, tuple[weakref.ref[Tensor], int]]


class BucketGradients(Protocol):
    """The gradients of one bucket: `pack` takes them out of `.grad`, and `bind` puts the reduced
    ones there. Positions count the slots of the bucket.

    `FlatGradients` and `SparseGradients` are whole on every rank, and `ShardedGradients` leave a
    placeholder over this rank's shard in `.grad`.
    """

    params: Sequence[Tensor]  # of each slot
    # positions whose results of earlier synchronizations are added to this one's
    earlier: Collection[int]

    def arrived(self) -> Iterable[Tensor | None]:
        """Returns the gradients that autograd has made since the last one."""

    def pack(self, not_arrived: Collection[int], *, is_discarded: bool = False) -> list[int]:
        """Moves every gradient out of `.grad`, leaving None, and returns the positions unused on
        this rank.

        Because of the None, a gradient that arrives while the bucket is in flight becomes a
        separate tensor. A parameter in `not_arrived` contributes its current `.grad`, or zeros if
        that is None; `bind` can restore it.

        With `is_discarded` the result is not used, and an earlier one must stay; only shards have
        memory for both.
        """

    def values(self) -> Sequence[Tensor]:
        """Returns the reduced values: of a dense bucket in one tensor, or each sparse gradient."""

    def bind(self, used_elsewhere: Collection[int]) -> None:
        """Binds `.grad` to the reduced values.

        Positions unused here are bound too if they are in `used_elsewhere`; the others get their
        previous `.grad` back, unchanged.
        """

    def bind_local(self) -> None:
        """Binds `.grad` to the packed values, which were not sent."""

    def note_known(self) -> None:
        """Called when a step begins: the present content of `.grad` is not a new gradient."""

    def is_written(self, position: int) -> bool:
        """Returns True if other code than autograd has written `.grad` since `bind` and
        `note_known`, and it is not zero.

        Hooks report every gradient that autograd adds. But a function of the user's may write
        `.grad` itself, as fused weight gradients do, or a loop may assign the result of
        `torch.autograd.grad`.
        """

    def has_result(self) -> bool:
        """Returns True if some `.grad` exists that has not been zeroed since `bind`.

        On a device, the host may wait.
        """

    def late_values(self, late: Mapping[int, Tensor]) -> Sequence[Tensor]:
        """Returns gradients that arrived late, by position, in new memory like `values`; with zeros
        for positions without one."""

    def add_late(self, values: Sequence[Tensor]) -> None:
        """Adds the reduced late values."""

    def release(self) -> None:
        """Frees the memory, except the parts that other code holds. It is not used any more."""


class FlatGradients:
    """Gradients one after another in the memory of their bucket: `.grad` is a view of it."""

    earlier: Collection[int] = ()

    def __init__(self, spec: Bucket, params: Sequence[Tensor]) -> None:
        self.params = params
        # The previous `.grad` of positions that are unused on this rank, from `pack` to `bind`.
        self.kept: dict[int, Tensor | None] = {}
        self._spec = spec
        self._place = params[0].device if params else torch.device(spec.device)
        # Fixed now: parameters may be cast or moved later, and new memory must keep the layout of
        # the other ranks.
        self._forms = [(param.shape, strides_of_gradient(param)) for param in params]
        self._starts = [*(slot.start for slot in spec.slots), spec.numel]
        self._allocate()
        self._row_shape = None if self._gaps else _row_shape(self.views)
        # versions of the views when they were bound; in-place writes increment them
        self._versions = [-1] * len(params)
        self._known = known_gradients(params)

    def _allocate(self) -> None:
        """Allocates new memory; code that holds the old one keeps its values."""
        dtype = getattr(torch, self._spec.dtype)
        self.flat = torch.empty(self._spec.storage_numel, dtype=dtype, device=self._place)
        # Padding stays zero. Gradients are written first by `pack`, under backward: pages that are
        # new to a process are slow.
        self.flat[self._starts[-1] :].zero_()
        self._gaps: list[Tensor] = []  # views between gradients
        for slot, start in zip(self._spec.slots, self._starts[1:], strict=True):
            if slot.stop < start:
                self._gaps.append(self.flat[slot.stop : start].zero_())
        # `.data` gives each view a separate version counter; plain views share one with their base.
        self.views = [view.data for view in self.views_of(self.flat)]
        trailer = self._spec.trailer
        self.trailer = self.flat[trailer.start : trailer.stop]
        self.trailer_array = array_of(self.trailer)
        self._pointers = list(map(Tensor.data_ptr, self.views))
        self._count_uses = private.counter_of_uses(self.flat)
        self._num_uses = self._count_uses()

    def views_of(self, flat: Tensor) -> list[Tensor]:
        """Returns views like `views` of `flat`, which has the same layout."""
        return [
            flat.as_strided(shape, strides, start)
            for (shape, strides), start in zip(self._forms, self._starts, strict=False)
        ]

    def arrived(self) -> Iterable[Tensor | None]:
        return map(_grad_of, self.params)

    def pack(
        self,
        not_arrived: Collection[int],
        *,
        is_discarded: bool = False,
        later: list[Copy] | None = None,
    ) -> list[int]:
        """Moves every gradient into its view.

        With `later`, it appends them to this list instead, and `copy_in` copies them.
        """
        if torch.is_grad_enabled():  # not in a usual backward, and setting it takes time
            with torch.no_grad():
                return self.pack(not_arrived, later=later)
        if later is None and self._gaps:
            self._zero_gaps()
        # True if a view was given other memory, as casts do: `param.grad.data = ...`
        is_rebased = list(map(Tensor.data_ptr, self.views)) != self._pointers
        if not_arrived or is_rebased or self._is_referenced():
            return self._pack_any(not_arrived, is_rebased=is_rebased, later=later)
        # The usual case: `.grad` was cleared before backward, and every gradient is a new tensor.
        unused: list[int] = []
        for start in range(0, len(self.params), _MOST_AT_ONCE):
            some = self.params[start : start + _MOST_AT_ONCE]
            grads = list(map(_grad_of, some))
            has_none = any(map(is_, grads, repeat(None)))
            if has_none:
                unused += [start + place for place, grad in enumerate(grads) if grad is None]
            if later is None:
                self._copy(start, grads, are_new=not has_none)
            else:
                later.append((start, grads, not has_none))
            with private.as_plain_tensors():
                for param in some:
                    param.grad = None
        self.kept = dict.fromkeys(unused)
        return unused

    def _pack_any(
        self, not_arrived: Collection[int], *, is_rebased: bool, later: list[Copy] | None
    ) -> list[int]:
        grads = [param.grad for param in self.params]
        unused = unused_positions(grads, not_arrived)
        self.kept = {position: grads[position] for position in unused}
        for position in unused:  # leaves no reference to a view
            if grads[position] is self.views[position]:  # which the reduction overwrites
                self.kept[position] = self.views[position].clone()
        for param in self.params:
            param.grad = None
        num_in_place = sum(map(is_, grads, self.views))
        if num_in_place == len(grads) and not is_rebased:
            return unused
        # Other code may still hold the last step's gradients, which must not change.
        if is_rebased or self._is_referenced(num_references=num_in_place):
            self._allocate()
        if later is None:
            self._copy(0, grads, are_new=False)
        else:
            later.append((0, grads, False))
        return unused

    def copy_in(self, later: list[Copy]) -> None:
        """Copies the gradients that `pack` has left for later, maybe in another thread."""
        while later:
            start, grads, are_new = later.pop(0)
            self._copy(start, grads, are_new=are_new)
            del grads  # frees them before the next copy
        self._zero_gaps()

    def _copy(self, start: int, grads: Sequence[Tensor | None], *, are_new: bool) -> None:
        """Copies gradients, from position `start` on, into their views.

        `are_new` is False if some may be None, or in place already.
        """
        stop = start + len(grads)
        try:
            if not are_new:
                self._copy_some(start, grads)
            elif self._row_shape is None:
                private.copy_each(self.views[start:stop], grads)  # type: ignore[arg-type]
            else:
                # Rows of one shape are adjacent: one concatenation costs a third of as many small
                # copies.
                target = self.flat[self._starts[start] : self._starts[stop]]
                torch.cat(grads, out=target.view(-1, *self._row_shape))  # type: ignore[arg-type]
        except RuntimeError:
            # A layer may make sparse gradients without declaring it. Checked only here, because it
            # costs nothing here.
            is_sparse = [grad is not None and grad.layout is not torch.strided for grad in grads]
            if not any(is_sparse):
                raise
            self._copy_some(start, [None if grad is None else grad.to_dense() for grad in grads])

    def _copy_some(self, start: int, grads: Sequence[Tensor | None]) -> None:
        """Copies the gradients that are not in place already, and writes zeros for None."""
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        absent: list[Tensor] = []
        views = self.views[start : start + len(grads)]
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

    def _zero_gaps(self) -> None:
        """Writes zeros between gradients. A format leaves NaN there after a block with NaN."""
        for gap in self._gaps:
            gap.zero_()

    def _is_referenced(self, *, num_references: int = 0) -> bool:
        """Returns True if other code refers to a view, so that writing here would change the values
        it sees.

        A view bound as `.grad` counts. `num_references` is the number of references to views that
        the caller holds.
        """
        expected = _REFERENCES_OF_OURS * len(self.views) + num_references
        return sum(map(getrefcount, self.views)) > expected or self._count_uses() > self._num_uses

    def values(self) -> Sequence[Tensor]:
        # A new view each time: a view that is kept would count as other code's use of the memory.
        return (self.flat[: self._starts[-1]],)

    def bind(self, used_elsewhere: Collection[int]) -> None:
        if self.kept:
            self._bind_some(used_elsewhere)
        else:
            with private.as_plain_tensors():  # a third faster
                for param, view in zip(self.params, self.views, strict=True):
                    param.grad = view
        self._versions = list(map(private.version_of, self.views))

    def _bind_some(self, used_elsewhere: Collection[int]) -> None:
        """Binds used positions, and gives the others their previous `.grad` back."""
        for position, (param, view) in enumerate(zip(self.params, self.views, strict=True)):
            is_restored = position in self.kept and position not in used_elsewhere
            param.grad = self.kept[position] if is_restored else view
        self.kept = {}
        self.note_known()

    def bind_local(self) -> None:
        self.bind(())

    def note_known(self) -> None:
        self._known = known_gradients(self.params)

    def is_written(self, position: int) -> bool:
        if self._is_bound(position):
            return False
        return has_been_written(self.params[position].grad, self._known.get(position))

    def has_result(self) -> bool:
        # A mean of zeros is a result. For gradients that are as they were bound, nothing is read.
        return any(map(self._is_bound, range(len(self.params)))) or any_values(self.params)

    def _is_bound(self, position: int) -> bool:
        """Returns True if that `.grad` is as `bind` has left it."""
        view = self.views[position]
        return (
            self.params[position].grad is view
            and private.version_of(view) == self._versions[position]
        )

    def late_values(self, late: Mapping[int, Tensor]) -> Sequence[Tensor]:
        (flat,) = self.values()
        values = torch.zeros_like(flat)
        views = self.views_of(values)
        for position, grad in late.items():
            views[position].add_(grad)  # which may be sparse
        return (values,)

    def add_late(self, values: Sequence[Tensor]) -> None:
        # The mean of a sum is the sum of the means, so the earlier result stays as it is.
        (flat,) = self.values()
        flat.add_(values[0])

    def release(self) -> None:
        device_of(self._place).keep(self.flat)  # another stream may have made it
        self.flat = self.trailer = torch.empty(0)
        self.trailer_array = None
        self.views = []
        self._gaps = []


def known_gradients(params: Sequence[Tensor]) -> Known:
    """Returns the present `.grad` of parameters, for `has_been_written`."""
    with private.as_plain_tensors():  # faster, and parameters may be on their way
        grads = list(map(_grad_of, params))
        if all(map(is_, grads, repeat(None))):  # the usual case
            return {}
        return {
            position: (weakref.ref(grad), private.version_of(grad))
            for position, grad in enumerate(grads)
            if grad is not None
        }


def has_been_written(grad: Tensor | None, known: tuple[weakref.ref[Tensor], int] | None) -> bool:
    """Returns True if a `.grad` is not the known one, or was written since, and is not zero."""
    if grad is None:
        return False
    ref, version = (None, -1) if known is None else known
    is_known = ref is not None and ref() is grad and version == private.version_of(grad)
    return not is_known and has_values(grad)


def any_values(params: Sequence[Tensor]) -> bool:
    """Returns True if a `.grad` has values. On a device, the host waits."""
    return any(grad is not None and has_values(grad) for grad in map(_grad_of, params))


def has_values(grad: Tensor) -> bool:
    """Returns True if there are nonzero values; a zeroed gradient has been discarded.

    On a device, the host waits.
    """
    return bool(grad.coalesce().values().any() if grad.is_sparse else grad.any())


def unused_positions(grads: Sequence[Tensor | None], not_arrived: Collection[int]) -> list[int]:
    """Returns the positions whose gradient is None, or that are in `not_arrived`, in order."""
    absent = [position for position, grad in enumerate(grads) if grad is None]
    return sorted({*not_arrived, *absent})


def strides_of_gradient(param: Tensor) -> tuple[int, ...]:
    """Returns the strides that autograd and optimizers expect of a gradient.

    The parameter's, such as channels-last.
    """
    if param.is_contiguous():
        return param.stride()
    # A tensor without gaps gives its strides to a new one like it.
    return torch.empty_like(param, device="meta").stride()


def array_of(tensor: Tensor) -> NDArray[Any] | None:
    """Returns the same memory for numpy, which reads and writes a few elements faster than torch.

    None on a device, and for bfloat16 and complex32.
    """
    is_on_host = device_of(tensor.device).is_host and not tensor.is_meta
    return tensor.numpy() if is_on_host and tensor.dtype not in WIDER_IN_NUMPY else None


def _row_shape(tensors: Sequence[Tensor]) -> torch.Size | None:
    """Returns the shape of a row if all of several tensors have the same."""
    if len(tensors) < 2 or not all(each.dim() > 0 and each.is_contiguous() for each in tensors):
        return None
    row_shape = tensors[0].shape[1:]
    is_same = all(tensor.shape[1:] == row_shape for tensor in tensors)
    return row_shape if is_same and row_shape.numel() > 0 else None
