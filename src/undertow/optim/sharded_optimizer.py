"""An optimizer whose state and work are sharded over ranks."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from itertools import chain, compress, repeat
from operator import attrgetter, is_not
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from undertow.errors import ConfigError, PhaseError, WrongType, require
from undertow.optim.clipping import gradients_apart, norm_and_scale
from undertow.optim.state import (
    MASTER,
    FullStates,
    InnerOptimizer,
    Owned,
    ParamState,
    ShardedState,
    changed_settings,
    full_states,
    hyper_parameters,
    owned_part,
    params_of,
    parts_of_state,
    require_elementwise,
    settings_as_text,
    sharded_state,
    state_of_one_element,
    whole_state_without_elements,
    with_scalars_in_place,
)
from undertow.runtime.sharded.layout import Sharding
from undertow.runtime.sharded.shards import ShardPart
from undertow.runtime.step.sharded_steps import finish_before_look
from undertow.runtime.torch_private import private
from undertow.sync import GradientSync, ZeroesWithoutReading

_grad_of = attrgetter("grad")
ParamGroups = Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]]


class ShardedOptimizer(ZeroesWithoutReading, torch.optim.Optimizer):
    """Runs an optimizer over the parameters of a model, with 1/n of its state and work on each rank.

        model = undertow.DistributedDataParallel(module)
        optimizer = undertow.ShardedOptimizer(torch.optim.AdamW, model, lr=1e-3)

    On a mesh, n is the number of ranks of a row. Construction is a collective call; a model has one
    ShardedOptimizer at a time. From its first step on, gradients are reduced to shards. Updated
    parameters are gathered during the next forward; any other read of a parameter waits for it. 16-bit
    parameters are updated in fp32.

    A model with experts needs one optimizer for each group of ranks: one for the model with its dense
    parameters as `params`, and one for each of `sync.experts`. `undertow.clip_grad_norm_` computes
    their common norm.

    Args:
        cls: An elementwise optimizer class, such as torch.optim.AdamW.
        target: The result of `attach` or `DistributedDataParallel`.
        params: Parameters or parameter groups as in torch; None takes all trained parameters.
        in_backward: True updates parameters bucket by bucket during backward, from the second step
            on, with the hyper-parameters that are set when it begins; `step()` confirms these updates.
            Clipping, a GradScaler and closures raise, because they need all gradients before the
            update. Reading parameters or state in another thread during that backward raises
            PhaseError. After a failed backward the parameters are whole: the first read ends the
            synchronization on all ranks.
        state_dict: "full" makes `state_dict()` return a plain optimizer's state dict, whole on every
            rank; every rank must call it. "sharded" makes it return this rank's shards, which only
            torch.distributed.checkpoint can save.
        defaults: The settings of `cls`.

    Raises:
        ConfigError: If the optimizer is not elementwise, if its steps change values in its parameter
            groups instead of its state, or if the model already has a ShardedOptimizer.
    """

    def __init__(
        self,
        cls: type[torch.optim.Optimizer],
        target: GradientSync | nn.Module,
        params: ParamGroups | None = None,
        *,
        in_backward: bool = False,
        state_dict: Literal["full", "sharded"] = "full",
        **defaults: Any,
    ) -> None:
        sync: Any = getattr(target, "sync", target)
        self._sync = _checked(cls, sync, params, state_dict)
        # Parameter groups alone are not enough: some settings are read only by the constructor.
        self._make: partial[Any] = partial(cls, **defaults)
        whole = self._make([param for _, param in self._sync.named_parameters()] if params is None else params)
        self._sharding: Sharding | None = None
        self._inners: dict[int, InnerOptimizer] = {}  # by bucket in backward; otherwise one, under key 0
        self._used: list[dict[str, Any]] = []  # hyper-parameters of the updates in the last backward, by group
        self._ours: frozenset[int] = frozenset()  # ids of the parameters that these updates cover
        self._stepped: set[Tensor] = set()  # parameters that have state on some rank, by identity
        self._waiting: FullStates = {}  # states of parameters that are not among this rank's parts, or not yet
        self._gives_shards = state_dict == "sharded"
        self._consolidated: Callable[[], FullStates] | None = None  # valid until the state changes
        super().__init__(whole.param_groups, whole.defaults)
        for group in self.param_groups:
            require_elementwise(cls, self._make, group, device=self._sync._group.device)
        described = {  # all ranks must have the same
            "optimizer": f"{cls.__module__}.{cls.__qualname__}",
            "parameter groups": [{"parameters": len(group["params"]), **settings_as_text(group)} for group in self.param_groups],
        }
        self._steps = self._sync._shard(self, described, steps_in_backward=in_backward)

    @private.untraced
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates this rank's shards; a collective call.

        Args:
            closure: Called once, before the update; it computes the loss and runs backward.

        Returns:
            The result of `closure`, or None.
        """
        loss = None
        if closure is not None:
            self._require_barrier("step(closure)", "the closure's backward would update parameters before step() ends")
            with torch.enable_grad():
                loss = closure()
            self._sync.finish()
        self._consolidated = None
        if self._steps.skips(self):
            return loss
        if self._steps.is_stepped:
            self._confirm()
        else:
            sharding, settings = self._begin(), self._settings()
            params = params_of(self)
            sharding.require_synchronized(params)
            with self._steps.update():
                for inner in self._inners.values():
                    inner.step(settings, sharding.gradients)
                self._stepped.update(compress(params, map(is_not, map(_grad_of, params), repeat(None))))
        self._steps.step_ends()
        return loss

    def begin_updates(self, sharding: Sharding) -> bool:
        """Called by the runtime when a synchronization begins; returns True if it updates buckets with the current settings."""
        if sharding is not self._sharding:
            return False
        self._consolidated = None
        self._used, self._ours = self._settings(), frozenset(map(id, params_of(self)))
        return True

    @torch.no_grad()
    def update(self, bucket: int) -> None:
        """Updates this rank's parts of a reduced bucket. Called by the runtime in a separate thread."""
        sharding = self._sharding
        assert sharding is not None  # begin_updates has checked that
        grads = sharding.settled(bucket)
        if bucket in self._inners:
            self._inners[bucket].step(self._used, partial(sharding.gradients, settled=grads))
        reduced = (sharding.params[index] for index, grad in grads.items() if grad is not None)
        self._stepped.update(param for param in reduced if id(param) in self._ours)

    @property
    @private.untraced
    def _step_supports_amp_scaling(self) -> bool:
        """Read only by torch's GradScaler, when it is about to step."""
        self._require_barrier("GradScaler", "it looks for infinite gradients when parameters are updated already")
        return False

    @private.untraced
    @torch.no_grad()
    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False, foreach: bool | None = None
    ) -> Tensor:
        """Scales all gradients of its parameters so that their total norm is at most `max_norm`; a collective call.

        Args:
            max_norm: Upper limit of the norm.
            norm_type: Order of the norm; infinity takes the largest element.
            error_if_nonfinite: True raises if the norm is not finite.
            foreach: Has no effect; torch's function has it.

        Returns:
            The norm before scaling, an fp32 scalar: the same on every rank, because powers are summed in
            fp64 and rounded once.

        Raises:
            NonFiniteGradient: If `error_if_nonfinite` is true and the norm is not finite.
            PhaseError: With `in_backward=True`, when parameters are updated already.
        """
        self._require_barrier("clip_grad_norm_", "parameters are updated before the norm is known")
        finish_before_look(self._sync, params_of(self))
        sharding = self._begin()
        sharding.require_synchronized(params_of(self))
        parts = [owned.part for inner in self._inners.values() for owned in inner.owned]
        in_parts, whole = gradients_apart(params_of(self), sharding)
        norm, scale = norm_and_scale(
            [*sharding.gradients(parts), *in_parts, *(whole if sharding.group.rank == 0 else ())],
            max_norm,
            norm_type,
            sharding.group,
            rank=self._sync.rank,
            error_if_nonfinite=error_if_nonfinite,
        )
        sharding.scale_gradients(parts, scale)
        for grad in (*in_parts, *whole):
            grad.mul_(scale.to(grad.device))
        return norm

    @property  # type: ignore[override]  # an attribute in torch
    def state(self) -> dict[Tensor, ParamState]:
        """The entries of `state_dict` for each parameter that has been stepped; changing them has no effect.

        It is empty on every rank until the first step, and on no rank afterwards: torch.distributed.checkpoint relies on that.
        """
        return defaultdict(dict, self._states())

    @state.setter
    def state(self, _value: object) -> None:
        """Ignores the value that torch's constructor sets."""

    @private.untraced
    def state_dict(self) -> dict[str, Any]:
        """Returns the whole state on every rank, as the state dict of a plain optimizer; a collective call.

        After `consolidate_state_dict(to)`, rank `to` returns it without communication until the next step. With
        `state_dict="sharded"`, the optimizer returns this rank's part instead, for torch.distributed.checkpoint.
        """
        if self._consolidated is not None:
            return self._packed(self._consolidated)
        return self.sharded_state_dict() if self._gives_shards else self.full_state_dict()

    @private.untraced
    def sharded_state_dict(self) -> dict[str, Any]:
        """Returns this rank's part in the layout of torch's optimizers, for torch.distributed.checkpoint, as `ShardedState`."""
        return self._packed(self._states)

    @private.untraced
    def full_state_dict(self) -> dict[str, Any]:
        """Returns the whole state on every rank, as the state dict of a plain optimizer; a collective call."""
        return self._packed(self._whole_states)

    @private.untraced
    def consolidate_state_dict(self, to: int = 0) -> None:
        """Brings the whole state to one rank, in host memory; a collective call.

        It is for frameworks that call `state_dict()` on one rank only, as with torch's
        ZeroRedundancyOptimizer; Lightning makes this call itself. The state is kept until the next step;
        until then, `state_dict()` raises PhaseError on the other ranks.

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
        self._consolidated = (lambda: states) if rank == to else partial(_raise_elsewhere, to)

    @private.untraced
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state on every rank; this rank keeps its parts of whole tensors.

        Args:
            state_dict: The result of `state_dict` or `full_state_dict`, or a plain optimizer's
                `state_dict`.

        Raises:
            ValueError: If the parameter groups differ, as in torch.
        """
        given: dict[str, Any] = {}

        def take(_self: object, found: dict[str, Any]) -> dict[str, Any]:
            given.update(found)
            is_in_shards = any(isinstance(value, ShardedState) for state in found["state"].values() for value in state.values())
            if self._sharding is None and is_in_shards:
                self._begin()  # they must match this rank's parts, which are known only now
            return {**found, "state": {}}  # super() loads the groups and checks their order

        # User hooks that run before may change the state, and user hooks that run after see the loaded one.
        with (
            self.register_load_state_dict_pre_hook(take),
            self.register_load_state_dict_post_hook(lambda _: self._load(given), prepend=True),
        ):
            super().load_state_dict(state_dict)

    def _load(self, state_dict: dict[str, Any]) -> None:
        numbers = (number for group in state_dict["param_groups"] for number in group["params"])
        params = ((param, group) for group in self.param_groups for param in group["params"])
        self._waiting = {
            param: with_scalars_in_place(state_dict["state"][number], param, group)
            for number, (param, group) in zip(numbers, params, strict=True)
            if number in state_dict["state"]
        }
        self._stepped, self._consolidated = set(), None
        if self._sharding is not None:
            self._steps.wait()
            self._sharding.follow_parameters()  # values may have been loaded into the parameters before
            self._take_over(self._sharding)

    @private.untraced
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a parameter group; a collective call if there is state.

        New parameters are synchronized from the next forward on.

        Args:
            param_group: As in torch: a dict with `params` and settings.

        Raises:
            ConfigError: If a parameter is not one of the wrapped module's, or is ignored.
        """
        super().add_param_group(param_group)
        known, params = {id(param) for _, param in self._sync.named_parameters()}, params_of(self)
        stranger = next((index for index, param in enumerate(params) if id(param) not in known), None)
        if stranger is not None:
            self.param_groups.pop()
            raise ConfigError(
                f"parameter {stranger} of the optimizer, of shape {tuple(params[stranger].shape)}, is not synchronized.",
                where="ShardedOptimizer",
                remedy="Give it only parameters of the wrapped module that `ignore` does not name.",
            )
        self._waiting = self._full_states(is_moved=True) | self._waiting
        self._sharding, self._inners = None, {}

    def __getstate__(self) -> dict[str, Any]:
        raise WrongType(
            "a ShardedOptimizer cannot be pickled or copied: each rank has a part of it.",
            where="ShardedOptimizer",
            remedy="Save its state_dict(), called on every rank.",
        )

    def _begin(self) -> Sharding:
        """Waits for everything in flight and returns the sharding of this rank's parts."""
        sharding = self._steps.begin()
        if sharding is not self._sharding:
            self._waiting = self._full_states(is_moved=True) | self._waiting
            self._take_over(sharding)
        return sharding

    def _take_over(self, sharding: Sharding) -> None:
        """Makes `sharding` the source of this rank's parts and moves waiting states to them."""
        self._sharding, self._inners = sharding, {}
        parts, in_backward = self.owned_parts(), self._steps.steps_in_backward
        by_group = [
            [owned_part(sharding, param, part) for param in group["params"] for part in parts.get(param, ())]
            for group in self.param_groups
        ]
        for place in {owned.part.bucket if in_backward else 0 for owned in chain.from_iterable(by_group)} or (0,):
            mine = [[owned for owned in of_group if not in_backward or owned.part.bucket == place] for of_group in by_group]
            groups: list[dict[str, Any]] = [
                {**hyper_parameters(group), "params": [owned.target for owned in of_group]}
                for group, of_group in zip(self.param_groups, mine, strict=True)
            ]
            if not any(mine):
                groups[0]["params"] = [torch.zeros(0, device=sharding.group.device)]  # torch requires at least one parameter
            self._inners[place] = inner = InnerOptimizer(list(chain.from_iterable(mine)), self._make(groups))
            for owned in inner.owned:
                if owned.param in self._waiting:
                    inner.take(owned, parts_of_state(self._waiting[owned.param], owned.part, owned.param))
        for param in self._waiting.keys() & parts.keys():
            if self._waiting.pop(param).keys() != {MASTER}:
                self._stepped.add(param)

    def _confirm(self) -> None:
        """Raises PhaseError if the updates made during backward differ from the ones that step() should make."""
        changed = changed_settings(self._used, self._settings())
        require(
            not changed,
            f"hyper-parameters have changed since the backward that has updated the parameters: {'; '.join(changed)}.",
            where="ShardedOptimizer.step, in_backward=True",
            remedy="Change them between step() and the next backward, as schedulers do, or leave in_backward=True out.",
            error=PhaseError,
        )
        if self._sharding is not None:
            self._sharding.require_synchronized(params_of(self))
        if self._steps.confirm():
            self._begin()

    def _require_barrier(self, what: str, why: str) -> None:
        require(
            not self._steps.steps_in_backward,
            f"{what} cannot be used with in_backward=True: {why}.",
            where="ShardedOptimizer",
            remedy="Leave in_backward=True out: then updates run after backward, and gathers under the next forward.",
            error=PhaseError,
        )

    def _settings(self) -> list[dict[str, Any]]:
        """Copies the current hyper-parameters by group, including changes by schedulers and users; shares no tensor."""
        return [
            {name: value.clone() if isinstance(value, Tensor) else value for name, value in hyper_parameters(group).items()}
            for group in self.param_groups
        ]

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The group that the state is sharded over; on a mesh it has all ranks, and each row holds the same state."""
        return self._sync.process_group

    @property
    def has_experts(self) -> bool:
        """True if the model has experts."""
        return bool(self._sync.config.experts)

    @property
    def optimizer_class(self) -> type[torch.optim.Optimizer]:
        return self._make.func  # type: ignore[return-value]

    def owned_parts(self) -> dict[Tensor, list[ShardPart]]:
        """Returns the parts that this rank owns of each sharded parameter, possibly none; parameters are keys by identity."""
        sharding = self._begin() if self._sharding is None else self._sharding
        found: dict[Tensor, list[ShardPart]] = {param: [] for param in sharding.params}
        for part in sharding.parts:
            found[sharding.params[part.param]].append(part)
        return found

    def _packed(self, states_of: Callable[[], FullStates]) -> dict[str, Any]:
        """Returns torch's state dict filled with these states; the user's hooks see the result."""

        def fill(_self: object, packed: dict[str, Any]) -> None:
            states = states_of()
            packed["state"] = {number: states[param] for number, param in enumerate(params_of(self)) if states.get(param)}

        with self.register_state_dict_post_hook(fill, prepend=True):
            return super().state_dict()

    def _whole_states(self, *, keeps: bool = True, device: torch.device | None = None) -> FullStates:
        """Gathers the whole state of every parameter, on `device` if given; empty if not `keeps`. A collective call."""
        self._steps.make_whole(gathers=True)
        nobodys = {
            param: whole_state_without_elements(param, self._state_of_one_element(number, param.dtype, param.device))
            for number, param in self._stepped_params()
            if param.numel() == 0
        }
        waiting = {param: state for param, state in self._waiting.items() if state.keys() != {MASTER}}
        return nobodys | self._full_states(keeps=keeps, device=device) | waiting

    def _states(self) -> FullStates:
        """Returns this rank's knowledge of every parameter's state."""
        self._steps.make_whole()
        mine: defaultdict[Tensor, list[tuple[ShardPart, ParamState]]] = defaultdict(list)
        for owned, state in self._inner_states():
            mine[owned.param].append((owned.part, state))
        of_one = cache(self._state_of_one_element)
        states = {
            param: sharded_state(param, mine[param], partial(of_one, number, param.dtype, param.device))
            for number, param in self._stepped_params()
        }
        return states | self._waiting

    def _state_of_one_element(self, group: int, dtype: torch.dtype, device: torch.device) -> ParamState:
        return state_of_one_element(self._make, self.param_groups[group], dtype, device)

    def _full_states(self, *, is_moved: bool = False, keeps: bool = True, device: torch.device | None = None) -> FullStates:
        """Gathers the whole state of every parameter of the current sharding; a collective call."""
        if self._sharding is None:
            return {}
        mine = {owned.part: state for owned, state in self._inner_states(is_moved=is_moved)}
        return full_states(self._sharding, mine, keeps=keeps, device=device)

    def _inner_states(self, *, is_moved: bool = False) -> Iterator[tuple[Owned, ParamState]]:
        """Yields this rank's parts and their state with fp32 values; an empty state stays empty, except when state moves."""
        for inner in self._inners.values():
            for owned in inner.owned:
                state = dict(inner.optimizer.state.get(owned.target, {}))
                has_master = owned.target is not owned.values and (is_moved or bool(state))
                yield owned, {**state, MASTER: owned.target} if has_master else state

    def _stepped_params(self) -> list[tuple[int, Tensor]]:
        """Returns the parameters that have state on some rank, each with the number of its group."""
        return [
            (number, param)
            for number, group in enumerate(self.param_groups)
            for param in group["params"]
            if param in self._stepped
        ]


