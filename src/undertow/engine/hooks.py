"""The hooks on parameters.

Reasons: docs/design/backward.md.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.utils.hooks import RemovableHandle

from undertow.device import Accelerator, Device
from undertow.engine.arrivals import Arrivals, BackwardListener
from undertow.mesh.local_tensors import KeptPlacements
from undertow.plan import Plan
from undertow.torch_private import private

_is_trained = attrgetter("requires_grad")


class GradientFactor:
    """Multiplies every new gradient by one factor, such as the one that a group of experts asks
    for.

    It applies before a gradient is added to `.grad`, so a reduction is always a mean, also of a
    later part of a step.
    """

    def __init__(self, factor: float) -> None:
        self._factor = factor
        self.is_one = factor == 1
        self._params: dict[Tensor, None] | None = None  # tensors are keys by identity
        # each with a node that must stay alive
        self._hooks: list[tuple[object, RemovableHandle]] = []

    @torch.no_grad()
    def follow(self, params: Iterable[Tensor]) -> None:
        """Applies to the gradients of these parameters only, frozen ones included: they may be
        unfrozen for a backward.

        If a parameter is new since the last call, its gradient arrived before it was followed.
        """
        before = self._params
        self._params = dict.fromkeys(filter(private.may_train, params))
        if before is not None:
            for param in self._params:
                if param not in before and param.grad is not None:
                    param.grad.mul_(self._factor)
        for _, hook in self._hooks:
            hook.remove()
        self._hooks = [private.scale_gradients(param, self._factor) for param in self._params]


class ParamHooks:
    """Hooks on `named_params` until `close`, by which `arrivals` counts their gradients.

    `watched` are parameters outside of the plan, frozen and new ones: their hooks tell the `engine`
    when a gradient arrives after all.
    """

    def __init__(
        self,
        named_params: Sequence[tuple[str, Tensor]],
        plan: Plan,
        engine: BackwardListener,
        device: Device,
    ) -> None:
        self.named_params = tuple(named_params)
        self.ids = frozenset(id(param) for _, param in named_params)
        self.arrivals = Arrivals(
            [bucket.params for bucket in plan.buckets],
            self.params,
            engine=engine,
            device=device if isinstance(device, Accelerator) else None,
        )
        self.arrived_before: set[int] = set()  # in micro-batches since the last synchronization
        # By id, parameters outside of the plan that have got a gradient, and the last backward that
        # was seen to bring one.
        self.outside: dict[int, tuple[Tensor, int | None]] = {}
        self._engine = engine
        self.watched: dict[int, tuple[Tensor, RemovableHandle]] = {}  # by id
        self._registered: list[RemovableHandle] = []  # on `named_params`, if there are rounds
        self.num_hooks_ever = 0  # of all code, when these hooks were last

    @property
    def params(self) -> list[Tensor]:
        return [param for _, param in self.named_params]

    def register(self) -> None:
        """Registers the hooks; again after a regrouping, because parameters have other buckets."""
        remove_all(self._registered)
        for param, bucket in zip(self.params, self.arrivals.bucket_of, strict=True):
            self._registered.append(private.hook_gradients(param, bucket.hook))
        self.num_hooks_ever = private.num_hooks_ever()

    def run_last(self) -> bool:
        """Called when code has registered hooks since `num_hooks_ever` was counted. Moves these
        hooks after newer ones of user code, which may change a gradient.

        Returns True if there were any.
        """
        self.num_hooks_ever = private.num_hooks_ever()
        return any(list(map(private.run_last, self.params, self._registered)))

    def watch(self, params: Sequence[Tensor], *, may_have_arrived: bool) -> None:
        """Hooks the parameters of a module that are outside of the plan.

        The gradients of new ones count if they `may_have_arrived` before their hooks.
        """
        wanted = {id(param): param for param in params if id(param) not in self.ids}
        for key in self.watched.keys() - wanted.keys():
            self.watched.pop(key)[1].remove()
        for key in wanted.keys() - self.watched.keys():
            param = wanted[key]
            with contextlib.suppress(RuntimeError):  # it can never be trained
                hook = private.hook_gradients(param, self._engine.arrives_outside)
                self.watched[key] = param, hook
            if may_have_arrived and param.grad is not None:
                self.outside[key] = param, None

    def has_thawed(self) -> bool:
        """Returns True if a watched parameter is trained now and no engine waits for its
        gradient."""
        params = [param for param, _ in self.watched.values()]
        # Runs in every round, hence a loop in C; most models have no frozen parameters.
        return any(map(_is_trained, params)) and any(
            param.requires_grad and not is_watched(param) for param in params
        )

    def regroup(self, plan: Plan) -> None:
        """Switches to the buckets of another plan."""
        self.arrivals.regroup([bucket.params for bucket in plan.buckets])
        if self._registered:
            self.register()

    def close(self) -> None:
        """Removes the hooks; a second call does nothing."""
        remove_all(self._registered)
        self.watch((), may_have_arrived=False)
        self.arrivals.close()

    def note_outside(self, param: Tensor) -> None:
        """Called when a parameter outside of the plan has got a gradient."""
        self.outside[id(param)] = param, private.graph_task_id()

    def arrived_in_backward(self) -> set[int]:
        """Returns by id the parameters that have got a gradient in this backward, in the plan or
        outside of it."""
        this = private.graph_task_id()
        outside = {key for key, (_, backward) in self.outside.items() if backward == this}
        return self.ids_of(self.arrivals.arrived) | outside

    def not_arrived(self, bucket: Sequence[int], missing: Collection[int]) -> list[int]:
        """Returns the positions in `bucket` of the `missing` parameters without a gradient since
        the last synchronization."""
        absent = set(missing) - self.arrived_before
        return (
            [position for position, param in enumerate(bucket) if param in absent] if absent else []
        )

    def ids_of(self, indices: Iterable[int]) -> set[int]:
        """Returns the ids of parameters given by index."""
        return {id(self.named_params[index][1]) for index in indices}

    def indices(self, tensors: set[int]) -> set[int]:
        """Returns the indices of parameters given by id."""
        return {index for index, param in enumerate(self.params) if id(param) in tensors}

    def names_of(self, plan: Plan, places: Mapping[int, Collection[int]]) -> tuple[str, ...]:
        """Returns the names of parameters given by their positions in each bucket, in the order of
        the plan."""
        return tuple(
            self.named_params[plan.buckets[bucket].params[place]][0]
            for bucket in sorted(places)
            for place in places[bucket]
        )


def remove_all(hooks: list[RemovableHandle]) -> None:
    """Removes these hooks and empties the list."""
    while hooks:
        hooks.pop().remove()


def earlier_watchers(
    named_params: Iterable[tuple[str, Tensor]], *, other_than: object = None
) -> dict[str, Any]:
    """Returns the engines that watch these parameters, each with the name of one.

    The engine `other_than` is left out.
    """
    found: dict[int, tuple[str, Any]] = {}
    for name, param in named_params:
        for engine in _watchers_of(param):
            if engine is not other_than:
                found.setdefault(id(engine), (name, engine))
    return dict(found.values())


def is_watched(param: Tensor, *, other_than: object = None) -> bool:
    """Returns True if an engine other than `other_than` waits for the gradient of `param`."""
    return any(engine is not other_than for engine in _watchers_of(param))


def users_hooks(param: Tensor) -> list[str]:
    """Returns the names of the functions that user code has put on the parameter as post-accumulate
    hooks."""
    hooks = [hook for hook in private.post_accumulate_hooks(param) if not _is_own(hook)]
    return [getattr(hook, "__qualname__", type(hook).__name__) for hook in hooks]


def _is_own(hook: Callable[..., object]) -> bool:
    owner = getattr(hook, "__self__", None)
    return hasattr(owner, "arrivals") or isinstance(owner, KeptPlacements)


def call_at_registration(then: Callable[..., None]) -> Callable[[], None]:
    """Calls `then`, with torch's arguments, when any module gets a parameter or submodule.

    Returns a function that ends this.
    """
    return partial(
        remove_all,
        [
            register_module_parameter_registration_hook(then),
            register_module_module_registration_hook(then),
        ],
    )


def _watchers_of(param: Tensor) -> Iterator[Any]:
    for hook in private.post_accumulate_hooks(param):
        arrivals = getattr(getattr(hook, "__self__", None), "arrivals", None)
        if isinstance(arrivals, Arrivals) and not arrivals.is_closed:
            yield arrivals.engine
