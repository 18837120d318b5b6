"""Starts local gloo ranks and brings back what rank 0 measured."""

from __future__ import annotations

import os
import tempfile
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks.links import LOOPBACK, Network, enter, network_of
from benchmarks.processes import die_with, interrupts_postponed


@dataclass(frozen=True, slots=True, kw_only=True)
class _Meeting:
    """Where the ranks find each other."""

    network: Network
    num_ranks: int
    store: str


def run_ranks(work: Callable[..., Any], num_ranks: int, *args: Any, link: str = LOOPBACK) -> Any:
    """Runs `work(rank, *args)` in `num_ranks` fresh processes with gloo and one thread each; returns rank 0's result.

    Over another link, each has a network namespace, and tc shapes the link between them. Raises NoNamespaces.
    """
    with network_of(link, num_ranks) as network:
        return _run_ranks(work, network, num_ranks, *args)


def _run_ranks(work: Callable[..., Any], network: Network, num_ranks: int, *args: Any) -> Any:
    context = mp.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        receive, send = context.Pipe(duplex=False)
        meeting = _Meeting(network=network, num_ranks=num_ranks, store=f"{folder}/store")
        ranks = [
            context.Process(target=_rank, args=(os.getpid(), partial(work, rank, *args), rank, meeting, send), daemon=True)
            for rank in range(num_ranks)
        ]
        is_ok, result = False, "the ranks ended without a result"
        started = []
        try:
            for process in ranks:
                with interrupts_postponed():
                    process.start()
                    started.append(process)
            send.close()
            with suppress(EOFError):
                is_ok, result = receive.recv()
        finally:
            for process in started if not is_ok else ():
                process.kill()  # it may be waiting for a rank that is gone
            for process in started:
                process.join()
    if not is_ok:
        raise RuntimeError(result)
    return result


def _rank(runner: int, work: Callable[[], Any], rank: int, meeting: _Meeting, send: Any) -> None:
    die_with(runner)
    if meeting.network.namespaces:
        enter(meeting.network.namespaces[rank])
    os.environ["GLOO_SOCKET_IFNAME"] = meeting.network.interface
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", init_method=f"file://{meeting.store}", rank=rank, world_size=meeting.num_ranks)
        result = work()
        dist.barrier()
        dist.destroy_process_group()
        if rank == 0:
            send.send((True, result))
    except Exception:
        send.send((False, f"rank {rank}:\n{traceback.format_exc()}"))
        raise
