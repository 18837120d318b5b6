"""The hooks on parameters, and the end of the outermost backward."""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook, register_module_parameter_registration_hook
from torch.utils.hooks import RemovableHandle

from undertow.runtime.torch_private import private
from undertow.runtime.torch_private.module_hook import ModuleHook
from undertow.schedule import Arrivals, SerialArrivals

for _arrive in (Arrivals.arrive, SerialArrivals.arrive):
    private.left_alone(_arrive)  # where a backward is compiled with what surrounds it, its hooks are looked at too


def watch_parameters(params: Sequence[Tensor], arrivals: Arrivals) -> list[RemovableHandle]:
    """Hooks that report every gradient of `params`, by index."""
    # A partial for each and no closure: thousands of those would not stay in the cache, and every frame counts here.
    return [private.hook_gradients(param, partial(arrivals.arrive, index)) for index, param in enumerate(params)]


def earlier_watchers(named_params: Iterable[tuple[str, Tensor]], *, but: object = None) -> dict[str, Any]:
    """The engines that watch these parameters already, each by the name of one of them; not the one `but` is a method of."""
    found: dict[int, tuple[str, Any]] = {}
    for name, param in named_params:
        for engine in _watchers_of(param):
            if engine is not getattr(but, "__self__", None):
                found.setdefault(id(engine), (name, engine))
    return dict(found.values())


def is_watched(param: Tensor, *, but: object = None) -> bool:
    """Whether an engine waits for the gradient of `param`; another one than `but`."""
    return any(engine is not but for engine in _watchers_of(param))


def watch_frozen(params: Iterable[Tensor], then: Callable[[Tensor], object]) -> list[RemovableHandle]:
    """Hooks that call `then(param)` when a gradient comes after all: somebody has unfrozen the parameter since."""
    hooks = []
    for param in params:
        with contextlib.suppress(RuntimeError):  # it never can be trained
            hooks.append(private.hook_gradients(param, then))
    return hooks


def call_at_registration(then: Callable[[], object]) -> Callable[[], None]:
    """Calls `then` whenever any module gets a parameter or a submodule; returns what ends that."""

    def hook(*_registered: object) -> None:
        then()

    hooks = [
        register_module_parameter_registration_hook(hook),
        register_module_module_registration_hook(hook),
    ]

    def remove() -> None:
        for each in hooks:
            each.remove()

    return remove


def _watchers_of(param: Tensor) -> Iterator[Any]:
    for hook in private.post_accumulate_hooks(param):
        arrivals = getattr(hook.func, "__self__", None) if isinstance(hook, partial) else None
        if isinstance(arrivals, Arrivals):
            yield arrivals.listener


def is_outermost_forward() -> bool:
    """Not a recomputation inside a backward, nor an evaluation, for which no other rank waits."""
    return private.graph_task_id() == -1 and torch.is_grad_enabled()


def warn_of_late_backward(module: nn.Module, params: Iterable[Tensor]) -> None:
    """Warns once if a gradient arrives before the next forward of `module`: its own forward ran before `close()`."""
    name = type(module).__name__  # not the module: parameters' hooks would hold it, and the garbage collector does not see them
    hooks: list[RemovableHandle] = []

    def forget() -> None:
        for hook in hooks:
            hook.remove()
        hooks.clear()

    def arrives(_param: Tensor) -> None:
        forget()
        warnings.warn(
            "this backward averages nothing: the model was closed between its forward and this backward.\n"
            f"  {name}\n  Call close() after the last backward.",
            stacklevel=2,
        )

    hooks.append(module.register_forward_pre_hook(ModuleHook(module, forget)))
    hooks.extend(param.register_post_accumulate_grad_hook(arrives) for param in params)  # type: ignore[no-untyped-call]


class OutermostEnd:
    """Calls `on_end` when the outermost of nested backwards is over, where a reentrant checkpoint runs one inside another."""

    def __init__(self, on_end: Callable[[], None]) -> None:
        self._on_end = on_end
        self._watched: set[int] = set()
        self._watches: weakref.WeakSet[_BackwardEnd] = weakref.WeakSet()

    @property
    def is_coming(self) -> bool:
        """Whether a watched backward still runs; one that an exception has ended does not, and its end never comes."""
        return len(self._watches) > 0

    def watch(self, task: int) -> None:
        """Called from a hook that runs in backward `task`; once per task is enough."""
        if task not in self._watched:
            self._watched.add(task)
            watch = _BackwardEnd(self._task_is_over)
            self._watches.add(watch)
            private.call_after_backward(watch)

    def forget(self) -> None:
        """The next round is another one: tasks of this one, also those that an exception ended, count no more."""
        self._watched.clear()
        self._watches.clear()

    @private.untraced  # where a whole step is compiled, what runs in its backward is looked at too
    def _task_is_over(self, watch: _BackwardEnd) -> None:
        node = private.enclosing_node()
        if node is None:
            self._on_end()
            return

        # The task ran inside a node of an outer one: when that node is done, wait for the end of the outer task.
        def climb(*_gradients: Any, _watch: _BackwardEnd = watch) -> None:
            handle.remove()
            self.watch(private.graph_task_id())

        handle = node.register_hook(climb)


class _BackwardEnd:
    """What a backward calls at its end. Held by nothing but that backward: it is gone as soon as that one is."""

    __slots__ = ("__weakref__", "_on_over")

    def __init__(self, on_over: Callable[[_BackwardEnd], None]) -> None:
        self._on_over = on_over

    @private.left_alone
    def __call__(self) -> None:
        self._on_over(self)
