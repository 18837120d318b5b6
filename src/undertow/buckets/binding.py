"""Binds `param.grad` to a view of the bucket at rest, and to None while the bucket is in flight.

A sparse gradient has no place in a flat bucket: it stays a separate tensor, and its bucket holds
only a trailer.

storage.flat        | gradients | padding | trailer |      one allocation, used again in every step
storage.gradients   | gradients |
storage.views         one per gradient, of its shape
"""

import contextlib
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, compress, repeat
from operator import attrgetter, is_
from sys import getrefcount
from typing import Any

import torch
from torch import Tensor

from undertow.plan import Bucket
from undertow.torch_private import private

# Python's garbage collector runs over young objects after 700 net allocations, and every tensor
# visible to Python is one. Smaller batches keep a bucket of thousands of gradients from triggering
# it.
_MOST_AT_ONCE = 512

# A view that no other code holds has two references: the list of views, and the argument of
# getrefcount.
_REFERENCES_OF_OURS = 2

_version_of, _grad_of = attrgetter("_version"), attrgetter("grad")


class BucketStorage:
    """The memory of one bucket of a plan, with a view for each of `like`, tensors of the shapes and
    strides of its gradients."""

    def __init__(self, layout: Bucket, like: Sequence[Tensor]) -> None:
        self._layout, self._device = layout, like[0].device if like else torch.device(layout.device)
        # Fixed now: parameters may be cast or moved later, and new memory must keep the layout of
        # the other ranks.
        self._shapes, self._strides = (
            [tensor.shape for tensor in like],
            list(map(strides_of_gradient, like)),
        )
        self._starts = [0, *accumulate(tensor.numel() for tensor in like)]
        self.reallocate()
        self._row_shape = _row_shape(self.views)

    @property
    def gradients(self) -> Tensor:
        """The gradients one after another, [numel], without padding and trailer."""
        return self.flat[: self._starts[-1]]

    def fill(self, first: int, sources: list[Tensor]) -> None:
        """Copies `sources` into the views from position `first` on, in one launch."""
        last = first + len(sources)
        if self._row_shape is None:
            private.copy_each(self.views[first:last], sources)
        else:
            # Rows of one shape are adjacent: one concatenation costs a third of as many small
            # copies.
            torch.cat(
                sources,
                out=self.flat[self._starts[first] : self._starts[last]].view(-1, *self._row_shape),
            )

    def reallocate(self) -> None:
        """Allocates new memory; code that holds the old one keeps its values."""
        self.flat = torch.empty(
            self._layout.storage_numel,
            dtype=getattr(torch, self._layout.dtype),
            device=self._device,
        )
        # Padding stays zero. Gradients are written first by `pack`, under backward: pages that are
        # new to a process are slow.
        self.flat[self._starts[-1] :].zero_()
        # `.data` gives each view a separate version counter; plain views share one with their base.
        self.views = [view.data for view in self.views_of(self.flat)]
        trailer = self._layout.trailer
        # The trailer, and its part without the numbers.
        parts = ((trailer.start, trailer.stop), (trailer.start, trailer.numbers.start))
        self.trailer = [self.flat[start:stop] for start, stop in parts]
        self._pointers = list(map(Tensor.data_ptr, self.views))
        self._num_sharing = private.storage_use_count(self.flat)

    def release(self) -> None:
        """Frees the memory, except what other code holds. It is used no more."""
        self.flat, self.views, self.trailer = torch.empty(0), [], []

    def views_of(self, flat: Tensor) -> list[Tensor]:
        """Returns views like `views` of `flat`, which has the same layout."""
        return list(map(flat.as_strided, self._shapes, self._strides, self._starts))

    def is_view_referenced(self, *, num_references: int = 0) -> bool:
        """Returns True if other code refers to a view, so that writing here would change the values
        it sees.

        A view bound as `.grad` counts. `num_references` is the number of references to views that
        the caller holds.
        """
        expected = _REFERENCES_OF_OURS * len(self.views) + num_references
        return (
            sum(map(getrefcount, self.views)) > expected
            or private.storage_use_count(self.flat) > self._num_sharing
        )

    def is_rebased(self) -> bool:
        """Returns True if a view was given other memory (`param.grad.data = ...`, as casts do) and
        is not a view any more."""
        return list(map(Tensor.data_ptr, self.views)) != self._pointers


def strides_of_gradient(param: Tensor) -> tuple[int, ...]:
    """Returns the strides that autograd and optimizers expect of a gradient.

    The parameter's, such as channels-last.
    """
    # A tensor without gaps gives its strides to a new one like it.
    return (
        param.stride() if param.is_contiguous() else torch.empty_like(param, device="meta").stride()
    )


