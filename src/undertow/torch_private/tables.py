"""The modules, parameters and buffers that are registered in a module, not those that its class
lists.

A class may override `named_parameters` and the like: models with adapters list only the adapters,
for the optimizer. Every rank averages all that autograd reaches, so the library reads the tables
themselves. Names and order are torch's.
"""

from collections.abc import Callable, Iterator, MutableMapping
from operator import attrgetter
from typing import Any, cast

from torch import Tensor, nn

# The tables of the children and of the parameters that a module itself has. Asked for every module
# in every forward, hence without a frame.
own_children: Callable[[Any], Any] = attrgetter("_modules")
own_parameters: Callable[[Any], Any] = attrgetter("_parameters")


class _ScriptTable:
    """The table of a TorchScript module, with the methods of a dict that it lacks."""

    def __init__(self, table: Any) -> None:
        self._table = table

    def __iter__(self) -> Iterator[str]:
        return iter(self._table.keys())

    def __setitem__(self, name: str, tensor: Tensor, /) -> None:
        self._table[name] = tensor

    def get(self, name: str, /) -> Any:
        return self._table[name] if name in self._table else None  # noqa: SIM401  it is the method


def own_buffers(module: nn.Module) -> MutableMapping[str, Tensor | None]:
    """Returns the table of the buffers that the module itself has."""
    table = module._buffers if isinstance(module._buffers, dict) else _ScriptTable(module._buffers)
    # Right for a _ScriptTable: only the methods above are called.
    return cast(MutableMapping[str, Tensor | None], table)


def own_tensors(module: nn.Module) -> list[tuple[str, Tensor | None]]:
    """Returns the parameters and buffers that the module itself has, by name; some may be None."""
    return [*module._parameters.items(), *module._buffers.items()]


def named_modules(module: nn.Module, *, is_unique: bool = True) -> Iterator[tuple[str, nn.Module]]:
    """Yields the module and all modules inside of it by name.

    Under each of its names unless `is_unique`.
    """
    return _inside(module, "", set() if is_unique else None)


def named_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yields all parameters by name; a shared one once."""
    return _once(module, "_parameters")


def named_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields all buffers by name; a shared one once."""
    return _once(module, "_buffers")


def joined(prefix: str, name: str) -> str:
    """Returns the full name of the member that the module `prefix` calls `name`."""
    return f"{prefix}.{name}" if prefix else name


def _inside(
    module: nn.Module, name: str, seen: set[nn.Module] | None
) -> Iterator[tuple[str, nn.Module]]:
    if seen is not None:
        if module in seen:
            return
        seen.add(module)
    yield name, module
    for inner, child in module._modules.items():
        if child is not None:
            yield from _inside(child, joined(name, inner), seen)


def _once(module: nn.Module, table: str) -> Iterator[tuple[str, Any]]:
    seen = set[int]()
    for prefix, part in named_modules(module):
        for name, tensor in getattr(part, table).items():
            if tensor is not None and id(tensor) not in seen:
                seen.add(id(tensor))
                yield joined(prefix, name), tensor
