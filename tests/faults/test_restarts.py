"""A job whose rank is killed starts again under torchrun, and ends as if nothing had happened."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

from support.elastic import DEAF_EXAMPLE, EXAMPLE, launch, order_of, run, steps_of, trained_alone

OPTIONS = ["--epochs", "1", "--checkpoint-every", "4", "--save-model", "model.pt"]
BATCH, NUM_STEPS = 24, 20
PATIENCE_S = 120.0


def model_in(folder: Path) -> dict[str, torch.Tensor]:
    return torch.load(folder / "model.pt", weights_only=True)


def batches(size: int) -> list[tuple[int, ...]]:
    """What the steps of one epoch are to train on, the last one with what is left."""
    order = order_of(1)
    return [tuple(order[start : start + size]) for start in range(0, len(order), size)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """The parameters after a run of two ranks to which nothing happens."""
    folder = tmp_path_factory.mktemp("undisturbed")
    done = run(folder, *OPTIONS, num_ranks=2)
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr, done.stderr
    assert "go on behind" not in done.stdout
    assert [step.samples for step in steps_of(folder / "2")] == batches(BATCH)
    return model_in(folder)


def require_as_undisturbed(
    folder: Path, done: subprocess.CompletedProcess, undisturbed: dict[str, torch.Tensor], *, killed_in: int, goes_on_in: int
) -> None:
    """Two attempts: what the first one has done since the checkpoint is done again by the second, and nothing else."""
    assert done.returncode == 0, done.stderr
    assert f"2 ranks go on behind sample {(goes_on_in - 1) * BATCH}, from elastic_checkpoint" in done.stdout
    found = steps_of(folder / "2")
    assert [step.number for step in found if step.attempt == 0] == list(range(1, killed_in + 1))
    assert [step.number for step in found if step.attempt == 1] == list(range(goes_on_in, NUM_STEPS + 1))
    in_the_model = [step for step in found if step.attempt == 1 or step.number < goes_on_in]
    assert [step.samples for step in in_the_model] == batches(BATCH)
    after = model_in(folder)
    assert all(torch.equal(after[name], value) for name, value in undisturbed.items())


def test_a_job_goes_on_behind_its_last_checkpoint_with_the_same_bits(
    tmp_path: Path, undisturbed: dict[str, torch.Tensor]
) -> None:
    done = run(tmp_path, *OPTIONS, "--kill-rank", "1", "--kill-step", "11", num_ranks=2, max_restarts=1, script=DEAF_EXAMPLE)
    assert "rank 1 is killed in step 11" in done.stdout
    assert "RankLost: rank 1 is gone: its process has ended without a word, or was killed." in done.stderr
    require_as_undisturbed(tmp_path, done, undisturbed, killed_in=11, goes_on_in=9)


def test_a_checkpoint_that_a_killed_rank_has_half_written_does_not_count(
    tmp_path: Path, undisturbed: dict[str, torch.Tensor]
) -> None:
    """Rank 1 brings one file of each checkpoint to the disk: the second is that of step 8."""
    done = run(tmp_path, "1", "2", *OPTIONS, num_ranks=2, max_restarts=1, script=DEAF_EXAMPLE)
    require_as_undisturbed(tmp_path, done, undisturbed, killed_in=8, goes_on_in=5)
    assert not (tmp_path / "elastic_checkpoint.new").exists()


def test_three_ranks_go_on_where_one_of_four_was_killed(tmp_path: Path) -> None:
    """Batches of 53 are no equal shares for either."""
    options = [*OPTIONS, "--batch", "53"]
    first = run(tmp_path, *options, "--kill-rank", "0", "--kill-step", "7", num_ranks=4, script=DEAF_EXAMPLE)
    assert first.returncode != 0
    assert "RankLost: rank 0 is gone" in first.stderr
    then = run(tmp_path, *options, num_ranks=3)
    assert then.returncode == 0, then.stderr
    assert "3 ranks go on behind sample 212, from elastic_checkpoint" in then.stdout
    of_four, of_three = steps_of(tmp_path / "4"), steps_of(tmp_path / "3")
    assert [step.number for step in of_four] == list(range(1, 8))
    assert [step.samples for step in (*of_four[:4], *of_three)] == batches(53)
    # The same terms in another order: about 1e-7 of each gradient, which is what AdamW's steps of at most 1e-2 differ by, in ten
    # steps; a hundred times that is allowed. A sample left out or taken twice changes them by more than a hundredth.
    alone, after = trained_alone(num_epochs=1, batch=53), model_in(tmp_path)
    for name, value in alone.items():
        torch.testing.assert_close(after[name], value, rtol=0.0, atol=1e-5)


def test_a_batch_that_is_smaller_than_the_ranks_leaves_one_without_data(tmp_path: Path) -> None:
    done = run(tmp_path, *OPTIONS, "--batch", "159", num_ranks=4)  # 159, 159, 159 and 3
    assert done.returncode == 0, done.stderr
    assert [step.samples for step in steps_of(tmp_path / "4")] == batches(159)
    alone, after = trained_alone(num_epochs=1, batch=159), model_in(tmp_path)
    for name, value in alone.items():
        torch.testing.assert_close(after[name], value, rtol=0.0, atol=1e-5)  # as above


def has_trained(folder: Path, *, num_steps: int) -> bool:
    logs = [path.read_text(encoding="utf-8").count("\n") for path in folder.glob("2/rank*.jsonl")]
    return len(logs) == 2 and min(logs) >= num_steps


def test_an_interrupted_job_leaves_no_process_and_goes_on_where_it_was(tmp_path: Path) -> None:
    """Ctrl-C reaches torchrun, and its ranks by it, wherever they are: they write a checkpoint after every step."""
    options = ["--epochs", "400", "--checkpoint-every", "1"]
    how = launch(tmp_path, *options, num_ranks=2)
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
    assert psutil.wait_procs(processes, timeout=PATIENCE_S)[1] == [], said
    assert job.returncode != 0
    assert "Fatal Python error" not in said, said
    assert {path.name for path in tmp_path.iterdir()} <= {"2", *(f"elastic_checkpoint{end}" for end in ("", ".new", ".old"))}
    then = run(tmp_path, "--epochs", "1", num_ranks=2)  # so many steps may be over
    assert then.returncode == 0, then.stderr
    assert "2 ranks go on behind sample" in then.stdout
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("elastic")] == ["elastic_checkpoint"]


def test_the_example_says_how_it_is_used() -> None:
    done = subprocess.run([sys.executable, str(EXAMPLE), "--help"], check=False, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0
    assert "torchrun --standalone --nproc-per-node=4 --max-restarts=3 examples/elastic_train.py" in done.stdout
    assert "--kill-rank RANK" in done.stdout
