"""This rank's shards of parameters and gradients in a plan's buckets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import cast

import torch
from torch import Tensor

from undertow.errors import ConfigError, PhaseError
from undertow.plan import Bucket, Plan
from undertow.runtime.comm.collectives import accumulation_dtype
from undertow.runtime.comm.recorder import Recorder
from undertow.runtime.gradients.storage import strides_of_gradient
from undertow.runtime.sharded.binding import ShardedBinding
from undertow.runtime.sharded.gathers import Gathers
from undertow.runtime.sharded.groups import ShardGroups
from undertow.runtime.sharded.in_backward import StepsInBackward
from undertow.runtime.sharded.placeholder import GradientPlaceholder
from undertow.runtime.sharded.shards import FlatParams, ShardPart, in_memory_order, shard_parts
from undertow.runtime.sharded.split import SplitParam
from undertow.schedule import Strategy


class Sharding:
    """This rank's shards of `plan` over `params`, which move into memory of the buckets.

    `parts` are this rank's nonempty parts of the parameters.
    """

    def __init__(
        self,
        plan: Plan,
        params: Sequence[Tensor],
        strategy: Strategy,
        groups: ShardGroups,
        recorder: Recorder,
        in_backward: StepsInBackward | None = None,
    ) -> None:
        _require_dense(plan)
        _require_apart(plan, params)
        self.plan = plan
        self.params = tuple(params)
        self._ids = frozenset(map(id, params))
        self.strategy = strategy
        self.groups = groups
        self.rank = groups.rank  # among all ranks; `group` has the ranks with the other shards of this replica
        self.group = group = groups.shard.group
        # Fixed now, when all ranks have the same: the order of elements in a bucket.
        self.strides = [strides_of_gradient(param) for param in params]
        self._num_replicas = plan.num_ranks // group.num_ranks
        self._parts = [shard_parts(bucket, rank=group.rank, num_replicas=self._num_replicas) for bucket in plan.buckets]
        self._flats = [
            FlatParams(bucket, [params[index] for index in bucket.params], parts, num_ranks=plan.num_ranks)
            for bucket, parts in zip(plan.buckets, self._parts, strict=True)
        ]
        self.in_backward = in_backward  # set if buckets are stepped in backward
        self._bindings: list[ShardedBinding] = []
        self._placeholders = [
            GradientPlaceholder(param, name=spec.name, group=group) for spec, param in zip(plan.params, params, strict=True)
        ]
        num_pieces = Counter(index for bucket in plan.buckets for index in bucket.params)
        self._splits = {index: SplitParam(params[index], num_pieces[index]) for index in plan.split_params}
        self.parts = [part for parts in self._parts for part in parts if part.numel]
        end_backward = int if in_backward is None else in_backward.end_backward
        self.gathers = Gathers(self._flats, self.groups.shard, recorder, end_backward=end_backward)

    def binding(self, bucket: Bucket) -> ShardedBinding:
        """Creates the owner of the `.grad` of a bucket's parameters."""
        made = ShardedBinding(
            bucket,
            [self.params[index] for index in bucket.params],
            self._parts[bucket.index],
            [self._placeholders[index] for index in bucket.params],
            {position: self._splits[index] for position, index in enumerate(bucket.params) if index in self._splits},
            shard_numel=self.shard_numel(bucket),
        )
        self._bindings.append(made)
        return made

    def shard_numel(self, bucket: Bucket) -> int:
        """Returns the number of a bucket's elements that a rank owns, padding included."""
        return bucket.shard_numel * self._num_replicas

    def buckets_of(self) -> dict[int, tuple[int, ...]]:
        """Returns the buckets of each parameter, by its id."""
        found: dict[int, tuple[int, ...]] = {}
        for bucket in self.plan.buckets:
            for index in bucket.params:
                found[id(self.params[index])] = (*found.get(id(self.params[index]), ()), bucket.index)
        return found

    def values(self, part: ShardPart) -> Tensor:
        """Returns this rank's part of a parameter, in place. [part.numel] of the parameter's dtype"""
        return part.of_bucket(self._flats[part.bucket].flat)

    def follow_parameters(self) -> None:
        """Takes over values written into parameters from outside since the last step; nothing may be in flight."""
        for flat in self._flats:
            flat.follow()

    def copy_out(self) -> None:
        """Copies updated values to the parameters on a single rank, which gathers nothing."""
        for flat in self._flats:
            flat.copy_out()

    def adopt_gradients(self) -> None:
        """Replaces whole gradients, which are the same on every rank, by placeholders; a single rank keeps them."""
        whole = [
            (binding, position, index)
            for bucket, binding in zip(self.plan.buckets, self._bindings, strict=False)
            for position, index in enumerate(bucket.params)
            if self.params[index].grad is not None and not isinstance(self.params[index].grad, GradientPlaceholder)
        ]  # collected before the first is replaced, because a parameter may lie in several buckets
        grads = {index: cast(Tensor, self.params[index].grad) for _, _, index in whole}
        for binding, position, index in whole:
            binding.adopt(position, in_memory_order(grads[index], self.strides[index]))

    def gradient(self, part: ShardPart) -> Tensor | None:
        """Returns the mean gradient of this rank's part, or None if the parameter has none. [part.numel] of the wide dtype

        Raises PhaseError if a later backward has added gradients that are not synchronized.
        """
        return self._gradient(part, self.params[part.param].grad)

    def settled_gradient(self, part: ShardPart) -> Tensor | None:
        """Returns the same for a settled bucket, before its `.grad` are bound."""
        return self._gradient(part, self.settled(part.bucket).get(part.param))

    def settled(self, bucket: int) -> dict[int, Tensor | None]:
        """Returns the next `.grad` of each parameter of a settled bucket."""
        grads = self._bindings[bucket].settled or ()
        return dict(zip(self.plan.buckets[bucket].params, grads, strict=True))

    def require_synchronized(self, params: Iterable[Tensor]) -> None:
        """Raises PhaseError if a gradient of these parameters has grown since it was reduced, on any rank's part.

        Also raises it if a parameter has a gradient but no part in the layout, because it was frozen when gradients were
        synchronized.
        """
        stepped = {id(param): param for param in params}
        for key, param in stepped.items():
            if key not in self._ids and param.requires_grad and param.grad is not None:
                raise PhaseError(
                    "the optimizer steps on a gradient that is not synchronized: its parameter was frozen in the meantime.",
                    where=f"a parameter of shape {tuple(param.shape)}, rank {self.rank}",
                    remedy="Freeze and unfreeze parameters between a step and its next forward, or call zero_grad() then.",
                )
        for index, param in enumerate(self.params):
            if isinstance(param.grad, GradientPlaceholder) and param.grad.added is not None and id(param) in stepped:
                raise self._not_synchronized(index)

    def _gradient(self, part: ShardPart, grad: Tensor | None) -> Tensor | None:
        if not isinstance(grad, GradientPlaceholder):  # a single rank has all of it
            whole = None if grad is None else in_memory_order(grad, self.strides[part.param])
            return None if whole is None else whole[part.start : part.stop].to(accumulation_dtype(whole.dtype))
        if grad.added is not None:
            raise self._not_synchronized(part.param)
        mine = grad.parts[part.bucket]
        return torch.zeros_like(mine) if grad.is_cleared else mine

    def _not_synchronized(self, index: int) -> PhaseError:
        return PhaseError(
            "the optimizer steps on gradients that were accumulated and not synchronized.",
            where=f"parameter {self.plan.params[index].name!r}, rank {self.rank}",
            remedy="Run the last backward of a step outside of accumulate() and no_sync().",
        )

    @torch.no_grad()
    def scale_gradients(self, parts: Sequence[ShardPart], scale: Tensor) -> None:
        """Multiplies the gradients of these parts by `scale`."""
        for part in parts:
            grad = self.params[part.param].grad
            if isinstance(grad, GradientPlaceholder):
                grad.parts[part.bucket].mul_(scale.to(grad.device))
            elif grad is not None:  # on a single rank, parts are whole parameters
                grad.mul_(scale.to(grad.device))

    def drop_gradients(self) -> None:
        """Removes all placeholders from `.grad`."""
        for param in self.params:
            if isinstance(param.grad, GradientPlaceholder):
                param.grad = None

    def begin_round(self) -> None:
        """Clears state left over by a failed synchronization."""
        for split in self._splits.values():
            split.begin_round()

    def holds_gradient(self, index: int) -> bool:
        """Returns True if ranks have shards of a gradient of that parameter that was not set to zero."""
        grad = self.params[index].grad
        return isinstance(grad, GradientPlaceholder) and not grad.is_cleared

    def full_gradient(self, index: int) -> Tensor | None:
        """Returns the mean gradient of a parameter, of its shape, or None if it has none; a collective call."""
        param = self.params[index]
        grad = param.grad
        if not isinstance(grad, GradientPlaceholder):
            return grad
        whole = torch.zeros(param.numel(), dtype=accumulation_dtype(param.dtype), device=param.device)
        for bucket, parts in zip(self.plan.buckets, self._parts, strict=True):
            for slot, part in zip(bucket.slots, parts, strict=True):
                if slot.param == index and not grad.is_cleared:
                    own = whole.new_zeros(self.shard_numel(bucket))
                    part.of_shard(own).copy_(grad.parts[bucket.index])
                    whole[slot.first : slot.first + slot.numel] = self.gathered(bucket.index, own)[slot.start : slot.stop]
        return whole.as_strided(param.shape, self.strides[index]).to(grad.dtype)

    def held_gradients(self) -> dict[int, HeldGradient]:
        """Returns the whole gradients of the placeholders, by parameter; a collective call."""
        held = {
            index: HeldGradient(
                param.grad, torch.zeros(param.numel(), dtype=accumulation_dtype(param.dtype), device=param.device)
            )
            for index, param in enumerate(self.params)
            if isinstance(param.grad, GradientPlaceholder)
        }
        for flat, bucket, parts in zip(self._flats, self.plan.buckets, self._parts, strict=True):
            own = torch.zeros(self.shard_numel(bucket), dtype=accumulation_dtype(flat.flat.dtype), device=flat.flat.device)
            mine = [(slot, part) for slot, part in zip(bucket.slots, parts, strict=True) if slot.param in held]
            for slot, part in mine:
                part.of_shard(own).copy_(held[slot.param].placeholder.parts[bucket.index])
            whole = self.gathered(bucket.index, own)
            for slot, _ in mine:
                held[slot.param].whole[slot.first : slot.first + slot.numel] = whole[slot.start : slot.stop]
        return held

    def take_over(self, held: Mapping[int, HeldGradient]) -> None:
        """Takes this rank's parts of gradients that an earlier layout `held`."""
        for bucket, binding in zip(self.plan.buckets, self._bindings, strict=False):
            for position, index in enumerate(bucket.params):
                if index in held:
                    binding.adopt(position, held[index].whole)
        for index, gradient in held.items():
            mine, before = self._placeholders[index], gradient.placeholder
            mine.added, mine.is_cleared = before.added, before.is_cleared

    def gathered(self, bucket: int, own: Tensor) -> Tensor:
        """Gathers every rank's shard of data in that bucket's layout; a collective call. [ranks * shard]"""
        whole = own.new_empty(self.group.num_ranks * own.numel())
        whole.view(self.group.num_ranks, -1)[self.group.rank].copy_(own)
        if self.group.num_ranks > 1:
            with self.group.waiting(f"the shards of bucket {bucket}"):
                self.groups.shard.all_gather(whole, number=len(self.plan.buckets) + bucket, then=int).wait()
        return whole


