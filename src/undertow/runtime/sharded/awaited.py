"""Parameters in flight: reading one first waits for it, under whatever name it is reached.

While a parameter is in flight, its class is a subclass that waits, in the same way as torch exchanges the class of a lazy
parameter when it gets its shape. torch calls such a class before every function and attribute of the tensor, so old lists of
parameters, the bare module and copies need no hooks. C++ code that is given the parameter itself does not call it.
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

_T: Any = Tensor  # its attributes are descriptors on the class

# These read no values of a parameter. Every `zero_grad()` uses the first two, and forwards use devices and dtypes. `dim()` is not
# here, because torch.vmap calls nothing else before it takes a tensor from C++.
_READ_NO_VALUES = frozenset(
    {
        *(descriptor.__get__ for descriptor in (_T.grad, _T.requires_grad, _T.is_leaf, _T.shape, _T.dtype, _T.device)),
        *(_T.grad.__set__, _T.grad.__delete__, _T.requires_grad.__set__, _T.requires_grad_),
        *(_T.numel, _T.size, _T.is_floating_point, torch.is_floating_point, _T.is_complex, torch.is_complex),
    }
)


class AwaitedReads:
    """Calls `before_read` before a watched parameter is read; afterwards that parameter is not watched any more."""

    def __init__(self, before_read: Callable[[], object], ids: Collection[int]) -> None:
        """`before_read` is a method of an owner that may be freed before its parameters; `ids` are all parameters to watch."""
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
        """Stops watching: they have arrived, or nothing will gather them any more."""
        for param in params:
            param.__class__ = getattr(type(param), "arrived_class", type(param))


def _awaited_class(kind: type, before_read: Callable[[], Callable[[], object] | None], ids: Collection[int]) -> type:
    def make(_cls: type, *args: Any, **kwargs: Any) -> Any:
        return kind(*args, **kwargs)  # `type(param)(values)` makes a new parameter that nothing waits for

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
        arrive(type(param), param)  # the copy function looked up depends on the class that the parameter has now
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
    """Restores the class of tensors that nothing will gather: all of class `of` except those with an id in `but`."""
    for leaf in tree_leaves(values):
        if isinstance(leaf, of) and id(leaf) not in but:
            leaf.__class__ = of.arrived_class


def _is_parameter_made() -> bool:
    """Returns True inside `nn.Parameter(param)`, which has seen the parameter's other class and expects to see it again."""
    frame = sys._getframe(1)
    for _ in range(4):
        if frame.f_back is None or frame.f_code is nn.Parameter.__new__.__code__:
            break
        frame = frame.f_back
    return frame.f_code is nn.Parameter.__new__.__code__