def _row_shape(tensors: Sequence[Tensor]) -> torch.Size | None:
    """Returns the shape of a row if all of several tensors have the same."""
    shapes = {tensor.shape[1:] for tensor in tensors if tensor.dim() > 0}
    has_rows = all(tensor.dim() > 0 and tensor.is_contiguous() for tensor in tensors)
    row_shape = shapes.pop() if len(shapes) == 1 and len(tensors) > 1 and has_rows else None
    return row_shape if row_shape is not None and row_shape.numel() > 0 else None


class Known:
    """The `.grad` of some parameters at the last look, by position, to detect writes from outside
    of autograd.

    Hooks report every gradient that autograd adds. But a function of the user's may write `.grad`
    itself, as fused weight gradients do, or a loop may assign the result of `torch.autograd.grad`.
    """

    def __init__(self) -> None:
        self.entries: dict[int, tuple[weakref.ref[Tensor], int]] = {}

    def look(self, grads: Iterable[tuple[int, Tensor | None]]) -> None:
        """Makes these the only known gradients."""
        self.entries = {
            position: (weakref.ref(grad), grad._version)
            for position, grad in grads
            if grad is not None
        }

    def has(self, position: int, grad: Tensor) -> bool:
        """Returns True if it is the same tensor, without writes since."""
        ref, version = self.entries.get(position, (None, -1))
        return ref is not None and ref() is grad and version == grad._version


def has_values(grad: Tensor) -> bool:
    """Returns True if there are nonzero values; a zeroed gradient has been discarded.

    On a device, the host waits.
    """
    return bool(grad.coalesce().values().any() if grad.is_sparse else grad.any())


@dataclass(frozen=True, slots=True)
class _Kept:
    """The previous `.grad` of a parameter that is unused on this rank."""

    grad: Tensor | None
    was_view: bool  # if True, `grad` is a copy, because the reduction overwrites the view


class Binding(ABC):
    """Owns the `.grad` of one bucket's parameters. Positions count the bucket's slots."""

    # positions whose results of earlier synchronizations are added to this one's
    live: Collection[int] = ()

    def __init__(self, storage: BucketStorage, params: Sequence[Tensor]) -> None:
        self.storage = storage
        self.params: Sequence[Tensor] = tuple(params)
        self._known = Known()  # known tensors in `.grad` that are not Undertow's
        # by position, gradients that arrived after the bucket was launched
        self._late: dict[int, Tensor] = {}

    @abstractmethod
    def pack(self, not_arrived: Collection[int] = ()) -> list[int]:
        """Moves every gradient out of `.grad`, leaving None, and returns the positions unused on
        this rank.

        Because of the None, a gradient that arrives while the bucket is in flight becomes a
        separate tensor. A parameter in `not_arrived` contributes its current `.grad`, or zeros if
        that is None; `bind` can restore it.
        """

    @abstractmethod
    def values(self) -> Sequence[Tensor]:
        """Returns the values to reduce: a dense bucket's flat gradients, or each sparse
        gradient."""

    @abstractmethod
    def bind(self, used_elsewhere: Collection[int] = ()) -> None:
        """Binds `.grad` to the reduced values.

        Positions unused here are bound too if they are in `used_elsewhere`; the others get their
        previous `.grad` back, unchanged.
        """

    def pack_local(self) -> object:
        """Like `pack`, in a backward that only accumulates.

        Gradients that are not sent yet may stay in place.
        """
        return self.pack()

    def bind_local(self) -> None:
        """Binds `.grad` to the locally packed values."""
        self.bind()

    @abstractmethod
    def has_result(self) -> bool:
        """Returns True if some `.grad` exists that has not been zeroed since `bind`.

        On a device, the host may wait.
        """

    @abstractmethod
    def look(self) -> None:
        """Called when a step begins: marks an unbound tensor in `.grad` as known, because user code
        may have put it there.

        It also marks in-place changes of bound gradients, such as clipping. Neither counts as a new
        gradient.
        """

    @abstractmethod
    def is_written(self, position: int) -> bool:
        """Returns True if `.grad` was written since `bind` and `look`.

        Called for positions without a gradient from autograd.
        """

    @abstractmethod
    def late_values(self) -> Sequence[Tensor]:
        """Returns the late gradients of this rank, laid out like `values`, with zeros for positions
        without one."""

    @abstractmethod
    def add_late(self, values: Sequence[Tensor]) -> None:
        """Adds the reduced `late_values`."""

    def has_graph(self) -> bool:
        """Returns True if some gradient can be differentiated again (`create_graph=True`), which a
        copy of it could not."""
        return any(param.grad is not None and param.grad.requires_grad for param in self.params)

    def catch_late(self) -> bool:
        """Takes gradients that arrived after the bucket was launched out of `.grad`.

        Returns True if there are any.
        """
        for position, param in enumerate(self.params):
            if param.grad is not None:
                self._late[position], param.grad = param.grad, None
        return bool(self._late)


