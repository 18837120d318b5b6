"""This rank's shards of parameters and gradients in a plan's buckets, and the groups that they are exchanged over.

               shard ──>
replicate   rank 0  rank 1      gradients: reduce-scatter over `shard`, then all-reduce of the shards over `replicate`
    │       rank 2  rank 3      parameters: all-gather over `shard`
    v
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise, repeat
from operator import attrgetter
from types import NoneType

import torch
from torch import Tensor

from undertow.config import SyncConfig, refused
from undertow.errors import ConfigError, PhaseError, require
from undertow.plan import Bucket, Plan
from undertow.runtime.comm.collectives import Collectives, accumulation_dtype, exchanges_over
from undertow.runtime.comm.group import OwnGroup
from undertow.runtime.comm.recorder import Recorder
from undertow.runtime.gradients.storage import strides_of_gradient
from undertow.runtime.sharded.binding import GradientPlaceholder, ShardedBinding, SplitParam
from undertow.runtime.sharded.gathers import Gathers
from undertow.runtime.sharded.shards import FlatParams, ShardPart, in_memory_order, shard_parts
from undertow.schedule import Strategy

_grad_of = attrgetter("grad")


class ShardGroups:
    """Exchanges over separate groups: `shard` and, on a mesh, `replicate`. Construction is a collective call.

    `all_ranks` is the group of all these ranks. Reductions give means over all of them. `close` ends the threads and destroys the
    groups.
    """

    def __init__(self, all_ranks: OwnGroup, config: SyncConfig) -> None:
        user = all_ranks.user
        self.rank, self.num_ranks = user.rank, len(user.ranks)
        groups = [OwnGroup(axis, device=all_ranks.device, within=all_ranks) for axis in user.axes()]
        for group in groups if self.num_ranks > 1 else ():
            group.open(all_meet=True)  # every rank creates each of them
        self.replicate: Collectives | None = None
        divisor = self.num_ranks
        if len(groups) > 1:
            self.replicate = exchanges_over(groups[1], config, divisor=divisor)
            divisor = 1  # of inner sums: the mean is rounded once, after all summands are added
        self.shard = exchanges_over(groups[0], config, divisor=divisor)

    def close(self) -> None:
        axes = [axis for axis in (self.shard, self.replicate) if axis is not None]
        for axis in axes:
            axis.close()
        for axis in axes:
            axis.group.close()


class Sharding:
    """This rank's shards of `plan` over `params`, which move into memory of the buckets.

    `flats` is the memory of each bucket, and `parts` are this rank's nonempty parts of the parameters.
    """

    def __init__(
        self,
        plan: Plan,
        params: Sequence[Tensor],
        strategy: Strategy,
        groups: ShardGroups,
        recorder: Recorder,
    ) -> None:
        _require_shardable(plan, params)
        self.plan, self.params, self.strategy, self.groups = plan, tuple(params), strategy, groups
        # Fixed now, when all ranks have the same: the order of elements in a bucket.
        self.strides = [strides_of_gradient(param) for param in params]
        self.flats = [
            FlatParams(
                bucket,
                [params[index] for index in bucket.params],
                shard_parts(bucket, rank=self.group.rank, num_replicas=plan.num_ranks // self.group.num_ranks),
                num_ranks=plan.num_ranks,
            )
            for bucket in plan.buckets
        ]
        self.parts = [part for flat in self.flats for part in flat.parts if part.numel]
        self.bindings: list[ShardedBinding] = []  # by bucket; a single rank has none
        self._index_of = {id(param): index for index, param in enumerate(params)}
        self._placeholders = [
            GradientPlaceholder(param, name=spec.name, group=self.group) for spec, param in zip(plan.params, params, strict=True)
        ]
        self.splits = {
            index: SplitParam(params[index], self.strides[index], sum(bucket.params.count(index) for bucket in plan.buckets))
            for index in plan.split_params
        }
        self.gathers = Gathers(self.flats, groups.shard, recorder)

    @property
    def group(self) -> OwnGroup:
        """The ranks with the other shards of this replica."""
        return self.groups.shard.group

    def binding(self, bucket: Bucket) -> ShardedBinding:
        made = ShardedBinding(
            bucket,
            self.flats[bucket.index].params,
            self.flats[bucket.index].parts,
            [self._placeholders[index] for index in bucket.params],
            {position: self.splits[index] for position, index in enumerate(bucket.params) if index in self.splits},
            shard_numel=self.shard_numel(bucket),
        )
        self.bindings.append(made)
        return made

    def shard_numel(self, bucket: Bucket) -> int:
        """Returns the number of a bucket's elements that a rank owns, padding included."""
        return bucket.shard_numel * (self.plan.num_ranks // self.group.num_ranks)

    def follow_parameters(self) -> None:
        """Takes over values written into parameters from outside since the last step; nothing may be in flight."""
        for flat in self.flats:
            flat.follow()

    @torch.no_grad()
    def adopt_gradients(self) -> None:
        """Replaces whole gradients, which are the same on every rank, by placeholders; a single rank keeps them."""
        grads = list(map(_grad_of, self.params))
        if not self.bindings or all(map(isinstance, grads, repeat((GradientPlaceholder, NoneType)))):
            return
        whole = {
            index: in_memory_order(grad, self.strides[index])
            for index, grad in enumerate(grads)
            if grad is not None and not isinstance(grad, GradientPlaceholder)
        }
        for part in self.parts:
            if part.param in whole:
                values = whole[part.param][part.start : part.stop]
                self._placeholders[part.param].parts[part.bucket].copy_(values)
        for index in whole:
            self._placeholders[index].bind_to(self.params[index])

    @torch.no_grad()
    def reduce_again(self, own: Mapping[int, tuple[Tensor, bool]]) -> None:
        """Replaces gradients that were reduced whole, and rounded, by parts reduced as in the following steps.

        A collective call. `own` has this rank's gradients by parameter, each with False if something has changed `.grad` since.
        """
        for bucket in self.plan.buckets:
            if own.keys().isdisjoint(bucket.params):  # of another dtype, or without parameters
                continue
            binding, trailer = self.bindings[bucket.index], range(bucket.trailer.start, bucket.storage_numel)
            sent, shard = torch.zeros_like(binding.storage.flat), torch.zeros_like(binding.shard)
            for slot in bucket.slots:
                values = in_memory_order(own[slot.param][0], self.strides[slot.param])
                sent[slot.start : slot.stop] = values[slot.first : slot.first + slot.numel]
            handle = self.groups.shard.reduce_scatter(sent, shard, trailer=trailer)
            if self.groups.replicate is not None:
                handle = self.groups.replicate.all_reduce_behind(handle, shard, trailer=sent[trailer.start :])
            with self.group.waiting(f"the shards of bucket {bucket.index}"):
                handle.wait()
            for part in self.flats[bucket.index].parts:
                if own[part.param][1]:
                    self._placeholders[part.param].parts[part.bucket].copy_(part.of_shard(shard))

    def gradients(self, parts: Iterable[ShardPart]) -> list[Tensor | None]:
        """Returns the mean gradient of each part, or None if the parameter has none. [part.numel] of the wide dtype

        Raises PhaseError if a later backward has added gradients that are not synchronized.
        """
        found: list[Tensor | None] = []
        for part in parts:
            grad = self.params[part.param].grad
            if isinstance(grad, GradientPlaceholder):
                if grad.added is not None:
                    raise self._not_synchronized(part.param)
                mine = grad.parts[part.bucket]
                grad = torch.zeros_like(mine) if grad.is_cleared else mine
            elif grad is not None:  # on a single rank
                whole = in_memory_order(grad, self.strides[part.param])
                grad = whole[part.start : part.stop].to(accumulation_dtype(whole.dtype))
            found.append(grad)
        return found

    def require_synchronized(self, params: Sequence[Tensor]) -> None:
        """Raises PhaseError if a gradient of these parameters has grown since it was reduced, on any rank's part.

        Also raises it if a parameter has a gradient but no part in the layout, because it was frozen when gradients were
        synchronized.
        """
        for param in params:
            index = self._index_of.get(id(param))
            if index is None:
                require(
                    not param.requires_grad or param.grad is None,
                    "the optimizer steps on a gradient that is not synchronized: its parameter was frozen in the meantime.",
                    where=f"a parameter of shape {tuple(param.shape)}, rank {self.groups.rank}",
                    remedy="Freeze and unfreeze parameters between a step and its next forward, or call zero_grad() then.",
                    error=PhaseError,
                )
            elif getattr(param.grad, "added", None) is not None:
                raise self._not_synchronized(index)

    def _not_synchronized(self, index: int) -> PhaseError:
        return PhaseError(
            "the optimizer steps on gradients that were accumulated and not synchronized.",
            where=f"parameter {self.plan.params[index].name!r}, rank {self.groups.rank}",
            remedy="Run the last backward of a step outside of accumulate() and no_sync().",
        )

    @torch.no_grad()
    def scale_gradients(self, parts: Sequence[ShardPart], scale: Tensor) -> None:
        for part in parts:
            grad = self.params[part.param].grad
            if grad is not None:  # on a single rank, parts are whole parameters
                mine = grad.parts[part.bucket] if isinstance(grad, GradientPlaceholder) else grad
                mine.mul_(scale.to(grad.device))

    def drop_gradients(self) -> None:
        for param in self.params:
            if isinstance(param.grad, GradientPlaceholder):
                param.grad = None

    @property
    def holds_gradients(self) -> bool:
        """True if ranks have shards of a gradient that was not set to zero."""
        return any(isinstance(param.grad, GradientPlaceholder) and not param.grad.is_cleared for param in self.params)

    def full_gradient(self, param: Tensor) -> Tensor | None:
        """Returns the mean gradient of a parameter, of its shape, or None if it has none; a collective call."""
        index = self._index_of.get(id(param))
        if index is None or not isinstance(param.grad, GradientPlaceholder):
            return param.grad
        whole = torch.zeros(param.numel(), dtype=accumulation_dtype(param.dtype), device=param.device)
        for bucket in () if param.grad.is_cleared else self.plan.buckets:
            slots = [slot for slot in bucket.slots if slot.param == index]
            if slots:
                flat = self.gathered(bucket.index, self.bindings[bucket.index].shard)
            for slot in slots:
                whole[slot.first : slot.first + slot.numel] = flat[slot.start : slot.stop]
        return whole.as_strided(param.shape, self.strides[index]).to(param.grad.dtype)

    def gathered(self, bucket: int, own: Tensor) -> Tensor:
        """Returns every rank's shard of data in that bucket's layout; a collective call. [ranks * shard]"""
        num_ranks = self.group.num_ranks
        whole = own.new_empty(num_ranks * own.numel())
        whole.view(num_ranks, -1)[self.group.rank].copy_(own)
        if num_ranks > 1:
            handle = self.groups.shard.all_gather(whole, number=len(self.plan.buckets) + bucket)
            with self.group.waiting(f"the shards of bucket {bucket}"):
                handle.wait()
        return whole


def _require_shardable(plan: Plan, params: Sequence[Tensor]) -> None:
    for bucket in plan.buckets:
        if bucket.is_sparse:
            name = plan.params[bucket.slots[0].param].name
            raise refused("shards", "sparse", where=f"ShardedOptimizer, parameter {name!r}")
    # Of two parameters that share memory, each would be updated as if it were alone.
    places = sorted((param.data_ptr(), param.nbytes, index) for index, param in enumerate(params) if param.nbytes)
    for (start, num_bytes, first), (following, _, second) in pairwise(places):
        if following < start + num_bytes:
            names = " and ".join(repr(plan.params[index].name) for index in sorted((first, second)))
            raise ConfigError(
                f"parameters {names} lie in the same memory: a sharded optimizer would update each by itself.",
                where="ShardedOptimizer",
                remedy="Make them one parameter (second.weight = first.weight), or use a plain optimizer.",
            )
