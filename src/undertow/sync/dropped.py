"""A model whose gradients nobody averages any more: closed between a forward and its backward, or
dropped without `close()`."""

import os
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from undertow.engine.engine import Engine
from undertow.engine.hooks import is_watched, remove_all
from undertow.engine.progress import params_of
from undertow.torch_private import private, tables
from undertow.torch_private.module_hook import ModuleHook

# names of Undertow's threads, and of threads that Python has not started
_NOT_THE_USERS = ("undertow-", "Dummy-")


def let_go(
    engine: Engine, close: Callable[[], object], process: int, module: weakref.ref[nn.Module]
) -> None:
    """Calls `close` for a model that user code has dropped, and warns if its `module` is trained
    without averaging from then on.

    It waits for the parameters of the engine's last step, and of its siblings' last steps, because
    other ranks wait for this rank's shards. Errors are dropped. It does not wait if the garbage
    collector runs in one of Undertow's threads, which may be the one that gathers parameters, or in
    a child process, which has no such threads.
    """
    try:
        if os.getpid() == process and not threading.current_thread().name.startswith(
            _NOT_THE_USERS
        ):
            engine.siblings.wait_for_parameters()
        there = module()
        if (
            os.getpid() == process
            and there is not None
            and not engine.is_closed
            and engine.current_plan.trains
        ):
            _warn_of_dropped(there, set(engine.current_plan.hooks.ids))
    finally:
        close()


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


def _warn_of_dropped(module: nn.Module, ids: set[int]) -> None:
    """Warns once, when an optimizer steps on one of these parameters, by id, unless `module` is
    gone or wrapped anew."""
    weak_module = weakref.ref(module)

    @private.untraced
    def before_step(optimizer: Optimizer, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
        module = weak_module()
        if module is None or not ids or ids.isdisjoint(map(id, params_of(optimizer))):
            return
        is_left = any(
            id(param) in ids and not is_watched(param)
            for _, param in tables.named_parameters(module)
        )
        ids.clear()  # torch's loop over hooks forbids to remove one
        if is_left:
            warnings.warn(
                f"{type(optimizer).__name__} steps on gradients that are not averaged any more: "
                "nothing refers to the wrapper "
                f"of their module, so it is gone.\n  {type(module).__name__}\n"
                "  Keep the wrapper, and call it: model = DistributedDataParallel(model). To "
                "train without it, close() it first.",
                stacklevel=2,
            )

    ends = weakref.finalize(module, register_optimizer_step_pre_hook(before_step).remove)
    ends.atexit = False
