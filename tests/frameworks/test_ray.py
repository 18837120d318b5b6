"""On two workers of Ray Train: the bits of torch's class, and a job that continues after a worker has died."""

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from frameworks.recipes import require_installed
from support.checkpoints import require_equal
from support.project import ROOT
from support.warm import python

PATIENCE_S = 280.0
pytestmark = [pytest.mark.slow, pytest.mark.timeout(PATIENCE_S + 20)]


def results_in(folder: Path) -> dict[str, Any]:
    paths = os.pathsep.join(str(path) for path in (ROOT / "src", ROOT / "tests"))
    variables = {"PYTHONPATH": paths, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    variables["RAY_worker_niceness"] = "0"  # by default 15: workers would hardly run beside other tests
    left = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    command = [python(), str(ROOT / "tests" / "frameworks" / "ray_jobs.py"), str(folder)]
    with (folder / "log").open("w") as log, subprocess.Popen(command, env={**left, **variables}, stdout=log, stderr=log) as job:
        try:
            exit_code = job.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            exit_code = "no exit code"  # the log says where it is
        finally:
            job.terminate()  # Ray's processes end with it
    assert exit_code == 0, f"{exit_code} after at most {PATIENCE_S} s\n{(folder / 'log').read_text()}"
    return torch.load(folder / "results.pt")


# One test, because each worker of pytest-xdist would start a cluster of its own.
def test_jobs_train_as_with_torchs_class_and_continue_after_a_worker_is_killed(tmp_path: Path) -> None:
    require_installed("ray")
    results = results_in(tmp_path)
    first, second = results["parity"]
    for way in ("ddp", "zero1", "zero2, taken over"):
        require_equal([first[way], second[way]], [first["torch"]] * 2, way)
    undisturbed, disturbed = results["undisturbed"], results["disturbed"]
    assert re.findall(r"step \d+", undisturbed["out"]) == ["step 12", "step 1"]
    assert re.findall(r"step \d+", disturbed["out"]) == ["step 12", "step 5"]  # the last one, and the first of its attempt
    require_equal(disturbed["state"], undisturbed["state"])
    assert results["driver"] == (
        "this process is not a worker of Ray Train.\n"
        "  undertow.integrations.ray.prepare_model\n"
        "  Call it in the function that you give to ray.train.torch.TorchTrainer, with num_workers of 1 or more."
    )
