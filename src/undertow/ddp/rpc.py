"""Gradients of torch.distributed.rpc. Distributed autograd keeps them in a context, and no engine
sees them.

When a backward ends, they are averaged in the context.
"""

from collections.abc import Callable, Mapping

from torch import Tensor
from torch.autograd.graph import register_multi_grad_hook

from undertow.engine.engine import Engine
from undertow.engine.hooks import is_outermost_forward, remove_all
from undertow.ranks.agreement import send_in_place
from undertow.sync.gradient_sync import GradientSync
from undertow.torch_private import private


def forward_begins(sync: GradientSync) -> None:
    """Called before a forward of the wrapper.

    In a context, each backward after it averages the gradients of the context.
    """
    if not is_outermost_forward():
        return
    remove_all(sync._forward_hooks)  # of an earlier forward; a wrapper has no others
    context = private.autograd_context()
    engines = [part._engine for part in sync._parts]
    if context is None or not engines[0].current_plan.is_active:
        return
    params = [param for engine in engines for _, param in engine.current_plan.members.trained_now()]

    def backward_ends() -> None:
        gradients = private.gradients_in(context)
        # A local backward is within a round of the engine, and torch.autograd.grad leaves no
        # gradients.
        if engines[0].is_busy or engines[0].is_accumulating or gradients.keys().isdisjoint(params):
            return
        for engine in engines:
            # The function waits after all models have sent: on another rank they may end in another
            # order.
            private.call_after_backward(start_mean(engine, gradients))

    hook = register_multi_grad_hook(
        params, lambda _: private.call_after_backward(backward_ends), mode="any"
    )
    sync._forward_hooks.append(hook)


def start_mean(engine: Engine, gradients: Mapping[Tensor, Tensor]) -> Callable[[], None]:
    """Starts to average gradients, by parameter; returns a function that writes the means into
    them. A collective call.

    A parameter without a gradient here counts as zeros.
    """
    engine.progress.is_owed = False
    sent: list[Tensor] = []
    for _, param in engine.current_plan.members.trained_now():
        dtype = private.gradient_dtype(param)
        gradient = (
            gradients[param] if param in gradients else param.new_zeros(param.shape, dtype=dtype)
        )
        sent.append(gradient.mul_(engine.progress.rescale))
    return send_in_place(sent, engine.current_plan.group, averages=True)
