"""Tensors of a checkpoint that all ranks at one place need: one rank reads each byte, the others
receive it.

rank 0's share | rank 1's share | ...       of the tensors, one after the other
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from itertools import accumulate

import torch
from torch import Tensor

from undertow.checkpoint.opened import Opened
from undertow.checkpoint.ranks import CheckpointRanks

_MOST_BYTES = 64 << 20  # of one message, of all ranks together


class Replicated:
    """Tensors that every rank at this place needs. Ranks call its methods in this order:

    add ──> read ──> gather
    """

    def __init__(self, ranks: CheckpointRanks, opened: Opened) -> None:
        self._ranks, self._opened = ranks, opened
        self._mapped: dict[tuple[str, str], Tensor] = {}  # by file and name
        self._share = torch.empty(0, dtype=torch.uint8)

    def add(self, file_name: str, names: Iterable[str]) -> None:
        """Adds tensors of a file, in the same order on every rank of the place."""
        file = self._opened.file(file_name)
        for name in names:
            tensor = file.tensor(name)
            if tensor.numel():
                self._mapped[file_name, name] = tensor

    def read(self) -> str:
        """Reads this rank's share. Returns a text that is the same on ranks with the same
        tensors."""
        each = [(*place, tensor.nbytes) for place, tensor in self._mapped.items()]
        text = json.dumps([str(self._opened.folder), each])
        if len(self._ranks.own) > 1:
            start = self._ranks.rank_at_place * self._share_bytes
            share = torch.empty(self._share_bytes, dtype=torch.uint8)
            mapped = _Bytes(tensor.view(-1).view(torch.uint8) for tensor in self._mapped.values())
            mapped.read(start, share)
            self._share = share
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def gather(self) -> None:
        """Gathers the shares of all ranks at this place, a collective call of these ranks."""
        share_bytes, share = self._share_bytes, self._share
        sizes = [tensor.nbytes for tensor in self._mapped.values()]
        memory = _Bytes(torch.empty(size, dtype=torch.uint8) for size in sizes)
        part_bytes = max(1, _MOST_BYTES // len(self._ranks.own))
        for start in range(0, share_bytes, part_bytes):
            rows = self._ranks.gathered(share[start : start + part_bytes])
            for rank, row in enumerate(rows):
                memory.write(rank * share_bytes + start, row)
        for ((file_name, name), like), found in zip(
            self._mapped.items(), memory.tensors, strict=True
        ):
            tensor = found.view(like.dtype).view(like.shape)
            self._opened.file(file_name).keep(name, tensor)
        self._mapped, self._share = {}, torch.empty(0, dtype=torch.uint8)

    @property
    def _share_bytes(self) -> int:
        """The bytes of each rank; the last ones may reach beyond the end."""
        num_bytes = sum(tensor.nbytes for tensor in self._mapped.values())
        return -(-num_bytes // len(self._ranks.own))


class _Bytes:
    """Tensors of bytes that follow each other, read and written like one."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self.tensors = list(tensors)
        self._ends = list(accumulate(tensor.nbytes for tensor in self.tensors))

    def read(self, start: int, into: Tensor) -> None:
        """Reads from `start` on; what is beyond the end stays as it is."""
        for piece, beside in self._between(start, into):
            beside.copy_(piece)

    def write(self, start: int, values: Tensor) -> None:
        """Writes from `start` on; what is beyond the end is left out."""
        for piece, beside in self._between(start, values):
            piece.copy_(beside)

    def _between(self, start: int, row: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Returns pieces of the tensors from `start` on, each with its piece of the row."""
        at = 0
        for place in range(bisect_right(self._ends, start), len(self.tensors)):
            tensor = self.tensors[place]
            first = start + at - self._ends[place] + tensor.nbytes
            piece = tensor[first : first + row.nbytes - at]
            yield piece, row[at : at + piece.nbytes]
            at += piece.nbytes
            if at == row.nbytes:
                return
