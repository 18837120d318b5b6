"""Binds `param.grad` under a sharded optimizer to a placeholder that has this rank's part of the gradient.

.grad   None ── autograd ──> gradient ── pack ──> None ── reduce-scatter ──> placeholder (part) ── zero_grad ──> None
                                                                             │  autograd adds       ▲
                                                                             └──> .added ── pack, reduce-scatter: part += new
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import repeat
from types import NoneType

import torch
from torch import Tensor

from undertow.plan import Bucket
from undertow.runtime.comm.collectives import accumulation_dtype
from undertow.runtime.gradients.binding import DenseBinding
from undertow.runtime.gradients.storage import BucketStorage
from undertow.runtime.gradients.written import Known, has_values
from undertow.runtime.sharded.placeholder import GradientPlaceholder
from undertow.runtime.sharded.shards import ShardPart, in_memory_order
from undertow.runtime.sharded.split import SplitParam, stand_in


class ShardedBinding:
    """The `.grad` of a bucket's parameters, whose gradients are reduced to `parts`.

    `placeholders` belong to the parameters, and `splits` to those that also lie in other buckets; both are by position.
    """

    def __init__(
        self,
        bucket: Bucket,
        params: Sequence[Tensor],
        parts: Sequence[ShardPart],
        placeholders: Sequence[GradientPlaceholder],
        splits: Mapping[int, SplitParam],
        *,
        shard_numel: int,
    ) -> None:
        dtype, device = getattr(torch, bucket.dtype), torch.device(bucket.device)
        like = torch.empty(0, dtype=dtype, device=device)
        packed = [
            stand_in(slot, like=like) if position in splits else param
            for position, (slot, param) in enumerate(zip(bucket.slots, params, strict=True))
        ]
        self.storage = BucketStorage(bucket, packed)
        self.params: Sequence[Tensor] = tuple(params)
        self._index = bucket.index
        self._slots = bucket.slots
        self._dense = DenseBinding(self.storage, packed)
        self._parts = tuple(parts)
        self._splits = dict(splits)
        self._wholes: dict[int, Tensor | None] = {}  # by position, the gradients of split parameters while the bucket is packed
        self._shard = torch.zeros(shard_numel, dtype=accumulation_dtype(dtype), device=device)
        self._aside: Tensor | None = None  # used instead of `_shard` if that holds values that must be kept
        self._held: dict[int, GradientPlaceholder] = {}  # by position, the previous `.grad`
        self._live: set[int] = set()  # positions whose placeholder holds an earlier part, to which a new one is added
        self._unused: set[int] = set()
        self.settled: list[Tensor | None] | None = None  # by position, the next `.grad`
        self._known = Known()  # known tensors in `.grad` that are not placeholders
        self._placeholders = tuple(placeholders)
        self.look()
        for placeholder, part in zip(placeholders, parts, strict=True):
            placeholder.parts[bucket.index] = part.of_shard(self._shard)

    def pack(self, not_arrived: Collection[int] = ()) -> list[int]:
        self._held, self._live, self.settled = {}, set(), None
        for position, split in self._splits.items():
            held, grad, is_live = split.take()
            self._wholes[position] = grad
            self._pack_piece(position, grad)
            if held is not None:
                self._held[position] = held
            if is_live:
                self._live.add(position)
        return self._pack(not_arrived)

    def pack_local(self) -> None:
        """Like `pack`, but a gradient with pieces in other buckets stays in place until all of them take it."""
        self._held, self._live = {}, set()
        self._pack()

    def _pack(self, not_arrived: Collection[int] = ()) -> list[int]:
        for position, param in enumerate(self.params):
            grad = param.grad
            if position not in self._splits and isinstance(grad, GradientPlaceholder):
                self._held[position] = grad
                param.grad, grad.added = grad.added, None
                if not grad.is_cleared:
                    self._live.add(position)
        self._dense.postponed = []
        unused = self._dense.pack(not_arrived)
        self._unused = set(unused)
        return unused

    def packing(self) -> Callable[[], None]:
        """Returns a function that copies the taken gradients into the bucket, for another thread, so that backward continues."""
        postponed, self._dense.postponed = self._dense.postponed or [], None

        def pack() -> None:
            while postponed:
                postponed.pop(0)()  # popping also frees the gradients

        return pack

    def target(self, *, is_apart: bool) -> Tensor:
        """Returns the tensor for this rank's shard of the reduced bucket; `is_apart` if a placeholder may hold an earlier one."""
        self._aside = torch.empty_like(self._shard) if is_apart or self._live else None
        return self.reduced

    @property
    def keeps_earlier(self) -> bool:
        """True if the taken gradients will be added to the result of an earlier reduction."""
        return bool(self._live)

    @property
    def reduced(self) -> Tensor:
        """The last `target`."""
        return self._shard if self._aside is None else self._aside

    @torch.no_grad()
    def weigh(self, *, divisor: float, keep: float) -> None:
        """Divides the reduced values, and multiplies the earlier ones in placeholders, to which they will be added."""
        self.reduced.div_(divisor)
        for position in self._live:
            self._held[position].parts[self._index].mul_(keep)

    def has_graph(self) -> bool:
        return self._dense.has_graph()

    def values(self) -> Sequence[Tensor]:
        return ()

    @torch.no_grad()
    def settle(self, used_elsewhere: Collection[int] = ()) -> None:
        """Moves the reduced values to their final place without binding them; `bind` does that in autograd's thread."""
        unused = {**self._dense.release(), **self._wholes}
        reduced, self._aside = self._aside, None
        self.settled = []
        for position in range(len(self.params)):
            held = self._held.get(position)
            if position in used_elsewhere or position not in self._unused:
                self.settled.append(self._placed(position, held, reduced))
            else:
                self.settled.append(unused[position] if held is None else held)
        self._held, self._wholes = {}, {}

    def bind(self, used_elsewhere: Collection[int] = ()) -> None:
        if self.settled is None:
            self.settle(used_elsewhere)
        for param, grad in zip(self.params, self.settled or (), strict=True):
            param.grad = grad
        self.settled = None
        if self._unused:
            self.look()

    @torch.no_grad()
    def bind_local(self) -> None:
        self.packing()()
        self._dense.bind_local()
        for position in self._splits:
            self._dense.params[position].grad = None
        for position, held in self._held.items():
            param = self.params[position]
            param.grad, held.added = held, param.grad
        self._held = {}

    @torch.no_grad()
    def adopt(self, position: int, whole: Tensor) -> None:
        """Replaces the gradient at `position` by a placeholder; `whole` is its value, in memory order, the same on every rank."""
        placeholder, part = self._placeholders[position], self._parts[position]
        placeholder.parts[self._index].copy_(whole[part.start : part.stop])
        placeholder.renew()
        self.params[position].grad = placeholder

    def has_result(self) -> bool:
        return any(
            grad is not None and not (isinstance(grad, GradientPlaceholder) and grad.is_cleared and grad.added is None)
            for grad in (param.grad for param in self.params)
        )

    def look(self) -> None:
        grads = [param.grad for param in self.params]
        is_ours = all(map(isinstance, grads, repeat((GradientPlaceholder, NoneType))))
        self._known.look(() if is_ours else enumerate(None if isinstance(grad, GradientPlaceholder) else grad for grad in grads))

    def is_written(self, position: int) -> bool:
        grad = self.params[position].grad
        if isinstance(grad, GradientPlaceholder):
            return grad.added is not None and has_values(grad.added)
        return grad is not None and not self._known.has(position, grad) and has_values(grad)

    def catch_late(self) -> bool:
        for position, split in self._splits.items():
            self._pack_piece(position, split.catch())
        return self._dense.catch_late()

    def late_values(self) -> Sequence[Tensor]:
        return self._dense.late_values()

    @torch.no_grad()
    def add_late(self, values: Sequence[Tensor]) -> None:
        for position, (param, part) in enumerate(zip(self.params, self._parts, strict=True)):
            grad = param.grad
            if not isinstance(grad, GradientPlaceholder):
                grad = param.grad = self._placeholders[position]
                grad.renew()
                grad.parts[self._index].zero_()
            grad.parts[self._index].add_(part.of_bucket(values[0]))

    def _pack_piece(self, position: int, grad: Tensor | None) -> None:
        """Gives the bucket its piece of a gradient, through the parameter's stand-in."""
        slot = self._slots[position]
        whole = None if grad is None else in_memory_order(grad, self._placeholders[position].stride())
        self._dense.params[position].grad = None if whole is None else whole[slot.first : slot.first + slot.numel]

    def _placed(self, position: int, held: GradientPlaceholder | None, reduced: Tensor | None) -> GradientPlaceholder:
        """Returns the placeholder with the reduced part, added to the one that it `held` unless that was cleared."""
        placeholder = self._placeholders[position]
        if reduced is not None:
            new = self._parts[position].of_shard(reduced)
            if held is not None and position in self._live:
                held.parts[self._index].add_(new)
                return held
            placeholder.parts[self._index].copy_(new)
        placeholder.renew()
        return placeholder
