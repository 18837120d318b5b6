"""The hooks on parameters, and the end of the outermost backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from undertow.errors import ConfigError
from undertow.runtime import private
from undertow.schedule import Op


class Arrivals:
    """What every parameter's hook reads: the backward under way, and whom to tell.

    One object for all hooks, because a re-plan or another mode changes whom to tell.
    """

    __slots__ = ("arrive", "enter", "run", "task")

    def __init__(self, enter: Callable[[int], None], run: Callable[[Sequence[Op]], None]) -> None:
        self.enter = enter  # called when the innermost backward has changed
        self.run = run  # issues the ops that an arrival has released
        self.arrive: Callable[[int], Sequence[Op]] = _nobody_expects
        self.task = -1


def watch_parameters(params: Sequence[Tensor], arrivals: Arrivals) -> list[RemovableHandle]:
    """Hooks that report every gradient of `params`, by index."""
    report = _reporter(arrivals)
    # One function for all and a partial for each: thousands of closures would not stay in the cache.
    return [
        param.register_post_accumulate_grad_hook(partial(report, index))  # type: ignore[no-untyped-call]
        for index, param in enumerate(params)
    ]


def require_unwatched(named_params: Sequence[tuple[str, Tensor]]) -> None:
    """ConfigError if some parameter is synchronised already."""
    for name, param in named_params:
        if any(_is_ours(hook) for hook in private.post_accumulate_hooks(param)):
            raise ConfigError(
                "this module is synchronised already.",
                where=f"parameter {name!r} belongs to an earlier attach() or DistributedDataParallel",
                remedy="Wrap a module once; call close() on the earlier one to wrap it anew.",
            )


def _reporter(arrivals: Arrivals) -> Callable[[int, Tensor], None]:
    graph_task_id = private.graph_task_id

    # Runs once per parameter and step: no line more than must be.
    def report(index: int, _param: Tensor) -> None:
        if graph_task_id() != arrivals.task:
            arrivals.enter(graph_task_id())
        released = arrivals.arrive(index)
        if released:
            arrivals.run(released)

    return report


def _is_ours(hook: object) -> bool:
    return isinstance(hook, partial) and getattr(hook.func, "__module__", None) == __name__


def _nobody_expects(_param: int) -> Sequence[Op]:
    return ()


class OutermostEnd:
    """Calls `on_end` when the outermost of nested backwards is over, where a reentrant checkpoint runs one inside another."""

    def __init__(self, on_end: Callable[[], None]) -> None:
        self._on_end = on_end
        self._watched: set[int] = set()

    def watch(self, task: int) -> None:
        """Called from a hook that runs in backward `task`; once per task is enough."""
        if task not in self._watched:
            self._watched.add(task)
            private.call_after_backward(self._task_is_over)

    def forget(self) -> None:
        """The next round is another one: tasks of this one, also those that an exception ended, count no more."""
        self._watched.clear()

    def _task_is_over(self) -> None:
        node = private.enclosing_node()
        if node is None:
            self._on_end()
            return

        # The task ran inside a node of an outer one: when that node is done, wait for the end of the outer task.
        def climb(*_gradients: Any) -> None:
            handle.remove()
            self.watch(private.graph_task_id())

        handle = node.register_hook(climb)
