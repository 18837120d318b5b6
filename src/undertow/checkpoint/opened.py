"""The files of a checkpoint that a rank has open while it loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from undertow.checkpoint import files


class TensorFile:
    """An open safetensors file: tensors are views of it, read when they are used, except those that
    all ranks have read together."""

    def __init__(self, path: Path) -> None:
        self._file: Any = files.open_tensors(path)
        self._metadata: dict[str, str] = self._file.metadata() or {}
        self._gathered: dict[str, Tensor] = {}  # in fresh memory

    def names(self) -> list[str]:
        return list(self._file.keys())

    def texts(self) -> dict[str, str]:
        """Returns what the file has besides tensors."""
        return {name: text for name, text in self._metadata.items() if name != "format"}

    def tensor(self, name: str) -> Tensor:
        """Returns a tensor; one that was gathered only once, so that its memory is free then."""
        gathered = self._gathered.pop(name, None)
        found: Tensor = self._file.get_tensor(name) if gathered is None else gathered
        return found

    def elements(self, name: str) -> Any:
        """Returns a tensor with one axis, to be cut: of a file, only what is cut is read."""
        gathered = self._gathered.pop(name, None)
        return self._file.get_slice(name) if gathered is None else gathered

    def keep(self, name: str, gathered: Tensor) -> None:
        self._gathered[name] = gathered


class Opened:
    """The open files of a folder. Each is opened once, when it is needed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: dict[str, TensorFile] = {}

    def file(self, name: str) -> TensorFile:
        if name not in self._files:
            self._files[name] = TensorFile(self.folder / name)
        return self._files[name]

    def __contains__(self, name: str) -> bool:
        return name in self._files
