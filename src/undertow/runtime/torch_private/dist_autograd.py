"""Backwards of torch.distributed.autograd, which keep gradients in a separate context instead of `.grad`."""

import sys
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from undertow.runtime.torch_private import private


class DistributedBackwards:
    """Calls `on_end(gradients by parameter index)` after such a backward has reached some of `params`, until `close`."""

    def __init__(
        self, params: Sequence[Tensor], *, is_local: Callable[[], bool], on_end: Callable[[dict[int, Tensor]], None]
    ) -> None:
        self._params = params
        self._is_local = is_local
        self._on_end = on_end
        self._context: int | None = None
        self._seen_task = -1
        # These backwards run the hooks of the accumulating nodes, not of the parameters; only this list keeps the nodes alive.
        self._nodes = [private.accumulating_node(param) for param in params]
        self._hooks = [node.register_hook(self._arrive) for node in self._nodes]

    def forward_begins(self) -> None:
        """Remembers the context of the forward, because backward runs in a thread that has none."""
        try:
            self._context = int(sys.modules["torch.distributed.autograd"]._current_context()._context_id())
        except RuntimeError:
            self._context = None

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._nodes = [], []

    def _arrive(self, *_gradients: Any) -> None:
        task = private.graph_task_id()
        if self._context is not None and task != self._seen_task:
            self._seen_task = task
            private.call_after_backward(self._end)

    def _end(self) -> None:
        self._seen_task = -1
        # An ordinary backward has reported its gradients already.
        if self._context is None or self._is_local():
            return
        gradients = sys.modules["torch.distributed.autograd"].get_gradients(self._context)  # by parameter, no copies
        self._on_end({index: gradients[param] for index, param in enumerate(self._params) if param in gradients})
