"""Hooks on one set of parameters, and the objects that follow their gradients."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from undertow.plan import Plan, observed
from undertow.runtime.comm.group import OwnGroup, Pending
from undertow.runtime.execute.hooks import ArrivalHooks, is_watched, watch_frozen
from undertow.runtime.replan.single_rank import SingleRank, SingleRankProbe
from undertow.runtime.replan.tuning import Tuning
from undertow.runtime.torch_private import private
from undertow.schedule import Arrivals
from undertow.tune import Tuner

_is_trained = attrgetter("requires_grad")


@dataclass(frozen=True, slots=True)
class Listeners:
    """The functions of `owner` that hooks on parameters call."""

    owner: object
    on_full: Callable[[int], object]  # with a bucket whose last gradient has arrived
    # With the hooks, a backward, and the parameter whose gradient is the first to arrive in it.
    on_backward: Callable[[ParamHooks, int, int], object]
    on_thawed: Callable[[Tensor], object]  # with a parameter that got a gradient although it was frozen at the last look


class ObservedOrder:
    """Rank 0's order of arrival: watched for one round, sent to all, and then taken by all."""

    def __init__(self, arrivals: Arrivals, num_params: int, group: OwnGroup) -> None:
        self._arrivals, self._num_params, self._group = arrivals, num_params, group
        self._seen: list[int] = []
        arrivals.at_each = self._seen.append
        self.sent: Pending[Tensor] | None = None

    def send(self) -> None:
        """Ends the watch and sends what rank 0 has seen; a second call does nothing.

        Not waited for: with several models in one backward, another rank may be in another one's turn.
        """
        if self.sent is None:
            self.close()
            order = torch.tensor(observed(self._num_params, self._seen), dtype=torch.int64)
            # [number of parameters]
            self.sent = self._group.broadcast(order.to(self._group.device), "the order of rank 0's gradients")

    def take(self) -> list[int] | None:
        """Waits for the order that was sent and returns it, once."""
        pending, self.sent = self.sent, None
        return None if pending is None else pending.take().tolist()

    def close(self) -> None:
        """Ends the watch."""
        if self._arrivals.at_each == self._seen.append:  # not yet another's
            self._arrivals.at_each = None


class ParamHooks:
    """Hooks on `named_params` until `close`, and on the module's `frozen` parameters."""

    def __init__(
        self,
        named_params: Sequence[tuple[str, Tensor]],
        plan: Plan,
        listeners: Listeners,
        *,
        frozen: Sequence[Tensor] = (),
    ) -> None:
        self.named_params = tuple(named_params)
        self.ids = frozenset(id(param) for _, param in named_params)
        self.frozen = tuple(frozen)
        self.arrivals = Arrivals(
            [bucket.params for bucket in plan.buckets],
            self.params,
            on_full=listeners.on_full,
            traversal=private.graph_task_id,
            on_traversal=partial(listeners.on_backward, self),
        )
        self.arrivals.owner = listeners.owner
        self.arrived_before: set[int] = set()  # in micro-batches since the last synchronization
        self.order: ObservedOrder | None = None
        self.tuning: Tuning | None = None  # if there are rounds
        self.probe: SingleRankProbe | None = None  # on one rank
        self.alone: SingleRank | None = None  # without rounds
        self.distributed: private.DistributedBackwards | None = None
        self.arrival_hooks = ArrivalHooks([], self.arrivals)
        self._other_hooks: list[tuple[object, RemovableHandle]] = []  # each with an object that must stay alive

    @property
    def params(self) -> list[Tensor]:
        return [param for _, param in self.named_params]

    @property
    def tuner(self) -> Tuner | None:
        """The measurements of these parameters."""
        source = self.tuning or self.probe
        return None if source is None else source.tuner

    def start(self, on_thawed: Callable[[Tensor], object]) -> None:
        """Registers the hooks."""
        self.arrival_hooks = ArrivalHooks(self.params, self.arrivals)
        self._other_hooks += [(None, hook) for hook in watch_frozen(self.frozen, on_thawed)]

    def regroup(self, plan: Plan) -> None:
        """Switches to the buckets of another plan."""
        self.arrivals.regroup([bucket.params for bucket in plan.buckets])
        self.arrival_hooks.renew()

    def has_thawed(self) -> bool:
        """Returns True if a parameter that was frozen is trained now, and no engine waits for its gradient."""
        # Runs in every round, hence a loop in C; most models have no frozen parameters.
        return any(map(_is_trained, self.frozen)) and any(param.requires_grad and not is_watched(param) for param in self.frozen)

    def call_before(self, call: Callable[[], object]) -> None:
        """Calls `call` before each gradient is added to `.grad`."""
        self._other_hooks += [private.before_accumulating(param, call) for param in self.params]

    def close(self) -> None:
        """Removes the hooks; a second call does nothing."""
        self.arrival_hooks.remove()
        for _, hook in self._other_hooks:
            hook.remove()
        self._other_hooks = []
        self.arrivals.on_full = lambda _bucket: None  # it may be in the middle of an arrival
        self.arrivals.owner = None
        for other in (self.order, self.tuning, self.probe, self.alone, self.distributed):
            if other is not None:
                other.close()

    def not_arrived(self, bucket: Sequence[int], missing: Collection[int]) -> list[int]:
        """Returns the positions in `bucket` of the `missing` parameters without a gradient since the last synchronization."""
        absent = set(missing) - self.arrived_before
        return [position for position, param in enumerate(bucket) if param in absent] if absent else []

    def accumulated_ids(self) -> set[int]:
        """Returns the parameters, by id, that have accumulated a gradient since the last synchronization."""
        return {id(self.named_params[index][1]) for index in self.arrived_before}

    def indices(self, tensors: set[int]) -> set[int]:
        """Returns the indices of parameters given by id."""
        return {index for index, param in enumerate(self.params) if id(param) in tensors}

    def names_of(self, plan: Plan, places: Mapping[int, Collection[int]]) -> tuple[str, ...]:
        """Returns the names of parameters given by their positions in each bucket, in the order of the plan."""
        params = [plan.buckets[bucket].params[place] for bucket in sorted(places) for place in places[bucket]]
        return tuple(self.named_params[param][0] for param in dict.fromkeys(params))  # a parameter in pieces has one name
