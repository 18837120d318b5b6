"""The events of a step that torch's hooks report. Each hook is registered once for a model:

event                    hook                                              registered
step_begins              before the step of any optimizer                  always
step_ends                after it                                          on demand
unscaling_begins, _ends  around a GradScaler's look at the gradients       always
load_begins              before a load into the module or a part of it     on demand
"""

from __future__ import annotations

import contextlib
import weakref
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from undertow.engine.nonfinite import Arguments
from undertow.torch_private import private, unscaling
from undertow.torch_private.module_hook import before_loads


class StepListener:
    """Base class of objects that are told of the events of a step.

    Its methods do nothing. The optimizers are all of this process, of other models too.
    """

    def step_begins(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Arguments | None:
        """Called before an optimizer steps, maybe inside of another one.

        Returns other arguments for the step, or None. The optimizer is the first of `args`.
        """
        return None

    def step_ends(self, optimizer: Optimizer) -> None:
        """Called after an optimizer has stepped, unless the step has raised."""

    def unscaling_begins(self, optimizer: Optimizer) -> None:
        """Called before a gradient scaler unscales the gradients of an optimizer."""

    def unscaling_ends(self, optimizer: Optimizer, found: unscaling.Found) -> unscaling.Found:
        """Called with the infinite gradients that a scaler has found.

        Returns the finding by which the scaler decides whether it skips the step.
        """
        return found

    def load_begins(self) -> None:
        """Called before `load_state_dict` changes the module or a part of it."""


class StepEvents:
    """Tells `listeners` of the events of a step, in the order in which they have subscribed, until
    `close`."""

    def __init__(self) -> None:
        self._listeners: list[StepListener] = []
        self._hooks = contextlib.ExitStack()
        self._follows_ends = self._follows_loads = False
        hook = self._hook = _Hook(self)
        self._hooks.callback(register_optimizer_step_pre_hook(hook.before_step).remove)
        self._hooks.callback(unscaling.around_unscaling(hook.around_unscaling))

    def subscribe(self, listener: StepListener) -> None:
        self._listeners.append(listener)

    def follow_ends(self) -> None:
        """Tells the listeners of the ends of steps from now on."""
        if not self._follows_ends:
            self._follows_ends = True
            hook = register_optimizer_step_post_hook(self._hook.after_step)
            self._hooks.callback(hook.remove)

    def follow_loads(self, module: nn.Module) -> None:
        """Tells the listeners of loads into `module` from now on."""
        if not self._follows_loads:
            self._follows_loads = True
            self._hooks.callback(before_loads(module, self._hook.before_load))

    def close(self) -> None:
        """Removes the hooks."""
        self._hooks.close()

    def step_begins(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Arguments | None:
        changed: Arguments | None = None
        for listener in self._listeners:
            returned = listener.step_begins(optimizer, args, kwargs)
            if returned is not None:
                changed = args, kwargs = returned
        return changed

    def step_ends(self, optimizer: Optimizer) -> None:
        for listener in self._listeners:
            listener.step_ends(optimizer)

    def unscaling_begins(self, optimizer: Optimizer) -> None:
        for listener in self._listeners:
            listener.unscaling_begins(optimizer)

    def unscaling_ends(self, optimizer: Optimizer, found: unscaling.Found) -> unscaling.Found:
        for listener in self._listeners:
            found = listener.unscaling_ends(optimizer, found)
        return found

    def load_begins(self) -> None:
        for listener in self._listeners:
            listener.load_begins()


class _Hook:
    """The functions that torch calls. If a step is compiled, they stay uncompiled, and so does
    everything that they call."""

    def __init__(self, events: StepEvents) -> None:
        # Weak, because torch keeps such hooks for the life of the process.
        self._events = weakref.ref(events)

    @private.untraced
    def before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Arguments | None:
        events = self._events()
        return None if events is None else events.step_begins(optimizer, args, kwargs)

    @private.untraced
    def after_step(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        events = self._events()
        if events is not None:
            events.step_ends(optimizer)

    def around_unscaling(self, optimizer: Optimizer, unscale: unscaling.Unscale) -> unscaling.Found:
        events = self._events()
        if events is None:
            return unscale()
        events.unscaling_begins(optimizer)
        return events.unscaling_ends(optimizer, unscale())

    def before_load(self, _module: nn.Module) -> None:
        events = self._events()
        if events is not None:
            events.load_begins()


def is_outermost_forward() -> bool:
    """Returns False in a recomputation inside a backward and in an evaluation: other ranks do not
    wait for these."""
    return private.graph_task_id() == -1 and torch.is_grad_enabled()


def has_closure(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Returns True if these are the arguments of a step with a closure, whose backward follows."""
    return any(map(callable, (*args[1:], *kwargs.values())))
