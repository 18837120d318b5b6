"""Where `param.grad` points: to a view of the bucket at rest, to nothing while the bucket is in flight."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import repeat
from operator import is_
from typing import cast

import torch
from torch import Tensor

from undertow.errors import ConfigError
from undertow.runtime import private
from undertow.runtime.buckets import GradientBucket

# Python's garbage collector looks through the young objects whenever 700 more have been made than freed, and a tensor
# that Python sees is such an object: fewer at once, and a bucket of thousands of gradients does not set it off.
_MOST_AT_ONCE = 512


@dataclass(frozen=True, slots=True)
class _Kept:
    """What the `.grad` of a parameter was that is unused on this rank."""

    grad: Tensor | None
    was_view: bool  # then `grad` is a copy: the reduction overwrites the view


class GradientBinding:
    """Owns the `.grad` of one bucket's parameters. Positions count the bucket's slots."""

    def __init__(self, bucket: GradientBucket, params: Sequence[Tensor], names: Sequence[str]) -> None:
        self.bucket = bucket
        self._params = tuple(params)
        self._names = tuple(names)
        self._kept: dict[int, _Kept] = {}
        self._late: dict[int, Tensor] = {}  # what arrived after the bucket had left

    def take(self, not_arrived: Collection[int] = ()) -> list[int]:
        """Moves every gradient into the bucket and leaves None in `.grad`; returns the positions unused on this rank.

        None, so that what arrives while the bucket is in flight lands in a tensor of its own. A parameter that has
        not arrived contributes what its `.grad` holds, zeros if that is None; `give` can put back what it was.
        """
        with torch.no_grad():
            try:
                if not not_arrived and not self.bucket.is_held():
                    return self._take_new()
                return self._take_any(not_arrived)
            except RuntimeError:
                self._require_dense()
                raise

    def give(self, used_elsewhere: Collection[int] = ()) -> None:
        """Binds `.grad` to the bucket's values.

        Of the positions unused here, those in `used_elsewhere` are bound too; the others get back, to the bit, what
        they had.
        """
        restored = self._kept.keys() - set(used_elsewhere)
        if not restored:
            for param, view in zip(self._params, self.bucket.views, strict=True):
                param.grad = view
        else:
            for position, (param, view) in enumerate(zip(self._params, self.bucket.views, strict=True)):
                param.grad = _put_back(self._kept[position], view) if position in restored else view
        self._kept.clear()

    def catch_late(self) -> bool:
        """Takes out of `.grad` what arrived after the bucket had left; whether there was anything."""
        for position, param in enumerate(self._params):
            if param.grad is not None:
                self._late[position] = param.grad
                param.grad = None
        return bool(self._late)

    @torch.no_grad()
    def late_contribution(self) -> Tensor:
        """What arrived late on this rank, laid out like the bucket's storage, zeros elsewhere. [storage_numel]"""
        scratch = torch.zeros_like(self.bucket.storage)
        views = self.bucket.views_of(scratch)
        for position, grad in self._late.items():
            views[position].copy_(grad)
        self._late.clear()
        return scratch

    def _take_new(self) -> list[int]:
        """The usual case: `.grad` was cleared before backward, and every gradient is a new tensor."""
        unused: list[int] = []
        for start in range(0, len(self._params), _MOST_AT_ONCE):
            params = self._params[start : start + _MOST_AT_ONCE]
            grads = [param.grad for param in params]
            if any(map(is_, grads, repeat(None))):
                unused += (start + position for position, grad in enumerate(grads) if grad is None)
                self._fill(start, grads)
            else:
                self.bucket.fill(start, cast(list[Tensor], grads))
            for param in params:
                param.grad = None
        self._kept = dict.fromkeys(unused, _Kept(None, was_view=False))
        return unused

    def _take_any(self, not_arrived: Collection[int]) -> list[int]:
        grads = [param.grad for param in self._params]
        unused = sorted({*not_arrived, *(position for position, grad in enumerate(grads) if grad is None)})
        for position in unused:
            self._kept[position] = _keep(grads[position], self.bucket.views[position])
        for param in self._params:
            param.grad = None
        num_in_place = sum(map(is_, grads, self.bucket.views))
        if num_in_place == len(grads):
            return unused
        # Last step's gradients may still be in somebody's hands: those must not change under them.
        if self.bucket.is_held(num_references=num_in_place):
            self.bucket.renew()
        self._fill(0, grads)
        return unused

    def _require_dense(self) -> None:
        for param, name in zip(self._params, self._names, strict=True):
            if param.grad is not None and param.grad.layout is not torch.strided:
                raise ConfigError(
                    f"the gradient of {name!r} is {param.grad.layout}, and buckets are dense.",
                    where=f"bucket {self.bucket.bucket_index}",
                    remedy="Make the layer with sparse=False, or name the parameter in SyncConfig(ignore=...).",
                )

    def _fill(self, start: int, grads: Sequence[Tensor | None]) -> None:
        """Copies the gradients of the positions from `start` on into their views; zeros where there is none."""
        views = self.bucket.views[start : start + len(grads)]
        targets, sources, absent = [], [], []
        for grad, view in zip(grads, views, strict=True):
            if grad is None:
                absent.append(view)
            elif grad is not view:
                targets.append(view)
                sources.append(grad)
        if targets:
            private.copy_each(targets, sources)
        private.zero_each(absent)


def _keep(grad: Tensor | None, view: Tensor) -> _Kept:
    return _Kept(grad.clone(), was_view=True) if grad is view and grad is not None else _Kept(grad, was_view=False)


def _put_back(kept: _Kept, view: Tensor) -> Tensor | None:
    if kept.was_view and kept.grad is not None:
        view.copy_(kept.grad)
        return view
    return kept.grad
