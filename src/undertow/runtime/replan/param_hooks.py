"""Hooks on one set of parameters, and the objects that follow their gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from undertow.plan import Plan, observed
from undertow.runtime.comm.group import OwnGroup, Pending
from undertow.runtime.execute.hooks import ArrivalHooks, is_watched
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
    on_backward: Callable[[int], object]  # with a backward whose first gradient arrives
    on_outside: Callable[[Tensor], object]  # with a parameter that got a gradient and is not in the plan


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


class OutsideHooks:
    """Hooks on parameters of a module that are not in the plan, which call `then(param)` when a gradient arrives after all."""

    def __init__(self, then: Callable[[Tensor], object]) -> None:
        self._then = then
        self.watched: dict[int, tuple[Tensor, RemovableHandle]] = {}  # by id

    def watch(self, params: Sequence[Tensor]) -> list[Tensor]:
        """Makes these the watched parameters, except those that can never be trained; returns those that are new."""
        wanted = {id(param): param for param in params}
        for key in self.watched.keys() - wanted.keys():
            self.watched.pop(key)[1].remove()
        new = [wanted[key] for key in wanted.keys() - self.watched.keys()]
        for param in new:
            with contextlib.suppress(RuntimeError):  # it can never be trained
                self.watched[id(param)] = param, private.hook_gradients(param, self._then)
        return new

    def has_thawed(self) -> bool:
        """Returns True if one of them is trained now, and no engine waits for its gradient."""
        params = [param for param, _ in self.watched.values()]
        # Runs in every round, hence a loop in C; most models have no frozen parameters.
        return any(map(_is_trained, params)) and any(param.requires_grad and not is_watched(param) for param in params)


class ParamHooks:
    """Hooks on `named_params` until `close`, and on parameters `outside` of the plan: frozen ones, and ones that are new."""

    def __init__(
        self,
        named_params: Sequence[tuple[str, Tensor]],
        plan: Plan,
        listeners: Listeners,
    ) -> None:
        self.named_params = tuple(named_params)
        self.ids = frozenset(id(param) for _, param in named_params)
        self.arrivals = Arrivals(
            [bucket.params for bucket in plan.buckets],
            self.params,
            on_full=listeners.on_full,
            traversal=private.graph_task_id,
            on_traversal=listeners.on_backward,
        )
        self.arrivals.owner = listeners.owner
        self.arrived_before: set[int] = set()  # in micro-batches since the last synchronization
        self.outside: dict[int, Tensor] = {}  # by id, parameters outside of the plan that have got a gradient
        self.order: ObservedOrder | None = None
        self.tuning: Tuning | None = None  # if there are rounds
        self.arrival_hooks = ArrivalHooks([], self.arrivals)
        self.outside_hooks = OutsideHooks(listeners.on_outside)

    @property
    def params(self) -> list[Tensor]:
        return [param for _, param in self.named_params]

    @property
    def tuner(self) -> Tuner | None:
        """The measurements of these parameters."""
        return None if self.tuning is None else self.tuning.tuner

    def start(self) -> None:
        """Registers the hooks."""
        self.arrival_hooks = ArrivalHooks(self.params, self.arrivals)

    def watch(self, params: Sequence[Tensor], *, may_have_arrived: bool) -> None:
        """Hooks the parameters of a module that are outside of the plan.

        The gradients of new ones count if they `may_have_arrived` before their hooks.
        """
        for param in self.outside_hooks.watch([param for param in params if id(param) not in self.ids]):
            if may_have_arrived and param.grad is not None:
                self.outside[id(param)] = param

    def regroup(self, plan: Plan) -> None:
        """Switches to the buckets of another plan."""
        self.arrivals.regroup([bucket.params for bucket in plan.buckets])
        self.arrival_hooks.renew()

    def close(self) -> None:
        """Removes the hooks; a second call does nothing."""
        self.arrival_hooks.remove()
        self.outside_hooks.watch(())
        self.arrivals.on_full = lambda _bucket: None  # it may be in the middle of an arrival
        self.arrivals.owner = None
        for other in (self.order, self.tuning):
            if other is not None:
                other.close()

    def not_arrived(self, bucket: Sequence[int], missing: Collection[int]) -> list[int]:
        """Returns the positions in `bucket` of the `missing` parameters without a gradient since the last synchronization."""
        absent = set(missing) - self.arrived_before
        return [position for position, param in enumerate(bucket) if param in absent] if absent else []

    def accumulated_ids(self) -> set[int]:
        """Returns the parameters, by id, that have accumulated a gradient since the last synchronization."""
        return {id(self.named_params[index][1]) for index in self.arrived_before}

    def arrived_ids(self) -> set[int]:
        """Returns the parameters, by id, whose gradient has arrived in this round."""
        return {id(self.named_params[index][1]) for index in self.arrivals.arrived}

    def indices(self, tensors: set[int]) -> set[int]:
        """Returns the indices of parameters given by id."""
        return {index for index, param in enumerate(self.params) if id(param) in tensors}

    def names_of(self, plan: Plan, places: Mapping[int, Collection[int]]) -> tuple[str, ...]:
        """Returns the names of parameters given by their positions in each bucket, in the order of the plan."""
        params = [plan.buckets[bucket].params[place] for bucket in sorted(places) for place in places[bucket]]
        return tuple(self.named_params[param][0] for param in params)
