"""Ranks of a test as processes: an emulated link in each, results back in rank order."""

from __future__ import annotations

import os
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from undertow.cost import link_from_text
from undertow.demo.launch import LocalRanks
from undertow.demo.results import RankFailed
from undertow.runtime.emulated_link import BACKEND, EmulatedLink, emulated_backend

_SILENCE_S = 120.0


@dataclass(frozen=True)
class Result:
    """What a rank's program returned."""

    rank: int
    value: Any


def run_over_link(program: Callable[[EmulatedLink], Any], link: str, *, num_ranks: int = 2, burst_bytes: int = 0) -> list[Any]:
    """What `program(link)` returned on each rank; RanksLost if a rank fails. It is imported anew by the ranks."""
    with tempfile.TemporaryDirectory() as directory:
        emulate = partial(emulated_backend, link_from_text(link), burst_bytes=burst_bytes)
        arguments = (program, emulate, num_ranks, Path(directory) / "meeting-point")
        with LocalRanks(_run, arguments, num_ranks=num_ranks, silence_s=_SILENCE_S) as ranks:
            results = list(ranks.messages())
    return [result.value for result in sorted(results, key=lambda result: result.rank)]


def _run(
    rank: int,
    program: Callable[[EmulatedLink], Any],
    emulate: Callable[[], AbstractContextManager[EmulatedLink]],
    num_ranks: int,
    meeting_point: Path,
    connection: Connection,
) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    try:
        with emulate() as emulated:
            store = dist.FileStore(str(meeting_point), num_ranks)
            dist.init_process_group(BACKEND, store=store, rank=rank, world_size=num_ranks)
            connection.send(Result(rank, program(emulated)))
            if dist.is_initialized():
                dist.barrier()
                dist.destroy_process_group()
    except BaseException:
        connection.send(RankFailed(rank=rank, failed_s=time.perf_counter(), traceback=traceback.format_exc()))
        connection.close()
        os._exit(1)
