"""Where torch's GradScaler looks for infinite gradients and unscales them; private to torch like what is in `private`."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from undertow.runtime.torch_private import private

Found = dict[torch.device, Tensor]  # by device, 1.0 where a gradient there is not finite, else 0.0
Look = Callable[[], Found]
Around = Callable[[Optimizer, Look], Found]


def around_unscaling(around: Around) -> Callable[[], None]:
    """Has `around(optimizer, look)` called wherever a scaler looks at an optimizer's gradients; returns what undoes that.

    `look()` does what the scaler would have done. What is asked for first is the outermost. GradScaler.step skips by what is
    returned, and GradScaler.update makes the next scale of it.
    """
    with _changing:
        _arounds.append(around)
        torch.amp.GradScaler._unscale_grads_ = _unscale_within  # type: ignore[assignment, method-assign]

    def undo() -> None:
        with _changing:
            _arounds.remove(around)
            # Not where somebody else has put something of theirs on top of it since.
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
_changing = threading.RLock()  # the garbage collector, which may undo, comes at any time
_arounds: list[Around] = []  # of all that is attached: torch's method is its own where there is none
