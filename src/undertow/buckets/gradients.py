"""The `.grad` of a bucket's parameters, between synchronizations and during one.

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
from typing import Protocol

import torch
from torch import Tensor

from undertow.buckets.memory import BucketMemory
from undertow.torch_private import private

_grad_of = attrgetter("grad")


class BucketGradients(Protocol):
    """The gradients of one bucket: `pack` takes them out of `.grad`, and `bind` puts the reduced
    ones there. Positions count the slots of the bucket.

    `WholeGradients` and `SparseGradients` are whole on every rank, and `ShardedGradients` leave a
    placeholder over this rank's shard in `.grad`.
    """

    @property
    def memory(self) -> BucketMemory:
        """The memory of the packed gradients and of the trailer."""

    @property
    def earlier(self) -> Collection[int]:
        """Positions whose results of earlier synchronizations are added to this one's."""

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
        """Returns True if `.grad` was written since `bind` and `note_known`.

        Called for positions without a gradient from autograd.
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


class KnownGradients:
    """The `.grad` of parameters when a step began.

    Hooks report every gradient that autograd adds. But a function of the user's may write `.grad`
    itself, as fused weight gradients do, or a loop may assign the result of `torch.autograd.grad`:
    `is_written` finds these.
    """

    def __init__(self, params: Sequence[Tensor]) -> None:
        self._params = params
        # `.grad` and its version, by position
        self._known: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        self.note()

    def note(self) -> None:
        with private.as_plain_tensors():  # faster, and parameters may be on their way
            grads = list(map(_grad_of, self._params))
            if all(map(is_, grads, repeat(None))):  # the usual case
                self._known = {}
                return
            self._known = {
                position: (weakref.ref(grad), private.version_of(grad))
                for position, grad in enumerate(grads)
                if grad is not None
            }

    def is_written(self, position: int) -> bool:
        """Returns True if `.grad` was replaced or written, and is not zero."""
        grad = self._params[position].grad
        if grad is None:
            return False
        ref, version = self._known.get(position, (None, -1))
        is_known = ref is not None and ref() is grad and version == private.version_of(grad)
        return not is_known and has_values(grad)


class WholeGradients:
    """Gradients in the memory of their bucket: `.grad` is a view of it."""

    earlier: Collection[int] = ()

    def __init__(self, params: Sequence[Tensor], memory: BucketMemory) -> None:
        self.memory = memory
        # The previous `.grad` of positions that are unused on this rank.
        self.kept: dict[int, Tensor | None] = {}
        self._params = params
        self._known = KnownGradients(params)
        # versions of the views when they were bound; in-place writes increment them
        self._versions = [-1] * len(params)

    def arrived(self) -> Iterable[Tensor | None]:
        return map(_grad_of, self._params)

    def pack(self, not_arrived: Collection[int], *, is_discarded: bool = False) -> list[int]:
        self.kept = self.memory.pack(self._params, not_arrived)
        return list(self.kept)

    def values(self) -> Sequence[Tensor]:
        return (self.memory.gradients,)

    def bind(self, used_elsewhere: Collection[int]) -> None:
        if self.kept:
            self._bind_some(used_elsewhere)
        else:
            with private.as_plain_tensors():  # a third faster
                for param, view in zip(self._params, self.memory.views, strict=True):
                    param.grad = view
        self._versions = list(map(private.version_of, self.memory.views))

    def _bind_some(self, used_elsewhere: Collection[int]) -> None:
        """Binds used positions, and gives the others their previous `.grad` back."""
        for position, (param, view) in enumerate(zip(self._params, self.memory.views, strict=True)):
            is_restored = position in self.kept and position not in used_elsewhere
            param.grad = self.kept[position] if is_restored else view
        self.kept = {}
        self.note_known()

    def bind_local(self) -> None:
        self.bind(())

    def note_known(self) -> None:
        self._known.note()

    def is_written(self, position: int) -> bool:
        return not self._is_bound(position) and self._known.is_written(position)

    def has_result(self) -> bool:
        # A mean of zeros is a result. For gradients that are as they were bound, nothing is read.
        return any(map(self._is_bound, range(len(self._params)))) or any_values(self._params)

    def _is_bound(self, position: int) -> bool:
        """Returns True if that `.grad` is as `bind` has left it."""
        view = self.memory.views[position]
        return (
            self._params[position].grad is view
            and private.version_of(view) == self._versions[position]
        )

    def late_values(self, late: Mapping[int, Tensor]) -> Sequence[Tensor]:
        values = torch.zeros_like(self.memory.gradients)
        views = self.memory.views_of(values)
        for position, grad in late.items():
            views[position].add_(grad)  # which may be sparse
        return (values,)

    def add_late(self, values: Sequence[Tensor]) -> None:
        # The mean of a sum is the sum of the means, so the earlier result stays as it is.
        self.memory.gradients.add_(values[0])


def any_values(params: Sequence[Tensor]) -> bool:
    """Returns True if a `.grad` has values. On a device, the host waits."""
    return any(grad is not None and has_values(grad) for grad in map(_grad_of, params))


def has_values(grad: Tensor) -> bool:
    """Returns True if there are nonzero values; a zeroed gradient has been discarded.

    On a device, the host waits.
    """
    return bool(grad.coalesce().values().any() if grad.is_sparse else grad.any())
