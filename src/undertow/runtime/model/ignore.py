"""The parameters and buffers that the user excludes from synchronization."""

from __future__ import annotations

import difflib
from collections import defaultdict
from collections.abc import Iterable, Iterator

from torch import Tensor, nn

from undertow.errors import ConfigError, WrongType


def names_to_ignore(module: nn.Module, ignore: Iterable[str | nn.Module | Tensor]) -> tuple[str, ...]:
    """Returns sorted names of the parameters and buffers in `ignore`, which lists names, tensors, submodules or their names.

    A tied weight is ignored as a whole, whichever of its names is given, and all its names are returned. Raises ConfigError for
    an entry that the module does not have, and WrongType for an entry of another type.
    """
    if isinstance(ignore, str | Tensor | nn.Module) or not isinstance(ignore, Iterable):
        raise WrongType(
            f"ignore must be a sequence of names, modules and tensors, got {_brief(ignore)}.",
            where=_where(module),
            remedy=f"Write ignore=({_brief(ignore)},)." if isinstance(ignore, str) else "Write ignore=(it,).",
        )
    contents = _Contents(module)
    chosen = {name for entry in ignore for name in contents.names_of(entry)}
    return tuple(sorted(chosen | contents.other_names_of(chosen)))


def still_there(module: nn.Module, names: Iterable[str]) -> tuple[str, ...]:
    """Returns the names of parameters and buffers that the module still has."""
    known = {name for name, _ in _named_places(module)}
    return tuple(name for name in names if name in known)


class _Contents:
    """Everything in a module that has a name."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._tensors = dict(_named_places(module))  # including places that hold None so far
        self._names: dict[int, set[str]] = defaultdict(set)  # by the tensor's id
        for name, tensor in self._tensors.items():
            if tensor is not None:
                self._names[id(tensor)].add(name)
        # Without the module itself: ignoring all of it is never intended.
        self._parts = {name: part for name, part in module.named_modules(remove_duplicate=False) if name}

    def names_of(self, entry: object) -> set[str]:
        """Returns the names of the parameters and buffers that `entry` refers to."""
        match entry:
            case str():
                return self._below(entry)
            case nn.Module():
                return self._inside(entry)
            case Tensor():
                return self._names.get(id(entry)) or self._refuse(f"a tensor of shape {tuple(entry.shape)}")
        raise WrongType(
            f"ignore takes names, modules, parameters and buffers, got {_brief(entry)}.",
            where=_where(self._module),
            remedy='Write ignore=("embedding.weight", model.head).',
        )

    def other_names_of(self, names: Iterable[str]) -> set[str]:
        """Returns all names of the tensors that have these names."""
        return {other for name in names for other in self._names.get(id(self._tensors[name]), ())}

    def _below(self, name: str) -> set[str]:
        if name in self._tensors:
            return {name}
        if name in self._parts:
            return {f"{name}.{inner}" for inner, _ in _named_places(self._parts[name])}
        close = difflib.get_close_matches(name, [*self._tensors, *self._parts], n=1)
        raise ConfigError(
            f"there is no {name!r} to ignore.",
            where=_where(self._module),
            remedy=f"Did you mean {close[0]!r}?"
            if close
            else "Use names of named_parameters(), named_buffers() or named_modules().",
        )

    def _inside(self, part: nn.Module) -> set[str]:
        found = [name for name, known in self._parts.items() if known is part]
        if not found:
            return self._refuse(f"a module of type {type(part).__name__}")
        return {name for prefix in found for name in self._below(prefix)}

    def _refuse(self, what: str) -> set[str]:
        raise ConfigError(
            f"{what} that is to be ignored is not inside the model.",
            where=_where(self._module),
            remedy="Give modules, parameters and buffers of this very model, no copies, and not the whole of it.",
        )


def _named_places(module: nn.Module) -> Iterator[tuple[str, Tensor | None]]:
    """Yields every place where a parameter or buffer is registered, under every name, also if it holds None so far."""
    for prefix, part in module.named_modules(remove_duplicate=False):
        for name, tensor in (*part._parameters.items(), *part._buffers.items()):
            yield (f"{prefix}.{name}" if prefix else name), tensor


def _brief(value: object) -> str:
    return repr(value) if isinstance(value, str | int | float | None) else type(value).__name__


def _where(module: nn.Module) -> str:
    return f"ignore, for a model of type {type(module).__name__}"
