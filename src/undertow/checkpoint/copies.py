"""Copies of tensors for a save in the background, in host memory that the next save uses again.

The first write to fresh memory takes longer than the copy itself, and steps wait for both.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from undertow.checkpoint.contents import Contents
from undertow.device import device_of

_ALIGNED = 64  # bytes: tensors begin at a multiple


class CopyMemory:
    """The memory for the copies of a model's saves, by the name of the file. One save has it at a
    time."""

    def __init__(self) -> None:
        self._free: dict[str, Tensor] = {}

    def take(self) -> dict[str, Tensor]:
        """Returns what the save before has left."""
        free, self._free = self._free, {}
        return free

    def leave(self, memory: Mapping[str, Tensor]) -> None:
        """Called when the copies are written."""
        self._free = dict(memory)


# By the model that was given to the saves: the memory goes when the model does.
_of_models: weakref.WeakKeyDictionary[nn.Module, CopyMemory] = weakref.WeakKeyDictionary()


def memory_for(model: nn.Module) -> CopyMemory:
    return _of_models.setdefault(model, CopyMemory())


class Copies:
    """Copies of the files of one save, which later steps do not change."""

    def __init__(self, owner: CopyMemory) -> None:
        self.files: dict[str, Contents] = {}
        self._owner, self._left = owner, owner.take()
        self._memory: dict[str, Tensor] = {}

    def add(self, name: str, of_file: Contents) -> None:
        """Copies the contents of a file."""
        tensors, texts = of_file
        sizes = [-(-tensor.nbytes // _ALIGNED) * _ALIGNED for tensor in tensors.values()]
        places = {tensor.device for tensor in tensors.values()}
        host = torch.device("cpu")
        source = next((place for place in places if not device_of(place).is_host), host)
        memory = self._memory[name] = self._memory_of(name, sum(sizes), source)
        copies = {}
        for (key, tensor), part in zip(tensors.items(), torch.split(memory, sizes), strict=True):
            copy = part[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            copies[key] = copy.copy_(tensor.detach(), non_blocking=True)
        for place in places:
            device_of(place).synchronize()
        self.files[name] = copies, texts

    def _memory_of(self, name: str, num_bytes: int, source: torch.device) -> Tensor:
        """Returns memory of the save before, unless it is too small, or much too large."""
        left = self._left.pop(name, None)
        if left is not None and num_bytes <= left.nbytes <= 2 * num_bytes:
            return left[:num_bytes]
        return device_of(source).memory_on_host(num_bytes)

    def end(self) -> None:
        """Called when everything is written, or has failed: the next save has the memory."""
        self.files.clear()
        self._owner.leave(self._memory)
        # A user may keep the save for longer than the model.
        self._owner, self._memory = CopyMemory(), {}
