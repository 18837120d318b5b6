"""What the user's optimizer works on: this rank's parts of the parameters, all of them or those of one bucket."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from undertow.runtime.comm.p2p import accumulation_dtype
from undertow.runtime.sharded.layout import Sharding
from undertow.runtime.sharded.shards import ShardPart
from undertow.runtime.torch_private import private


@dataclass(frozen=True, slots=True)
class Owned:
    """What this rank updates of one parameter."""

    part: ShardPart
    values: Tensor  # [part.numel] in place, of the parameter's dtype
    target: Tensor  # what the inner optimizer updates: `values`, or an fp32 copy of them where they are of 16 bits

    def follow_values(self) -> None:
        """The copy follows what somebody else has written into the parameter, such as `load_state_dict`."""
        if self.target is not self.values:
            is_written = self.values != self.target.to(self.values.dtype)
            self.target.copy_(torch.where(is_written, self.values.to(self.target.dtype), self.target))


@dataclass(frozen=True, slots=True, eq=False)
class InnerOptimizer:
    """An optimizer of the user's class over some of what this rank updates."""

    owned: Sequence[Owned]
    optimizer: torch.optim.Optimizer

    def step(self, settings: Sequence[dict[str, Any]], gradient_of: Callable[[ShardPart], Tensor | None]) -> None:
        """With these hyper-parameters, by group."""
        for group, setting in zip(self.optimizer.param_groups, settings, strict=True):
            group.update(setting)
        for owned in self.owned:
            grad = gradient_of(owned.part)
            owned.target.grad = None if grad is None else grad.to(owned.target.dtype)
            owned.follow_values()
        try:
            private.step_unwatched(self.optimizer)  # the user's is the one of the whole, around which hooks are called
        finally:  # where it is interrupted too: else a copy would be taken for what somebody has written over
            for owned in self.owned:
                owned.target.grad = None
                if owned.target is not owned.values:
                    owned.values.copy_(owned.target)


def owned_part(sharding: Sharding, part: ShardPart) -> Owned:
    """This rank's part, and the fp32 copy of it where it is of 16 bits."""
    values = sharding.values(part)
    is_narrow = accumulation_dtype(values.dtype) != values.dtype
    return Owned(part, values, values.to(accumulation_dtype(values.dtype)) if is_narrow else values)


def changed_settings(before: Sequence[dict[str, Any]], now: Sequence[dict[str, Any]]) -> list[str]:
    """Which hyper-parameters differ, and in which group: "lr of group 0: 0.1, now 0.01"."""
    if len(before) != len(now):
        return [f"number of groups: {len(before)}, now {len(now)}"]
    return [
        f"{name} of group {group}: {then.get(name)}, now {present.get(name)}"
        for group, (then, present) in enumerate(zip(before, now, strict=True))
        for name in dict.fromkeys((*then, *present))
        if not _is_same(then.get(name), present.get(name))
    ]


def _is_same(one: object, other: object) -> bool:
    """Whether two values of a hyper-parameter are."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one is other or (one.shape == other.shape and bool((one == other).all()))
    return bool(one == other)
