"""Where `param.grad` points under a sharded optimizer: to a placeholder, which has this rank's part of the gradient.

.grad   None ── autograd ──> gradient ── take ──> None ── reduce-scatter ──> placeholder (part) ── zero_grad ──> None
                                                                             │  autograd adds       ▲
                                                                             └──> .added ── take, reduce-scatter: part += new
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from undertow.runtime.binding import DenseBinding
from undertow.runtime.buckets import GradientBucket
from undertow.runtime.exchange import wide_dtype
from undertow.runtime.group import OwnGroup
from undertow.runtime.placeholder import GradientPlaceholder
from undertow.runtime.shards import ShardPart


class ShardedBinding:
    """The `.grad` of parameters whose gradients are reduced to `parts` of them; `names` are the parameters'."""

    def __init__(
        self,
        bucket: GradientBucket,
        params: Sequence[Tensor],
        *,
        names: Sequence[str],
        parts: Sequence[ShardPart],
        shard_numel: int,
        group: OwnGroup,
    ) -> None:
        self.bucket = bucket
        self.params: Sequence[Tensor] = tuple(params)
        self._dense = DenseBinding(bucket, params)
        self._parts = tuple(parts)
        storage = bucket.storage
        self._shard = torch.zeros(shard_numel, dtype=wide_dtype(storage.dtype), device=storage.device)
        self._aside: Tensor | None = None  # takes the place of `_shard` where that holds what must not be lost
        self._held: dict[int, GradientPlaceholder] = {}  # by position, what `.grad` was
        self._placeholders = [
            GradientPlaceholder(param, name=name, group=group) for param, name in zip(params, names, strict=True)
        ]
        for placeholder, part in zip(self._placeholders, parts, strict=True):
            placeholder.parts[bucket.bucket_index] = part.of_shard(self._shard)

    def take(self, not_arrived: Collection[int] = ()) -> list[int]:
        self._held = {}
        for position, param in enumerate(self.params):
            grad = param.grad
            if isinstance(grad, GradientPlaceholder):
                self._held[position] = grad
                param.grad, grad.added = grad.added, None
        return self._dense.take(not_arrived)

    def target(self, *, is_apart: bool) -> Tensor:
        """Where this rank's shard of the reduced bucket goes; `is_apart`: a placeholder may hold an earlier one elsewhere."""
        if is_apart or not all(held.is_cleared for held in self._held.values()):
            self._aside = torch.empty_like(self._shard)
            return self._aside
        return self._shard

    def has_graph(self) -> bool:
        return self._dense.has_graph()

    def values(self) -> Sequence[Tensor]:
        return ()

    def views_of(self, value: Tensor) -> list[Tensor]:
        return self.bucket.views_of(value)

    def give(self, used_elsewhere: Collection[int] = ()) -> None:
        unused = self._dense.release()
        reduced, self._aside = self._aside, None
        for position, param in enumerate(self.params):
            held = self._held.get(position)
            if position not in unused or position in used_elsewhere:
                param.grad = self._placed(position, held, reduced)
            else:
                param.grad = unused[position] if held is None else held
        self._held = {}

    def drop(self) -> None:
        """Binds nothing: the reduction was another rank's affair."""
        self._dense.release()
        self._aside, self._held = None, {}

    def keep(self) -> None:
        self._dense.keep()
        for position, held in self._held.items():
            param = self.params[position]
            param.grad, held.added = held, param.grad
        self._held = {}

    @torch.no_grad()
    def adopt(self, position: int, whole: Tensor) -> None:
        """`whole` is the gradient there, in memory order and the same on every rank: a placeholder takes its place."""
        placeholder, part = self._placeholders[position], self._parts[position]
        placeholder.parts[self.bucket.bucket_index].copy_(whole[part.start : part.stop])
        placeholder.renew()
        self.params[position].grad = placeholder

    def has_result(self) -> bool:
        return any(
            grad is not None and not (isinstance(grad, GradientPlaceholder) and grad.is_cleared and grad.added is None)
            for grad in (param.grad for param in self.params)
        )

    def catch_late(self) -> bool:
        return self._dense.catch_late()

    def late_values(self) -> Sequence[Tensor]:
        return self._dense.late_values()

    @torch.no_grad()
    def add_late(self, values: Sequence[Tensor]) -> None:
        index = self.bucket.bucket_index
        for position, (param, part) in enumerate(zip(self.params, self._parts, strict=True)):
            grad = param.grad
            if not isinstance(grad, GradientPlaceholder):
                grad = param.grad = self._placeholders[position]
                grad.renew()
                grad.parts[index].zero_()
            grad.parts[index].add_(part.of_bucket(values[0]))

    def _placed(self, position: int, held: GradientPlaceholder | None, reduced: Tensor | None) -> GradientPlaceholder:
        """The placeholder with what was reduced, added to what it `held` where that was not cleared."""
        placeholder = self._placeholders[position]
        if reduced is not None:
            new = self._parts[position].of_shard(reduced)
            if held is not None and not held.is_cleared:
                held.parts[self.bucket.bucket_index].add_(new)
                return held
            placeholder.parts[self.bucket.bucket_index].copy_(new)
        placeholder.renew()
        return placeholder
