"""Parameters in the memory of their bucket: who refers to it."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import torch
from torch import nn

from support.strategies import spec
from undertow.plan import Piece, plan_from_groups
from undertow.runtime import shards
from undertow.runtime.shards import FlatParams, shard_parts


def in_pieces() -> FlatParams:
    """What the first of two ranks has of a parameter that lies in two buckets."""
    groups = ((Piece(param=0, first=0, stop=5),), (Piece(param=0, first=5, stop=8),))
    bucket = plan_from_groups([spec("weight", 8)], groups, num_ranks=2).buckets[0]
    return FlatParams(bucket, [nn.Parameter(torch.ones(8))], shard_parts(bucket, rank=0), num_ranks=2)


def test_copying_out_does_not_count_as_a_reference() -> None:
    flat, is_copying, is_asked = in_pieces(), threading.Event(), threading.Event()
    in_memory = shards._Slot.in_memory

    def slow(slot: shards._Slot) -> torch.Tensor:
        memory = in_memory(slot)
        is_copying.set()
        is_asked.wait(0.2)
        return memory

    with mock.patch.object(shards._Slot, "in_memory", slow), ThreadPoolExecutor(1) as threads:
        copies = threads.submit(flat.copy_out)
        is_copying.wait()
        assert not flat.is_referred_to
        copies.result()
    kept = flat.params[0].data
    assert flat.is_referred_to
    del kept
    assert not flat.is_referred_to
