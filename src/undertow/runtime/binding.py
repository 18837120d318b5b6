"""Where `param.grad` points: to a view of the bucket at rest, to nothing while the bucket is in flight."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from undertow.errors import ConfigError
from undertow.runtime import private
from undertow.runtime.buckets import GradientBucket


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
        grads = [param.grad for param in self._params]
        unused = sorted({*not_arrived, *(position for position, grad in enumerate(grads) if grad is None)})
        for position in unused:
            self._kept[position] = _keep(grads[position], self.bucket.views[position])
        for param in self._params:
            param.grad = None
        with torch.no_grad():
            self._fill(grads)
        return unused

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

    def late_contribution(self) -> Tensor:
        """What arrived late on this rank, laid out like the bucket's storage, zeros elsewhere. [storage_numel]"""
        scratch = torch.zeros_like(self.bucket.storage)
        offsets = self.bucket.offsets
        for position, grad in self._late.items():
            start = offsets[position]
            scratch[start : start + grad.numel()].view(grad.shape).copy_(grad)
        self._late.clear()
        return scratch

    def _fill(self, grads: Sequence[Tensor | None]) -> None:
        num_in_place = sum(grad is view for grad, view in zip(grads, self.bucket.views, strict=True))
        if num_in_place == len(grads):
            return
        # Last step's gradients may still be in somebody's hands: those must not change under them.
        if self.bucket.is_held(num_references=num_in_place):
            self.bucket.renew()
        targets, sources, absent = [], [], []
        for grad, view in zip(grads, self.bucket.views, strict=True):
            if grad is None:
                absent.append(view)
            elif grad is not view:
                targets.append(view)
                sources.append(grad)
        if targets:
            self._copy(targets, sources)
        if absent:
            private.zero_each(absent)

    def _copy(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        try:
            private.copy_each(targets, sources)
        except RuntimeError:
            for param_name, grad in zip(self._names, sources, strict=False):
                if grad.layout is not torch.strided:
                    raise ConfigError(
                        f"the gradient of {param_name!r} is {grad.layout}, and buckets are dense.",
                        where=f"bucket {self.bucket.bucket_index}",
                        remedy="Make the layer with sparse=False, or name the parameter in SyncConfig(ignore=...).",
                    ) from None
            raise


def _keep(grad: Tensor | None, view: Tensor) -> _Kept:
    return _Kept(grad.clone(), was_view=True) if grad is view and grad is not None else _Kept(grad, was_view=False)


def _put_back(kept: _Kept, view: Tensor) -> Tensor | None:
    if kept.was_view and kept.grad is not None:
        view.copy_(kept.grad)
        return view
    return kept.grad