def _checked(cls: Any, sync: GradientSync, params: ParamGroups | None, state_dict: object) -> GradientSync:
    require(
        isinstance(sync, GradientSync),
        f"target must be the result of attach() or DistributedDataParallel, got {type(sync).__name__}.",
        where="ShardedOptimizer",
        remedy="Write ShardedOptimizer(torch.optim.AdamW, model, lr=...), with the wrapped model. "
        "Parameters or groups come third: ShardedOptimizer(torch.optim.AdamW, model, groups, lr=...).",
        error=WrongType,
    )
    require(
        isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer) and not issubclass(cls, ShardedOptimizer),
        f"cls must be a class of optimizers, got {cls!r}.",
        where="ShardedOptimizer",
        remedy="Pass the class, such as torch.optim.AdamW, and its settings by name.",
        error=WrongType,
    )
    require(
        state_dict in ("full", "sharded"),
        f'state_dict must be "full" or "sharded", got {state_dict!r}.',
        where="ShardedOptimizer",
        remedy='Leave it out, or write state_dict="sharded" to save by torch.distributed.checkpoint.',
    )
    require(
        not sync.experts or params is not None,
        "this model has experts, whose parameters and optimizer state are sharded over other ranks than the dense ones.",
        where="ShardedOptimizer",
        remedy="Make one for the model with params=[param for _, param in sync.named_parameters()], its dense ones, and "
        "one for each of sync.experts.",
    )
    return sync


def _raise_elsewhere(rank: int) -> FullStates:
    raise PhaseError(
        f"consolidate_state_dict() gathered the state on rank {rank}, and state_dict() is called on another rank.",
        where="ShardedOptimizer.state_dict",
        remedy=f"Call state_dict() on rank {rank} only, or full_state_dict() on every rank.",
    )
