"""Writes safetensors files in parts, without Python's lock, so training continues.

    size of the header, 8 bytes | header, JSON | tensors, wide dtypes first

https://huggingface.co/docs/safetensors
"""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor

from undertow.errors import CheckpointError, require

Progress: TypeAlias = Callable[[int], object]  # called with a number of bytes
_PART_BYTES = 8 << 20  # of one call: progress is noted after each
_SYNC_BYTES = 128 << 20  # between flushes to the disk, so that none takes long
_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def require_stored(tensors: Mapping[str, Tensor]) -> None:
    """Raises CheckpointError for a tensor that the format does not hold."""
    for name, tensor in tensors.items():
        require(
            tensor.layout is torch.strided and tensor.dtype in _NAMES,
            f"{name!r} is of {tensor.dtype} and {tensor.layout}, which safetensors files do not "
            "hold.",
            where="save_checkpoint",
            remedy="Convert it, or save model.state_dict() and optimizer.state_dict() by "
            "torch.save().",
            error=CheckpointError,
        )


def write_safetensors(
    path: Path, tensors: Mapping[str, Tensor], texts: Mapping[str, str], *, note: Progress
) -> None:
    """Writes the file, and flushes it to disk; `note` is called after each part."""
    require_stored(tensors)
    names = sorted(tensors, key=lambda name: (-tensors[name].itemsize, name))
    with open(path, "wb", buffering=0) as file:
        output = _Output(file.fileno(), note)
        output.write(_header(names, tensors, texts))
        for name in names:
            output.write_tensor(tensors[name])
        output.flush()


def _header(names: list[str], tensors: Mapping[str, Tensor], texts: Mapping[str, str]) -> bytes:
    header: dict[str, object] = {"__metadata__": dict(texts)}
    start = 0
    for name in names:
        tensor = tensors[name]
        stop = start + tensor.nbytes
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, stop],
        }
        start = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


class _Output:
    """A file that is written in parts."""

    def __init__(self, descriptor: int, note: Progress) -> None:
        self._descriptor, self._note = descriptor, note
        self._unsynced = 0

    def write_tensor(self, tensor: Tensor) -> None:
        plain = tensor.detach().resolve_conj().resolve_neg().to("cpu").contiguous()
        if plain.nbytes:
            # Its memory itself: bytes would be a copy, made while Python's lock is held.
            self.write((ctypes.c_char * plain.nbytes).from_address(plain.data_ptr()))

    def write(self, data: bytes | ctypes.Array[ctypes.c_char]) -> None:
        left = memoryview(data).cast("B")
        while left:
            written = os.write(self._descriptor, left[:_PART_BYTES])
            left = left[written:]
            self._unsynced += written
            if self._unsynced >= _SYNC_BYTES:
                self.flush()
            self._note(written)

    def flush(self) -> None:
        self._unsynced = 0
        os.fsync(self._descriptor)
