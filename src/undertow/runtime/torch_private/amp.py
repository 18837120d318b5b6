"""Hooks into torch's GradScaler where it unscales gradients and looks for infinite ones; private to torch, like `private`."""

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from undertow.runtime.torch_private import private

Found = dict[torch.device, Tensor]  # by device: 1.0 if a gradient there is not finite, else 0.0
Look = Callable[[], Found]
Around = Callable[[Optimizer, Look], Found]


def around_unscaling(around: Around) -> Callable[[], None]:
    """Calls `around(optimizer, look)` whenever a scaler looks at an optimizer's gradients; returns a function that undoes this.

    `look()` does the scaler's own work. The first `around` registered is the outermost. GradScaler.step uses the returned values
    to decide whether it skips, and GradScaler.update to choose the next scale.
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


@private.untraced
def _unscale_within(scaler: Any, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Found:
    look: Look = partial(_unscale, scaler, optimizer, *args, **kwargs)
    for around in reversed(tuple(_arounds)):
        look = partial(around, optimizer, look)
    return look()


_unscale = torch.amp.GradScaler._unscale_grads_
_changing = threading.RLock()  # reentrant: the garbage collector may call the undo at any time
_arounds: list[Around] = []  # of everything attached; if empty, torch has its original method
