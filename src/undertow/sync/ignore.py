"""The parameters and buffers that the user excludes from synchronization."""

from collections.abc import Iterable, Iterator, Mapping

from torch import Tensor, nn

from undertow.errors import ConfigError, WrongType, require, suggestion
from undertow.torch_private import tables


def names_to_ignore(
    module: nn.Module, ignore: Iterable[str | nn.Module | Tensor]
) -> tuple[str, ...]:
    """Returns sorted names of the parameters and buffers in `ignore`, which lists names, tensors,
    submodules or their names.

    A tied weight is ignored as a whole, whichever of its names is given, and all its names are
    returned. Raises ConfigError for an entry that the module does not have, and WrongType for an
    entry of another type.
    """
    where = f"ignore, for a model of type {type(module).__name__}"
    require(
        isinstance(ignore, Iterable) and not isinstance(ignore, str | Tensor | nn.Module),
        f"ignore must be a sequence of names, modules and tensors, got {_brief(ignore)}.",
        where=where,
        remedy=f"Write ignore=({_brief(ignore)},)."
        if isinstance(ignore, str)
        else "Write ignore=(it,).",
        error=WrongType,
    )
    entries = tuple(ignore)
    if not entries:
        return ()
    places = dict(_named_places(module))
    # Without the module itself: ignoring all of it is never intended.
    parts = {name: part for name, part in tables.named_modules(module, is_unique=False) if name}
    chosen: set[str] = set()
    for entry in entries:
        chosen |= _names_of(entry, places, parts, where)
    tensors = {id(places[name]) for name in chosen if places[name] is not None}
    return tuple(
        sorted(chosen | {name for name, tensor in places.items() if id(tensor) in tensors})
    )


def still_there(module: nn.Module, names: Iterable[str]) -> tuple[str, ...]:
    """Returns the names of parameters and buffers that the module still has."""
    known = {name for name, _ in _named_places(module)}
    return tuple(name for name in names if name in known)


def _names_of(
    entry: object, places: Mapping[str, Tensor | None], parts: Mapping[str, nn.Module], where: str
) -> set[str]:
    not_inside = "that is to be ignored is not inside the model."
    remedy = (
        "Give modules, parameters and buffers of this model itself: no copies, and not the whole "
        "model."
    )
    match entry:
        case str() if entry in places:
            return {entry}
        case str() if entry in parts:
            prefixes: tuple[str, ...] = (f"{entry}.",)
        case str():
            instead = "Use names of named_parameters(), named_buffers() or named_modules()."
            raise ConfigError(
                f"{entry!r} does not exist and cannot be ignored.",
                where=where,
                remedy=suggestion(entry, [*places, *parts], instead=instead),
            )
        case Tensor():
            names = {name for name, tensor in places.items() if tensor is entry}
            require(
                names,
                f"a tensor of shape {tuple(entry.shape)} {not_inside}",
                where=where,
                remedy=remedy,
            )
            return names
        case nn.Module():
            prefixes = tuple(f"{name}." for name, part in parts.items() if part is entry)
            require(
                prefixes,
                f"a module of type {type(entry).__name__} {not_inside}",
                where=where,
                remedy=remedy,
            )
        case _:
            raise WrongType(
                f"ignore takes names, modules, parameters and buffers, got {_brief(entry)}.",
                where=where,
                remedy='Write ignore=("embedding.weight", model.head).',
            )
    return {name for name in places if name.startswith(prefixes)}


def _named_places(module: nn.Module) -> Iterator[tuple[str, Tensor | None]]:
    """Yields every place where a parameter or buffer is registered, under every name, also if it
    holds None so far."""
    for prefix, part in tables.named_modules(module, is_unique=False):
        for name, tensor in tables.own_tensors(part):
            yield tables.joined(prefix, name), tensor


def _brief(value: object) -> str:
    return repr(value) if isinstance(value, str | int | float | None) else type(value).__name__
