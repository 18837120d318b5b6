"""What all-reduces cost on this link, now: measured by the ranks of a run before anything else.

Trains of equal pieces, all launched at once as an overlapping system would: their seconds per byte, at the best piece
size, are the link's speed. The fastest of some small ones, one by one, is its latency.
"""

from __future__ import annotations

import time
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.matrix.clock import clock_of

PIECES = (1 << 20, 4 << 20, 16 << 20)  # bytes
TRAIN = 16 << 20
NUM_TRAINS, NUM_SMALL = 3, 20


def calibrate(group: dist.ProcessGroup, device: torch.device) -> dict[str, Any]:
    """The median per piece size, and the fastest small all-reduce, of tensors on `device`, on this rank."""
    small = torch.zeros(64, device=device)
    return {
        "small_s": min(_train_s([small], group) for _ in range(NUM_SMALL)),
        "trains": [{"piece_bytes": piece, "bytes": TRAIN, "seconds": _piece_s(piece, group, device)} for piece in PIECES],
    }


def _piece_s(piece_bytes: int, group: dist.ProcessGroup, device: torch.device) -> float:
    pieces = [torch.zeros(piece_bytes // 4, device=device) for _ in range(TRAIN // piece_bytes)]
    _train_s(pieces, group)  # the first one through a connection is slower
    return median(_train_s(pieces, group) for _ in range(NUM_TRAINS))


def _train_s(pieces: list[torch.Tensor], group: dist.ProcessGroup) -> float:
    clock = clock_of(pieces[0].device)
    clock.settle()
    dist.barrier(group=group)
    began_s = time.perf_counter()
    works = [dist.all_reduce(piece, group=group, async_op=True) for piece in pieces]
    for work in works:
        assert work is not None
        work.wait()
    clock.settle()
    return time.perf_counter() - began_s
