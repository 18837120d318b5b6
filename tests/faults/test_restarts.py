"""Jobs: one whose rank is killed starts again and ends as if nothing had happened; one whose results are right ends well; one
whose script has an error ends with it.
"""

import itertools
import os
import re
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import nn

from support.elastic import (
    DEAF_EXAMPLE,
    EXAMPLE,
    PATIENCE_S,
    losses_in,
    run,
    run_under_torchrun,
    steps_of,
    torchrun,
)
from support.processes import Ended, Rank
from support.project import ROOT

FAILS = """
import torch
import torch.distributed as dist
from undertow import DistributedDataParallel

def label(row):
    if row == 3 and dist.get_rank() == 1:
        raise ValueError("row 3 has no label")
    return row

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(1, 1))
for row in range(5):
    (model(torch.ones(2, 1)) - label(row)).sum().backward()
"""
OPTIONS = ["--epochs", "1", "--checkpoint-every", "4", "--save-model", "model.pt"]
ORDER: list[int] = runpy.run_path(str(EXAMPLE))["sample_order"](1)
BATCH, NUM_STEPS = 24, 20


def model_in(folder: Path) -> dict[str, torch.Tensor]:
    return torch.load(folder / "model.pt", weights_only=True)


def batches(size: int) -> list[tuple[int, ...]]:
    """What the steps of one epoch are to train on, the last one with what is left."""
    return [tuple(ORDER[start : start + size]) for start in range(0, len(ORDER), size)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    folder = tmp_path_factory.mktemp("undisturbed")
    for rank in run(folder, *OPTIONS, num_ranks=2):
        assert (rank.exit_code, "Warning" in rank.log, "continue after" in rank.out) == (0, False, False), rank.log
    assert [step.samples for step in steps_of(folder / "2")] == batches(BATCH)
    return model_in(folder)


def require_as_undisturbed(folder: Path, out: str, undisturbed: dict[str, torch.Tensor], killed_in: int, goes_on_in: int) -> None:
    """Two attempts: what the first one has done since the checkpoint is done again by the second, and nothing else."""
    assert f"2 ranks continue after sample {(goes_on_in - 1) * BATCH}, from elastic_checkpoint" in out
    found = steps_of(folder / "2")
    made = [(step.attempt, step.number) for step in found]
    assert (made, [step.samples for step in found if step.attempt == 1 or step.number < goes_on_in]) == (
        [*((0, step) for step in range(1, killed_in + 1)), *((1, step) for step in range(goes_on_in, NUM_STEPS + 1))],
        batches(BATCH),
    )
    after = model_in(folder)
    assert all(torch.equal(after[name], value) for name, value in undisturbed.items())


KILLED = [*OPTIONS, "--kill-rank", "1", "--kill-step", "11"]
GONE = "RankLost: rank 1 is gone: its process exited or was killed without reporting an error."


@pytest.mark.slow
def test_torchrun_has_a_job_go_on(tmp_path: Path, undisturbed: dict[str, torch.Tensor]) -> None:
    done = run_under_torchrun(DEAF_EXAMPLE, *KILLED, "--sample-log=2", num_ranks=2, folder=tmp_path, max_restarts=1)
    assert (done.exit_code, "rank 1 is killed in step 11" in done.out, GONE in done.log) == (0, True, True), done.log
    require_as_undisturbed(tmp_path, done.out, undisturbed, killed_in=11, goes_on_in=9)


def exit_codes(found: Sequence[Ended]) -> list[int | None]:
    return [rank.exit_code for rank in found]


@pytest.mark.slow
@pytest.mark.smoke
def test_a_job_goes_on_behind_its_last_checkpoint_with_the_same_bits(
    tmp_path: Path, undisturbed: dict[str, torch.Tensor]
) -> None:
    found = run(tmp_path, *KILLED, num_ranks=2, max_restarts=1)
    assert (exit_codes(found), "rank 1 is killed in step 11" in found[1].out, GONE in found[0].log) == (
        [1, -signal.SIGKILL, 0, 0],
        True,
        True,
    ), found[-1].log
    require_as_undisturbed(tmp_path, found[2].out, undisturbed, killed_in=11, goes_on_in=9)


def is_killed_in_a_checkpoint(number: int, times: int, rank: Rank) -> None:
    calls, fsync = itertools.count(1), os.fsync

    def killed(descriptor: int) -> None:
        if next(calls) == times:
            os.kill(os.getpid(), signal.SIGKILL)
        fsync(descriptor)

    if rank.number == number:
        os.fsync = killed


# Rank 1 brings one file of each checkpoint to the disk: the second is that of step 8.
@pytest.mark.slow
def test_a_checkpoint_that_a_killed_rank_has_half_written_does_not_count(
    tmp_path: Path, undisturbed: dict[str, torch.Tensor]
) -> None:
    found = run(tmp_path, *OPTIONS, num_ranks=2, max_restarts=1, spoils=partial(is_killed_in_a_checkpoint, 1, 2))
    assert exit_codes(found) == [1, -signal.SIGKILL, 0, 0], found[-1].log
    require_as_undisturbed(tmp_path, found[2].out, undisturbed, killed_in=8, goes_on_in=5)
    assert not (tmp_path / "elastic_checkpoint.new").exists()


def trained_alone(order: list[int], *, batch: int) -> dict[str, Any]:
    inputs = torch.randn(480, 32, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batches = [order[start : start + batch] for start in range(0, len(order), batch)]
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=len(batches))
    for samples in batches:
        optimizer.zero_grad()
        x = inputs[samples]
        (model(x) - x[:, :4].sum(dim=1, keepdim=True)).square().mean().backward()
        optimizer.step()
        schedule.step()
    return model.state_dict()


def require_trained_alone(folder: Path, *, batch: int) -> None:
    # The same terms in another order: about 1e-7 of each gradient, which is what AdamW's steps of at most 1e-2 differ by, in ten
    # steps; a hundred times that is allowed. A sample left out or taken twice changes them by more than a hundredth.
    after = model_in(folder)
    for name, value in trained_alone(ORDER, batch=batch).items():
        torch.testing.assert_close(after[name], value, rtol=0.0, atol=1e-5)


# Batches of 53 are no equal shares for either.
@pytest.mark.slow
def test_three_ranks_go_on_where_one_of_four_was_killed(tmp_path: Path) -> None:
    options = [*OPTIONS, "--batch", "53"]
    first = run(tmp_path, *options, "--kill-rank", "0", "--kill-step", "7", num_ranks=4)
    assert exit_codes(first) == [-signal.SIGKILL, 1, 1, 1], first[1].log
    assert all("RankLost: rank 0 is gone" in rank.log for rank in first[1:])
    then = run(tmp_path, *options, num_ranks=3)
    assert (exit_codes(then), "3 ranks continue after sample 212, from elastic_checkpoint" in then[0].out) == ([0, 0, 0], True), (
        then[0].log
    )
    of_four, of_three = steps_of(tmp_path / "4"), steps_of(tmp_path / "3")
    assert ([step.number for step in of_four], [step.samples for step in (*of_four[:4], *of_three)]) == (
        list(range(1, 8)),
        batches(53),
    )
    require_trained_alone(tmp_path, batch=53)


@pytest.mark.slow
def test_a_batch_that_is_smaller_than_the_ranks_leaves_one_without_data(tmp_path: Path) -> None:
    found = run(tmp_path, *OPTIONS, "--batch", "159", num_ranks=4)  # 159, 159, 159 and 3
    assert (exit_codes(found), [step.samples for step in steps_of(tmp_path / "4")]) == ([0] * 4, batches(159)), found[0].log
    require_trained_alone(tmp_path, batch=159)


def has_trained(folder: Path, *, num_steps: int) -> bool:
    logs = [path.read_text(encoding="utf-8").count("\n") for path in folder.glob("2/rank*.jsonl")]
    return len(logs) == 2 and min(logs) >= num_steps


@pytest.mark.slow
def test_an_interrupted_job_leaves_no_process_and_goes_on_where_it_was(tmp_path: Path) -> None:
    """Ctrl-C reaches torchrun, and its ranks by it, wherever they are: they write a checkpoint after every step."""
    options = ("--epochs=400", "--checkpoint-every=1", "--sample-log=2")
    how = torchrun(EXAMPLE, *options, num_ranks=2, folder=tmp_path, interpreter=sys.executable)
    with subprocess.Popen(**how, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True) as job:
        try:
            until_s = time.monotonic() + PATIENCE_S
            while not has_trained(tmp_path, num_steps=12) and job.poll() is None and time.monotonic() < until_s:
                time.sleep(0.02)
            processes = psutil.Process(job.pid).children(recursive=True)
            assert len(processes) >= 2
            job.send_signal(signal.SIGINT)
            said, _ = job.communicate(timeout=PATIENCE_S)
        finally:
            job.kill()
    left = psutil.wait_procs(processes, timeout=PATIENCE_S)[1]
    assert (left, job.returncode == 0, "Fatal Python error" in said) == ([], False, False), said
    assert {path.name for path in tmp_path.iterdir()} <= {"2", *(f"elastic_checkpoint{end}" for end in ("", ".new", ".old"))}
    first, second = run(tmp_path, "--epochs", "1", num_ranks=2)  # so many steps may be over
    assert (first.exit_code, second.exit_code, "2 ranks continue after sample" in first.out) == (0, 0, True), first.log
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("elastic")] == ["elastic_checkpoint"]


