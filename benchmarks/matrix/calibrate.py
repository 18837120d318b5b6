"""What all-reduces cost on this link, now: measured by the ranks of a run before anything else.

Trains of equal pieces, all launched at once as an overlapping system would: their seconds per byte, at the best piece
size, are the link's speed. The fastest of some small ones, one by one, is its latency. Between devices 16 MB may take no
longer than it takes to begin with them: a train has as many bytes as the gradients there.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.matrix.clock import clock_of

PIECES = (1 << 20, 4 << 20, 16 << 20)  # bytes
TRAIN = 16 << 20
NUM_TRAINS, NUM_SMALL = 3, 20


def calibrate(
    group: dist.ProcessGroup, device: torch.device, *, gradient_bytes: int, beat: Callable[[], object]
) -> dict[str, Any]:
    """The median per piece size, and the fastest small all-reduce, of tensors on `device`, on this rank.

    `beat` is called often: so many bytes may take minutes.
    """
    small, size = torch.zeros(64, device=device), train_bytes(device, gradient_bytes)
    small_s = min(_train_s([small], group) for _ in range(NUM_SMALL))
    trains = []
    for piece_bytes in PIECES:
        num_bytes = size // piece_bytes * piece_bytes
        seconds = _median_s([torch.zeros(piece_bytes // 4, device=device) for _ in range(num_bytes // piece_bytes)], group, beat)
        trains.append({"piece_bytes": piece_bytes, "bytes": num_bytes, "seconds": seconds})
    return {"small_s": small_s, "trains": trains}


def _median_s(pieces: list[torch.Tensor], group: dist.ProcessGroup, beat: Callable[[], object]) -> float:
    _train_s(pieces, group)  # the first one through a connection is slower
    seconds = []
    for _ in range(NUM_TRAINS):
        beat()
        seconds.append(_train_s(pieces, group))
    return median(seconds)


def train_bytes(device: torch.device, gradient_bytes: int) -> int:
    """Of a train, but for what is less than a piece; `gradient_bytes` is what the workload's gradients have."""
    return max(TRAIN, gradient_bytes) if device.type == "cuda" else TRAIN


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
