"""The user's optimizer: the check that it can update parameters in pieces, and its steps over this rank's parts."""

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from undertow.errors import require
from undertow.optim.state import MASTER, ParamState
from undertow.runtime.comm.collectives import accumulation_dtype
from undertow.runtime.sharded.layout import Sharding
from undertow.runtime.sharded.shards import ShardPart
from undertow.runtime.torch_private import private

# Their update of a shard differs from the same elements of an update of the whole parameter.
_NOT_ELEMENTWISE = {
    "Adafactor": "it keeps one statistic for each row and column of a matrix",
    "LBFGS": "it takes scalar products of whole gradients, and evaluates the model several times in a step",
    "Muon": "it orthogonalizes whole matrices",
    "SparseAdam": "it updates the rows of sparse gradients",
    "Shampoo": "it keeps a statistic for each pair of rows",
    "SOAP": "it rotates whole matrices",
    "LAMB": "it scales an update by the norm of the whole parameter",
    "LARS": "it scales an update by the norm of the whole parameter",
}
_KNOWN = frozenset(["SGD", "Adam", "AdamW", "Adamax", "Adagrad", "Adadelta", "RMSprop", "NAdam", "RAdam", "Rprop", "ASGD"])
MakeOptimizer = Callable[[Any], torch.optim.Optimizer]  # takes parameters or parameter groups
_SHAPE, _CUT, _NUM_STEPS = (4, 6), 9, 3


@dataclass(frozen=True, slots=True)
class Owned:
    """This rank's part of one parameter."""

    part: ShardPart
    param: Tensor
    values: Tensor  # [part.numel] in place, of the parameter's dtype
    target: Tensor  # the tensor that the inner optimizer updates: `values`, or an fp32 copy of 16-bit values


@dataclass(frozen=True, slots=True, eq=False)
class InnerOptimizer:
    """An optimizer of the user's class over some of this rank's parts."""

    owned: Sequence[Owned]
    optimizer: torch.optim.Optimizer

    def step(self, settings: Sequence[dict[str, Any]], gradient_of: Callable[[ShardPart], Tensor | None]) -> None:
        """Steps with these hyper-parameters, one dict for each group."""
        for group, setting in zip(self.optimizer.param_groups, settings, strict=True):
            group.update(setting)
        for owned in self.owned:
            grad, target = gradient_of(owned.part), owned.target
            target.grad = None if grad is None else grad.to(target.dtype)
            if target is not owned.values:  # follow values that were written into the parameter, for example by `load_state_dict`
                is_written = owned.values != target.to(owned.values.dtype)
                target.copy_(torch.where(is_written, owned.values.to(target.dtype), target))
        try:
            private.step_unwatched(self.optimizer)  # hooks of the user's optimizer run around the whole step, not here
        finally:  # also if interrupted: a stale copy would look like an outside write to the parameter
            for owned in self.owned:
                owned.target.grad = None
                if owned.target is not owned.values:
                    owned.values.copy_(owned.target)

    def take(self, owned: Owned, state: ParamState) -> None:
        """Takes over the state of a part and its fp32 values."""
        master = state.pop(MASTER, None)
        if master is not None and owned.target is not owned.values:
            owned.target.copy_(master)
        self.optimizer.state[owned.target] = state


def owned_part(sharding: Sharding, param: Tensor, part: ShardPart) -> Owned:
    """Returns this rank's part of `param`, with an fp32 copy if its dtype has 16 bits."""
    values = sharding.values(part)
    return Owned(part, param, values, values.to(accumulation_dtype(values.dtype)))


def hyper_parameters(group: dict[str, Any]) -> dict[str, Any]:
    """Returns the settings of a parameter group, without its parameters."""
    return {name: value for name, value in group.items() if name not in ("params", "param_names")}


def settings_as_text(group: dict[str, Any]) -> dict[str, str]:
    """Returns the settings of a parameter group as text, because a function or NaN among them does not equal its own copy."""
    return {name: repr(value) for name, value in hyper_parameters(group).items()}


