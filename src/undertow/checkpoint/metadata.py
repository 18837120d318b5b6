"""The `.metadata` of a checkpoint: its tensors and values, and the bytes of the files that hold them.

torch.distributed.checkpoint writes it as a pickle of torch's classes. The file may come from an untrusted source, so it is not
unpickled. This reader knows only the opcodes that Python's pickler writes for those classes. They build strings, numbers, lists,
dicts and `_Made`, a record of a call that the pickle requests. No class is looked up, nothing is called, and no attribute is set.
Everything is checked before anything is used.
"""

import itertools
import math
import pickle
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from io import BytesIO
from reprlib import repr as brief
from typing import Any

import torch

from undertow.foreign import MOST_LEVELS

__all__ = ["Entry", "Piece", "file_sizes", "stored_entries"]

Sizes = tuple[int, ...]
Extent = tuple[Sizes, Sizes]  # offsets, sizes

_FILE = re.compile(r"__[0-9]+_[0-9]+\.distcp")
# The meaning of their values is stored elsewhere.
_QUANTIZED = {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4}
_DTYPES = {str(it): it for it in vars(torch).values() if isinstance(it, torch.dtype) and it not in _QUANTIZED}
_MOST = 2**63 - 1  # bytes or elements

_OF_TORCH = "torch.distributed.checkpoint.metadata"
_METADATA, _TENSOR, _VALUE = f"{_OF_TORCH}.Metadata", f"{_OF_TORCH}.TensorStorageMetadata", f"{_OF_TORCH}.BytesStorageMetadata"
_PROPERTIES, _CHUNK, _INDEX = f"{_OF_TORCH}.TensorProperties", f"{_OF_TORCH}.ChunkStorageMetadata", f"{_OF_TORCH}.MetadataIndex"
_PLACE, _SIZE = "torch.distributed.checkpoint.filesystem._StorageInfo", "torch.Size"
_STRIDED = ("torch.serialization._get_layout", ("torch.strided",))
_NAMES = {
    *(_METADATA, _TENSOR, _VALUE, _PROPERTIES, _CHUNK, _INDEX, _PLACE, _SIZE, _STRIDED[0], *_DTYPES),
    *(f"{_OF_TORCH}.StorageMeta", f"{_OF_TORCH}._MEM_FORMAT_ENCODING"),
    *(f"{module}.{system}Path" for module in ("pathlib", "pathlib._local") for system in ("Posix", "Windows")),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A box of a tensor's elements, from `offsets` on and of size `sizes`, and the bytes that hold it; a value has neither."""

    offsets: Sizes
    sizes: Sizes
    file: str
    start: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One tensor, or one other value, which has one piece and neither `dtype` nor `shape`."""

    name: str
    path: tuple[str | int, ...]
    pieces: tuple[Piece, ...]
    dtype: torch.dtype | None = None
    shape: Sizes | None = None


def stored_entries(data: bytes) -> dict[str, Entry]:
    """Parses a `.metadata` and returns its entries by name; raises any exception if torch's writer cannot have written it.

    The pieces of a tensor cover all of it, and no two pieces share a byte.
    """
    metadata = _fields(_Reader(BytesIO(data)).load(), _METADATA)
    described, paths = _table(metadata["state_dict_metadata"]), _table(metadata["planner_data"])
    places = _places(metadata["storage_data"])
    if described.keys() != paths.keys():
        raise ValueError("it describes other names than it has paths for")
    entries = {name: _entry(name, _path(paths[name], name), found, places) for name, found in described.items()}
    if places:
        raise ValueError(f"nothing is said of {brief(next(iter(places))[0])}")
    _require_apart(entries.values())
    return entries


def file_sizes(entries: Iterable[Entry]) -> dict[str, int]:
    """Returns the files that hold the entries, with their sizes in bytes."""
    sizes: dict[str, int] = {}
    for piece in itertools.chain.from_iterable(entry.pieces for entry in entries):
        sizes[piece.file] = max(sizes.get(piece.file, 0), piece.start + piece.num_bytes)
    return sizes


@dataclass(slots=True, eq=False)
class _Made:
    """The pickle's request to call `name` with `arguments` and to set `state` on the result."""

    name: str
    arguments: tuple[Any, ...]
    state: Any = None


_Unpickler: Any = pickle._Unpickler  # the pure Python version, whose opcodes are a table


class _Reader(_Unpickler):  # type: ignore[misc]
    def find_class(self, module: str, name: str) -> Any:
        if f"{module}.{name}" not in _NAMES:
            raise pickle.UnpicklingError(f"{module}.{name} does not belong there")
        return f"{module}.{name}"

    def _make(self) -> None:
        arguments, name = self.stack.pop(), self.stack.pop()
        if not isinstance(arguments, tuple) or name not in _NAMES:
            raise pickle.UnpicklingError("it calls what is not a class")
        self.stack.append(_Made(name, arguments))

    def _give_state(self) -> None:
        state, made = self.stack.pop(), self.stack[-1]
        if not isinstance(made, _Made) or made.state is not None:
            raise pickle.UnpicklingError("it changes what is made already")
        made.state = state

    def _set_items(self) -> None:
        items = self.pop_mark()
        self._put(self.stack[-1], zip(items[::2], items[1::2], strict=True))

    def _set_item(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._put(self.stack[-1], [(key, value)])

    def _put(self, into: Any, pairs: Iterable[tuple[Any, Any]]) -> None:
        for key, value in pairs:
            if type(into) is not dict or key in into:
                raise pickle.UnpicklingError("it has a key twice")
            into[key] = value

    # The opcodes of protocols 4 and 5. Others can do more, or reserve as much memory as the file claims to need.
    dispatch = {
        code[0]: _Unpickler.dispatch[code[0]]
        for code in (
            *(pickle.PROTO, pickle.FRAME, pickle.STOP, pickle.MARK, pickle.MEMOIZE, pickle.BINGET, pickle.LONG_BINGET),
            *(pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE, pickle.BININT, pickle.BININT1, pickle.BININT2, pickle.LONG1),
            *(pickle.SHORT_BINUNICODE, pickle.BINUNICODE, pickle.EMPTY_TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3),
            *(pickle.TUPLE, pickle.EMPTY_LIST, pickle.APPEND, pickle.APPENDS, pickle.EMPTY_DICT, pickle.STACK_GLOBAL),
        )
    } | {
        pickle.NEWOBJ[0]: _make,
        pickle.REDUCE[0]: _make,
        pickle.BUILD[0]: _give_state,
        pickle.SETITEM[0]: _set_item,
        pickle.SETITEMS[0]: _set_items,
    }


def _entry(name: str, path: tuple[str | int, ...], found: Any, places: dict[tuple[str, Sizes | None], Piece]) -> Entry:
    if isinstance(found, _Made) and found.name == _VALUE:
        return Entry(name=name, path=path, pieces=(places.pop((name, None)),))
    fields = _fields(found, _TENSOR)
    dtype, layout, *_ = _state(fields["properties"], _PROPERTIES, tuple)
    if not isinstance(layout, _Made) or (layout.name, layout.arguments) != _STRIDED:
        raise ValueError(f"{brief(name)} has another layout than tensors that are saved")
    shape = _sizes(fields["size"])
    chunks = [_fields(chunk, _CHUNK) for chunk in fields["chunks"]]
    extents = [(_sizes(chunk["offsets"]), _sizes(chunk["sizes"])) for chunk in chunks]
    _require_whole(name, shape, extents)
    pieces = tuple(replace(places.pop((name, offsets)), sizes=sizes) for offsets, sizes in extents)
    for piece in pieces:
        if math.prod(piece.sizes) * _DTYPES[dtype].itemsize > piece.num_bytes:
            raise ValueError(f"{piece.num_bytes} bytes do not hold {piece.sizes} of {brief(name)}")
    return Entry(name=name, path=path, pieces=pieces, dtype=_DTYPES[dtype], shape=shape)


def _places(table: Any) -> dict[tuple[str, Sizes | None], Piece]:
    """Returns the bytes of each piece, by the name of its entry and its offsets."""
    places: dict[tuple[str, Sizes | None], Piece] = {}
    for key, value in _checked(table, dict).items():
        index, info = _fields(key, _INDEX), _fields(value, _PLACE)
        offset, file = index.get("offset"), info["relative_path"]
        if not isinstance(file, str) or not _FILE.fullmatch(file):
            raise ValueError(f"{brief(file)} is not a file of this checkpoint")
        if info.get("transform_descriptors"):
            raise ValueError(f"{brief(file)} is to be transformed")
        start, num_bytes = _count(info["offset"]), _count(info["length"])
        name, offsets = _checked(index["fqn"], str), None if offset is None else _sizes(offset)
        if (name, offsets) in places or start + num_bytes > _MOST:
            raise ValueError(f"{brief(name)} is stored twice, or beyond all files")
        places[name, offsets] = Piece(offsets=offsets or (), sizes=(), file=file, start=start, num_bytes=num_bytes)
    return places


def _require_whole(name: str, shape: Sizes, extents: list[Extent]) -> None:
    """Raises ValueError unless the pieces cover `shape` exactly: gaps would hold uninitialized memory.

    Ranks write ranges of a tensor in memory order: rows, and parts of rows. Neighbors that match in all other dimensions are
    merged, innermost dimension first, until one piece is left.
    """
    if math.prod(shape) > _MOST or any(len(offsets) != len(shape) or len(sizes) != len(shape) for offsets, sizes in extents):
        raise ValueError(f"{brief(name)} has a shape that cannot be")
    if math.prod(shape) == 0:
        return
    left = extents
    before: list[Extent] = []
    while left != before:
        before = left
        for dim in reversed(range(len(shape))):
            left = _joined(left, dim)
    if left != [((0,) * len(shape), shape)]:
        raise ValueError(f"the pieces of {brief(name)} do not make up all of it")


def _joined(extents: list[Extent], dim: int) -> list[Extent]:
    """Merges each extent with the one that ends at its start in this dimension."""

    def others(extent: Extent) -> list[Sizes]:
        return [sizes[:dim] + sizes[dim + 1 :] for sizes in extent]

    joined: list[Extent] = []
    for offsets, sizes in sorted(extents, key=lambda extent: (others(extent), extent[0][dim])):
        first, length = joined[-1] if joined else (offsets, sizes)
        if joined and others(joined[-1]) == others((offsets, sizes)) and first[dim] + length[dim] == offsets[dim]:
            joined[-1] = first, (*length[:dim], length[dim] + sizes[dim], *length[dim + 1 :])
        else:
            joined.append((offsets, sizes))
    return joined


def _require_apart(entries: Iterable[Entry]) -> None:
    """Raises ValueError if two pieces share bytes, because then a small file could request any amount of memory."""
    pieces = sorted((piece.file, piece.start, piece.num_bytes) for entry in entries for piece in entry.pieces)
    for (file, start, num_bytes), (following, later, _) in itertools.pairwise(pieces):
        if file == following and start + num_bytes > later:
            raise ValueError(f"two entries share bytes of {file}")


def _path(path: Any, name: str) -> tuple[str | int, ...]:
    steps = _checked(path, tuple)
    is_sound = 1 < len(steps) <= MOST_LEVELS and all(type(step) in (str, int) for step in steps)
    if not is_sound or ".".join(map(str, steps)) != name:
        raise ValueError(f"the path of {brief(name)} is another one")
    return tuple(steps)


def _fields(value: Any, name: str) -> Mapping[str, Any]:
    return _table(_state(value, name, dict))


def _state(value: Any, name: str, kind: type) -> Any:
    if not isinstance(value, _Made) or value.name != name or value.arguments:
        raise ValueError(f"it has something else than a {name.rpartition('.')[2]}")
    return _checked(value.state, kind)


def _table(value: Any) -> dict[str, Any]:
    table: dict[str, Any] = _checked(value, dict)
    for key in table:
        _checked(key, str)
    return table


def _checked(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise ValueError(f"it has a {type(value).__name__} and not a {kind.__name__}")
    return value


def _sizes(value: Any) -> Sizes:
    if not isinstance(value, _Made) or value.name != _SIZE or value.state is not None or len(value.arguments) != 1:
        raise ValueError("it has something else than a torch.Size")
    return tuple(map(_count, _checked(value.arguments[0], tuple)))


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= _MOST:
        raise ValueError("it has a size or an offset that cannot be")
    return value