@pytest.mark.slow
def test_a_job_that_a_scheduler_stops_saves_the_step_in_which_it_stops(tmp_path: Path) -> None:
    """Without a regular checkpoint before: the position is the one at which the ranks have left."""
    options = ("--epochs=400", "--checkpoint-every=100000", "--sample-log=2")
    how = torchrun(EXAMPLE, *options, num_ranks=2, folder=tmp_path)
    with subprocess.Popen(**how, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as job:
        until_s = time.monotonic() + PATIENCE_S
        while not has_trained(tmp_path, num_steps=12) and job.poll() is None and time.monotonic() < until_s:
            time.sleep(0.02)
        job.send_signal(signal.SIGTERM)
        said, _ = job.communicate(timeout=PATIENCE_S)
    stopped = re.search(r"trained on (\d+) samples", said)
    assert stopped, said
    assert max(step.number for step in steps_of(tmp_path / "2")) * BATCH == int(stopped[1])
    first, _ = run(tmp_path, "--epochs=1", num_ranks=2)
    assert f"2 ranks continue after sample {stopped[1]}, from elastic_checkpoint" in first.out, first.log


@pytest.mark.slow
@pytest.mark.timeout(3600)  # for as many as are asked for
def test_every_run_of_the_example_learns_and_ends_with_exit_code_0(request: pytest.FixtureRequest) -> None:
    num_runs = request.config.getoption("--exits", default=1)
    for number in range(num_runs):
        done = run_under_torchrun(ROOT / "examples" / "train.py", num_ranks=2, folder=ROOT)
        assert (done.exit_code, "Warning" in done.log) == (0, False), f"run {number} of {num_runs}: {done.log}"
        first, last = losses_in(done.out, 4)
        assert last < first
        assert "Where a step goes" in done.out


@pytest.mark.slow
def test_the_last_text_of_a_job_is_the_error_of_its_script(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(FAILS)
    ended = run_under_torchrun(tmp_path / "script.py", num_ranks=2, folder=tmp_path)
    _, _, cause = ended.log.rpartition("traceback : ")
    assert [line.strip() for line in cause.splitlines() if "File" in line or "Error" in line] == [
        f'File "{tmp_path}/script.py", line 14, in <module>',
        f'File "{tmp_path}/script.py", line 8, in label',
        'raise ValueError("row 3 has no label")',
        "ValueError: row 3 has no label",
    ]
