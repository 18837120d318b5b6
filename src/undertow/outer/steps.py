"""Counts the steps of a module's optimizers, so that ranks agree on the number of a step."""

from __future__ import annotations

import warnings
import weakref
from dataclasses import dataclass

import torch
from torch.optim.optimizer import Optimizer

from undertow.engine.engine import Engine
from undertow.engine.progress import params_of
from undertow.engine.step_settings import settings_of
from undertow.errors import PhaseError
from undertow.outer.step_settings import StepSettings
from undertow.torch_private import unscaling

_NUM_FORWARDS = 100  # without a step, after which a warning follows


@dataclass
class _Stepping:
    """A step under way, of the outermost optimizer."""

    optimizer: int  # its id
    has_closure: bool
    may_make_state: bool
    is_stale: bool = False  # it has raised, or runs its own forward


class StepCounter:
    """Counts a step when every trained parameter has been stepped: with several optimizers, after
    the last one.

    A step that a gradient scaler skips counts too: when the scaler finds infinite gradients. A step
    that trains nothing does not: torch.distributed.checkpoint makes an optimizer's state by one
    with lr=0, and with zeros for gradients, before training or between two steps. torch marks it by
    `closure=None`, without which a step after a forward counts.

    `settings` are those of the steps. `replaced` are parameters, by id, in whose place a load has
    put others. `engine` knows the trained parameters, and whether a forward only accumulates.
    """

    def __init__(self, engine: Engine) -> None:
        self.num_steps = 0
        self.num_forwards = 0  # that do not only accumulate
        self.settings = StepSettings(engine.current_plan.members)
        self.replaced: dict[int, weakref.ref[torch.Tensor]] = {}
        self._engine = engine
        self._stepped: set[int] = set()  # parameters, by id, since the last step
        self._without: set[int] = set()  # parameters that no optimizer steps
        self._stepping: _Stepping | None = None
        self.has_forward = False  # since the last step

    @property
    def is_begun(self) -> bool:
        """True if some trained parameters have been stepped, and others not yet."""
        return bool(self._stepped)

    def count(self) -> None:
        """Counts a step, of optimizers that are not torch's."""
        self._stepped.clear()
        self.has_forward = False
        self.num_steps += 1
        self.settings.step_ends(self.num_steps)

    def forward_begins(self) -> None:
        """Called before each training forward."""
        if self._stepping is not None and not self._stepping.has_closure:
            self._stepping.is_stale = True
        self.has_forward = True
        # Replicas may call a closure a different number of times.
        if self._engine.is_accumulating or self._is_stepping:
            return
        self.num_forwards += 1
        if self.num_steps == 0 and self.num_forwards == _NUM_FORWARDS:
            warnings.warn(
                f"{_NUM_FORWARDS} forwards have run, and no optimizer has stepped: replicas are "
                "never synchronized.\n  SyncConfig(outer=...)\n"
                "  Call model.outer.step() after each step of an optimizer that does not derive "
                "from torch.optim.Optimizer.",
                stacklevel=2,
            )

    def step_begins(self, optimizer: Optimizer, *, has_closure: bool, may_make_state: bool) -> bool:
        """Called before any optimizer steps, maybe inside of another one.

        Returns True if it is the outermost one, and steps trained parameters. `may_make_state`:
        torch makes an optimizer's state by such a call.
        """
        if self._is_stepping:
            return False
        if self.replaced:
            self._require_current(optimizer)
        if not self._own(optimizer):
            return False
        self._stepping = _Stepping(id(optimizer), has_closure, may_make_state)
        return True

    def step_ends(self, optimizer: Optimizer) -> bool:
        """Called after any optimizer has stepped; returns True if a step counts now."""
        if self._stepping is None or self._stepping.optimizer != id(optimizer):
            return False
        stepping, self._stepping = self._stepping, None
        if not self._trains(optimizer, may_make_state=stepping.may_make_state):
            return False
        names = self.settings.names
        self.settings.add(settings_of(optimizer, self._trained, names, with_estimates=False))
        return self._add(self._own(optimizer))

    def is_skipped(self, optimizer: Optimizer, found: unscaling.Found) -> bool:
        """Returns True if a scaler, which has `found` infinite gradients, is going to skip the step
        of this optimizer."""
        # A fused optimizer steps also then, and skips by itself. For others the scaler waits for
        # these numbers too.
        is_own = bool(self._own(optimizer)) and not unscaling.is_done_by_step(optimizer)
        return is_own and any(value.item() for value in found.values())

    def skip(self, optimizer: Optimizer) -> bool:
        """Called when a scaler is going to skip the step; returns True if a step counts now.

        It counts at once: replicas that step may wait for an exchange with this one.
        """
        params = self._own(optimizer)
        self.settings.skip(params)
        return self._add(params)

    def _trains(self, optimizer: Optimizer, *, may_make_state: bool) -> bool:
        """Returns False for a step without a learning rate and gradients, unless a forward ran
        before and torch does not make a state by such a call."""
        rates = [group.get("lr") for group in optimizer.param_groups]
        if any(rate is None or float(rate) != 0 for rate in rates):
            return True
        if self.has_forward and not may_make_state:
            return True
        if hasattr(optimizer, "optimizer_class"):  # shards: no rank has whole gradients
            return False
        return any(param.grad is not None and param.grad.any() for param in params_of(optimizer))

    def _require_current(self, optimizer: Optimizer) -> None:
        """Raises PhaseError if a load has put others in the place of the optimizer's parameters."""
        for param in params_of(optimizer):
            replaced = self.replaced.get(id(param))
            is_present = id(param) in self._trained
            if replaced is not None and replaced() is param and not is_present:
                raise PhaseError(
                    "load_state_dict(assign=True) has put other parameters into the model: "
                    f"{type(optimizer).__name__} steps those from before.",
                    where="outer synchronization",
                    remedy="Make the optimizer after the load, or load with assign=False.",
                )

    @property
    def _is_stepping(self) -> bool:
        return self._stepping is not None and not self._stepping.is_stale

    @property
    def _trained(self) -> frozenset[int]:
        return self._engine.current_plan.hooks.ids

    def _own(self, optimizer: Optimizer) -> frozenset[int]:
        return self._trained.intersection(map(id, params_of(optimizer)))

    def _add(self, params: frozenset[int]) -> bool:
        """Adds parameters that have stepped; returns True if a step counts with them."""
        missing = self._trained - self._without - self._stepped
        if params & self._stepped and missing - params:
            # A whole step has passed without these.
            self._without |= missing
            self._stepped.clear()
            if any(
                param.requires_grad
                for param in self._engine.current_plan.hooks.params
                if id(param) in missing
            ):
                warnings.warn(
                    f"{len(missing)} trained parameters are not stepped with the others: steps are "
                    "counted without them.\n  SyncConfig(outer=...)\n"
                    "  Give an optimizer all trained parameters, or freeze the rest.",
                    stacklevel=2,
                )
        self._without -= params
        self._stepped |= params
        is_complete = self._stepped >= self._trained - self._without
        if is_complete:
            self.count()
        return is_complete
