"""A script under torchrun ends well every time: no abort when the interpreter ends, once its results are right."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from support.project import ROOT

_PATIENCE_S = 240.0  # for one run


@pytest.mark.timeout(3600)  # for as many as are asked for
def test_every_run_of_the_example_ends_with_exit_code_0(request: pytest.FixtureRequest) -> None:
    num_runs = request.config.getoption("--exits", default=2)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "examples/train.py"]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    for run in range(num_runs):
        done = subprocess.run(
            command, check=False, capture_output=True, text=True, env=environment, timeout=_PATIENCE_S, cwd=ROOT
        )
        assert done.returncode == 0, f"run {run} of {num_runs}: {done.stderr}"
