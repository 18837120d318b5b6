"""This rank's shards of parameters and gradients in a plan's buckets."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from operator import attrgetter

import torch
from torch import Tensor

from undertow.buckets.bucket import LiveBucket, Shared, strides_of_gradient
from undertow.buckets.recorder import Recorder
from undertow.config import refused
from undertow.errors import ConfigError, PhaseError, require
from undertow.plan import Bucket, Plan
from undertow.ranks.collectives import accumulation_dtype
from undertow.ranks.group import OwnGroup
from undertow.schedule import Strategy
from undertow.sharded.bucket import GradientPlaceholder, ShardedBucket
from undertow.sharded.gathers import Gathers
from undertow.sharded.groups import ShardGroups
from undertow.sharded.shards import FlatParams, ShardPart, in_memory_order
from undertow.torch_private import private

_grad_of = attrgetter("grad")


class Sharding:
    """This rank's shards of `plan` over `params`, which move into memory of the buckets.

    `flats` is the memory of each bucket, and `parts` are this rank's nonempty parts of each
    parameter.
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
        num_replicas = plan.num_ranks // self.group.num_ranks
        self.flats = [
            FlatParams(
                bucket,
                [params[index] for index in bucket.params],
                rank=self.group.rank,
                num_ranks=plan.num_ranks,
                num_replicas=num_replicas,
            )
            for bucket in plan.buckets
        ]
        self.parts: dict[Tensor, list[ShardPart]] = {param: [] for param in params}  # by identity
        for flat in self.flats:
            for part in flat.parts:
                if part.numel:
                    self.parts[params[part.param]].append(part)
        self.buckets: list[ShardedBucket] = []  # a single rank has none
        self._index_of = {id(param): index for index, param in enumerate(params)}
        self._placeholders = [
            GradientPlaceholder(param, name=spec.name, group=self.group)
            for spec, param in zip(plan.params, params, strict=True)
        ]
        self.gathers = Gathers(self.flats, groups.shard, recorder)

    @property
    def group(self) -> OwnGroup:
        """The ranks with the other shards of this replica."""
        return self.groups.shard.group

    def live_buckets(self, shared: Shared) -> Sequence[LiveBucket]:
        self.buckets = [
            ShardedBucket(bucket, shared, self.flats[bucket.index], self._placeholders, self.groups)
            for bucket in self.plan.buckets
        ]
        return self.buckets

    def make_gradients_whole(self, named_params: Iterable[tuple[str, Tensor]]) -> None:
        """Called before gradients move to another plan.

        Raises PhaseError if ranks have shards of one of them.
        """
        for name, param in named_params:
            grad = param.grad
            if not isinstance(grad, GradientPlaceholder):
                continue
            require(
                grad.is_cleared,
                "the parameters have changed while sharded gradients are held.",
                where=f"parameter {name!r}, rank {self.groups.rank}",
                remedy="Call zero_grad() before parameters are frozen, unfrozen, added or "
                "replaced.",
                error=PhaseError,
            )
            param.grad = grad.added
            if grad.added is None:
                param.grad = torch.zeros_like(param, dtype=private.gradient_dtype(param))

    def shard_numel(self, bucket: Bucket) -> int:
        """Returns the number of a bucket's elements that a rank owns, padding included."""
        return bucket.shard_numel * (self.plan.num_ranks // self.group.num_ranks)

    def round_begins(self) -> None:
        # no forward has waited; autograd then detects most parameters that were read too early
        if self.gathers.in_flight:
            self.gathers.wait_for_all()

    def wait_for_parameters(self) -> None:
        self.gathers.wait_for_all()

    def follow_parameters(self) -> None:
        """Takes over values written into parameters from outside since the last step.

        Nothing may be in flight.
        """
        for flat in self.flats:
            flat.follow()

    @torch.no_grad()
    def adopt_gradients(self) -> None:
        """Replaces whole gradients, which are the same on every rank, by placeholders.

        A single rank keeps them.
        """
        for index, grad in enumerate(map(_grad_of, self.params) if self.buckets else ()):
            if grad is None or isinstance(grad, GradientPlaceholder):
                continue
            values, placeholder = (
                in_memory_order(grad, self.strides[index]),
                self._placeholders[index],
            )
            for part in self.parts[self.params[index]]:
                placeholder.parts[part.bucket].copy_(values[part.start : part.stop])
            placeholder.bind_to(self.params[index])

    @torch.no_grad()
    def reduce_again(self, own: Mapping[int, tuple[Tensor, bool]]) -> None:
        """Replaces gradients that were reduced whole, and rounded, by parts reduced as in the
        following steps.

        A collective call. `own` has this rank's gradients by parameter, each with False if
        something has changed `.grad` since.
        """
        for bucket in self.plan.buckets:
            if own.keys().isdisjoint(bucket.params):  # of another dtype, or without parameters
                continue
            live = self.buckets[bucket.index]
            trailer = range(bucket.trailer.start, bucket.storage_numel)
            sent, shard = torch.zeros_like(live.memory.flat), torch.zeros_like(live.shard)
            for slot in bucket.slots:
                values = in_memory_order(own[slot.param][0], self.strides[slot.param])
                sent[slot.start : slot.stop] = values
            handle = self.groups.shard.reduce_scatter(sent, shard, trailer=trailer)
            if self.groups.replicate is not None:
                handle = self.groups.replicate.all_reduce_behind(
                    handle, shard, trailer=sent[trailer.start :]
                )
            with self.group.waiting(f"the shards of bucket {bucket.index}"):
                handle.wait()
            for part in self.flats[bucket.index].parts:
                if own[part.param][1]:
                    self._placeholders[part.param].parts[part.bucket].copy_(part.of_shard(shard))

    def gradients(self, parts: Sequence[ShardPart]) -> list[Tensor | None]:
        """Returns the mean gradient of each part, or None. [part.numel] of the wide dtype"""
        found: list[Tensor | None] = []
        for part in parts:
            grad = self.params[part.param].grad
            if isinstance(grad, GradientPlaceholder):
                mine = grad.parts[part.bucket]
                grad = torch.zeros_like(mine) if grad.is_cleared else mine
            elif grad is not None:  # on a single rank
                whole = in_memory_order(grad, self.strides[part.param])
                grad = whole[part.start : part.stop].to(accumulation_dtype(whole.dtype))
            found.append(grad)
        return found

    def require_synchronized(self, params: Sequence[Tensor]) -> None:
        """Raises PhaseError if a gradient of these parameters has grown since it was reduced, on
        any rank's part.

        Also raises it if a parameter has a gradient but no part in the layout, because it was
        frozen when gradients were synchronized.
        """
        for param in params:
            index = self._index_of.get(id(param))
            if index is not None and getattr(param.grad, "added", None) is not None:
                raise PhaseError(
                    "the optimizer steps on gradients that were accumulated and not synchronized.",
                    where=f"parameter {self.plan.params[index].name!r}, rank {self.groups.rank}",
                    remedy="Run the last backward of a step outside of accumulate() and no_sync().",
                )
            if index is None and param.requires_grad and param.grad is not None:
                raise PhaseError(
                    "the optimizer steps on a gradient that is not synchronized: its parameter "
                    "was frozen in the meantime.",
                    where=f"a parameter of shape {tuple(param.shape)}, rank {self.groups.rank}",
                    remedy="Freeze and unfreeze parameters between a step and its next forward, "
                    "or call zero_grad() then.",
                )

    def drop_gradients(self) -> None:
        for param in self.params:
            if isinstance(param.grad, GradientPlaceholder):
                param.grad = None

    @property
    def holds_shards(self) -> bool:
        return any(
            isinstance(param.grad, GradientPlaceholder) and not param.grad.is_cleared
            for param in self.params
        )

    def full_gradient(self, param: Tensor) -> Tensor | None:
        """Returns the mean gradient of a parameter, of its shape, or None if it has none.

        A collective call.
        """
        index = self._index_of.get(id(param))
        if index is None or not isinstance(param.grad, GradientPlaceholder):
            return param.grad
        whole = torch.zeros(
            param.numel(), dtype=accumulation_dtype(param.dtype), device=param.device
        )
        for bucket in () if param.grad.is_cleared else self.plan.buckets:
            if index in bucket.params:
                self.gather_whole(bucket, self.buckets[bucket.index].shard, {index: whole})
        return whole.as_strided(param.shape, self.strides[index]).to(param.grad.dtype)

    def gather_whole(self, bucket: Bucket, own: Tensor, into: Mapping[int, Tensor]) -> None:
        """Writes all ranks' shards of data in that bucket's layout into whole tensors.

        A collective call. `own` is this rank's shard. `into` has elements in memory order, by
        parameter.
        """
        num_ranks = self.group.num_ranks
        flat = own.new_empty(num_ranks * own.numel())
        flat.view(num_ranks, -1)[self.group.rank].copy_(own)
        if num_ranks > 1:
            number = len(self.plan.buckets) + bucket.index
            handle = self.groups.shard.all_gather(flat, number=number)
            with self.group.waiting(f"the shards of bucket {bucket.index}"):
                handle.wait()
        for slot in bucket.slots:
            if slot.param in into:
                into[slot.param].copy_(flat[slot.start : slot.stop])


def _require_shardable(plan: Plan, params: Sequence[Tensor]) -> None:
    for bucket in plan.buckets:
        if bucket.is_sparse:
            name = plan.params[bucket.slots[0].param].name
            raise refused("shards", "sparse", where=f"ShardedOptimizer, parameter {name!r}")
    # Of two parameters that share memory, each would be updated as if it were alone.
    places = sorted(
        (param.data_ptr(), param.nbytes, index)
        for index, param in enumerate(params)
        if param.nbytes
    )
    for (start, num_bytes, first), (following, _, second) in pairwise(places):
        if following < start + num_bytes:
            names = " and ".join(repr(plan.params[index].name) for index in sorted((first, second)))
            raise ConfigError(
                f"parameters {names} lie in the same memory: a sharded optimizer would update "
                "each by itself.",
                where="ShardedOptimizer",
                remedy="Make them one parameter (second.weight = first.weight), or use a plain "
                "optimizer.",
            )
