from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from support.project import ROOT


def output_of(example: str, *, num_ranks: int, directory: Path | None = None) -> str:
    """What an example prints under torchrun, which itself fails if a rank does; no rank may cause a warning.

    It runs in `directory`, where it may write.
    """
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={num_ranks}", str(ROOT / "examples" / example)]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment, timeout=240, cwd=directory)
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr, done.stderr
    return done.stdout


def losses_in(text: str) -> list[float]:
    """The losses of the lines that report a step, in their order."""
    return [float(loss) for loss in re.findall(r"^step +\d+ .*\bloss (\S+)", text, re.MULTILINE)]


def test_the_training_example_learns_and_reports() -> None:
    text = output_of("train.py", num_ranks=2)
    losses = losses_in(text)
    assert len(losses) == 4
    assert losses[-1] < losses[0]
    assert "Where a step goes" in text


def test_the_sharded_example_learns_and_saves_what_a_plain_optimizer_can_load(tmp_path: Path) -> None:
    text = output_of("train_sharded.py", num_ranks=2, directory=tmp_path)
    losses = losses_in(text)
    assert len(losses) == 3
    assert losses[-1] < losses[0]
    (of_new_data,) = re.findall(r"^loss of new data: (\S+)$", text, re.MULTILINE)
    assert float(of_new_data) < 8.0  # the variance of a sum of 8: the loss of whoever always says zero
    assert "of it gathers" in text
    saved = torch.load(tmp_path / "checkpoint.pt")
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(512, 512), nn.GELU())), nn.Linear(512, 1))
    model.load_state_dict(saved["model"])
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.load_state_dict(saved["optimizer"])
    assert all(optimizer.state[param]["exp_avg"].shape == param.shape for param in model.parameters())
    assert {state["step"].item() for state in optimizer.state.values()} == {30}


def test_the_residual_network_learns_and_is_evaluated_by_one_rank() -> None:
    text = output_of("resnet.py", num_ranks=2)
    losses = losses_in(text)
    assert len(losses) == 6
    assert losses[-1] < 0.2 * losses[0]
    (accuracy,) = re.findall(r"^right on (\d+)% of new images$", text, re.MULTILINE)
    assert int(accuracy) > 80  # in evaluation mode: the running statistics are right too; guessing gives 25
    assert "Where a step goes" in text


def test_the_gpt_learns_to_repeat() -> None:
    text = output_of("gpt.py", num_ranks=2)
    losses = losses_in(text)
    assert len(losses) == 5
    # Whoever does not look back can do no better than guess one of 16 tokens: a loss of log 16, 2.8.
    assert losses[-1] < 0.5
    assert losses[0] > 1.5
    norms = [float(norm) for norm in re.findall(r"gradient norm (\S+)", text)]
    assert min(norms) > 0.0  # clipping saw the gradients, and not None in their place
    assert "Where a step goes" in text


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_branches_are_used_as_each_rank_likes(num_ranks: int) -> None:
    text = output_of("branches.py", num_ranks=num_ranks)
    losses = losses_in(text)
    assert len(losses) == 12
    assert losses[-1] < 0.2 * losses[0]
    unused = [set(names.split(", ")) for names in re.findall(r"unused here: (.*)$", text, re.MULTILINE)]
    names = {f"branches.{branch}.{kind}" for branch in range(3) for kind in ("weight", "bias")}
    assert len(unused) == 12
    assert all(len(each) in (2, 4, 6) and each <= names for each in unused)  # a branch is used as a whole
    # In every tenth step one rank has nothing to do, each in its turn.
    assert [step for step in range(10, 70, 10) if unused[step // 5 - 1] == names] == list(
        range(10 * num_ranks, 70, 10 * num_ranks)
    )
    assert "Where a step goes" in text


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_the_bucketing_example_sends_less_often_and_gets_the_same(num_ranks: int) -> None:
    lines = output_of("demo_bucketing.py", num_ranks=num_ranks).splitlines()
    one_by_one, in_buckets = (int(line.split()[-2]) for line in lines[1:3])
    assert one_by_one == 48
    assert in_buckets < one_by_one
    assert lines[-1] == "gradients equal: yes"


def test_the_mixture_of_experts_learns_and_reports_its_experts() -> None:
    text = output_of("experts.py", num_ranks=4)
    losses = losses_in(text)
    assert len(losses) == 6
    assert losses[-1] < 0.5 * losses[0]
    norms = [float(norm) for norm in re.findall(r"gradient norm (\S+)", text)]
    assert min(norms) > 0.0
    assert "Experts '*.experts.*', ranks 0, 2:" in text
