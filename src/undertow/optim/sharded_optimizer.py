"""An optimizer whose state and work are sharded over ranks."""

from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from itertools import chain
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from undertow.engine.progress import params_of
from undertow.errors import CheckpointError, ConfigError, PhaseError, WrongType, require
from undertow.optim.clipping import clip_members
from undertow.optim.inner_optimizer import InnerOptimizer, copy_of, hyper_parameters
from undertow.optim.requirements import (
    TARGET,
    ParamGroups,
    require_arguments,
    require_params_of_the_model,
    require_replacements,
    require_whole_on_ranks,
)
from undertow.optim.state import (
    NEED_WHOLE,
    OF_EXACT,
    ParamState,
    gather_states,
    on_this_rank,
    placed_on_mesh,
    updates_whole_parameters,
)
from undertow.sharded.params import ShardPart
from undertow.sharded.sharding import Sharding
from undertow.sync.gradient_sync import GradientSync, sync_of
from undertow.sync.zeroing import ZeroesWithoutReading
from undertow.torch_private import private


class ShardedOptimizer(ZeroesWithoutReading, torch.optim.Optimizer):
    """Runs an optimizer over the parameters of a model, with 1/n of its state and work on each
    rank.

        model = undertow.DistributedDataParallel(module)
        optimizer = undertow.ShardedOptimizer(torch.optim.AdamW, model, lr=1e-3)

    On a mesh, n is the number of ranks of a row. Construction is a collective call outside of
    backward: it lays the parameters out in the memory of the buckets. From then on, gradients are
    reduced to shards. A model may have several, each over its own `params`; together they have
    every trained parameter, and the last one lays out. Updated parameters are gathered during the
    next forward; any other read of a parameter waits for it.
    16-bit parameters are updated in fp32.

    A model with experts needs one optimizer for each group of ranks: one for the model with its
    dense parameters as `params`, and one for each of `sync.experts`. `undertow.clip_grad_norm_`
    computes their common norm.

    Args:
        cls: A class of optimizers. LBFGS and SparseAdam cannot be sharded.
        target: The result of `attach` or `DistributedDataParallel`.
        params: Parameters or parameter groups as in torch; None takes all trained parameters.
        whole: True lets one rank update all of a parameter, for optimizers that need whole
            matrices (LAMB, Shampoo). You vouch that the update of a parameter depends on no other
            parameter, and that everything a step changes is in `state[param]`. False cuts
            parameters into equal parts: the update of an element must depend on that element alone.
            None cuts for Adadelta, Adagrad, Adam, AdamW, Adamax, ASGD, NAdam, RAdam, RMSprop, Rprop
            and SGD of torch, keeps parameters whole for its Adafactor and Muon, and refuses any
            other class.
        defaults: The settings of `cls`.

    Raises:
        ConfigError: If the class cannot be sharded so, or if another ShardedOptimizer updates one
            of the parameters.
    """

    def __init__(
        self,
        cls: type[torch.optim.Optimizer],
        target: GradientSync | nn.Module,
        params: ParamGroups | None = None,
        *,
        whole: bool | None = None,
        **defaults: Any,
    ) -> None:
        sync = sync_of(target, where="ShardedOptimizer", remedy=TARGET)
        require_arguments(cls, sync, params)
        is_whole = updates_whole_parameters(cls, whole)
        given = [param for _, param in sync.named_parameters()] if params is None else params
        # Parameter groups alone are not enough: some settings are read only by the constructor.
        make: Callable[[Any], torch.optim.Optimizer] = partial(cls, **defaults)
        self._set_up(make(given), make, sync, is_whole=is_whole)

    @classmethod
    def _of(
        cls,
        whole: torch.optim.Optimizer,
        target: GradientSync | nn.Module,
        *,
        is_whole: bool,
    ) -> Self:
        """Shards an optimizer that exists, without its state; see `shard_optimizer`."""
        sync = sync_of(target, where="ShardedOptimizer", remedy=TARGET)
        require_arguments(type(whole), sync, whole.param_groups)
        made = cls.__new__(cls)
        made._set_up(whole, partial(copy_of, whole), sync, is_whole=is_whole)
        return made

    def _set_up(
        self,
        whole: torch.optim.Optimizer,
        make: Callable[[list[dict[str, Any]]], torch.optim.Optimizer],
        sync: GradientSync,
        *,
        is_whole: bool,
    ) -> None:
        """Shards `whole`, an optimizer over whole parameters; a collective call.

        `make` makes one like it, over other groups.
        """
        if is_whole:
            require_whole_on_ranks(whole, sync)
        self._sync, self._make = sync, make
        self.optimizer_class = type(whole)
        self._inner: InnerOptimizer | None = None  # over this rank's parts
        # The rank of `consolidate_state_dict`, and the states there, until the next step.
        self._consolidated: tuple[int, dict[Tensor, ParamState]] | None = None
        # Parameters that have stepped, or whose state was loaded: their exact values are saved even
        # if the class keeps no other state.
        self._stepped = WeakIdKeyDictionary()
        super().__init__(whole.param_groups, whole.defaults)
        self._grouped = [list(group["params"]) for group in self.param_groups]  # as they were taken
        # Texts, because a function or NaN does not equal its own copy.
        names = sync._engine.current_plan.members.names
        groups = [
            ([names.get(id(param)) for param in group["params"]], repr(hyper_parameters(group)))
            for group in self.param_groups
        ]
        cls = self.optimizer_class
        described = {
            "optimizer": f"{cls.__module__}.{cls.__qualname__}",
            "parameter groups": groups,
        }
        self._sharded_steps = sync._own.hand_to(self, described, whole=is_whole)

    @private.untraced
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates this rank's shards; a collective call.

        Args:
            closure: Called once, before the update; it computes the loss and runs backward.

        Returns:
            The result of `closure`, or None.

        Raises:
            ConfigError: If the step of a class changes the settings of its groups.
        """
        # torch has called `BeforeSteps.step_begins`, as before the step of every optimizer.
        loss, own = None, self._sync._own
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
            if not own.engine.is_closure_idle:
                self._sync.finish()
            ids, reader = set(map(id, params_of(self))), type(self).__name__
            own.before_steps.average_before_step(ids, reader=reader, is_sharded=True)
            own.engine.checks.require_alike()
        self._consolidated = None
        numbers = own.engine.checks.numbers
        if numbers.is_on and numbers.skips(self):  # on every rank
            return loss
        inner, params = self._begin(), list(params_of(self))
        outside: list[Tensor] = []
        if len(params) > len(inner.parts):
            outside = [param for param in params if param not in inner.parts]
        inner.sharding.require_synchronized(inner.parts.values(), outside)
        with self._sharded_steps.update(inner.sharding, self):
            inner.step(self.param_groups, self.state)
            for param in params:
                if param.grad is not None:
                    # On ranks without a part too: torch.distributed.checkpoint steps an optimizer
                    # that has no state.
                    self.state.setdefault(param, {})
                    if id(param) not in inner.stepped:
                        inner.stepped.add(id(param))
                        self._stepped[param] = None
        return loss

    @private.untraced
    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        *,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        """Scales all gradients of its parameters, and of the model's other ShardedOptimizers, so
        that their total norm is at most `max_norm`; a collective call.

        Args:
            max_norm: Upper limit of the norm.
            norm_type: Order of the norm; infinity takes the largest element.
            error_if_nonfinite: True raises if the norm is not finite.
            foreach: Has no effect; torch's function has it.

        Returns:
            The norm before scaling, an fp32 scalar: the same on every rank, because powers are
            summed in fp64 and rounded once.

        Raises:
            NonFiniteGradient: If `error_if_nonfinite` is true and the norm is not finite.
        """
        params = chain.from_iterable(map(params_of, self._sharded_steps.steppers))
        members = [(self._sync, list(params))]
        return clip_members(members, max_norm, norm_type, error_if_nonfinite=error_if_nonfinite)

    @private.untraced
    def state_dict(self) -> dict[str, Any]:
        """Returns the whole state on every rank, as the state dict of a plain optimizer; a
        collective call.

        After `consolidate_state_dict(to)`, rank `to` returns it without communication until the
        next step.
        """
        if self._consolidated is None:
            return self._packed(placed_on_mesh(self._whole_states(), self.optimizer_class))
        to, states = self._consolidated
        require(
            to == dist.get_rank(self.process_group),
            f"consolidate_state_dict() gathered the state on rank {to}, and state_dict() is "
            "called on another rank.",
            where="ShardedOptimizer.state_dict",
            remedy=f"Call state_dict() on rank {to} only, until the next step.",
            error=PhaseError,
        )
        return self._packed(placed_on_mesh(states, self.optimizer_class))

    def _own_state_dict(self) -> tuple[dict[str, Any], dict[Tensor, ShardPart]]:
        """Returns the state on this rank in the layout of `state_dict`, and the parts of
        parameters.

        If a parameter has a part, its state has the elements of the part, in one dimension. Any
        other state is whole.
        """
        if self._inner is None:
            return self._packed(self._kept(self.state)), {}
        self._inner.look(self.state)
        found = self._kept({**self.state, **self._inner.states()})
        return self._packed(found), self._inner.parts

    @private.untraced
    def consolidate_state_dict(self, to: int = 0) -> None:
        """Brings the whole state to one rank, in host memory; a collective call.

        It is for frameworks that call `state_dict()` on one rank only, as with torch's
        ZeroRedundancyOptimizer; Lightning makes this call itself. The state is kept until the next
        step; until then, `state_dict()` raises PhaseError on the other ranks.

        Args:
            to: The rank of the process group.

        Raises:
            ConfigError: If `to` is not a rank of the process group.
        """
        num_ranks, rank = dist.get_world_size(self.process_group), dist.get_rank(self.process_group)
        require(
            to in range(num_ranks),
            f"to={to!r} is not one of the {num_ranks} ranks.",
            where="ShardedOptimizer.consolidate_state_dict",
            remedy=f"Give a rank of the process group, 0 to {num_ranks - 1}.",
        )
        states = self._whole_states(keeps=rank == to, device=torch.device("cpu"))
        self._consolidated = (to, states)

    @private.untraced
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state on every rank; this rank keeps its parts of whole tensors.

        Args:
            state_dict: The result of `state_dict`, of this optimizer or of a plain one.

        Raises:
            ValueError: If the parameter groups differ, as in torch.
            CheckpointError: If a state belongs to no parameter.
        """
        loaded: dict[str, Any] = {}

        def set_aside(_self: object, found: dict[str, Any]) -> dict[str, Any]:
            loaded.update(found)
            return {**found, "state": {}}  # super() would narrow the state of 16-bit parameters

        # User hooks that run before may change the state, and user hooks that run after see the
        # loaded one.
        with (
            self.register_load_state_dict_pre_hook(set_aside),
            self.register_load_state_dict_post_hook(lambda _: self._load(loaded), prepend=True),
        ):
            super().load_state_dict(state_dict)

    def _load(self, state_dict: dict[str, Any]) -> None:
        states = dict(state_dict["state"])
        numbers = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        for number, param in zip(numbers, params_of(self), strict=True):
            if number in states:
                self.state[param] = on_this_rank(param, states.pop(number))
                self._stepped[param] = None
        require(
            not states,
            f"the state has an entry for {next(iter(states), None)!r}, which is not a parameter.",
            where="ShardedOptimizer.load_state_dict",
            remedy="Remove it: a sharded optimizer keeps state for parameters only.",
            error=CheckpointError,
        )
        self._consolidated = None
        sharding = self._sharded_steps.sharding
        if sharding is not None:  # None until the others of several optimizers are made
            self._sync.wait()
            # Values may have been loaded into the parameters before.
            sharding.follow_parameters()
            self._take_over(sharding)

    @private.untraced
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a parameter group, on every rank.

        New parameters are synchronized from the next forward on.

        Args:
            param_group: As in torch: a dict with `params` and settings.

        Raises:
            ConfigError: If a parameter is not one of the wrapped module's, or is ignored.
        """
        super().add_param_group(param_group)
        try:
            require_params_of_the_model(self, self._sync)
        except ConfigError:
            self.param_groups.pop()
            raise

    def __getstate__(self) -> dict[str, Any]:
        raise WrongType(
            "a ShardedOptimizer cannot be pickled or copied: each rank has a part of it.",
            where="ShardedOptimizer",
            remedy="Save its state_dict(), called on every rank.",
        )

    def _begin(self) -> InnerOptimizer:
        """Waits for everything in flight, and returns the optimizer over this rank's parts."""
        # Users may have put other parameters into the groups, or in another order.
        present = [list(map(id, group["params"])) for group in self.param_groups]
        before = [list(map(id, params)) for params in self._grouped]
        has_other_params = False
        if present != before:
            require_params_of_the_model(self, self._sync)
            has_other_params = self._sharded_steps.are_others(present, before)
        if has_other_params:
            if self.optimizer_class in NEED_WHOLE:
                # Raises its own errors, such as Muon's for vectors, on ranks without them too.
                self.optimizer_class(list(map(dict, self.param_groups)), **self.defaults)
            self._sharded_steps.regroup(self)
            self._grouped = [list(group["params"]) for group in self.param_groups]
        inner = self._inner
        if inner is None:
            require_replacements(self, self._sync)
        sharding = self._sharded_steps.begin(self)
        if inner is not None:
            if sharding is inner.sharding and not has_other_params:
                return inner
            require_replacements(self, self._sync)
            inner.look(self.state)
            # Exact values of parameters without any other state move too.
            self.state.update(gather_states(inner.sharding, inner.states()))
        return self._take_over(sharding)

    def _take_over(self, sharding: Sharding) -> InnerOptimizer:
        """Makes an optimizer over this rank's parts in `sharding`, whose states are whole yet."""
        self._inner = InnerOptimizer(self._make, self.param_groups, sharding, self.optimizer_class)
        self._inner.optimizer.defaults = self.defaults  # follows changes that users make
        self._inner.follow(self.state)
        return self._inner

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The group that the state is sharded over.

        On a mesh it has all ranks, and each row holds the same state.
        """
        return self._sync.process_group

    def owned_parts(self) -> dict[Tensor, ShardPart]:
        """Returns the part that this rank owns of each sharded parameter, possibly without
        elements.

        Parameters are keys by identity.
        """
        sharding = self._sharded_steps.sharding
        if sharding is None:  # the others of several optimizers are not made yet
            sharding = self._sharded_steps.begin(self)
        parts = sharding.parts
        return {param: parts[param] for param in params_of(self) if param in parts}

    def _packed(self, states: Mapping[Tensor, ParamState]) -> dict[str, Any]:
        """Returns torch's state dict of these states that are not empty; the user's hooks see
        it."""
        own = self.state
        found = {param: states[param] for param in params_of(self) if states.get(param)}
        self.state = defaultdict(dict, found)
        try:
            return super().state_dict()
        finally:
            self.state = own

    def _whole_states(
        self, *, keeps: bool = True, device: torch.device | None = None
    ) -> dict[Tensor, ParamState]:
        """Gathers the whole state of every parameter, on `device` if given; a collective call.

        Returns nothing if not `keeps`.
        """
        inner = self._inner
        found: dict[Tensor, ParamState] = {}
        if inner is not None:
            if inner.sharding.group.num_ranks > 1:
                self._sharded_steps.require_open(
                    "Call state_dict() before close(); save_checkpoint() works afterwards too."
                )
            inner.look(self.state)
            mine = self._kept(inner.states())
            found = gather_states(inner.sharding, mine, keeps=keeps, device=device)
        for param, state in self._kept(self.state).items() if keeps else ():
            if inner is None or param not in inner.parts:
                found[param] = state
        return found

    def _kept(self, states: Mapping[Tensor, ParamState]) -> dict[Tensor, ParamState]:
        """Returns the states to save, the same ones on every rank.

        Leaves out the exact values of a parameter that has never stepped: a plain optimizer would
        take them for a state.
        """
        return {
            param: state
            for param, state in states.items()
            if state.keys() - OF_EXACT or (param in self._stepped and param in self.state)
        }
