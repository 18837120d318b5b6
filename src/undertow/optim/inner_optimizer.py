"""The optimizer of the user's class over this rank's parts of parameters, and its exact values."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import Tensor

from undertow.buckets.gradients import strides_of_gradient
from undertow.errors import require
from undertow.mesh.local_tensors import local_tensor
from undertow.optim.state import (
    ELEMENTWISE,
    MASTER,
    MASTER_OF,
    ParamState,
    fingerprints_of,
    is_of_the_whole,
    part_of_state,
)
from undertow.ranks.exchanges import accumulation_dtype
from undertow.sharded.params import FlatParams, ShardPart, in_memory_order
from undertow.sharded.sharding import Sharding
from undertow.torch_private import private


@dataclass(slots=True, eq=False)
class _Owned:
    """This rank's part of one parameter, which has elements."""

    param: Tensor
    part: ShardPart
    group: dict[str, Any]  # of the parameter, in the ShardedOptimizer
    flat: FlatParams
    # The tensor that the inner optimizer updates: in place, or of `flat.exact`. [part.numel], or of
    # the parameter's shape if this rank owns all of it
    target: Tensor
    state: ParamState | None = None  # at the last look, the dict of both optimizers
    entries: tuple[Any, ...] = ()  # of that dict, at the last look
    # Loaded exact values, and the fingerprint of the parameter that they belong to, until it has
    # these values: the model may be loaded later.
    waiting: tuple[Tensor, int] | None = None
    # Loaded exact values of a parameter that is updated in place from now on, and the values that
    # it had then. They take effect in a step, because ranks gather after it.
    loaded: tuple[Tensor, Tensor] | None = None

    @property
    def local(self) -> Tensor:
        """The parameter's tensor on this rank."""
        return local_tensor(self.param)

    def accept(self, exact: Tensor) -> None:
        """Takes over exact values, which belong to the parameter's present values."""
        self.waiting = None
        if self.flat.exact is None:
            self.loaded = exact, self.target.clone()
        else:
            if self.part.owner is not None:
                exact = in_memory_order(exact, self.target.stride())
            self.flat.accept(self.part, exact)

    def use_loaded(self) -> None:
        """Called in a step: updates in place begin with the loaded exact values.

        Loaded values that wait for other values of the parameter are void: it was written since.
        """
        self.waiting = None
        if self.loaded is not None:
            self.target.copy_(self._exact_in_place(*self.loaded))
            self.loaded = None

    def exact(self) -> Tensor | None:
        """Returns the values that ranks do not hold as they are, if there are any."""
        if self.loaded is not None:
            return self._exact_in_place(*self.loaded)
        return None if self.flat.exact is None else self.target

    def _exact_in_place(self, exact: Tensor, before: Tensor) -> Tensor:
        """Returns loaded values, except for elements that were written since."""
        return torch.where(self.target == before, exact, self.target)


