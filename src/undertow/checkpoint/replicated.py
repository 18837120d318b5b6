"""Tensors of a checkpoint that all ranks need: one rank reads each byte, the others receive it.

rank 0's share | rank 1's share | ...       of the tensors, one behind the other
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from undertow.checkpoint.opened import Opened
from undertow.checkpoint.ranks import CheckpointRanks

_MOST_BYTES = 64 << 20  # of one message, of all ranks together


class Replicated:
    """Tensors that every rank needs. Ranks call its methods in this order:

    add ──> read ──> gather
    """

    def __init__(self, ranks: CheckpointRanks, opened: Opened) -> None:
        self._ranks, self._opened = ranks, opened
        self._mapped: dict[tuple[str, str], Tensor] = {}  # by file and name
        self._share = torch.empty(0, dtype=torch.uint8)
        self._memory: list[Tensor] = []  # bytes of each tensor

    def add(self, file_name: str, names: Iterable[str]) -> None:
        """Adds tensors of a file, in the same order on every rank."""
        file = self._opened.file(file_name)
        for name in names:
            tensor = file.tensor(name)
            if tensor.numel():
                self._mapped[file_name, name] = tensor

    def read(self) -> str:
        """Reads this rank's share. Returns a text that is the same on ranks with the same
        tensors."""
        each = [(*place, tensor.nbytes) for place, tensor in self._mapped.items()]
        if self._ranks.size > 1:
            start = self._ranks.rank * self._share_bytes
            share = torch.empty(self._share_bytes, dtype=torch.uint8)
            mapped = [tensor.view(-1).view(torch.uint8) for tensor in self._mapped.values()]
            _copy(_between(mapped, start, start + share.nbytes), share, is_into=False)
            self._share = share
            self._memory = [torch.empty_like(of_one) for of_one in mapped]
        return hashlib.blake2b(json.dumps(each).encode(), digest_size=16).hexdigest()

    def gather(self) -> None:
        """Gathers the shares of all ranks; a collective call."""
        share_bytes, share = self._share_bytes, self._share
        part_bytes = max(1, _MOST_BYTES // self._ranks.size)
        for start in range(0, share_bytes, part_bytes):
            rows = self._ranks.gathered(share[start : start + part_bytes])
            for rank, row in enumerate(rows):
                at = rank * share_bytes + start
                _copy(_between(self._memory, at, at + row.nbytes), row, is_into=True)
        for (file_name, name), memory in zip(self._mapped, self._memory, strict=True):
            like = self._mapped[file_name, name]
            tensor = memory.view(like.dtype).view(like.shape)
            self._opened.file(file_name).keep(name, tensor)
        self._mapped, self._memory, self._share = {}, [], share[:0]

    @property
    def _share_bytes(self) -> int:
        """The bytes of each rank; the last ones may reach beyond the end."""
        num_bytes = sum(tensor.nbytes for tensor in self._mapped.values())
        return -(-num_bytes // self._ranks.size)


def _between(tensors: Iterable[Tensor], start: int, stop: int) -> Iterator[Tensor]:
    """Returns views of the bytes from `start` to `stop` of tensors that follow each other."""
    at = 0
    for tensor in tensors:
        first, last = max(start - at, 0), min(stop - at, tensor.nbytes)
        if first < last:
            yield tensor[first:last]
        at += tensor.nbytes


def _copy(pieces: Iterable[Tensor], row: Tensor, *, is_into: bool) -> None:
    """Copies bytes between the pieces and a row of all of them, into the pieces or out of them."""
    at = 0
    for piece in pieces:
        beside = row[at : at + piece.nbytes]
        piece.copy_(beside) if is_into else beside.copy_(piece)
        at += piece.nbytes