class DenseBinding(Binding):
    """The `.grad` of parameters whose gradients lie in a bucket."""

    def __init__(self, storage: BucketStorage, params: Sequence[Tensor]) -> None:
        super().__init__(storage, params)
        self._kept: dict[int, _Kept] = {}
        # versions of the views when they were bound; in-place writes increment them
        self._versions: list[int] = []
        # versions when the last look found gradients
        self._versions_seen = list(map(_version_of, storage.views))
        # copies into the bucket, if another thread is to make them
        self.postponed: list[Callable[[], None]] | None = None
        self.look()

    def pack(self, not_arrived: Collection[int] = ()) -> list[int]:
        is_enabled = torch.is_grad_enabled()
        if is_enabled:  # not in a usual backward, and setting it takes time
            torch.set_grad_enabled(False)
        try:
            if (
                not not_arrived
                and not self.storage.is_view_referenced()
                and not self.storage.is_rebased()
            ):
                return self._pack_new()
            return self._pack_any(not_arrived)
        finally:
            if is_enabled:
                torch.set_grad_enabled(True)

    def values(self) -> Sequence[Tensor]:
        return (self.storage.gradients,)

    def bind(self, used_elsewhere: Collection[int] = ()) -> None:
        restored = self._kept.keys() - set(used_elsewhere)
        if not restored:
            with private.as_plain_tensors():  # a third faster
                for param, view in zip(self.params, self.storage.views, strict=True):
                    param.grad = view
        else:
            for position, (param, view) in enumerate(
                zip(self.params, self.storage.views, strict=True)
            ):
                param.grad = _put_back(self._kept[position], view) if position in restored else view
            self._known.look((position, self.params[position].grad) for position in restored)
        self._kept.clear()
        self._versions = self._versions_seen = list(map(_version_of, self.storage.views))

    def release(self) -> dict[int, Tensor | None]:
        """Ends a `pack` without binding.

        Returns the previous `.grad` of each position that is unused here.
        """
        kept = {position: kept.grad for position, kept in self._kept.items()}
        self._kept.clear()
        return kept

    def has_result(self) -> bool:
        grads = [param.grad for param in self.params]
        # For gradients in the bucket, versions answer this without reading values.
        if (
            any(map(is_, grads, self.storage.views))
            and list(map(_version_of, self.storage.views)) == self._versions
        ):
            return True
        if all(map(is_, grads, self.storage.views)):
            return bool(self.storage.gradients.any())
        return any(grad is not None and bool(grad.any()) for grad in grads)

    def is_unchanged(self, position: int) -> bool:
        """Returns True if that `.grad` is as the last `bind` has left it."""
        view = self.storage.views[position]
        return self.params[position].grad is view and self._versions[position : position + 1] == [
            view._version
        ]

    def look(self) -> None:
        grads = list(map(_grad_of, self.params))
        if all(map(is_, grads, repeat(None))):  # the usual case
            self._known.entries.clear()
            return
        self._versions_seen = list(map(_version_of, self.storage.views))
        pairs = zip(grads, self.storage.views, strict=True)
        self._known.look(enumerate(None if grad is view else grad for grad, view in pairs))

    def is_written(self, position: int) -> bool:
        grad, view = self.params[position].grad, self.storage.views[position]
        if grad is None:
            return False
        is_known = (
            view._version == self._versions_seen[position]
            if grad is view
            else self._known.has(position, grad)
        )
        return not is_known and has_values(grad)

    @torch.no_grad()
    def late_values(self) -> Sequence[Tensor]:
        late = torch.zeros_like(self.storage.gradients)
        views = self.storage.views_of(late)
        for position, grad in self._late.items():
            views[position].copy_(grad)
        self._late.clear()
        return (late,)

    @torch.no_grad()
    def add_late(self, values: Sequence[Tensor]) -> None:
        # The mean of a sum is the sum of the means, so the earlier result stays as it is.
        self.storage.gradients.add_(values[0])

    def _pack_new(self) -> list[int]:
        """The usual case: `.grad` was cleared before backward, and every gradient is a new
        tensor."""
        unused: list[int] = []
        for start in range(0, len(self.params), _MOST_AT_ONCE):
            params = self.params[start : start + _MOST_AT_ONCE]
            grads = list(map(_grad_of, params))
            fill: Callable[[int, Any], None] = self.storage.fill
            if any(map(is_, grads, repeat(None))):
                unused += (start + position for position, grad in enumerate(grads) if grad is None)
                fill = self._fill_some
            if self.postponed is None:
                self._copy(fill, start, grads)
            else:
                self.postponed.append(partial(self._copy, fill, start, grads))
            with private.as_plain_tensors():
                for param in params:
                    param.grad = None
        self._kept = dict.fromkeys(unused, _Kept(None, was_view=False))
        return unused

    def _pack_any(self, not_arrived: Collection[int]) -> list[int]:
        grads = [param.grad for param in self.params]
        unused = sorted(
            {*not_arrived, *(position for position, grad in enumerate(grads) if grad is None)}
        )
        for position in unused:
            self._kept[position] = _keep(grads[position], self.storage.views[position])
        for param in self.params:
            param.grad = None
        is_rebased = self.storage.is_rebased()
        num_in_place = sum(map(is_, grads, self.storage.views))
        if num_in_place == len(grads) and not is_rebased:
            return unused
        # Other code may still hold the last step's gradients, which must not change.
        if is_rebased or self.storage.is_view_referenced(num_references=num_in_place):
            self.storage.reallocate()
        copy = partial(self._copy, self._fill_some, 0, grads)
        if self.postponed is None:
            copy()
        else:
            self.postponed.append(copy)
        return unused

    def _copy(
        self, fill: Callable[[int, Any], None], start: int, grads: Sequence[Tensor | None]
    ) -> None:
        """Copies gradients, from position `start` on, into their views by `fill`."""
        try:
            fill(start, grads)
        except RuntimeError:
            # A layer may make sparse gradients without declaring it. Checked only here, because it
            # costs nothing here.
            dense = [
                grad if grad is None or grad.layout is torch.strided else grad.to_dense()
                for grad in grads
            ]
            if all(map(is_, dense, grads)):
                raise
            self._fill_some(start, dense)

    def _fill_some(self, start: int, grads: Sequence[Tensor | None]) -> None:
        """Copies the gradients that are not in place already, and writes zeros for None."""
        views = self.storage.views[start : start + len(grads)]
        absent = [view for grad, view in zip(grads, views, strict=True) if grad is None]
        are_new = [
            grad is not None and grad is not view for grad, view in zip(grads, views, strict=True)
        ]
        if any(are_new):
            # no None
            private.copy_each(list(compress(views, are_new)), list(compress(grads, are_new)))  # type: ignore[arg-type]
        for view in absent:
            view.zero_()