class InnerOptimizer:
    """An optimizer of the user's class over this rank's parts of the parameters in `groups`.

    `sharding` lays the parameters out. `cls` is the class, also on a rank without parts.
    """

    def __init__(
        self,
        make: Callable[[list[dict[str, Any]]], torch.optim.Optimizer],
        groups: Sequence[dict[str, Any]],
        sharding: Sharding,
        cls: type[torch.optim.Optimizer],
    ) -> None:
        self.sharding, self._cls = sharding, cls
        self.parts: dict[Tensor, ShardPart] = {}  # by identity of the parameter
        self.owned: list[_Owned] = []  # those with elements
        self.stepped: set[int] = set()  # by id, those that have stepped since this was made
        params = chain.from_iterable(group["params"] for group in groups)
        present = [sharding.parts[param].bucket for param in params if param in sharding.parts]
        self._flats = [sharding.flats[bucket] for bucket in dict.fromkeys(present)]
        self._follow_writes()
        # Groups with parts on this rank, by their place: torch makes no group without parameters.
        inner_groups: dict[int, dict[str, Any]] = {}
        for place, group in enumerate(groups):
            targets = []
            for param in group["params"]:
                part = sharding.parts.get(param)
                if part is None:
                    continue
                self.parts[param] = part
                if part.numel == 0:
                    continue
                flat = sharding.flats[part.bucket]
                if flat.exact is None:
                    target = part.of_bucket(flat.flat)
                else:
                    target = part.of_shard(flat.exact)
                if part.owner is not None:
                    local = local_tensor(param)
                    target = target.as_strided(local.shape, strides_of_gradient(local))
                self.owned.append(_Owned(param, part, group, flat, target))
                targets.append(target)
            if targets:
                inner_groups[place] = {**hyper_parameters(group), "params": targets}
        self._places = list(inner_groups)
        self._elsewhere = [param for param, part in self.parts.items() if part.numel == 0]
        # Without a part it does not step, and the constructor of the user's class may look at
        # parameters.
        found = list(inner_groups.values())
        self.optimizer = make(found) if found else torch.optim.SGD([{"params": []}])

    def look(self, states: dict[Tensor, ParamState]) -> None:
        """Called before states are read, outside of a step: follows changes of states and writes
        into parameters, whose updates have arrived then."""
        flats = [flat for flat in self._flats if flat.exact is not None]
        if flats or any(owned.waiting or owned.loaded for owned in self.owned):
            gathers = self.sharding.gathers
            gathers.wait(gathers.buckets_of(iter(self.parts)))
            for flat in flats:
                flat.read_moved()
            self._follow_writes()
        self.follow(states)

    def follow(self, states: dict[Tensor, ParamState]) -> None:
        """Takes over the states that were loaded or that users have set or deleted; each becomes
        the dict that the inner optimizer has, and empty without a part."""
        inner = self.optimizer.state
        for owned in self.owned:
            state = states.get(owned.param)
            if state is owned.state:
                if state is not None:
                    self._follow_entries(owned, state)
                continue
            owned.state = None
            inner.pop(owned.target, None)
            if state is None:
                continue
            mine = self._part_of(state, owned)
            master, of = mine.pop(MASTER, None), mine.pop(MASTER_OF, None)
            # Without `master_of` nothing tells if the parameter was written since. A narrower
            # `master` went through a plain optimizer, which narrows it and then does not update it
            # along with the parameter.
            if master is not None and of is not None and state[MASTER].dtype == master.dtype:
                owned.waiting = master, of
            inner[owned.target] = states[owned.param] = owned.state = mine
        self._accept_loaded()
        for param in self._elsewhere:
            if states.get(param):
                states[param] = {}

    def _follow_entries(self, owned: _Owned, state: ParamState) -> None:
        """Cuts whole tensors that users have put into the state of a parameter."""
        known = owned.entries
        if len(known) == len(state) and all(map(is_, known, state.values())):
            return
        param = owned.local
        wide = accumulation_dtype(param.dtype)
        for key, value in state.items():
            if not isinstance(value, Tensor) or any(value is each for each in known):
                continue
            if is_of_the_whole(key, value, param, self._cls):
                continue
            is_narrow = value.dtype == param.dtype != wide
            is_uncut = value.shape == param.shape != owned.target.shape
            if is_narrow or is_uncut:
                state.update(self._part_of({key: value}, owned))
        owned.entries = tuple(state.values())

    def _part_of(self, state: ParamState, owned: _Owned) -> ParamState:
        return part_of_state(state, owned.local, owned.part, owned.group, cls=self._cls)

    def _accept_loaded(self) -> None:
        """Takes over loaded exact values if the parameters have the values that they belong to."""
        waiting = [owned for owned in self.owned if owned.waiting is not None]
        if not waiting:
            return
        present = fingerprints_of(owned.param for owned in waiting)
        for owned, fingerprint in zip(waiting, present, strict=True):
            assert owned.waiting is not None
            exact, of = owned.waiting
            if of == fingerprint:
                owned.accept(exact)

    def step(self, groups: Sequence[dict[str, Any]], states: dict[Tensor, ParamState]) -> None:
        """Steps with these groups' hyper-parameters, as schedulers and users left them."""
        self.follow(states)
        for place, group in zip(self._places, self.optimizer.param_groups, strict=False):
            for name, value in hyper_parameters(groups[place]).items():
                group[name] = value.clone() if isinstance(value, Tensor) else value
        grads = self.sharding.gradients([owned.part for owned in self.owned])
        for owned, grad in zip(self.owned, grads, strict=True):
            if owned.waiting or owned.loaded:
                owned.use_loaded()
            if grad is not None and owned.part.owner is not None:
                grad = grad.as_strided(owned.target.shape, owned.target.stride())
            owned.target.grad = None if grad is None else grad.to(owned.target.dtype)
        self._follow_writes()
        inner = self.optimizer.state
        try:
            # Hooks of the user's optimizer run around the whole step, not here.
            if self.owned and type(self.optimizer) in ELEMENTWISE:
                private.step_unwatched(self.optimizer)
            elif self.owned:
                self._step_as_agreed()
        finally:
            for owned in self.owned:
                owned.target.grad = None
                if owned.state is None and owned.target in inner:
                    owned.state = states[owned.param] = inner[owned.target]

    def _step_as_agreed(self) -> None:
        """Raises ConfigError if the step of a class that may do anything has changed settings."""
        before = list(map(hyper_parameters, self.optimizer.param_groups))
        private.step_unwatched(self.optimizer)
        cls = type(self.optimizer).__name__
        require(
            list(map(hyper_parameters, self.optimizer.param_groups)) == before,
            f"{cls} cannot be sharded: its step changes the settings of a parameter group.",
            where="ShardedOptimizer.step",
            remedy="Ranks would not agree on them. Use this optimizer without sharding.",
        )

    def _follow_writes(self) -> None:
        for flat in self._flats:
            if flat.exact is not None:
                flat.follow_writes()

    def states(self) -> dict[Tensor, ParamState]:
        """Returns the state of each part that has one, with its exact values and the fingerprint of
        the parameter that they belong to."""
        found: dict[Tensor, ParamState] = {}
        rounded = []
        for owned in self.owned:
            state = dict(self.optimizer.state.get(owned.target, {}))
            exact = owned.exact()
            if owned.waiting is not None:
                state[MASTER], state[MASTER_OF] = owned.waiting
            elif exact is not None:
                state[MASTER] = exact
                rounded.append(owned.param)
            if state:
                found[owned.param] = state
        for param, fingerprint in zip(rounded, fingerprints_of(rounded), strict=True):
            found[param][MASTER_OF] = fingerprint
        return found


def hyper_parameters(group: dict[str, Any]) -> dict[str, Any]:
    """Returns the settings of a parameter group, without its parameters."""
    return {name: value for name, value in group.items() if name not in ("params", "param_names")}


def copy_of(whole: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Returns an optimizer with the class and the attributes of `whole`, over these groups."""
    made = object.__new__(type(whole))
    vars(made).update(vars(whole), state=defaultdict(dict), param_groups=groups)
    vars(made).pop("step", None)  # by schedulers, of the whole one
    return made
