"""The `.metadata` of a checkpoint: its tensors and values, and the bytes of the files that hold them.

torch.distributed.checkpoint writes it as a pickle of torch's classes. The file may come from an untrusted source, so it is not
unpickled. This reader knows only the opcodes that Python's pickler writes for those classes. They build strings, numbers, lists,
dicts and `_Made`, a record of a call that the pickle requests. No class is looked up, nothing else is called, and no attribute of
anything else is set. Everything is checked before anything is used; a value of an unexpected type raises where it is used.
"""

import itertools
import math
import pickle
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
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
    metadata = _state(_Reader(BytesIO(data)).load(), _METADATA)
    described, paths = metadata["state_dict_metadata"], metadata["planner_data"]
    if described.keys() != paths.keys():
        raise ValueError("the names that it describes differ from the names of its paths")
    places = dict(_place(index, info) for index, info in metadata["storage_data"].items())
    entries = {name: _entry(name, tuple(paths[name]), found, places) for name, found in described.items()}
    if places:
        raise ValueError(f"it does not describe {brief(next(iter(places))[0])}")
    # If two pieces shared bytes, a small file could request any amount of memory.
    pieces = sorted((piece.file, piece.start, piece.num_bytes) for entry in entries.values() for piece in entry.pieces)
    for (file, start, num_bytes), (following, later, _) in itertools.pairwise(pieces):
        if file == following and start + num_bytes > later:
            raise ValueError(f"two entries share bytes of {file}")
    return entries


def file_sizes(entries: Iterable[Entry]) -> dict[str, int]:
    """Returns the files that hold the entries, with their sizes in bytes."""
    # Sorted, so that the end of a file's last piece replaces the earlier ones.
    return dict(sorted((piece.file, piece.start + piece.num_bytes) for entry in entries for piece in entry.pieces))


class _Made:
    """The pickle's request to call `name` with `arguments` and to set `state` on the result."""

    def __init__(self, name: str, *arguments: Any) -> None:
        self.name, self.arguments = name, arguments
        self.state: Any = None


_Unpickler: Any = pickle._Unpickler  # the pure Python version, whose opcodes are a table


class _Reader(_Unpickler):  # type: ignore[misc]
    def find_class(self, module: str, name: str) -> Any:
        full_name = f"{module}.{name}"
        if full_name not in _NAMES:
            raise pickle.UnpicklingError(f"{full_name} does not belong there")
        return _DTYPES.get(full_name) or partial(_Made, full_name)

    def _give_state(self) -> None:
        state, made = self.stack.pop(), self.stack[-1]
        if not isinstance(made, _Made) or made.state is not None:
            raise pickle.UnpicklingError("it changes an object that is made already")
        made.state = state

    # The opcodes of protocols 4 and 5. Others can do more, or reserve as much memory as the file claims to need.
    dispatch = {
        code[0]: _Unpickler.dispatch[code[0]]
        for code in (
            *(pickle.PROTO, pickle.FRAME, pickle.STOP, pickle.MARK, pickle.MEMOIZE, pickle.BINGET, pickle.LONG_BINGET),
            *(pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE, pickle.BININT, pickle.BININT1, pickle.BININT2, pickle.LONG1),
            *(pickle.SHORT_BINUNICODE, pickle.BINUNICODE, pickle.EMPTY_TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3),
            *(pickle.TUPLE, pickle.EMPTY_LIST, pickle.APPEND, pickle.APPENDS, pickle.EMPTY_DICT, pickle.SETITEM, pickle.SETITEMS),
            *(pickle.STACK_GLOBAL, pickle.REDUCE),
        )
    } | {
        pickle.NEWOBJ[0]: _Unpickler.dispatch[pickle.REDUCE[0]],  # a record is made in the same way
        pickle.BUILD[0]: _give_state,
    }


