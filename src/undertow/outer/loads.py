"""Follows loads into a module: outer synchronization asks if they have changed anything."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch
from torch import Tensor

from undertow.buckets.fingerprints import fingerprints
from undertow.engine.current_plan import CurrentPlan
from undertow.engine.step_events import StepListener
from undertow.mesh.local_tensors import local_tensors

Values = list[int]  # the fingerprint of each parameter


class OuterLoads(StepListener):
    """The loads into the module of `plan` since its parameters were last followed."""

    def __init__(self, plan: CurrentPlan) -> None:
        self.are_new = False  # since the last `follow`
        self._plan = plan
        self._before: Values | None = None  # when the first of them began

    @torch.no_grad()
    def load_begins(self) -> None:
        if not self.are_new:
            self._before = None
            with contextlib.suppress(RuntimeError):  # a rank is gone: it is told elsewhere
                self._before = self.values()
        self.are_new = True

    def follow(self) -> Values | None:
        """Returns the values from before the loads; None if they are not known."""
        before, self._before = self._before, None
        self.are_new = False
        return before

    def present(self) -> dict[str, Tensor]:
        """Returns the parameters of this synchronization that the module has now, by name."""
        plan = self._plan
        plan.wait_for_parameters()
        names = {name for name, _ in plan.hooks.named_params}
        return {name: param for name, param in plan.members.named_params() if name in names}

    def values(self) -> Values:
        """Returns the fingerprints of the parameters."""
        return values_of(list(self.present().values()))


def values_of(params: Sequence[Tensor]) -> Values:
    """Returns the fingerprints of tensors."""
    if not params:
        return []
    found: Values = fingerprints(local_tensors(params), device=params[0].device).tolist()
    return found
