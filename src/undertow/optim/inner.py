"""The user's optimizer, running over this rank's parts of the parameters: all of them, or those in one bucket."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from undertow.optim.state import MASTER, ParamState
from undertow.runtime.comm.collectives import accumulation_dtype
from undertow.runtime.sharded.layout import Sharding
from undertow.runtime.sharded.shards import ShardPart
from undertow.runtime.torch_private import private

_part_of = attrgetter("part")


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

    def step(
        self, settings: Sequence[dict[str, Any]], gradients_of: Callable[[Iterable[ShardPart]], Sequence[Tensor | None]]
    ) -> None:
        """Steps with these hyper-parameters, one dict for each group."""
        for group, setting in zip(self.optimizer.param_groups, settings, strict=True):
            group.update(setting)
        for owned, grad in zip(self.owned, gradients_of(map(_part_of, self.owned)), strict=True):
            target = owned.target
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
    values = part.of_bucket(sharding.flats[part.bucket].flat)
    return Owned(part, param, values, values.to(accumulation_dtype(values.dtype)))


def hyper_parameters(group: dict[str, Any]) -> dict[str, Any]:
    """Returns the settings of a parameter group, without its parameters."""
    return {name: value for name, value in group.items() if name not in ("params", "param_names")}


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
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one is other or (one.shape == other.shape and bool((one == other).all()))
    return bool(one == other)