def _entry(name: str, path: tuple[str | int, ...], found: Any, places: dict[tuple[str, Sizes], Piece]) -> Entry:
    """Returns the entry `name`, and takes the bytes of its pieces out of `places`."""
    is_path = 1 < len(path) <= MOST_LEVELS and all(type(step) in (str, int) for step in path)
    if not is_path or ".".join(map(str, path)) != name:
        raise ValueError(f"the path of {brief(name)} does not match the name")
    if isinstance(found, _Made) and found.name == _VALUE:
        return Entry(name=name, path=path, pieces=(places.pop((name, ())),))
    fields = _state(found, _TENSOR)
    dtype, layout, *_ = _state(fields["properties"], _PROPERTIES)
    if (layout.name, layout.arguments) != _STRIDED:
        raise ValueError(f"{brief(name)} does not have the layout of saved tensors")
    shape = _sizes(fields["size"])
    chunks = [_state(chunk, _CHUNK) for chunk in fields["chunks"]]
    extents = [(_sizes(chunk["offsets"]), _sizes(chunk["sizes"])) for chunk in chunks]
    if any(len(numbers) != len(shape) for extent in extents for numbers in extent):
        raise ValueError(f"{brief(name)} has an impossible shape")
    if not _is_whole(extents, shape):
        raise ValueError(f"the pieces of {brief(name)} do not make up all of it")
    pieces = tuple(replace(places.pop((name, offsets)), sizes=sizes) for offsets, sizes in extents)
    if any(math.prod(piece.sizes) * dtype.itemsize > piece.num_bytes for piece in pieces):
        raise ValueError(f"the bytes of {brief(name)} do not hold its pieces")
    return Entry(name=name, path=path, pieces=pieces, dtype=dtype, shape=shape)


def _place(index: Any, info: Any) -> tuple[tuple[str, Sizes], Piece]:
    """Returns the entry and the offsets of a piece, and its bytes. The tensor's description has its sizes."""
    key, fields = _state(index, _INDEX), _state(info, _PLACE)
    file, offset = fields["relative_path"], key.get("offset")
    if not isinstance(file, str) or not _FILE.fullmatch(file) or fields.get("transform_descriptors"):
        raise ValueError(f"{brief(file)} is not a file of this checkpoint, or is to be transformed")
    offsets = () if offset is None else _sizes(offset)
    start, num_bytes = _count(fields["offset"]), _count(fields["length"])
    return (key["fqn"], offsets), Piece(offsets=offsets, sizes=(), file=file, start=start, num_bytes=num_bytes)


def _is_whole(extents: Sequence[Extent], shape: Sizes) -> bool:
    """Returns True if the boxes cover `shape` exactly once: gaps would hold uninitialized memory.

    The first dimension is cut where a box begins or ends. In each slab, the boxes must cover the other dimensions.
    """
    if not shape:
        return len(extents) == 1
    begins: dict[int, list[Extent]] = {0: []}
    for offsets, sizes in extents:
        begins.setdefault(offsets[0], []).append((offsets, sizes))
        begins.setdefault(offsets[0] + sizes[0], [])
    boxes: list[Extent] = []
    for cut in sorted(begins)[:-1]:
        boxes = [(offsets, sizes) for offsets, sizes in (*boxes, *begins[cut]) if offsets[0] + sizes[0] > cut]
        if not _is_whole([(offsets[1:], sizes[1:]) for offsets, sizes in boxes], shape[1:]):
            return False
    return max(begins) == shape[0]


def _state(value: Any, name: str) -> Any:
    if not isinstance(value, _Made) or value.name != name or value.arguments:
        raise ValueError(f"it has something that is not a {name.rpartition('.')[2]}")
    return value.state


def _sizes(value: Any) -> Sizes:
    if value.name != _SIZE or len(value.arguments) != 1:
        raise ValueError("it has something that is not a torch.Size")
    return tuple(map(_count, value.arguments[0]))


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= _MOST:
        raise ValueError("it has an impossible size or offset")
    return value