def params_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Returns the parameters of all groups, in their order."""
    return list(chain.from_iterable(group["params"] for group in optimizer.param_groups))


def changed_settings(before: Sequence[dict[str, Any]], now: Sequence[dict[str, Any]]) -> list[str]:
    """Lists the hyper-parameters that differ, with their group: "lr of group 0: 0.1, now 0.01"."""
    if len(before) != len(now):
        return [f"number of groups: {len(before)}, now {len(now)}"]
    return [
        f"{name} of group {group}: {then.get(name)}, now {present.get(name)}"
        for group, (then, present) in enumerate(zip(before, now, strict=True))
        for name in {**then, **present}
        if not _is_same(then.get(name), present.get(name))
    ]


def _is_same(one: object, other: object) -> bool:
    same = one == other
    return bool(same.all()) if isinstance(same, Tensor) else bool(same)


def require_elementwise(cls: type[Any], make: MakeOptimizer, hyper_parameters: dict[str, Any], *, device: torch.device) -> None:
    """Raises ConfigError if an optimizer is not elementwise, or if its steps change values in its parameter groups.

    torch's optimizers are in a table; any other is tried out on a few numbers.
    """
    is_torchs = cls.__module__.startswith("torch.optim")
    reason = _NOT_ELEMENTWISE.get(cls.__name__)
    if reason is None and not (is_torchs and cls.__name__ in _KNOWN):
        reason = _found_out(make, hyper_parameters, device)
    require(
        reason is None,
        f"{cls.__name__} cannot be sharded: {reason}.",
        where="ShardedOptimizer, which gives each rank a part of a parameter as a flat piece",
        remedy="Use an elementwise optimizer such as AdamW or SGD, or this one without sharding.",
    )


def state_of_one_element(
    make: MakeOptimizer, hyper_parameters: dict[str, Any], dtype: torch.dtype, device: torch.device
) -> ParamState:
    """Returns the state of a parameter with one element, after one step."""
    like = torch.zeros(1, dtype=accumulation_dtype(dtype), device=device)
    optimizer = _stepped(make, hyper_parameters, [like], [[torch.ones_like(like)]])
    state = dict(optimizer.state.get(params_of(optimizer)[0], {}))
    return state if like.dtype == dtype else {**state, MASTER: like}


def _found_out(make: MakeOptimizer, hyper_parameters: dict[str, Any], device: torch.device) -> str | None:
    """Runs a few steps of an unknown optimizer; returns why it cannot be sharded, or None if it can."""
    generator = torch.Generator().manual_seed(0)  # does not touch the user's generator
    start, *grads = (torch.randn(_SHAPE, generator=generator).to(device) for _ in range(_NUM_STEPS + 1))
    new, whole = (_stepped(make, hyper_parameters, [start], [[grad] for grad in given]) for given in ((), grads))
    parts = _stepped(make, hyper_parameters, _cut(start), map(_cut, grads))
    in_one, in_parts = (torch.cat([param.detach().flatten() for param in params_of(each)]) for each in (whole, parts))
    if not torch.equal(in_one, in_parts):
        return "it updates parts of a parameter differently from the whole"
    before, after = (settings_as_text(each.param_groups[0]) for each in (new, whole))
    changed = [repr(name) for name in {**before, **after} if before.get(name) != after.get(name)]
    if changed:
        return f"its steps change {', '.join(changed)} in its parameter groups, and only its state is kept, moved and saved"
    return None


def _stepped(
    make: MakeOptimizer, hyper_parameters: dict[str, Any], start: Sequence[Tensor], grads: Iterable[Sequence[Tensor]]
) -> torch.optim.Optimizer:
    """Returns an optimizer of parameters like `start`, after one step for each of `grads`."""
    params = [torch.nn.Parameter(tensor.clone()) for tensor in start]
    optimizer = make([{"params": params, **copy.deepcopy(hyper_parameters)}])
    for of_step in grads:
        for param, grad in zip(params, of_step, strict=True):
            param.grad = grad.clone()
        private.step_unwatched(optimizer)
    return optimizer


def _cut(tensor: Tensor) -> list[Tensor]:
    return [tensor.flatten()[:_CUT], tensor.flatten()[_CUT:]]
