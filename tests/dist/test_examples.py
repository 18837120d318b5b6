"""What the examples print, on forked ranks that end as scripts do; tests/faults/test_restarts.py has one under torchrun."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from support.elastic import losses_in
from support.processes import example, free_port, run_ranks
from support.project import ROOT


def output_of(name: str, folder: Path, *, num_ranks: int) -> str:
    """What rank 0 of an example prints that runs in `folder`, where it may write; no rank may cause a warning."""
    target = partial(example, ROOT / "examples" / name, port=free_port(), folder=folder)
    found = run_ranks(target, num_ranks, is_script=True, patience_s=240)
    for rank in found:
        assert (rank.exit_code, "Warning" in rank.log) == (0, False), rank.log
    return found[0].out


def require_norms(text: str) -> None:
    """Clipping saw the gradients, and not None in their place."""
    assert min(float(norm) for norm in re.findall(r"gradient norm (\S+)", text)) > 0.0


@pytest.mark.slow
def test_the_sharded_example_learns_and_saves_what_a_plain_optimizer_can_load(tmp_path: Path) -> None:
    text = output_of("train_sharded.py", tmp_path, num_ranks=2)
    first, last = losses_in(text, 3)
    assert last < first
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


@pytest.mark.slow
def test_the_residual_network_learns_and_is_evaluated_by_one_rank(tmp_path: Path) -> None:
    text = output_of("resnet.py", tmp_path, num_ranks=2)
    first, last = losses_in(text, 6)
    assert last < 0.2 * first
    (accuracy,) = re.findall(r"^right on (\d+)% of new images$", text, re.MULTILINE)
    assert int(accuracy) > 80  # in evaluation mode: the running statistics are right too; guessing gives 25
    assert "Where a step goes" in text


@pytest.mark.slow
def test_the_gpt_learns_to_repeat(tmp_path: Path) -> None:
    text = output_of("gpt.py", tmp_path, num_ranks=2)
    first, last = losses_in(text, 5)
    # Whoever does not look back can do no better than guess one of 16 tokens: a loss of log 16, 2.8.
    assert last < 0.5
    assert first > 1.5
    require_norms(text)
    assert "Where a step goes" in text


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_branches_are_used_as_each_rank_likes(num_ranks: int, tmp_path: Path) -> None:
    text = output_of("branches.py", tmp_path, num_ranks=num_ranks)
    first, last = losses_in(text, 12)
    assert last < 0.2 * first
    unused = [set(names.split(", ")) for names in re.findall(r"unused here: (.*)$", text, re.MULTILINE)]
    names = {f"branches.{branch}.{kind}" for branch in range(3) for kind in ("weight", "bias")}
    assert len(unused) == 12
    assert all(len(each) in (2, 4, 6) and each <= names for each in unused)  # a branch is used as a whole
    # In every tenth step one rank has nothing to do, each in its turn.
    idle = range(10 * num_ranks, 70, 10 * num_ranks)
    assert [step for step in range(10, 70, 10) if unused[step // 5 - 1] == names] == list(idle)
    assert "Where a step goes" in text


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_the_bucketing_example_sends_less_often_and_gets_the_same(num_ranks: int, tmp_path: Path) -> None:
    lines = output_of("demo_bucketing.py", tmp_path, num_ranks=num_ranks).splitlines()
    one_by_one, in_buckets = (int(line.split()[-2]) for line in lines[1:3])
    assert one_by_one == 48
    assert in_buckets < one_by_one
    assert lines[-1] == "gradients equal: yes"


@pytest.mark.slow
def test_the_mixture_of_experts_learns_and_reports_its_experts(tmp_path: Path) -> None:
    text = output_of("experts.py", tmp_path, num_ranks=4)
    first, last = losses_in(text, 6)
    assert last < 0.5 * first
    require_norms(text)
    assert "Experts '*.experts.*', ranks 0, 2:" in text