def _keep(grad: Tensor | None, view: Tensor) -> _Kept:
    return (
        _Kept(grad.clone(), was_view=True)
        if grad is view and grad is not None
        else _Kept(grad, was_view=False)
    )


def _put_back(kept: _Kept, view: Tensor) -> Tensor | None:
    if kept.was_view and kept.grad is not None:
        view.copy_(kept.grad)
        return view
    return kept.grad


class SparseBinding(Binding):
    """The `.grad` of parameters with sparse gradients, such as the weight of
    nn.Embedding(sparse=True)."""

    def __init__(self, storage: BucketStorage, params: Sequence[Tensor]) -> None:
        super().__init__(storage, params)
        self._values: list[Tensor] = []
        self._are_dense: list[bool] = []
        self._kept: dict[int, Tensor | None] = {}
        self.look()

    @torch.no_grad()
    def pack(self, not_arrived: Collection[int] = ()) -> list[int]:
        grads = [param.grad for param in self.params]
        unused = sorted(
            {*not_arrived, *(position for position, grad in enumerate(grads) if grad is None)}
        )
        self._kept = {position: grads[position] for position in unused}
        self._values = [_rows(param, grad) for param, grad in zip(self.params, grads, strict=True)]
        self._are_dense = [grad is not None and not grad.is_sparse for grad in grads]
        for param in self.params:
            param.grad = None
        return unused

    def values(self) -> Sequence[Tensor]:
        return self._values

    def bind(self, used_elsewhere: Collection[int] = ()) -> None:
        restored = self._kept.keys() - set(used_elsewhere)
        for position, (param, value) in enumerate(zip(self.params, self._values, strict=True)):
            if position in restored:
                param.grad = self._kept[position]
            else:  # dense again if it was dense, because the weight is tied to a dense layer
                param.grad = value.to_dense() if self._are_dense[position] else value
        self._values = []
        self._kept = {}
        self.look()

    def has_result(self) -> bool:
        return any(grad is not None and has_values(grad) for grad in map(_grad_of, self.params))

    def look(self) -> None:
        self._known.look(enumerate(map(_grad_of, self.params)))

    def is_written(self, position: int) -> bool:
        grad = self.params[position].grad
        return grad is not None and not self._known.has(position, grad) and has_values(grad)

    @torch.no_grad()
    def late_values(self) -> Sequence[Tensor]:
        late = [
            _rows(param, self._late.get(position)) for position, param in enumerate(self.params)
        ]
        self._late.clear()
        return late

    @torch.no_grad()
    def add_late(self, values: Sequence[Tensor]) -> None:
        for param, value in zip(self.params, values, strict=True):
            param.grad = value if param.grad is None else param.grad + value


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
