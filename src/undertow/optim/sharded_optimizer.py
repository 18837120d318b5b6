"""An optimizer whose state and work are sharded over ranks."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import chain
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from undertow.errors import CheckpointError, ConfigError, PhaseError, WrongType, listed, require
from undertow.optim.clipping import clip_members
from undertow.optim.state import (
    ELEMENTWISE,
    MASTER,
    FullStates,
    InnerOptimizer,
    ParamState,
    WrittenStates,
    hyper_parameters,
    params_of,
    sharded_state,
    with_copied_scalars,
)
from undertow.sharded.layout import Sharding
from undertow.sharded.shards import ShardPart
from undertow.sync.gradient_sync import GradientSync, ZeroesWithoutReading, sync_of
from undertow.torch_private import private

ParamGroups = Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]]


class ShardedOptimizer(ZeroesWithoutReading, torch.optim.Optimizer):
    """Runs an optimizer over the parameters of a model, with 1/n of its state and work on each
    rank.

        model = undertow.DistributedDataParallel(module)
        optimizer = undertow.ShardedOptimizer(torch.optim.AdamW, model, lr=1e-3)

    On a mesh, n is the number of ranks of a row. Construction is a collective call; a model has one
    ShardedOptimizer at a time. From its first step on, gradients are reduced to shards. Updated
    parameters are gathered during the next forward; any other read of a parameter waits for it.
    16-bit parameters are updated in fp32.

    A model with experts needs one optimizer for each group of ranks: one for the model with its
    dense parameters as `params`, and one for each of `sync.experts`. `undertow.clip_grad_norm_`
    computes their common norm.

    Args:
        cls: A class of torch.optim that updates each element on its own: Adadelta, Adagrad, Adam,
            AdamW, Adamax, ASGD, NAdam, RAdam, RMSprop, Rprop, SGD. Any other class needs
            `elementwise=True`.
        target: The result of `attach` or `DistributedDataParallel`.
        params: Parameters or parameter groups as in torch; None takes all trained parameters.
        state_dict: "full" makes `state_dict()` return a plain optimizer's state dict, whole on
            every rank; every rank must call it. "sharded" makes it return this rank's shards, which
            only torch.distributed.checkpoint can save.
        elementwise: True lets another class be sharded. You vouch that the update of an element
            depends on that element alone, and that everything a step changes is in `state[param]`.
            Each rank steps flat pieces of parameters. So a norm, statistics of rows or columns,
            quantization in blocks or a projection would use pieces, without an error.
        defaults: The settings of `cls`.

    Raises:
        ConfigError: If the class is not known to be elementwise, or if the model already has a
            ShardedOptimizer.
    """

    def __init__(
        self,
        cls: type[torch.optim.Optimizer],
        target: GradientSync | nn.Module,
        params: ParamGroups | None = None,
        *,
        state_dict: Literal["full", "sharded"] = "full",
        elementwise: bool = False,
        **defaults: Any,
    ) -> None:
        self._sync = sync_of(
            target,
            where="ShardedOptimizer",
            remedy="Write ShardedOptimizer(torch.optim.AdamW, model, lr=...), with the wrapped "
            "model. Parameters or groups come third: ShardedOptimizer(torch.optim.AdamW, model, "
            "groups, lr=...).",
        )
        _require_arguments(cls, self._sync, params, state_dict)
        # A class that is derived from a known one is not known: its constructor alone may add
        # hooks.
        require(
            cls in ELEMENTWISE or elementwise,
            f"{cls.__name__} cannot be sharded: Undertow does not know that it updates each "
            "element on its own.",
            where="ShardedOptimizer, which gives each rank a part of a parameter as a flat piece",
            remedy="Pass elementwise=True if the update of an element depends on no other "
            "element. If it does, or if you are "
            "not sure, use this optimizer without sharding.",
        )
        # Parameter groups alone are not enough: some settings are read only by the constructor.
        self._make: partial[Any] = partial(cls, **defaults)
        whole = self._make(
            [param for _, param in self._sync.named_parameters()] if params is None else params
        )
        self._inner: InnerOptimizer | None = None  # over this rank's parts
        self._stepped: set[Tensor] = set()  # parameters that have state on some rank, by identity
        # states of parameters that are not among this rank's parts, or not yet
        self._waiting: FullStates = {}
        self._gives_shards = state_dict == "sharded"
        # The rank of `consolidate_state_dict`, and the states there, until the state changes.
        self._consolidated: tuple[int, FullStates | None] | None = None
        super().__init__(whole.param_groups, whole.defaults)
        self._grouped = [list(group["params"]) for group in self.param_groups]  # as they were taken
        # Texts, because a function or NaN does not equal its own copy.
        groups = [
            (len(group["params"]), repr(hyper_parameters(group))) for group in self.param_groups
        ]
        described = {
            "optimizer": f"{cls.__module__}.{cls.__qualname__}",
            "parameter groups": groups,
        }
        self._steps = self._sync._shard(self, described)

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
            with torch.enable_grad():
                loss = closure()
            self._sync.finish()
        self._consolidated = None
        numbers = self._sync._engine.checks.numbers
        if numbers.is_on and numbers.skips(self):  # on every rank
            return loss
        inner, params = self._begin(), params_of(self)
        inner.sharding.require_synchronized(params)
        with self._steps.update(inner.sharding):
            inner.step(self.param_groups)
            self._stepped.update([param for param in params if param.grad is not None])
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
        """Scales all gradients of its parameters so that their total norm is at most `max_norm`; a
        collective call.

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
        members = [(self._sync, params_of(self))]
        return clip_members(members, max_norm, norm_type, error_if_nonfinite=error_if_nonfinite)

    @property  # type: ignore[override]  # an attribute in torch
    def state(self) -> WrittenStates:
        """The entries of `state_dict` for each parameter that has been stepped.

        They can be set and deleted, on every rank. Tensors in them cannot be changed in place.

        It is empty on every rank until the first step, and on no rank afterwards:
        torch.distributed.checkpoint relies on that.
        """
        states = {param: with_copied_scalars(state) for param, state in self._states().items()}
        written = WrittenStates(states, lambda param: self._put(param, written.get(param, {})))
        return written

    @state.setter
    def state(self, states: Mapping[Tensor, Mapping[str, Any]]) -> None:
        if "_steps" in vars(self):  # not in torch's constructor
            written = self.state
            written.clear()
            written.update(states)

    def _put(self, param: Tensor, state: Mapping[str, Any]) -> None:
        """Replaces the state of a parameter on this rank; an empty state stands for none."""
        got = f"one of shape {tuple(param.shape)}" if isinstance(param, Tensor) else repr(param)
        require(
            any(param is each for each in params_of(self)) or not state,
            "state can be kept for parameters in the groups of the optimizer only, "
            f"got it for {got}.",
            where="ShardedOptimizer.state",
            remedy="Keep it outside of the optimizer.",
        )
        self._consolidated = None
        self._stepped.discard(param)
        self._waiting.pop(param, None)
        if self._inner is None or param not in self._inner.sharding.parts:
            if state:
                self._waiting[param] = dict(state)
            return
        if state.keys() - {MASTER}:
            self._stepped.add(param)
        self._inner.take({param: state})

    @private.untraced
    def state_dict(self) -> dict[str, Any]:
        """Returns the whole state on every rank, as the state dict of a plain optimizer; a
        collective call.

        After `consolidate_state_dict(to)`, rank `to` returns it without communication until the
        next step. With `state_dict="sharded"`, the optimizer returns this rank's part instead, for
        torch.distributed.checkpoint.
        """
        if self._consolidated is None:
            return self.sharded_state_dict() if self._gives_shards else self.full_state_dict()
        to, states = self._consolidated
        if states is None:
            raise PhaseError(
                f"consolidate_state_dict() gathered the state on rank {to}, and state_dict() is "
                "called on another rank.",
                where="ShardedOptimizer.state_dict",
                remedy=f"Call state_dict() on rank {to} only, or full_state_dict() on every rank.",
            )
        return self._packed(states)

    @private.untraced
    def sharded_state_dict(self) -> dict[str, Any]:
        """Returns this rank's part in the layout of torch's optimizers, for
        torch.distributed.checkpoint, as `ShardedState`."""
        return self._packed(self._states())

    @private.untraced
    def full_state_dict(self) -> dict[str, Any]:
        """Returns the whole state on every rank, as the state dict of a plain optimizer.

        A collective call.
        """
        return self._packed(self._whole_states())

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
        self._consolidated = (to, states if rank == to else None)

    @private.untraced
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state on every rank; this rank keeps its parts of whole tensors.

        Args:
            state_dict: The result of `state_dict` or `full_state_dict`, or a plain optimizer's
                `state_dict`.

        Raises:
            ValueError: If the parameter groups differ, as in torch.
            CheckpointError: If a state belongs to no parameter.
        """
        given: dict[str, Any] = {}

        def take(_self: object, found: dict[str, Any]) -> dict[str, Any]:
            given.update(found)
            of_groups = chain.from_iterable(group["params"] for group in found["param_groups"])
            others = [*(found["state"].keys() - set(of_groups)), None]
            require(
                len(others) == 1,
                f"the state has an entry for {others[0]!r}, which is not a parameter.",
                where="ShardedOptimizer.load_state_dict",
                remedy="Remove it: a sharded optimizer keeps state for parameters only.",
                error=CheckpointError,
            )
            return {**found, "state": {}}  # super() loads the groups and checks their order

        # User hooks that run before may change the state, and user hooks that run after see the
        # loaded one.
        with (
            self.register_load_state_dict_pre_hook(take),
            self.register_load_state_dict_post_hook(lambda _: self._load(given), prepend=True),
        ):
            super().load_state_dict(state_dict)

    def _load(self, state_dict: dict[str, Any]) -> None:
        numbers = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        states = state_dict["state"]
        self._waiting = {}
        for number, param in zip(numbers, params_of(self), strict=True):
            if number in states:
                self._waiting[param] = dict(states[number])
        self._stepped = set()
        self._consolidated = None
        if self._inner is not None:
            self._sync.wait()
            # Values may have been loaded into the parameters before.
            self._inner.sharding.follow_parameters()
            self._take_over(self._inner.sharding)

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
            self._require_params_of_the_model()
        except ConfigError:
            self.param_groups.pop()
            raise

    def _require_params_of_the_model(self) -> None:
        known = {id(param) for _, param in self._sync.named_parameters()}
        for number, param in enumerate(params_of(self)):
            require(
                id(param) in known,
                f"parameter {number} of the optimizer, of shape {tuple(param.shape)}, is not "
                "synchronized.",
                where="ShardedOptimizer",
                remedy="Give it only parameters of the wrapped module that `ignore` does not name.",
            )

    def __getstate__(self) -> dict[str, Any]:
        raise WrongType(
            "a ShardedOptimizer cannot be pickled or copied: each rank has a part of it.",
            where="ShardedOptimizer",
            remedy="Save its state_dict(), called on every rank.",
        )

    def _begin(self) -> InnerOptimizer:
        """Waits for everything in flight, and returns the optimizer over this rank's parts."""
        sharding, inner = self._steps.begin(), self._inner
        # Users may have put other parameters into the groups, or in another order.
        present = [list(map(id, group["params"])) for group in self.param_groups]
        has_other_params = present != [list(map(id, params)) for params in self._grouped]
        if has_other_params:
            self._require_params_of_the_model()
            self._grouped = [list(group["params"]) for group in self.param_groups]
        if inner is None:
            inner = self._take_over(sharding)
        elif has_other_params or sharding is not inner.sharding:
            self._require_replacements()
            self._waiting = inner.whole_states(is_moved=True) | self._waiting
            inner = self._take_over(sharding)
        return inner

    def _require_replacements(self) -> None:
        """Raises PhaseError if members of the groups have left the model, and others are in none.

        So it is after a layer was replaced, and after `load_state_dict(assign=True)`.
        """
        own = set(map(id, params_of(self)))
        named_params = self._sync.named_parameters()
        if own <= {id(param) for _, param in named_params}:
            return
        left_out = [
            repr(name)
            for name, param in named_params
            if param.requires_grad and id(param) not in own
        ]
        require(
            not left_out,
            "this optimizer updates parameters that the model no longer has, and not their "
            "replacements.",
            where=f"ShardedOptimizer, parameter {listed(left_out, most=1)}",
            remedy="Make the optimizer after the change.",
            error=PhaseError,
        )

    def _take_over(self, sharding: Sharding) -> InnerOptimizer:
        """Makes an optimizer over this rank's parts in `sharding`; moves waiting states to it."""
        inner = self._inner = InnerOptimizer(self._make, self.param_groups, sharding)
        inner.optimizer.defaults = self.defaults  # follows changes that users make
        inner.take(self._waiting)
        for param in sharding.parts.keys() & self._waiting.keys() & set(params_of(self)):
            if self._waiting.pop(param).keys() != {MASTER}:
                self._stepped.add(param)
        return inner

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The group that the state is sharded over.

        On a mesh it has all ranks, and each row holds the same state.
        """
        return self._sync.process_group

    @property
    def optimizer_class(self) -> type[torch.optim.Optimizer]:
        return self._make.func  # type: ignore[return-value]

    def owned_parts(self) -> dict[Tensor, list[ShardPart]]:
        """Returns the parts that this rank owns of each sharded parameter, possibly none.

        Parameters are keys by identity.
        """
        inner = self._begin() if self._inner is None else self._inner
        return inner.sharding.parts

    def _packed(self, states: FullStates) -> dict[str, Any]:
        """Returns torch's state dict filled with these states; the user's hooks see the result."""

        def fill(_self: object, packed: dict[str, Any]) -> None:
            params = enumerate(params_of(self))
            packed["state"] = {number: states[param] for number, param in params if param in states}

        with self.register_state_dict_post_hook(fill, prepend=True):
            return super().state_dict()

    def _whole_states(
        self,
        *,
        keeps: bool = True,
        device: torch.device | None = None,
    ) -> FullStates:
        """Gathers the whole state of every parameter, on `device` if given; a collective call.

        Returns nothing if not `keeps`.
        """
        states: FullStates = {}
        if self._inner is not None:
            if self._inner.sharding.group.num_ranks > 1:
                self._steps.require_open(
                    "Call state_dict() before close(); save_checkpoint() works afterwards too."
                )
            states = self._inner.whole_states(keeps=keeps, device=device)
        for param, state in self._waiting.items():
            if state.keys() - {MASTER}:
                states[param] = state
        return states

    def _states(self) -> FullStates:
        """Returns this rank's knowledge of every parameter's state; it may have no part of one."""
        mine: dict[Tensor, list[tuple[ShardPart, ParamState]]] = {
            param: [] for param in params_of(self) if param in self._stepped
        }
        if self._inner is not None:
            states = self._inner.states()
            for owned in self._inner.owned:
                if owned.param in mine:
                    mine[owned.param].append((owned.part, states[owned.part]))
        return {param: sharded_state(param, parts) for param, parts in mine.items()} | self._waiting


def _require_arguments(
    cls: object, sync: GradientSync, params: ParamGroups | None, state_dict: object
) -> None:
    require(
        isinstance(cls, type)
        and issubclass(cls, torch.optim.Optimizer)
        and not issubclass(cls, ShardedOptimizer),
        f"cls must be a class of optimizers, got {cls!r}.",
        where="ShardedOptimizer",
        remedy="Pass the class, such as torch.optim.AdamW, and its settings by name.",
        error=WrongType,
    )
    require(
        state_dict in ("full", "sharded"),
        f'state_dict must be "full" or "sharded", got {state_dict!r}.',
        where="ShardedOptimizer",
        remedy='Leave it out, or write state_dict="sharded" to save by '
        "torch.distributed.checkpoint.",
    )
    require(
        not sync.experts or params is not None,
        "this model has experts, whose parameters and optimizer state are sharded over other "
        "ranks than the dense ones.",
        where="ShardedOptimizer",
        remedy="Make one for the model with params=[param for _, param in "
        "sync.named_parameters()], its dense ones, and "
        "one for each of sync.experts.",
    )
