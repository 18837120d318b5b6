"""Parameters on their way: a read of one waits for it first, through whatever name it is reached.

While a parameter is on its way its class is a subclass that waits, as torch exchanges the class of a lazy parameter when it
gets its shape. torch asks such a class before every function and attribute of its own; so lists that were made long ago, the
bare module and copies need no hooks. Code in C++ that is given the parameter itself is not asked.
"""

from __future__ import annotations

import copy
import sys
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from undertow.runtime.torch_private import private

_T: Any = Tensor  # whose attributes are descriptors on the class

# They say nothing of a parameter's values. Every `zero_grad()` asks for the first two, forwards for devices and dtypes.
# Not `dim()`: it is all that torch.vmap asks before it takes a tensor from C++.
_READ_NO_VALUES = frozenset(
    {
        *(descriptor.__get__ for descriptor in (_T.grad, _T.requires_grad, _T.is_leaf, _T.shape, _T.dtype, _T.device)),
        *(_T.grad.__set__, _T.grad.__delete__, _T.requires_grad.__set__, _T.requires_grad_),
        *(_T.numel, _T.size, _T.is_floating_point, torch.is_floating_point, _T.is_complex, torch.is_complex),
    }
)


class AwaitedReads:
    """Calls `before_read` before a parameter that is watched is read; afterwards none that is read is watched any more."""

    def __init__(self, before_read: Callable[[], object], ids: Collection[int]) -> None:
        """`before_read` is a method of the owner, which may go before its parameters do; `ids` are of all that may be watched."""
        self._before_read = weakref.WeakMethod(before_read)
        self._ids = ids
        self._classes: dict[type, type] = {}

    def watch(self, params: Iterable[Tensor]) -> None:
        for param in params:
            kind = type(param)
            if not hasattr(kind, "arrived_class"):
                if kind not in self._classes:
                    self._classes[kind] = _awaited_class(kind, self._before_read, self._ids)
                param.__class__ = self._classes[kind]

    def release(self, params: Iterable[Tensor]) -> None:
        """They have come, or nothing will bring them any more."""
        for param in params:
            param.__class__ = getattr(type(param), "arrived_class", type(param))


def _awaited_class(kind: type, before_read: Callable[[], Callable[[], object] | None], ids: Collection[int]) -> type:
    def make(_cls: type, *args: Any, **kwargs: Any) -> Any:
        return kind(*args, **kwargs)  # of `type(param)(values)`: nobody waits for it

    def arrive(cls: type, values: Any) -> None:
        wait = before_read()
        if wait is not None:
            wait()
        # torch.utils.swap_tensors gives the class to other tensors.
        _give_back(values, of=cls, but=() if wait is None else ids)

    def read(cls: type, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        if function in _READ_NO_VALUES:
            with private.as_plain_tensors():
                return function(*args, **(kwargs or {}))
        arrive(cls, (args, kwargs))
        if function is _T.detach and kind is nn.Parameter and _is_parameter_made():
            return _T._make_subclass(kind, args[0])
        return function(*args, **(kwargs or {}))

    def deep_copy(param: Tensor, memo: dict[int, Any]) -> Any:
        arrive(type(param), param)  # a parameter is copied by the class that it has when it is asked
        return copy.deepcopy(param, memo)

    def reduce(param: Any, protocol: Any) -> Any:
        arrive(type(param), param)
        return param.__reduce_ex__(protocol)

    return type(kind)(
        kind.__name__,
        (kind,),
        {
            "__module__": kind.__module__,
            "__new__": make,
            "__torch_function__": classmethod(private.untraced(read)),
            "__deepcopy__": private.untraced(deep_copy),
            "__reduce_ex__": reduce,
            "arrived_class": kind,
        },
    )


def _give_back(values: Any, *, of: Any, but: Collection[int]) -> None:
    """Tensors of the class `of` that nothing will bring get the class back that they had, all `but` those, by id."""
    for leaf in tree_leaves(values):
        if isinstance(leaf, of) and id(leaf) not in but:
            leaf.__class__ = of.arrived_class


def _is_parameter_made() -> bool:
    """Whether this is called by `nn.Parameter(param)`, which has seen another class than its own and wants to see that again."""
    frame = sys._getframe(1)
    for _ in range(4):
        if frame.f_back is None or frame.f_code is nn.Parameter.__new__.__code__:
            break
        frame = frame.f_back
    return frame.f_code is nn.Parameter.__new__.__code__
