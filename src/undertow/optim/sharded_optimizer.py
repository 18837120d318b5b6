"""An optimizer of which every rank keeps its shard."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from undertow.errors import ConfigError, PhaseError, WrongType
from undertow.optim.arguments import (
    ParamGroups,
    described,
    hyper_parameters,
    require_kind_of_state_dict,
    require_one_group_of_ranks,
)
from undertow.optim.clipping import checked_norm_type, require_finite, total_norm
from undertow.optim.elementwise import MakeOptimizer, require_elementwise, state_of_one_element
from undertow.optim.inner import InnerOptimizer, Owned, changed_settings, owned_part
from undertow.optim.state import (
    MASTER,
    Consolidated,
    FullStates,
    ParamState,
    ShardedState,
    full_states,
    has_shards,
    parts_of_state,
    states_without_elements,
    with_scalars_in_place,
)
from undertow.runtime.comm.p2p import accumulation_dtype
from undertow.runtime.sharded.layout import Sharding
from undertow.runtime.sharded.shards import ShardPart
from undertow.runtime.step.sharded_steps import finish_before_look
from undertow.runtime.torch_private import private
from undertow.sync import GradientSync


class ShardedOptimizer(torch.optim.Optimizer):
    """`cls` over the parameters of `target`, with 1/n of its state and of its work on each of n ranks, of a mesh those of a row.

    `target` is what `attach` or `DistributedDataParallel` returned, `params` as for torch (all trained parameters if None),
    `defaults` are `cls`'s. Making one is a collective call; a model has one at a time. From its first step on gradients are
    reduced to shards, and what every rank has updated is gathered under the next forward; any other read of a parameter waits.
    Parameters of 16 bits are updated in fp32. Raises ConfigError for an optimizer that is not elementwise, or that counts in its
    parameter groups, and not in its state, and while the model has another ShardedOptimizer.

    Of a model with experts an optimizer has the parameters of one group of ranks: make one for the model with its dense ones
    as `params`, and one for each of `sync.experts`. Their norm is that of `undertow.clip_grad_norm_`.

    `eager`: from the second step on parameters are updated bucket by bucket while backward goes on, with the hyper-parameters
    of its begin, and `step()` confirms that. What needs all gradients before the update raises: clipping, a GradScaler, closures.
    So does what reads parameters, or state, in another thread beside that backward: PhaseError. After one that has failed they
    are whole: reading them first ends it on all ranks.

    `state_dict`: by default `state_dict()` is a plain optimizer's, whole on every rank, and every rank calls it. With "sharded"
    it holds this rank's shards, for torch.distributed.checkpoint; nothing else can save those.
    """

    def __init__(
        self,
        cls: type[torch.optim.Optimizer],
        target: GradientSync | nn.Module,
        params: ParamGroups | None = None,
        *,
        eager: bool = False,
        state_dict: Literal["full", "sharded"] = "full",
        **defaults: Any,
    ) -> None:
        sync = _checked(cls, getattr(target, "sync", target))
        require_kind_of_state_dict(state_dict)
        require_one_group_of_ranks(sync, params)
        self._cls = cls
        make: Any = cls  # whose constructor is another one than that of its base
        # Not the groups alone: some settings are read by a constructor only.
        self._make: MakeOptimizer = partial(make, **defaults)
        self._sync = sync
        whole = self._make([param for _, param in sync.named_parameters()] if params is None else params)
        self._is_eager = eager
        self._inners: dict[int, InnerOptimizer] = {}  # by bucket in eager form, else one for all
        self._used: list[dict[str, Any]] = []  # hyper-parameters of the updates in the last backward, by group
        self._ours: frozenset[int] = frozenset()  # parameters that they are for, by id
        self._sharding: Sharding | None = None
        self._owned: list[Owned] = []
        self._stepped: set[Tensor] = set()  # parameters that have state on some rank, by identity
        self._waiting: FullStates = {}  # states of parameters that are not among our parts, or not yet
        self._gives_shards = state_dict == "sharded"
        self._consolidated: Consolidated | None = None  # until the state changes
        super().__init__(whole.param_groups, whole.defaults)
        for group in self.param_groups:
            require_elementwise(cls, self._make, hyper_parameters(group), device=sync.device)
        self._steps = sync.shard(self, described(cls, self.param_groups), is_eager=eager)

    @private.untraced
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates this rank's shards; a collective call. `closure` is called once, before the update."""
        loss = None
        if closure is not None:
            self._require_barrier("step(closure)", "the closure's backward would update parameters before step() is through")
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
            sharding.require_synchronized(self._params())
            with self._steps.update():
                for inner in self._inners.values():
                    inner.step(settings, sharding.gradient)
                self._stepped.update(param for param in self._params() if param.grad is not None)
        self._steps.step_ends()
        return loss

    @private.untraced
    def zero_grad(self, set_to_none: bool = True) -> None:
        with private.as_plain_tensors() if set_to_none else nullcontext():  # nothing is read of a parameter
            super().zero_grad(set_to_none)

    def begin_updates(self, sharding: Sharding) -> bool:
        """A round begins: whether buckets are updated in it, with hyper-parameters as they are now. Called by the runtime."""
        if not self._is_eager or sharding is not self._sharding:
            return False
        self._consolidated = None
        self._used, self._ours = self._settings(), frozenset(map(id, self._params()))
        return True

    @torch.no_grad()
    def update(self, bucket: int) -> None:
        """Updates this rank's parts of a bucket that is reduced. Called by the runtime, from a thread of its own."""
        sharding = self._sharding
        assert sharding is not None  # begin_updates has said that it is there
        if bucket in self._inners:
            self._inners[bucket].step(self._used, sharding.settled_gradient)
        settled = ((sharding.params[index], grad) for index, grad in sharding.settled(bucket).items())
        self._stepped.update(param for param, grad in settled if grad is not None and id(param) in self._ours)

    @property
    @private.untraced
    def _step_supports_amp_scaling(self) -> bool:
        """Asked by torch's GradScaler, and by nobody else, when it is about to step."""
        self._require_barrier("GradScaler", "it looks for infinite gradients when parameters are updated already")
        return False

    @private.untraced
    @torch.no_grad()
    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False, foreach: bool | None = None
    ) -> Tensor:
        """Scales all gradients so that their norm, as one vector, is at most `max_norm`; returns the norm before, fp32.

        A collective call. Every rank gets the same value: powers are summed in fp64 and rounded once. `foreach` is accepted.
        """
        self._require_barrier("clip_grad_norm_", "the norm is known when parameters are updated already")
        norm_type = checked_norm_type(norm_type)
        finish_before_look(self._sync, self._params())
        sharding = self._begin()
        sharding.require_synchronized(self._params())
        grads = [grad for owned in self._owned if (grad := sharding.gradient(owned.part)) is not None]
        total = total_norm(grads, norm_type, device=sharding.group.device, group=sharding.group)
        if error_if_nonfinite:
            require_finite(total, norm_type, rank=sharding.rank)
        sharding.scale_gradients([owned.part for owned in self._owned], (max_norm / (total + 1e-6)).clamp(max=1.0))
        return total

    @property  # type: ignore[override]  # torch's is an attribute
    def state(self) -> dict[Tensor, ParamState]:
        """What `state_dict` has of each parameter, as far as it has been stepped; changing it changes nothing.

        On every rank it is empty until the first step, which torch.distributed.checkpoint goes by, and not later.
        """
        found: defaultdict[Tensor, ParamState] = defaultdict(dict)
        found.update(self._states())
        return found

    @state.setter
    def state(self, _value: object) -> None:
        """torch's constructor sets it."""

    @private.untraced
    def state_dict(self) -> dict[str, Any]:
        """All of the state on every rank, as the state dict of a plain optimizer; a collective call.

        On the rank to which `consolidate_state_dict` has brought it, it communicates nothing until the next step. An optimizer
        made with `state_dict="sharded"` returns this rank's part instead, for torch.distributed.checkpoint.
        """
        if self._consolidated is not None:
            return self._packed(self._consolidated.states)
        return self.sharded_state_dict() if self._gives_shards else self.full_state_dict()

    @private.untraced
    def sharded_state_dict(self) -> dict[str, Any]:
        """This rank's part, laid out as torch's optimizers do: for torch.distributed.checkpoint; each tensor a `ShardedState`."""
        return self._packed(self._states)

    @private.untraced
    def full_state_dict(self) -> dict[str, Any]:
        """All of the state on every rank, as the state dict of a plain optimizer; a collective call."""
        return self._packed(self._whole_states)

    @private.untraced
    def consolidate_state_dict(self, to: int = 0) -> None:
        """Brings all of the state to rank `to` of the process group, on the host; a collective call.

        For frameworks that call `state_dict()` on one rank only, as with torch's ZeroRedundancyOptimizer; Lightning makes this
        call itself. It holds until the next step; until then `state_dict()` is a PhaseError on the other ranks.
        """
        num_ranks, rank = dist.get_world_size(self.process_group), dist.get_rank(self.process_group)
        if to not in range(num_ranks):
            raise ConfigError(
                f"to={to!r} is not one of the {num_ranks} ranks.",
                where="ShardedOptimizer.consolidate_state_dict",
                remedy=f"Give a rank of the process group, 0 to {num_ranks - 1}.",
            )
        states = self._whole_states(keeps=rank == to, device=torch.device("cpu"))
        self._consolidated = Consolidated(to, states if rank == to else None)

    @private.untraced
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over what `state_dict`, `full_state_dict` or a plain optimizer's `state_dict` gave, on every rank.

        Of whole tensors this rank keeps its parts. ValueError, as torch's, where the parameter groups are others.
        """
        given: dict[str, Any] = {}

        def take(_self: object, found: dict[str, Any]) -> dict[str, Any]:
            given.update(found)
            if self._sharding is None and has_shards(found["state"].values()):
                self._begin()  # they must be ours, which is known only now
            return {**found, "state": {}}  # torch's own part of the work: groups, and their order

        with ExitStack() as hooks:  # between those of the user, who may change what is loaded, and may look at what was
            hooks.callback(self.register_load_state_dict_pre_hook(take).remove)
            hooks.callback(self.register_load_state_dict_post_hook(lambda _: self._load(given), prepend=True).remove)
            super().load_state_dict(state_dict)

    def _load(self, state_dict: dict[str, Any]) -> None:
        """The states, where the parameter groups are loaded already."""
        states = state_dict["state"]
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        params = [(param, group) for group in self.param_groups for param in group["params"]]
        self._waiting = {
            param: with_scalars_in_place(states[number], param, group)
            for number, (param, group) in zip(numbers, params, strict=True)
            if number in states
        }
        self._stepped, self._consolidated = set(), None
        if self._sharding is not None:
            self._steps.wait()
            self._sharding.follow_parameters()  # what was loaded into them before
            self._take_over(self._sharding)

    @private.untraced
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's; a collective call once there is state. New parameters are synchronized from the next forward on."""
        super().add_param_group(param_group)
        try:
            self._require_synchronized()
        except ConfigError:
            self.param_groups.pop()
            raise
        if getattr(self, "_sharding", None) is not None:
            self._waiting = self._full_states(is_moved=True) | self._waiting
            self._sharding, self._owned = None, []

    def __getstate__(self) -> dict[str, Any]:
        raise WrongType(
            "a ShardedOptimizer cannot be pickled or copied: each rank has a part of it.",
            where="ShardedOptimizer",
            remedy="Save its state_dict(), called on every rank.",
        )

    def _begin(self) -> Sharding:
        """Nothing is in flight, and what this rank owns is known."""
        before, sharding = self._sharding, self._steps.begin()
        if sharding is not before:
            if before is not None:
                self._waiting = self._full_states(is_moved=True) | self._waiting
            self._take_over(sharding)
        return sharding

    def _take_over(self, sharding: Sharding) -> None:
        """From now on these are our parts; states that wait for some of them come into their places."""
        self._sharding = sharding
        parts = self.owned_parts()
        by_group = [
            [owned_part(sharding, part) for param in group["params"] for part in parts.get(param, ())]
            for group in self.param_groups
        ]
        self._owned = [owned for of_group in by_group for owned in of_group]
        self._inners = {
            at: self._inner_over([[it for it in of_group if self._place(it) == at] for of_group in by_group], sharding)
            for at in (dict.fromkeys(map(self._place, self._owned)) or (0,))
        }
        for owned in self._owned:
            param = sharding.params[owned.part.param]
            if param in self._waiting:
                state = parts_of_state(self._waiting[param], owned.part, param)
                master = state.pop(MASTER, None)
                if master is not None and owned.target is not owned.values:
                    owned.target.copy_(master)
                self._inners[self._place(owned)].optimizer.state[owned.target] = state
        arrived = [param for param in self._waiting if param in parts]
        self._stepped.update(param for param in arrived if self._waiting[param].keys() != {MASTER})
        for param in arrived:
            del self._waiting[param]

    def _place(self, owned: Owned) -> int:
        """Of its inner optimizer."""
        return owned.part.bucket if self._is_eager else 0

    def _inner_over(self, by_group: Sequence[Sequence[Owned]], sharding: Sharding) -> InnerOptimizer:
        groups: list[dict[str, Any]] = [
            {**hyper_parameters(group), "params": [each.target for each in mine]}
            for group, mine in zip(self.param_groups, by_group, strict=True)
        ]
        if not any(by_group):
            groups[0]["params"] = [torch.zeros(0, device=sharding.group.device)]  # torch wants a parameter
        return InnerOptimizer([owned for mine in by_group for owned in mine], self._make(groups))

    def _confirm(self) -> None:
        """Parameters were updated in backward: PhaseError where that is not what step() was to do."""
        changed = changed_settings(self._used, self._settings())
        if changed:
            raise PhaseError(
                f"hyper-parameters have changed since the backward that has updated the parameters: {'; '.join(changed)}.",
                where="ShardedOptimizer.step, eager=True",
                remedy="Change them between step() and the next backward, as schedulers do, or leave eager=True out.",
            )
        if self._sharding is not None:
            self._sharding.require_synchronized(self._params())
        if self._steps.confirm():
            self._begin()

    def _require_barrier(self, what: str, why: str) -> None:
        """PhaseError in eager form."""
        if self._is_eager:
            raise PhaseError(
                f"{what} does not go with eager=True: {why}.",
                where="ShardedOptimizer",
                remedy="Leave eager=True out: gathers lie under the next forward, and updates between them and backward.",
            )

    def _settings(self) -> list[dict[str, Any]]:
        """Hyper-parameters that schedulers and users have set on our groups, by group; no tensor is shared."""
        return [
            {name: value.clone() if isinstance(value, Tensor) else value for name, value in hyper_parameters(group).items()}
            for group in self.param_groups
        ]

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The group over whose ranks the state is sharded; of a mesh all ranks, whose rows have the same."""
        return self._sync.process_group

    @property
    def has_experts(self) -> bool:
        """Whether it is of a model with experts."""
        return bool(self._sync.config.experts)

    @property
    def optimizer_class(self) -> type[torch.optim.Optimizer]:
        return self._cls

    def owned_parts(self) -> dict[Tensor, list[ShardPart]]:
        """What this rank owns of each parameter that is sharded, which may be nothing; by identity."""
        sharding = self._begin() if self._sharding is None else self._sharding
        found: dict[Tensor, list[ShardPart]] = {param: [] for param in sharding.params}
        for part in sharding.parts:
            found[sharding.params[part.param]].append(part)
        return found

    def _packed(self, states_of: Callable[[], FullStates]) -> dict[str, Any]:
        """torch's state dict, with these states; hooks of the user see all of it."""

        def fill(_self: object, packed: dict[str, Any]) -> None:
            states = states_of()
            packed["state"] = {number: states[param] for number, param in enumerate(self._params()) if states.get(param)}

        hook = self.register_state_dict_post_hook(fill, prepend=True)
        try:
            return super().state_dict()
        finally:
            hook.remove()

    def _whole_states(self, *, keeps: bool = True, device: torch.device | None = None) -> FullStates:
        """All of every parameter's state, on `device` if given; none where this rank `keeps` nothing. A collective call."""
        self._steps.make_whole_to_gather()
        nobodys = states_without_elements(self._stepped, self._state_of_nothing)
        waiting = {param: state for param, state in self._waiting.items() if state.keys() != {MASTER}}
        return nobodys | self._full_states(keeps=keeps, device=device) | waiting

    def _states(self) -> FullStates:
        """What is known here of every parameter's state."""
        self._steps.make_whole()
        owned: dict[int, list[Owned]] = {}
        for each in self._owned:
            owned.setdefault(id(self._param_of(each)), []).append(each)
        empty: dict[Any, ParamState] = {}  # of the parameters of which nothing is here, by what tells them apart
        states = {
            param: self._state_of(param, owned.get(id(param), ()), empty.setdefault((number, param.dtype, param.device), {}))
            for number, group in enumerate(self.param_groups)
            for param in group["params"]
            if param in self._stepped
        }
        return states | self._waiting

    def _state_of(self, param: Tensor, owned: Sequence[Owned], empty: ParamState) -> ParamState:
        """Scalars where this rank owns a part, and parts of tensors; `empty` is filled where it does not."""
        states = [self._inner_state(each) for each in owned]
        if not owned:
            if not empty:
                empty.update(self._state_of_nothing(param))
            states = [empty]
        found: ParamState = {}
        for key, value in states[0].items():
            if isinstance(value, Tensor) and value.dim() == 1:
                pieces = [(each.part, state[key]) for each, state in zip(owned, states, strict=False)]
                found[key] = ShardedState(param, value.dtype, pieces)
            elif owned or param.numel() == 0:  # nobody owns what has no elements: every rank says the same of it
                found[key] = value
        return found

    def _state_of_nothing(self, param: Tensor) -> dict[str, Any]:
        group = next(group for group in self.param_groups if any(it is param for it in group["params"]))
        like = torch.zeros(1, dtype=accumulation_dtype(param.dtype), device=param.device)
        state = state_of_one_element(self._make, hyper_parameters(group), like=like)
        return state if like.dtype == param.dtype else {**state, MASTER: like}

    def _inner_state(self, owned: Owned, *, is_moved: bool = False) -> dict[str, Any]:
        """A plain optimizer that keeps no state has no entry; what moves takes its wide values along in any case."""
        state = dict(self._inners[self._place(owned)].optimizer.state.get(owned.target, {}))
        has_master = owned.target is not owned.values and (is_moved or bool(state))
        return {**state, MASTER: owned.target} if has_master else state

    def _full_states(self, *, is_moved: bool = False, keeps: bool = True, device: torch.device | None = None) -> FullStates:
        """A collective call."""
        if self._sharding is None:
            return {}
        mine = {each.part: self._inner_state(each, is_moved=is_moved) for each in self._owned}
        return full_states(self._sharding, mine, keeps=keeps, device=device)

    def _param_of(self, owned: Owned) -> Tensor:
        assert self._sharding is not None
        return self._sharding.params[owned.part.param]

    def _params(self) -> list[Tensor]:
        return [param for group in self.param_groups for param in group["params"]]

    def _require_synchronized(self) -> None:
        known = {id(param) for _, param in self._sync.named_parameters()}
        strangers = [index for index, param in enumerate(self._params()) if id(param) not in known]
        if strangers:
            raise ConfigError(
                f"parameter {strangers[0]} of the optimizer, of shape {tuple(self._params()[strangers[0]].shape)}, is none "
                "that is synchronized.",
                where="ShardedOptimizer",
                remedy="Give it parameters of the wrapped module, and none that `ignore` names.",
            )


def _checked(cls: object, sync: object) -> GradientSync:
    if not isinstance(sync, GradientSync):
        raise WrongType(
            f"target must be what attach() or DistributedDataParallel returned, got {type(sync).__name__}.",
            where="ShardedOptimizer",
            remedy="Write ShardedOptimizer(torch.optim.AdamW, model, lr=...), with the wrapped model.",
        )
    if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)) or issubclass(cls, ShardedOptimizer):
        raise WrongType(
            f"cls must be a class of optimizers, got {cls!r}.",
            where="ShardedOptimizer",
            remedy="Pass the class, such as torch.optim.AdamW, and its settings by name.",
        )
    return sync
