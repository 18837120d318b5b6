"""Warns of a backward whose model was closed after its forward."""

import warnings
from collections.abc import Iterable
from functools import partial

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from undertow.engine.hooks import remove_all
from undertow.torch_private import private
from undertow.torch_private.module_hook import ModuleHook


def warn_of_late_backward(module: nn.Module, params: Iterable[Tensor]) -> None:
    """Warns once if a gradient arrives before the next forward of `module`.

    Its own forward ran before `close()`.
    """
    # not the module: parameters' hooks would hold it, and the garbage collector does not see them
    name = type(module).__name__
    hooks: list[RemovableHandle] = []

    def arrives(_param: Tensor) -> None:
        remove_all(hooks)
        warnings.warn(
            "this backward averages nothing: the model was closed between its forward and this "
            "backward.\n"
            f"  {name}\n  Call close() after the last backward.",
            stacklevel=2,
        )

    hooks.append(module.register_forward_pre_hook(ModuleHook(module, partial(remove_all, hooks))))
    with private.as_plain_tensors():  # parameters in flight may never arrive
        hooks.extend(private.hook_gradients(param, arrives) for param in params)
