"""The modules, parameters and buffers that are registered in a module, whatever its class lists as such.

A class may override `named_parameters` and the like: models with adapters list only the adapters, for the optimizer. Every rank
averages all that autograd reaches, so the library reads the tables themselves. Names and order are torch's.
"""

from collections.abc import Iterator, MutableMapping
from typing import Any

from torch import Tensor, nn


class _ScriptTable(MutableMapping[str, Any]):
    """The table of a TorchScript module, which lacks some methods of a dict."""

    def __init__(self, table: Any) -> None:
        self._table = table

    def __getitem__(self, name: str) -> Any:
        return self._table[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self._table[name] = value

    def __delitem__(self, name: str) -> None:
        del self._table[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._table.keys())

    def __len__(self) -> int:
        return len(self._table)


def own_modules(module: nn.Module) -> MutableMapping[str, nn.Module | None]:
    """Returns the table of the module's children."""
    return _table(module._modules)


def own_parameters(module: nn.Module) -> MutableMapping[str, nn.Parameter | None]:
    """Returns the table of the parameters that the module itself has."""
    return _table(module._parameters)


def own_buffers(module: nn.Module) -> MutableMapping[str, Tensor | None]:
    """Returns the table of the buffers that the module itself has."""
    return _table(module._buffers)


def named_modules(module: nn.Module, *, is_unique: bool = True) -> Iterator[tuple[str, nn.Module]]:
    """Yields the module and all modules inside of it by name; under each of its names unless `is_unique`."""
    return _inside(module, "", set() if is_unique else None)


def named_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yields all parameters by name; a shared one once."""
    return _once((prefix, own_parameters(part)) for prefix, part in named_modules(module))


def named_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields all buffers by name; a shared one once."""
    return _once((prefix, own_buffers(part)) for prefix, part in named_modules(module))


def joined(prefix: str, name: str) -> str:
    """Returns the full name of what the module `prefix` calls `name`."""
    return f"{prefix}.{name}" if prefix else name


def _table(table: Any) -> Any:
    return table if isinstance(table, dict) else _ScriptTable(table)


def _inside(module: nn.Module, name: str, seen: set[nn.Module] | None) -> Iterator[tuple[str, nn.Module]]:
    if seen is not None:
        if module in seen:
            return
        seen.add(module)
    yield name, module
    for inner, child in own_modules(module).items():
        if child is not None:
            yield from _inside(child, joined(name, inner), seen)


def _once(tables: Iterator[tuple[str, MutableMapping[str, Any]]]) -> Iterator[tuple[str, Any]]:
    seen = set[int]()
    for prefix, table in tables:
        for name, tensor in table.items():
            if tensor is not None and id(tensor) not in seen:
                seen.add(id(tensor))
                yield joined(prefix, name), tensor
