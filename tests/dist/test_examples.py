from __future__ import annotations

import os
import subprocess
import sys

import pytest

from support.project import ROOT


def output_of(example: str, *, num_ranks: int) -> str:
    """What an example prints under torchrun, which itself fails if a rank does."""
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={num_ranks}", str(ROOT / "examples" / example)]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_training_example_learns_and_reports() -> None:
    text = output_of("train.py", num_ranks=2)
    losses = [float(line.split()[-1]) for line in text.splitlines() if line.startswith("step ")]
    assert len(losses) == 4
    assert losses[-1] < losses[0]
    assert "Where a step goes" in text


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_the_bucketing_example_sends_less_often_and_gets_the_same(num_ranks: int) -> None:
    lines = output_of("demo_bucketing.py", num_ranks=num_ranks).splitlines()
    one_by_one, in_buckets = (int(line.split()[-2]) for line in lines[1:3])
    assert one_by_one == 48
    assert in_buckets < one_by_one
    assert lines[-1] == "gradients equal: yes"
