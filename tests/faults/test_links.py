"""With root and iproute2: ranks in network namespaces, whose links are cut and throttled while they train."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from benchmarks.matrix.links import Network, shaped_network

from faults.conftest import Record
from faults.test_lost_ranks import WITHIN_S
from support.processes import Ended

pytestmark = pytest.mark.usefixtures("needs_namespaces")
NUM_RANKS = 3
PATIENCE_S = 240.0

SCRIPT = """
    import sys, time, torch, torch.distributed as dist
    from pathlib import Path
    import undertow

    rank, num_ranks, here = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(str(here / "meeting-point"), num_ranks), rank=rank, world_size=num_ranks)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(700, 700), torch.nn.Tanh(), torch.nn.Linear(700, 700))  # 4 MB
    bare = [param.detach().clone() for param in model.parameters()]
    ddp = undertow.DistributedDataParallel(model, config=undertow.SyncConfig(reduction="ordered"))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)

    def loss(model, step, rank):
        generator = torch.Generator().manual_seed(1000 * step + rank)
        return model(torch.randn(4, 700, generator=generator)).square().mean()

    num_steps = 0
    try:
        while not (here / "last").exists() or num_steps < int((here / "last").read_text()):
            optimizer.zero_grad()
            loss(ddp, num_steps, rank).backward()
            optimizer.step()
            num_steps += 1
            (here / f"coming-{rank}").write_text(str(num_steps))
            (here / f"coming-{rank}").rename(here / f"steps-{rank}")  # who reads finds it whole
    except undertow.errors.UndertowError as error:
        at = time.monotonic()
        (here / f"error-{rank}").write_text(f"{at}\\n{type(error).__name__}\\n{error}")
        raise
    ours = [param.detach().clone() for param in model.parameters()]
    with torch.no_grad():
        for param, value in zip(model.parameters(), bare, strict=True):
            param.copy_(value)
    alone = torch.optim.SGD(model.parameters(), lr=0.1)
    ddp.close()
    for step in range(num_steps if rank == 0 else 0):  # what all ranks have done, by one of them
        of_ranks = []
        for other in range(num_ranks):
            alone.zero_grad()
            loss(model, step, other).backward()
            of_ranks.append([param.grad for param in model.parameters()])
        for param, *gradients in zip(model.parameters(), *of_ranks, strict=True):
            param.grad = sum(gradients[1:], start=gradients[0]) / num_ranks
        alone.step()
    if rank == 0:
        same = all(map(torch.equal, ours, model.parameters()))
        (here / "bits").write_text("the same" if same else "others")
"""
Ranks = list[subprocess.Popen[str]]


@pytest.fixture
def network() -> Iterator[Network]:
    with shaped_network("1gbit", NUM_RANKS) as made:
        yield made


@pytest.fixture
def ranks(network: Network, tmp_path: Path) -> Iterator[Ranks]:
    """Processes that train, each in its namespace."""
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": network.interface}
    command = [sys.executable, "-c", textwrap.dedent(SCRIPT)]
    started = []
    for rank in range(NUM_RANKS):
        where = network.command(rank, [*command, str(rank), str(NUM_RANKS), str(tmp_path)])
        with (tmp_path / f"log-{rank}").open("w") as log:
            started.append(subprocess.Popen(where, env=environment, stderr=log, text=True))
    try:
        wait_until(lambda: num_steps(tmp_path) >= 3)
        yield started
    finally:
        for rank in started:
            rank.kill()
            rank.wait()


def num_steps(directory: Path) -> int:
    """That all ranks have made."""
    found = [directory / f"steps-{rank}" for rank in range(NUM_RANKS)]
    return min(int(path.read_text()) if path.exists() else 0 for path in found)


def wait_until(is_so: Callable[[], bool]) -> None:
    until_s = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < until_s
        time.sleep(0.05)


def end(directory: Path) -> None:
    """Has all ranks end after the same step."""
    (directory / "to come").write_text(str(num_steps(directory) + 20))
    (directory / "to come").rename(directory / "last")


def change(network: Network, rank: int, *what: str) -> None:
    subprocess.run([what[0], "-n", network.namespaces[rank], *what[1:]], check=True)


def test_a_cut_link_is_found_and_names_who_cannot_be_reached(
    network: Network, ranks: Ranks, tmp_path: Path, record: Record
) -> None:
    cut_s = time.monotonic()
    change(network, 2, "ip", "link", "set", "eth0", "down")
    found = []
    for rank in range(NUM_RANKS):
        ranks[rank].wait(PATIENCE_S)
        at, kind, text = (tmp_path / f"error-{rank}").read_text().split("\n", 2)
        others = "rank (0|1|0, 1) cannot be reached from rank 2" if rank == 2 else "rank 2 cannot be reached from rank [01]"
        assert kind == "RankLost"
        assert re.match(others + r": nothing has been acknowledged for \d+ s\.\n  synchronisation \d+, rank \d\n  The step", text)
        found.append(Ended(words={"kind": kind, "text": text, "seconds": float(at) - cut_s}))
        assert found[-1].seconds < WITHIN_S
    record("link cut", found)


def test_a_slow_link_is_told_with_its_rank_and_figures_and_training_goes_on(
    network: Network, ranks: Ranks, tmp_path: Path
) -> None:
    before = num_steps(tmp_path)
    time.sleep(12.0)  # that two windows are measured in
    assert num_steps(tmp_path) > before
    shape = ("dev", "eth0", "root", "tbf", "rate", "10mbit", "burst", "128kb", "latency", "100ms")
    change(network, 2, "tc", "qdisc", "change", *shape)
    logs = [tmp_path / f"log-{rank}" for rank in range(NUM_RANKS)]
    wait_until(lambda: all("slow" in log.read_text() for log in logs))
    steps = num_steps(tmp_path)
    wait_until(lambda: num_steps(tmp_path) > steps)
    change(network, 2, "tc", "qdisc", "change", *(("1gbit" if word == "10mbit" else word) for word in shape))
    end(tmp_path)
    assert [rank.wait(PATIENCE_S) for rank in ranks] == [0] * NUM_RANKS
    assert (tmp_path / "bits").read_text() == "the same"
    for log in logs:
        assert re.search(
            r"undertow: (a link is|\d links are) slow, and training goes on at that pace: look at the network of rank 2\.\n"
            r"(.*\n)*  rank 2 sends \d\.\d MB/s to rank [01] \(10\.77\.0\.[12]\); \d+\.\d MB/s before, "
            r"\d+\.\d MB/s on links of other ranks\n",
            log.read_text(),
        )


def test_a_process_that_is_stopped_is_not_taken_to_be_unreachable(ranks: Ranks, tmp_path: Path) -> None:
    """Its machine acknowledges what others send."""
    ranks[1].send_signal(signal.SIGSTOP)
    time.sleep(1.5 * WITHIN_S)
    steps = num_steps(tmp_path)
    ranks[1].send_signal(signal.SIGCONT)
    wait_until(lambda: num_steps(tmp_path) > steps)
    end(tmp_path)
    assert [rank.wait(PATIENCE_S) for rank in ranks] == [0] * NUM_RANKS
