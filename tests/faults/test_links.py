"""With root and iproute2: ranks in network namespaces, whose link is cut while they train."""

import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch.distributed as dist
from benchmarks.links import Network, enter, shaped_network
from torch import nn

from faults.conftest import Record
from faults.places import WITHIN_S
from support.models import noise
from support.processes import Ended, Rank, run_ranks
from undertow import DistributedDataParallel, SyncConfig

pytestmark = [pytest.mark.usefixtures("needs_namespaces"), pytest.mark.root, pytest.mark.waits]
FEW, MANY = 3, 8
PATIENCE_S = 240.0
TIMEOUT_S = 3.0


def trains(network: Network, here: Path, timeout_s: float, rank: Rank) -> None:
    num_ranks = len(network.namespaces)
    enter(network.namespaces[rank.number])
    os.environ["GLOO_SOCKET_IFNAME"] = network.interface
    store = dist.FileStore(str(here / "meeting-point"), num_ranks)  # the harness has its own beyond the namespaces
    dist.init_process_group("gloo", store=store, rank=rank.number, world_size=num_ranks)
    model = DistributedDataParallel(nn.Linear(700, 700), config=SyncConfig(stall_timeout_s=timeout_s))
    step = 0
    while True:
        model(noise(4, 700, step=step, rank=rank.number)).square().mean().backward()
        step += 1
        if step == 3:
            (here / f"rank-{rank.number}").write_text(str(os.getpid()))


@dataclass(frozen=True)
class Job:
    network: Network
    ended: Future[list[Ended]]


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    yield from started(tmp_path, FEW, TIMEOUT_S)


@pytest.fixture
def patient_job(tmp_path: Path) -> Iterator[Job]:
    yield from started(tmp_path, MANY, PATIENCE_S)


def started(tmp_path: Path, num_ranks: int, timeout_s: float) -> Iterator[Job]:
    paths = [tmp_path / f"rank-{rank}" for rank in range(num_ranks)]
    with shaped_network("1gbit", num_ranks) as network, ThreadPoolExecutor(1) as thread:
        ended = thread.submit(run_ranks, partial(trains, network, tmp_path, timeout_s), num_ranks, patience_s=PATIENCE_S)
        try:
            until_s = time.monotonic() + PATIENCE_S
            while not all(path.exists() for path in paths):
                assert time.monotonic() < until_s
                assert not ended.done(), ended.result()
                time.sleep(0.05)
            yield Job(network, ended)
        finally:
            for path in paths if not ended.done() else ():
                with suppress(OSError, ValueError):
                    os.kill(int(path.read_text()), signal.SIGKILL)


def test_a_cut_link_ends_the_step_on_both_of_its_sides(job: Job, record: Record) -> None:
    cut_s = time.monotonic()
    subprocess.run(["ip", "-n", job.network.namespaces[2], "link", "set", "eth0", "down"], check=True)
    for number, rank in enumerate(job.ended.result()):
        assert rank.kind == "StallTimeout", rank.log
        named = "ranks 0, 1 have" if number == 2 else "rank 2 has"
        head = rf"rank \d has waited \d+ s for .*: {named} not arrived\.\n"
        assert re.match(rf"{head}  synchronization \d+, rank {number}\n", rank.text), rank.text
        silent = "ranks 0, 1: no answer; they are" if number == 2 else "rank 2: no answer; it is"
        assert [line for line in rank.text.split("\n") if "no answer" in line] == [
            f"  {silent} stopped, out of reach, or in a call that keeps Python from running"
        ]
        rank.words["seconds"] = rank.words["at"] - cut_s
        assert rank.seconds < WITHIN_S
        record(f"link cut, beyond stall_timeout_s={TIMEOUT_S}", [rank])


def test_a_machine_that_is_out_of_reach_is_named(patient_job: Job, record: Record) -> None:
    cut_s = time.monotonic()
    subprocess.run(["ip", "-n", patient_job.network.namespaces[2], "link", "set", "eth0", "down"], check=True)
    for number, rank in enumerate(patient_job.ended.result()):
        assert rank.kind == "RankLost", rank.log
        named = "[13]" if number == 2 else "2"  # those beside it in the ring
        assert re.match(rf"rank {named} is gone: its machine has not answered for 10 s\.\n", rank.text), rank.text
        rank.words["seconds"] = rank.words["at"] - cut_s
        assert rank.seconds < 10.0 + WITHIN_S
        record("its link is down", [rank])
