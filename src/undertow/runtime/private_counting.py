"""What collectives are handed, counted where torch dispatches them; private to torch like what is in `private`."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode, _pop_mode, _push_mode


class CollectiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's has no types
    """Inside, `num_bytes` grows by what every collective is handed: the larger of what it reads and what it writes.

    Only collectives of this thread count, and those of callbacks that are put on futures inside, which run in any thread.
    """

    def __init__(self, parent: CollectiveBytes | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_bytes = 0
        self._parent = parent

    def __enter__(self) -> CollectiveBytes:
        global _num_counting
        with _counting:
            _num_counting += 1
            torch._C.Future.then = _then_counting  # type: ignore[assignment, method-assign]
        # Not as TorchDispatchMode does it, which also notes for the whole process, and not for this thread, what there was
        # before: a mode of another thread that ends in between would be there for ever, for torch.compile.
        _push_mode(self)
        return self

    def __exit__(self, *_error: Any) -> None:
        global _num_counting
        _pop_mode()
        with _counting:
            _num_counting -= 1
            if _num_counting == 0:
                torch._C.Future.then = _then  # type: ignore[method-assign]

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Asked by torch.compile, which else compiles nothing inside: fullgraph=True would be an error."""
        return True

    def __torch_dispatch__(self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        result = op(*args, **(kwargs or {}))
        if op.namespace == "c10d":
            self._add(max(map(_tensor_bytes, args), default=0))
        elif op.namespace == "_c10d_functional" and op.name() not in _NO_COLLECTIVES:
            self._add(max(map(_tensor_bytes, (*args, result))))
        return result

    def around(self, callback: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """The callback, which counts here."""

        def counted(future: Any) -> Any:
            if isinstance(_get_current_dispatch_mode(), CollectiveBytes):
                return callback(future)  # it was complete already: we are inside still
            with CollectiveBytes(self):  # of its own: a mode knows in which thread it is
                return callback(future)

        return counted

    def _add(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        if self._parent is not None:
            self._parent._add(num_bytes)


_NO_COLLECTIVES = ("_c10d_functional::wait_tensor", "_c10d_functional::_wrap_tensor_autograd")
_then = torch._C.Future.then
_counting = threading.Lock()
_num_counting = 0  # inside, of all threads: `then` is torch's own where it is 0


def _then_counting(future: Any, callback: Callable[[Any], Any]) -> Any:
    """In place of torch's `then`: modes belong to a thread, and a future's callbacks run in whichever completes it."""
    counting = _get_current_dispatch_mode()
    return _then(future, counting.around(callback) if isinstance(counting, CollectiveBytes) else callback)


def _tensor_bytes(value: object) -> int:
    if isinstance(value, torch.Tensor):
        return value._indices().nbytes + value._values().nbytes if value.is_sparse else value.nbytes
    return sum(map(_tensor_bytes, value)) if isinstance(value, list | tuple) else 0
