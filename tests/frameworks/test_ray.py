"""On two workers of Ray Train: the bits of torch's class, and a job that continues after a worker has died."""

import os
import re
import subprocess
from typing import Any

import pytest
import torch

from support.checkpoints import require_equal
from support.frameworks import require_installed
from support.project import ROOT
from support.warm import python

PATIENCE_S = 280.0
pytestmark = [pytest.mark.slow, pytest.mark.timeout(PATIENCE_S + 20)]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    require_installed("ray")
    folder = tmp_path_factory.mktemp("jobs")
    paths = os.pathsep.join(str(path) for path in (ROOT / "src", ROOT / "tests"))
    variables = {"PYTHONPATH": paths, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    variables["RAY_worker_niceness"] = "0"  # by default 15: workers would hardly run beside other tests
    left = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    command = [python(), str(ROOT / "tests" / "support" / "ray_jobs.py"), str(folder)]
    with (folder / "log").open("w") as log, subprocess.Popen(command, env={**left, **variables}, stdout=log, stderr=log) as job:
        try:
            exit_code = job.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            exit_code = "no exit code"  # the log says where it is
        finally:
            job.terminate()  # Ray's processes end with it
    assert exit_code == 0, f"{exit_code} after at most {PATIENCE_S} s\n{(folder / 'log').read_text()}"
    return torch.load(folder / "results.pt")


@pytest.mark.parametrize("way", ["ddp", "zero1", "zero2, taken over"])
def test_workers_train_as_with_torchs_class(results: dict[str, Any], way: str) -> None:
    first, second = results["parity"]
    require_equal([first[way], second[way]], [first["torch"]] * 2)


def test_a_job_continues_from_its_checkpoint_after_a_worker_is_killed(results: dict[str, Any]) -> None:
    undisturbed, disturbed = results["undisturbed"], results["disturbed"]
    assert re.findall(r"step \d+", undisturbed["out"]) == ["step 12", "step 1"]
    assert re.findall(r"step \d+", disturbed["out"]) == ["step 12", "step 5"]  # the last one, and the first of its attempt
    require_equal(disturbed["state"], undisturbed["state"])


def test_a_process_that_is_no_worker_is_told_where_to_call(results: dict[str, Any]) -> None:
    assert results["driver"] == (
        "this process is not a worker of Ray Train.\n"
        "  undertow.integrations.ray.prepare_model\n"
        "  Call it in the function that you give to ray.train.torch.TorchTrainer, with num_workers of 1 or more."
    )