@dataclass(frozen=True, slots=True, eq=False)
class HeldGradient:
    """A whole gradient of which ranks have parts, and its placeholder."""

    placeholder: GradientPlaceholder
    whole: Tensor  # [numel] of the wide dtype, in memory order


def _require_apart(plan: Plan, params: Sequence[Tensor]) -> None:
    """Raises ConfigError if two parameters share memory, because each would be updated as if it were alone."""
    places = sorted((param.data_ptr(), param.nbytes, index) for index, param in enumerate(params) if param.nbytes)
    for (start, num_bytes, first), (following, _, second) in pairwise(places):
        if following < start + num_bytes:
            names = " and ".join(repr(plan.params[index].name) for index in sorted((first, second)))
            raise ConfigError(
                f"parameters {names} lie in the same memory: a sharded optimizer would update each by itself.",
                where="ShardedOptimizer",
                remedy="Make them one parameter (second.weight = first.weight), or use a plain optimizer.",
            )


def _require_dense(plan: Plan) -> None:
    for bucket in plan.buckets:
        if bucket.is_sparse and bucket.slots:
            name = plan.params[bucket.slots[0].param].name
            raise ConfigError(
                f"the gradient of {name!r} is sparse: it cannot be cut into shards.",
                where="ShardedOptimizer",
                remedy="Make the embedding with sparse=False, or use a plain optimizer.",
            )
