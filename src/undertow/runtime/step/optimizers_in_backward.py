"""Optimizers that torch steps within a backward."""

from collections.abc import Callable

from torch import Tensor

from undertow.runtime.replan.param_hooks import ParamHooks
from undertow.runtime.torch_private import private


class OptimizersInBackward:
    """Steps the optimizers that torch.distributed.optim._apply_optimizer_in_backward has put on parameters.

    Torch has them step as soon as a gradient is there; here they wait until it is the mean over ranks.
    """

    def __init__(self) -> None:
        self.rearm: dict[Tensor, Callable[[], None]] = {}  # by parameter, identified by identity
        self.seen: ParamHooks | None = None

    def take_over(self, hooks: ParamHooks) -> None:
        """Also takes over the optimizers of these parameters; once is enough."""
        self.seen = hooks
        for param in hooks.params:
            if param not in self.rearm and private.optimizers_in_backward(param):
                self.rearm[param] = private.disarm_optimizers_in_backward(param)

    def step(self) -> None:
        """Updates every parameter that has a gradient, and drops the gradient."""
        for param in self.rearm:
            if param.grad is not None:
                for optimizer in private.optimizers_in_backward(param):
                    optimizer.step()
                param.grad = None

    def close(self) -> None:
        """Lets them step by themselves again."""
        for rearm in self.rearm.values():
            rearm()
        self.rearm.clear()
        self.seen = None
