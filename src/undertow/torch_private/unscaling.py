"""Looks at a GradScaler's unscaling of gradients, which torch has no hook for."""

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from undertow.torch_private.private import untraced

# A GradScaler unscales gradients by the first, which looks for infinities too; zero_grad writes
# zeros by the second.
unscale_each: Any = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default
zero_each: Any = torch.ops.aten._foreach_zero_.default

# by device: 1.0 if a gradient there is not finite, else 0.0
Found = dict[torch.device, torch.Tensor]
Unscale = Callable[[], Found]
Around = Callable[[torch.optim.Optimizer, Unscale], Found]
_unscale = torch.amp.GradScaler._unscale_grads_
_changing = threading.RLock()  # reentrant: the garbage collector may call the undo at any time
_arounds: list[Around] = []  # of everything attached; if empty, torch has its original method


def around_unscaling(around: Around) -> Callable[[], None]:
    """Calls `around(optimizer, unscale)` whenever a scaler looks at an optimizer's gradients.

    Returns a function that undoes this.

    `unscale()` does the scaler's own work. The first `around` registered is the outermost.
    GradScaler.step uses the returned values to decide whether it skips, and GradScaler.update to
    choose the next scale.
    """
    with _changing:
        _arounds.append(around)
        torch.amp.GradScaler._unscale_grads_ = _unscale_within  # type: ignore[assignment, method-assign]

    def undo() -> None:
        with _changing:
            _arounds.remove(around)
            # Not if other code has wrapped it since.
            if not _arounds and torch.amp.GradScaler._unscale_grads_ is _unscale_within:
                torch.amp.GradScaler._unscale_grads_ = _unscale  # type: ignore[method-assign]

    return undo


def is_done_by_step(optimizer: torch.optim.Optimizer) -> bool:
    """Returns True if a scaler leaves unscaling, and skipping, to the optimizer's step: a fused
    one."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


@untraced
def _unscale_within(
    scaler: Any, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any
) -> Found:
    unscale: Unscale = partial(_unscale, scaler, optimizer, *args, **kwargs)
    for around in reversed(tuple(_arounds)):
        unscale = partial(around, optimizer, unscale)
    return unscale()
