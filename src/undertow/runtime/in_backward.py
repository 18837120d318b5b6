"""Optimizers that step as part of backward."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from undertow.runtime import private


class InBackward:
    """Steps the optimizers that torch.distributed.optim._apply_optimizer_in_backward has put on `params`.

    Torch has them step as soon as a gradient is there; here they wait until it is the mean over ranks.
    """

    def __init__(self, params: Sequence[Tensor]) -> None:
        self._params = [param for param in params if private.optimizers_in_backward(param)]
        for param in self._params:
            private.disarm_optimizers_in_backward(param)

    def step(self) -> None:
        """Updates every parameter that has a gradient, and drops the gradient."""
        for param in self._params:
            if param.grad is not None:
                for optimizer in private.optimizers_in_backward(param):
                    optimizer.step()
                param.grad = None
