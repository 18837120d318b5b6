"""The hooks on parameters, and the end of the outermost backward."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from undertow.runtime import private
from undertow.schedule import Arrivals


def watch_parameters(params: Sequence[Tensor], arrivals: Arrivals) -> list[RemovableHandle]:
    """Hooks that report every gradient of `params`, by index."""
    # A partial for each and no closure: thousands of those would not stay in the cache, and every frame counts here.
    return [
        param.register_post_accumulate_grad_hook(partial(arrivals.arrive, index))  # type: ignore[no-untyped-call]
        for index, param in enumerate(params)
    ]


def earlier_watchers(named_params: Iterable[tuple[str, Tensor]], *, but: object = None) -> dict[str, Any]:
    """The engines that watch these parameters already, each by the name of one of them; not the one `but` is a method of."""
    found: dict[int, tuple[str, Any]] = {}
    for name, param in named_params:
        for engine in _watchers_of(param):
            if engine is not getattr(but, "__self__", None):
                found.setdefault(id(engine), (name, engine))
    return dict(found.values())


def is_watched(param: Tensor) -> bool:
    """Whether an engine waits for the gradient of `param`."""
    return any(True for _ in _watchers_of(param))


def _watchers_of(param: Tensor) -> Iterator[Any]:
    for hook in private.post_accumulate_hooks(param):
        arrivals = getattr(hook.func, "__self__", None) if isinstance(hook, partial) else None
        if isinstance(arrivals, Arrivals):
            yield arrivals.listener


def is_outermost_forward() -> bool:
    """Not a recomputation inside a backward, nor an evaluation, for which no other rank waits."""
    return private.graph_task_id() == -1 and torch.is_grad_enabled()


class ModuleHook:
    """Calls `then` where it is registered with `module`. A copy of the module has it too, where it does nothing."""

    def __init__(self, module: nn.Module, then: Callable[[], None]) -> None:
        self._module = weakref.ref(module)
        self._then = then

    def __call__(self, called: nn.Module, *_arguments: Any) -> None:
        if called is self._module():
            self._then()

    def __reduce__(self) -> tuple[Any, ...]:
        return _no_hook, ()


def _no_hook() -> Callable[..., None]:
    return _do_nothing


def _do_nothing(*_arguments: Any) -> None:
    return None


class OutermostEnd:
    """Calls `on_end` when the outermost of nested backwards is over, where a reentrant checkpoint runs one inside another."""

    def __init__(self, on_end: Callable[[], None]) -> None:
        self._on_end = on_end
        self._watched: set[int] = set()
        self._watches: weakref.WeakSet[_Watch] = weakref.WeakSet()

    @property
    def is_coming(self) -> bool:
        """Whether a watched backward still runs; one that an exception has ended does not, and its end never comes."""
        return len(self._watches) > 0

    def watch(self, task: int) -> None:
        """Called from a hook that runs in backward `task`; once per task is enough."""
        if task not in self._watched:
            self._watched.add(task)
            watch = _Watch(self._task_is_over)
            self._watches.add(watch)
            private.call_after_backward(watch)

    def forget(self) -> None:
        """The next round is another one: tasks of this one, also those that an exception ended, count no more."""
        self._watched.clear()
        self._watches.clear()

    @private.untraced  # where a whole step is compiled, what runs in its backward is looked at too
    def _task_is_over(self, watch: _Watch) -> None:
        node = private.enclosing_node()
        if node is None:
            self._on_end()
            return

        # The task ran inside a node of an outer one: when that node is done, wait for the end of the outer task.
        def climb(*_gradients: Any, _watch: _Watch = watch) -> None:
            handle.remove()
            self.watch(private.graph_task_id())

        handle = node.register_hook(climb)


class _Watch:
    """What a backward calls at its end. Held by nothing but that backward: it is gone as soon as that one is."""

    __slots__ = ("__weakref__", "_on_over")

    def __init__(self, on_over: Callable[[_Watch], None]) -> None:
        self._on_over = on_over

    def __call__(self) -> None:
        self._on_over(self)
