"""Inside join(), with an optimizer in shards: ranks that have run out of data take part in every synchronisation and step.

They hold shards of gradients and parameters like all others, and do not know what those with data have added up since their last
step, and what they have thrown away. So those say it when a synchronisation begins, and before all else that ranks do together.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from undertow.errors import PhaseError
from undertow.runtime import private
from undertow.runtime.collectives import ReductionHandle
from undertow.runtime.group import OwnGroup
from undertow.runtime.placeholder import GradientPlaceholder

_NONE, _ZEROS, _HOLDS = 0, 1, 2  # what a rank with data has in `.grad` when a synchronisation begins, but for what is new


class Company:
    """What one rank knows of the others inside join(); `tell(name, arguments)` has those without data make a call, too."""

    def __init__(self, group: OwnGroup, tell: Callable[[str, dict[str, Any]], None], *, has_shards: bool) -> None:
        self.has_shards = has_shards  # else ranks without data make no steps, and their gradients stay what they are
        self.is_out = False  # this rank has run out of data
        self.has_others_out = False  # some rank had, when the last forward began
        self._group = group
        self._tell = tell
        self._said: ReductionHandle | None = None

    def tell(self, name: str, arguments: dict[str, Any]) -> None:
        """Before a call that all ranks make; does nothing on a rank that has been told itself."""
        if not self.is_out:
            self._tell(name, arguments)

    def say_gradients(self, params: Sequence[Tensor], earlier: Container[int], *, is_sharded: bool) -> None:
        """On a rank with data; of the parameters in `earlier`, by id, what a synchronisation has brought is set aside."""
        if self.has_others_out:
            self._exchange([_state_of(param, is_earlier=id(param) in earlier, is_sharded=is_sharded) for param in params])

    def follow_gradients(self, params: Sequence[Tensor]) -> None:
        """On a rank without: every `.grad` becomes what it is on those with data, without what is new."""
        states = self._exchange([_NONE] * len(params))
        self.wait()
        for index, (param, state) in enumerate(zip(params, states.tolist(), strict=True)):
            grad = param.grad
            if state == _NONE:
                param.grad = None
            elif isinstance(grad, GradientPlaceholder):
                grad.added = None
                if state == _ZEROS:
                    grad.zero_()
            elif state == _ZEROS:
                param.grad = torch.zeros_like(param, dtype=private.gradient_dtype(param))
            elif grad is None:
                raise PhaseError(
                    "other ranks add to a gradient that this one has thrown away.",
                    where=f"parameter {index} of those that are trained, join(), rank {self._group.rank}",
                    remedy="Zero gradients at the same place of the loop on every rank, and not behind it.",
                )

    def wait(self) -> None:
        """Returns when what was said has arrived."""
        said, self._said = self._said, None
        if said is not None:
            with self._group.waiting("what other ranks have in their gradients"):
                said.wait()

    def _exchange(self, states: list[int]) -> Tensor:
        told = torch.tensor(states, dtype=torch.uint8, device=self._group.device)
        self._said = self._group.all_reduce_async(told, dist.ReduceOp.MAX)
        return told


def _state_of(param: Tensor, *, is_earlier: bool, is_sharded: bool) -> int:
    grad = param.grad
    if is_earlier:
        return _HOLDS
    if isinstance(grad, GradientPlaceholder):
        return _ZEROS if grad.is_cleared else _HOLDS
    # What is whole where ranks hold shards is new. Else it may be zeros, which count where nobody adds to them.
    return _NONE if grad is None or is_sharded else _ZEROS


def settings_to_json(groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The hyper-parameters of each group that are numbers, texts, or tuples or tensors of numbers: those that change."""
    return [
        {
            name: value.tolist() if isinstance(value, Tensor) else value
            for name, value in group.items()
            if name not in ("params", "param_names") and isinstance(value, int | float | str | tuple | list | Tensor | None)
        }
        for group in groups
    ]


def take_settings(groups: Sequence[dict[str, Any]], told: Sequence[dict[str, Any]]) -> None:
    """Gives `groups` those of another rank, in the types that they have here."""
    for group, settings in zip(groups, told, strict=True):
        for name, value in settings.items():
            mine = group.get(name)
            if isinstance(mine, Tensor):
                mine.copy_(torch.as_tensor(value, dtype=mine.dtype))
            else:
                group[name] = tuple(value) if isinstance(mine, tuple) else value
