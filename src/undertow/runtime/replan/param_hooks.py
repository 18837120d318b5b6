"""One set of parameters, and what counts their gradients."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from undertow.plan import Plan
from undertow.runtime.execute.compiled_plan import Present
from undertow.runtime.execute.hooks import is_watched, watch_frozen, watch_parameters
from undertow.runtime.replan.order import ObservedOrder
from undertow.runtime.replan.single_rank import SingleRankProbe
from undertow.runtime.replan.tuning import Tuning
from undertow.runtime.replan.uses import Uses
from undertow.runtime.torch_private import private
from undertow.runtime.torch_private.dist_autograd import DistributedBackwards
from undertow.schedule import Arrivals, SerialArrivals
from undertow.tune import Tuner

_is_trained = attrgetter("requires_grad")


@dataclass(frozen=True, slots=True)
class Listeners:
    """What hooks on parameters call."""

    on_full: Callable[[int], object]  # a bucket, when its last gradient is there
    on_backward: Callable[
        [ParamHooks, int, int], object
    ]  # a watch, a backward and the parameter that is the first to arrive in it
    on_thawed: Callable[[Tensor], object]  # a parameter that gets a gradient although it was frozen when it was last looked at


class ParamHooks:
    """Hooks on `named_params` until `close`, and on the `frozen` parameters beside them."""

    def __init__(
        self,
        named_params: Sequence[tuple[str, Tensor]],
        plan: Plan,
        listeners: Listeners,
        *,
        frozen: Sequence[Tensor] = (),
    ) -> None:
        self.named_params = tuple(named_params)
        self._frozen, self._on_thawed = tuple(frozen), listeners.on_thawed
        self.ids = frozenset(id(param) for _, param in named_params)
        kind = Arrivals if len({param.device for _, param in named_params}) <= 1 else SerialArrivals
        self.arrivals = kind(
            params_of_bucket(plan),
            num_params=len(named_params),
            on_full=listeners.on_full,
            traversal=private.graph_task_id,
            on_traversal=partial(listeners.on_backward, self),
        )
        self.arrived_before: set[int] = set()  # in micro-batches since the last synchronization
        self.order: ObservedOrder | None = None
        self.tuning: Tuning | None = None  # where there are rounds
        self.alone: SingleRankProbe | None = None  # where there are none
        self.uses: Uses | None = None  # the same
        self.distributed: DistributedBackwards | None = None
        self._hooks: list[RemovableHandle] = []
        self._frozen_hooks: list[RemovableHandle] = []
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
        self._frozen_hooks = watch_frozen(self._frozen, self._on_thawed)
        self._num_hooks_ever = private.num_hooks_ever()

    def has_thawed(self) -> bool:
        """Whether a parameter that was frozen is trained now, and nobody waits for its gradient."""
        # At every round, hence a loop in C; most models have nothing frozen.
        return any(map(_is_trained, self._frozen)) and any(
            param.requires_grad and not is_watched(param) for param in self._frozen
        )

    def forward_begins(self) -> None:
        """Tells those that are there where no rounds are."""
        for each in (self.alone, self.uses):
            if each is not None:
                each.forward_begins()

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
        for hook in (*self._hooks, *self._frozen_hooks, *(hook for _, hook in self._before)):
            hook.remove()
        self._hooks, self._frozen_hooks, self._before = [], [], []
        self.arrivals.silence()  # it may be in the middle of one
        for other in (self.order, self.tuning, self.alone, self.uses, self.distributed):
            if other is not None:
                other.close()

    def not_arrived(self, bucket: Sequence[int], missing: Collection[int]) -> list[int]:
        """Positions in `bucket` of the `missing` parameters that have no gradient since the last synchronization."""
        absent = set(missing) - self.arrived_before if missing else ()
        return [position for position, param in enumerate(bucket) if param in absent] if absent else []

    def came_uncounted(self, before: ParamHooks) -> set[int]:
        """Parameters that `before` did not watch and that have a gradient: it came in this backward, ahead of our hooks."""
        return {index for index, param in enumerate(self.params) if id(param) not in before.ids and param.grad is not None}

    def accumulated_ids(self) -> set[int]:
        """The parameters, by id, that have accumulated a gradient since the last synchronization."""
        return {id(self.named_params[index][1]) for index in self.arrived_before}

    def indices(self, tensors: set[int]) -> set[int]:
        """Which parameters those are, given by id."""
        return {index for index, (_, param) in enumerate(self.named_params) if id(param) in tensors}

    def names_of(self, plan: Plan, places: Mapping[int, Sequence[int]]) -> tuple[str, ...]:
        """The names of parameters, given by their positions in each bucket."""
        params = [plan.buckets[bucket].params[place] for bucket in sorted(places) for place in places[bucket]]
        return tuple(self.named_params[param][0] for param in dict.fromkeys(params))  # of a parameter in pieces, one

    def names_in_order(self, plan: Plan, params: Collection[int]) -> tuple[str, ...]:
        """The names of those parameters, in the order of the plan."""
        places = {bucket.index: [at for at, it in enumerate(bucket.params) if it in params] for bucket in plan.buckets}
        return self.names_of(plan, places) if params else ()

    def has_no_gradient(self, name: str) -> bool:
        """Whether nothing has come for that parameter, or it was thrown away."""
        return next((param.grad is None for it, param in self.named_params if it == name), True)


def params_of_bucket(plan: Plan) -> list[tuple[int, ...]]:
    """Indices of the parameters in each bucket."""
    return [bucket.params for bucket in plan.buckets]
