"""One set of parameters, and what counts their gradients."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from undertow.plan import Plan
from undertow.runtime import private
from undertow.runtime.alone import Alone
from undertow.runtime.assembly import Present
from undertow.runtime.dist_autograd import DistributedBackwards
from undertow.runtime.hooks import watch_parameters
from undertow.runtime.order import ObservedOrder
from undertow.runtime.tuning import Tuning
from undertow.schedule import Arrivals, SerialArrivals
from undertow.tune import Tuner


class Watch:
    """Hooks on `named_params` until `close`: `on_full(bucket)` and `on_backward(watch, task, param)` are called from them."""

    def __init__(
        self,
        named_params: Sequence[tuple[str, Tensor]],
        plan: Plan,
        *,
        on_full: Callable[[int], object],
        on_backward: Callable[[Watch, int, int], object],
    ) -> None:
        self.named_params = tuple(named_params)
        self.ids = frozenset(id(param) for _, param in named_params)
        kind = Arrivals if len({param.device for _, param in named_params}) <= 1 else SerialArrivals
        self.arrivals = kind(
            params_of_bucket(plan),
            num_params=len(named_params),
            on_full=on_full,
            traversal=private.graph_task_id,
            on_traversal=partial(on_backward, self),
        )
        self.arrived_before: set[int] = set()  # in micro-batches since the last synchronisation
        self.order: ObservedOrder | None = None
        self.tuning: Tuning | None = None  # where there are rounds
        self.alone: Alone | None = None  # where there are none
        self.distributed: DistributedBackwards | None = None
        self._hooks: list[RemovableHandle] = []
        self._before: list[tuple[Any, RemovableHandle]] = []
        self._num_hooks_ever = 0

    @property
    def params(self) -> list[Tensor]:
        return [param for _, param in self.named_params]

    @property
    def tuner(self) -> Tuner | None:
        """What was learned of these parameters."""
        source = self.tuning or self.alone
        return None if source is None else source.tuner

    def start(self) -> None:
        self._hooks = watch_parameters(self.params, self.arrivals)
        self._num_hooks_ever = private.num_hooks_ever()

    def call_before(self, call: Callable[[], object]) -> None:
        """Has `call` called before each gradient is added to what `.grad` holds."""
        self._before = [private.before_accumulating(param, call) for param in self.params]

    def run_last(self) -> bool:
        """Has our hooks run after those that the user has put on parameters since: they may change a gradient.

        Returns whether there were any.
        """
        if self._num_hooks_ever == private.num_hooks_ever():
            return False
        self._num_hooks_ever = private.num_hooks_ever()
        moved = [private.run_last(param, hook) for (_, param), hook in zip(self.named_params, self._hooks, strict=True)]
        return any(moved)

    def round_ends(self, present: Present) -> None:
        """All ranks have found a round under this plan sound: what was learned is sent."""
        if self.order is not None:
            self.order.send()
        if self.tuning is not None:
            self.tuning.round_ends(present)

    def close(self) -> None:
        """Takes the hooks off; a second call does nothing."""
        for hook in (*self._hooks, *(hook for _, hook in self._before)):
            hook.remove()
        self._hooks, self._before = [], []
        self.arrivals.silence()  # it may be in the middle of one
        for other in (self.order, self.tuning, self.alone, self.distributed):
            if other is not None:
                other.close()

    def not_arrived(self, bucket: Sequence[int], missing: Collection[int]) -> list[int]:
        """Positions in `bucket` of those of the `missing` that have no gradient since the last synchronisation."""
        absent = set(missing) - self.arrived_before if missing else ()
        return [position for position, param in enumerate(bucket) if param in absent] if absent else []

    def came_uncounted(self, before: Watch) -> set[int]:
        """Parameters that `before` did not watch and that have a gradient: it came in this backward, ahead of our hooks."""
        return {index for index, param in enumerate(self.params) if id(param) not in before.ids and param.grad is not None}

    def accumulated_ids(self) -> set[int]:
        """The parameters, by id, that have accumulated a gradient since the last synchronisation."""
        return {id(self.named_params[index][1]) for index in self.arrived_before}

    def indices(self, tensors: set[int]) -> set[int]:
        """Which parameters those are, given by id."""
        return {index for index, (_, param) in enumerate(self.named_params) if id(param) in tensors}

    def names_of(self, plan: Plan, places: Mapping[int, Sequence[int]]) -> tuple[str, ...]:
        """The names of parameters, given by their positions in each bucket."""
        params = [plan.buckets[bucket].params[place] for bucket in sorted(places) for place in places[bucket]]
        return tuple(self.named_params[param][0] for param in params)


def params_of_bucket(plan: Plan) -> list[tuple[int, ...]]:
    """Indices of the parameters in each bucket."""
    return [bucket.params for bucket in plan.buckets]
