"""This rank's shards of the parameters and gradients of a plan.

Reasons: docs/design/sharded-optimizer.md.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from undertow.buckets.bucket import BucketLayout, LiveBucket
from undertow.buckets.gradients import FlatGradients, strides_of_gradient
from undertow.buckets.recorder import Recorder
from undertow.buckets.transfer import Reducer
from undertow.config import refused
from undertow.errors import ConfigError, PhaseError, require
from undertow.mesh.local_tensors import (
    in_same_memory,
    let_go_of_memory,
    local_gradient,
    local_params,
    parameter_of,
    placed_like,
)
from undertow.plan import Bucket, Plan
from undertow.plan.layout import round_up
from undertow.ranks.exchanges import accumulation_dtype
from undertow.schedule import Strategy
from undertow.sharded.gathers import Gathers
from undertow.sharded.gradients import ReduceScatter, ShardedGradients
from undertow.sharded.params import FlatParams, ShardPart, in_memory_order
from undertow.sharded.placeholder import GradientPlaceholder, gradients_of
from undertow.sharded.shard_exchanges import ShardExchanges
from undertow.torch_private import private


class Sharding(BucketLayout):
    """This rank's shards of `plan` over `params`, which move into memory of the buckets.

    `flats` is the memory of each bucket, and `parts` has this rank's part of each parameter, which
    may be empty. `params` are as buckets hold them, and `held` as users do: others on a mesh.
    """

    def __init__(
        self,
        plan: Plan,
        params: Sequence[Tensor],
        strategy: Strategy,
        shard_exchanges: ShardExchanges,
        recorder: Recorder,
    ) -> None:
        _require_shardable(plan, params)
        # the ranks with the other shards of this replica
        super().__init__(shard_exchanges.inside.group)
        self.plan, self.params, self.strategy = plan, tuple(params), strategy
        self.names = [param.name for param in plan.params]
        self.shard_exchanges, self.exchanges = shard_exchanges, shard_exchanges.axes
        let_go_of_memory(params)  # it moves
        self.held = tuple(map(parameter_of, params))
        # Fixed now, when all ranks have the same: the order of elements in a bucket.
        self.strides = [strides_of_gradient(param) for param in params]
        self.flats = [
            FlatParams(
                bucket,
                [self.held[index] for index in bucket.params],
                rank=self.group.rank,
                num_ranks=plan.num_ranks,
                num_shards=self.group.num_ranks,
                param_wire=shard_exchanges.param_wire,
            )
            for bucket in plan.buckets
        ]
        self.parts: dict[Tensor, ShardPart] = {}  # by identity of the held parameter
        for flat in self.flats:
            self.parts.update(zip(flat.params, flat.parts, strict=True))
        # The shard of each bucket's gradients, and the placeholder of each parameter: from
        # `live_buckets` on, which a single rank does not call.
        self._shards: dict[int, Tensor] = {}
        self._placeholders: dict[int, GradientPlaceholder] = {}
        # by the number of their optimizer
        self.buckets_of: defaultdict[int, list[int]] = defaultdict(list)
        for bucket in plan.buckets:
            self.buckets_of[bucket.stepper].append(bucket.index)
        shards = [shard_exchanges.shards_of(bucket) for bucket in plan.buckets]
        self.gathers = Gathers(self.flats, shards, shard_exchanges.inside, recorder)

    def live_buckets(
        self, plan: Plan, params: Sequence[Tensor], reducer: Reducer, recorder: Recorder
    ) -> Sequence[LiveBucket]:
        return [self._live_bucket(spec, params, reducer, recorder) for spec in plan.buckets]

    def _live_bucket(
        self, spec: Bucket, params: Sequence[Tensor], reducer: Reducer, recorder: Recorder
    ) -> LiveBucket:
        whole = FlatGradients(spec, [params[index] for index in spec.params])
        shard = whole.flat.new_zeros(  # [shard_numel] of the wide dtype
            self.shard_exchanges.shard_numel(spec), dtype=accumulation_dtype(whole.flat.dtype)
        )
        parts: list[tuple[GradientPlaceholder, ShardPart]] = []
        for index, part in zip(spec.params, self.flats[spec.index].parts, strict=True):
            placeholder = GradientPlaceholder(
                self.params[index],
                part.of_shard(shard),
                name=self.plan.params[index].name,
                group=self.group,
            )
            self._placeholders[index] = placeholder
            parts.append((placeholder, part))
        self._shards[spec.index] = shard
        gradients = ShardedGradients(whole, shard, parts)
        transfer = ReduceScatter(spec, self.plan, gradients, reducer, self.shard_exchanges)
        return LiveBucket(self.plan, gradients, transfer, recorder)

    def make_gradients_whole(self, named_params: Iterable[tuple[str, Tensor]]) -> None:
        """Called before gradients move to another plan.

        Raises PhaseError if ranks have shards of one of them.
        """
        for name, held in named_params:
            (param,) = local_params([held])
            grad = param.grad
            if not isinstance(grad, GradientPlaceholder):
                continue
            require(
                grad.is_cleared,
                "the parameters have changed while sharded gradients are held.",
                where=f"parameter {name!r}, rank {self.shard_exchanges.rank}",
                remedy="Call zero_grad() before parameters are frozen, unfrozen, added or "
                "replaced.",
                error=PhaseError,
            )
            param.grad = grad.added
            if grad.added is None:
                param.grad = torch.zeros_like(param, dtype=private.gradient_dtype(param))

    def wait_for_parameters(self) -> None:
        if self.gathers.in_flight:
            self.gathers.wait_for_all()

    def follow_parameters(self, stepper: int | None = None) -> None:
        """Waits for the parameters of an optimizer, and takes over values written into them from
        outside since the last step. None means all optimizers."""
        buckets = range(len(self.flats)) if stepper is None else self.buckets_of[stepper]
        if self.gathers.in_flight:
            self.gathers.wait(buckets)
        for bucket in buckets:
            self.flats[bucket].follow()

    def adopt_gradients(self, own: Collection[int] = ()) -> dict[int, Tensor]:
        """Replaces whole gradients by placeholders; a single rank keeps them.

        Gradients are the same on every rank, except for the parameters in `own`, by id: their
        gradients are this rank's own, and the next synchronization reduces them. Returns the
        others, by parameter.
        """
        found: dict[int, Tensor] = {}
        if not self._shards:
            return found
        for index, grad in gradients_of(self.params).items():
            if grad is None:
                continue
            param, placeholder = self.params[index], self._placeholders[index]
            part = self.parts[self.held[index]]
            if id(self.held[index]) in own:
                placeholder.bind_to(param)
                placeholder.is_cleared, placeholder.added = True, grad
                continue
            found[index] = grad
            # one of a second backward requires a gradient
            values = in_memory_order(self.group.hardware.keep(grad).detach(), self.strides[index])
            placeholder.part.copy_(values[part.start : part.stop])
            placeholder.bind_to(param)
        return found

    @torch.no_grad()
    def move_gradients(self, to: "Sharding") -> None:
        """Moves gradients in shards to another layout of the same parameters, with the same bits.

        A collective call.
        """
        for bucket in self.plan.buckets:
            held: dict[int, GradientPlaceholder] = {}
            whole: dict[int, Tensor] = {}  # [param.numel()] of the wide dtype
            for slot in bucket.slots:
                grad = self.params[slot.param].grad
                if isinstance(grad, GradientPlaceholder):
                    held[slot.param] = grad
                    if not grad.is_cleared:
                        whole[slot.param] = grad.part.new_empty(slot.stop - slot.start)
            if whole:
                # kept, because nothing holds this layout any more
                own = self.group.hardware.keep(self._shards[bucket.index])
                self.gather_whole(bucket, own, whole)
            for index, grad in held.items():
                to._take_gradient(index, grad, whole.get(index), self.strides[index])

    def _take_gradient(
        self,
        index: int,
        grad: GradientPlaceholder,
        whole: Tensor | None,
        strides: tuple[int, ...],
    ) -> None:
        """Takes over a gradient from another layout, with its mean, in memory of these strides."""
        param, placeholder = self.params[index], self._placeholders[index]
        placeholder.bind_to(param)
        placeholder.added, placeholder.is_cleared = grad.added, grad.is_cleared
        if whole is not None:
            part = self.parts[self.held[index]]
            values = in_memory_order(whole.as_strided(param.shape, strides), self.strides[index])
            placeholder.part.copy_(values[part.start : part.stop])

    def gradients(self, parts: Sequence[ShardPart]) -> list[Tensor | None]:
        """Returns the mean gradient of each part of a parameter on this rank, or None. [part.numel]
        of the wide dtype"""
        found: list[Tensor | None] = []
        for part in parts:
            grad = self.params[part.param].grad
            if isinstance(grad, GradientPlaceholder):
                grad = torch.zeros_like(grad.part) if grad.is_cleared else grad.part
            elif grad is not None:  # on a single rank
                grad = in_memory_order(grad, self.strides[part.param])
                grad = grad.to(accumulation_dtype(grad.dtype))
            found.append(grad)
        return found

    def require_synchronized(self, parts: Iterable[ShardPart], outside: Iterable[Tensor]) -> None:
        """Raises PhaseError if a gradient of these parts' parameters has grown since it was
        reduced, on any rank's part.

        Also raises it if a parameter `outside` of the layout has a gradient, because it was frozen
        when gradients were synchronized.
        """
        for part in parts:
            grad = self.params[part.param].grad
            if isinstance(grad, GradientPlaceholder) and grad.added is not None:
                raise self._not_reduced(grad)
        for param in outside:
            grad = local_gradient(param)
            if isinstance(grad, GradientPlaceholder):
                if grad.added is not None:
                    raise self._not_reduced(grad)
            elif grad is not None and param.requires_grad:
                raise PhaseError(
                    "the optimizer steps on a gradient that is not synchronized: its parameter "
                    "was frozen in the meantime.",
                    where=f"a parameter of shape {tuple(param.shape)}, rank "
                    f"{self.shard_exchanges.rank}",
                    remedy="Freeze and unfreeze parameters between a step and its next forward, "
                    "or call zero_grad() then.",
                )

    def _not_reduced(self, grad: GradientPlaceholder) -> PhaseError:
        return PhaseError(
            "the optimizer steps on gradients that were accumulated and not synchronized.",
            where=f"parameter {grad.param_name!r}, rank {self.shard_exchanges.rank}",
            remedy="Run the last backward of a step outside of accumulate() and no_sync().",
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
        grad = local_gradient(param)
        if not isinstance(grad, GradientPlaceholder):
            return param.grad
        part = self.parts[param]
        wide = accumulation_dtype(param.dtype)
        whole = torch.zeros(grad.numel(), dtype=wide, device=param.device)
        if not grad.is_cleared:
            bucket = self.plan.buckets[part.bucket]
            own = self._shards[bucket.index]
            self.gather_whole(bucket, own, {part.param: whole})
        whole = whole.as_strided(grad.shape, self.strides[part.param]).to(grad.dtype)
        placed: Tensor = placed_like(param, whole)
        return placed

    def gather_whole(self, bucket: Bucket, own: Tensor, into: Mapping[int, Tensor]) -> None:
        """Writes all ranks' shards of data in that bucket's layout into whole tensors.

        A collective call. `own` is this rank's shard. `into` has elements in memory order, by
        parameter.
        """
        shards = self.shard_exchanges.shards_of(bucket)
        part = shards[self.group.rank]
        flat = own.new_empty(round_up(shards[-1].stop, len(shards)))
        flat[part.start : part.stop].copy_(own)
        if self.group.num_ranks > 1:
            number = len(self.plan.buckets) + bucket.index
            handle = self.shard_exchanges.inside.all_gather(flat, shards, number=number)
            what = f"the shards of bucket {bucket.index}"
            self.group.makes_call(what)
            with self.group.waiting(what):
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
    shared = in_same_memory(params)
    if shared is not None:
        names = " and ".join(repr(plan.params[index].name) for index in shared)
        raise ConfigError(
            f"parameters {names} lie in the same memory: a sharded optimizer would update "
            "each by itself.",
            where="ShardedOptimizer",
            remedy="Make them one parameter (second.weight = first.weight), or use a plain "
            "optimizer.",
        )
