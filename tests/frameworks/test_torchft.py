"""Replica groups of torchft: one is killed, the other continues, and both end with the same bits."""

import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from support.checkpoints import require_equal
from support.project import ROOT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("torchft") is None, reason="torchft is not installed: it has nightly wheels only"
    ),
]
JOB, PATIENCE_S = ROOT / "tests" / "frameworks" / "torchft_job.py", 100.0
LIGHTHOUSE = """
import sys
from torchft.coordination import LighthouseServer
server = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=10_000)
print(server.address(), flush=True)
sys.stdin.read()
"""


def environment() -> dict[str, str]:
    paths = os.pathsep.join(str(path) for path in (ROOT / "src", ROOT / "tests"))
    return {**os.environ, "PYTHONPATH": paths, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def trained(folder: Path) -> list[dict[str, Any]]:
    """What both groups have at the end; the second one is killed in step 12, and comes back after the first has trained alone."""
    how: dict[str, Any] = {"env": environment(), "text": True}
    lighthouse = subprocess.Popen(
        [sys.executable, "-c", LIGHTHOUSE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, **how
    )
    started = [lighthouse]

    def start(group: int, *killed_in: str) -> subprocess.Popen[str]:
        command = [sys.executable, str(JOB), str(group), address, str(folder), *killed_in]
        with (folder / f"{group}.log").open("a") as log:
            started.append(subprocess.Popen(command, stdout=log, stderr=log, **how))
        return started[-1]

    def log_of(group: int) -> str:
        return (folder / f"{group}.log").read_text()

    try:
        assert lighthouse.stdout is not None
        address = lighthouse.stdout.readline().strip()
        first, second = start(0), start(1, "12")
        assert second.wait(PATIENCE_S) == -signal.SIGKILL, log_of(1)
        until_s = time.monotonic() + PATIENCE_S
        while not (folder / "alone").exists():
            assert (first.poll(), time.monotonic() < until_s) == (None, True), log_of(0)
            time.sleep(0.05)
        second = start(1)
        assert first.wait(PATIENCE_S) == 0, log_of(0)
        assert second.wait(PATIENCE_S) == 0, log_of(1)
    finally:
        for process in started:
            process.kill()
            process.communicate()  # closes its pipes
    return [torch.load(folder / f"{group}.pt") for group in range(2)]


def test_a_group_continues_without_another_one_that_comes_back(tmp_path: Path) -> None:
    first, second = trained(tmp_path)
    assert {1, 2} <= set(first["participants"])
    assert first["participants"][-1] == second["participants"][-1] == 2
    assert len(second["participants"]) < len(first["participants"])
    require_equal(second["parameters"], first["parameters"])
