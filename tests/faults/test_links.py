"""With root and iproute2: ranks in network namespaces, whose links are cut and throttled while they train."""

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from benchmarks.matrix.links import Network, shaped_network
from torch import Tensor, nn

from faults.conftest import Record
from faults.places import WITHIN_S
from support import processes
from support.models import noise
from support.namespaces import enter
from support.processes import Ended, Rank, run_ranks
from undertow import DistributedDataParallel, SyncConfig

pytestmark = [pytest.mark.usefixtures("needs_namespaces"), pytest.mark.root, pytest.mark.waits]
NUM_RANKS = 3
PATIENCE_S = 240.0
STEPS, PROCESS, WARNINGS = range(3)  # what a rank tells


def loss(model: nn.Module, step: int, rank: int) -> Tensor:
    return model(noise(4, 700, step=step, rank=rank)).square().mean()


def trains_until_told(network: Network, here: Path, rank: Rank) -> bool:
    """True if rank 0 comes to the same bits alone."""
    enter(network.namespaces[rank.number])
    os.environ["GLOO_SOCKET_IFNAME"] = network.interface
    store = dist.FileStore(str(here / "meeting-point"), NUM_RANKS)  # the harness has its own beyond the namespaces
    dist.init_process_group("gloo", store=store, rank=rank.number, world_size=NUM_RANKS)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(700, 700), nn.Tanh(), nn.Linear(700, 700))  # 4 MB
    begins = [param.detach().clone() for param in model.parameters()]
    with contextlib.closing(DistributedDataParallel(model, config=SyncConfig(reduction="ordered"))) as ddp:
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        num_steps = 0
        while not (here / "last").exists() or num_steps < int((here / "last").read_text()):
            optimizer.zero_grad()
            loss(ddp, num_steps, rank.number).backward()
            optimizer.step()
            num_steps += 1
            write(here / f"rank-{rank.number}", f"{num_steps} {os.getpid()} {sum('slow' in text for text in rank.logged)}")
    return rank.number > 0 or is_trained_alone(model, begins, num_steps)


def is_trained_alone(model: nn.Module, begins: list[Tensor], num_steps: int) -> bool:
    ours = [param.detach().clone() for param in model.parameters()]
    with torch.no_grad():
        for param, value in zip(model.parameters(), begins, strict=True):
            param.copy_(value)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(num_steps):
        of_ranks = [torch.autograd.grad(loss(model, step, rank), tuple(model.parameters())) for rank in range(NUM_RANKS)]
        for param, *gradients in zip(model.parameters(), *of_ranks, strict=True):
            param.grad = sum(gradients[1:], start=gradients[0]) / NUM_RANKS
        optimizer.step()
    return all(map(torch.equal, ours, model.parameters()))


def write(path: Path, text: str) -> None:
    """Who reads finds it whole."""
    part = path.with_suffix(".part")
    part.write_text(text)
    part.rename(path)


@dataclass(frozen=True)
class Job:
    """Ranks that train, each in its namespace."""

    network: Network
    here: Path
    ended: Future[list[Ended]]

    def told(self, what: int) -> list[int]:
        """What each rank has told after its last step."""
        paths = [self.here / f"rank-{rank}" for rank in range(NUM_RANKS)]
        return [int(path.read_text().split()[what]) if path.exists() else 0 for path in paths]

    def wait_until(self, is_so: Callable[[], bool]) -> None:
        until_s = time.monotonic() + PATIENCE_S
        while not is_so():
            assert time.monotonic() < until_s
            assert not self.ended.done(), self.ended.result()
            time.sleep(0.05)

    def goes_on(self) -> None:
        steps = min(self.told(STEPS))
        self.wait_until(lambda: min(self.told(STEPS)) > steps)

    def change(self, *what: str) -> None:
        subprocess.run([what[0], "-n", self.network.namespaces[2], *what[1:]], check=True)

    def end(self) -> list[Ended]:
        """Has all ranks end after the same step, with the right bits."""
        write(self.here / "last", str(min(self.told(STEPS)) + 20))
        found = self.ended.result()
        assert [(rank.exit_code, rank.words.get("value")) for rank in found] == [(0, True)] * NUM_RANKS, found[0].log
        return found


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    with shaped_network("1gbit", NUM_RANKS) as network, ThreadPoolExecutor(1) as thread:
        trains = partial(trains_until_told, network, tmp_path)
        started = Job(network, tmp_path, thread.submit(run_ranks, trains, NUM_RANKS, patience_s=PATIENCE_S))
        try:
            started.wait_until(lambda: min(started.told(STEPS)) >= 3)
            yield started
        finally:
            for process in () if started.ended.done() else filter(None, started.told(PROCESS)):
                os.kill(process, signal.SIGKILL)


def test_a_cut_link_is_found_and_names_who_cannot_be_reached(job: Job, record: Record) -> None:
    cut_s = time.monotonic()
    job.change("ip", "link", "set", "eth0", "down")
    for number, rank in enumerate(job.ended.result()):
        others = "rank (0|1|0, 1) cannot be reached from rank 2" if number == 2 else "rank 2 cannot be reached from rank [01]"
        text = others + r": nothing has been acknowledged for \d+ s\.\n  synchronisation \d+, rank \d\n  The step"
        assert rank.kind == "RankLost", rank.log
        assert re.match(text, rank.text), rank.text
        rank.words["seconds"] = rank.words["at"] - cut_s
        assert rank.seconds < WITHIN_S
        record("link cut", [rank])


def test_a_slow_link_is_told_with_its_rank_and_figures_and_training_goes_on(job: Job) -> None:
    before = min(job.told(STEPS))
    time.sleep(12.0)  # that two windows are measured in
    assert min(job.told(STEPS)) > before
    shape = ("dev", "eth0", "root", "tbf", "rate", "10mbit", "burst", "128kb", "latency", "100ms")
    job.change("tc", "qdisc", "change", *shape)
    job.wait_until(lambda: min(job.told(WARNINGS)) > 0)
    job.goes_on()
    job.change("tc", "qdisc", "change", *(("1gbit" if word == "10mbit" else word) for word in shape))
    for rank in job.end():
        assert re.search(
            r"(a link is|\d links are) slow, and training goes on at that pace: look at the network of rank 2\.\n"
            r"(.*\n)*  rank 2 sends \d\.\d MB/s to rank [01] \(10\.77\.0\.[12]\); \d+\.\d MB/s before, "
            r"\d+\.\d MB/s on links of other ranks",
            "\n".join(rank.words["logged"]),
        )


def test_a_process_that_is_stopped_is_not_taken_to_be_unreachable(job: Job) -> None:
    """Its machine acknowledges what others send."""
    process = job.told(PROCESS)[1]
    os.kill(process, signal.SIGSTOP)
    time.sleep(20.0 * processes.PATIENCE)  # four times as long as a machine may be silent
    os.kill(process, signal.SIGCONT)
    job.goes_on()
    job.end()
