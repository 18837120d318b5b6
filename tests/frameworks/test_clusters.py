"""The files for Slurm and Kubernetes: their syntax, and what torchrun makes of their command lines. tests/faults has them run."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch.distributed.run import get_args_parser

from support.project import ROOT

SBATCH, JOBSET = ROOT / "examples" / "slurm" / "train.sbatch", ROOT / "examples" / "kubernetes" / "jobset.yaml"


def test_the_batch_script_is_bash() -> None:
    done = subprocess.run(["bash", "-n", SBATCH], check=False, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_shellcheck_finds_nothing_in_the_batch_script() -> None:
    shellcheck = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}")
    assert shellcheck is not None, "the extra test has it"
    done = subprocess.run([shellcheck, SBATCH], check=False, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


def test_slurm_reads_all_options_of_the_batch_script() -> None:
    """It stops at the first command."""
    lines = SBATCH.read_text().splitlines()
    first_command = next(number for number, line in enumerate(lines) if line and not line.startswith("#"))
    options = [number for number, line in enumerate(lines) if line.startswith("#SBATCH ")]
    assert options
    assert max(options) < first_command


# The fields in use, from the published schema of jobset.x-k8s.io/v1alpha2. A list has elements of one kind.
ENTRY = {"name": str, "value": str}
CONTAINER = {
    "name": str,
    "image": str,
    "command": [str],
    "args": [str],
    "env": [ENTRY],
    "ports": [{"containerPort": int}],
    "resources": {"requests": {"cpu": str, "memory": str}, "limits": {"memory": str}},
    "volumeMounts": [{"name": str, "mountPath": str}],
}
VOLUME = {"name": str, "persistentVolumeClaim": {"claimName": str}, "emptyDir": {"medium": str, "sizeLimit": str}}
POD = {"restartPolicy": str, "terminationGracePeriodSeconds": int, "containers": [CONTAINER], "volumes": [VOLUME]}
JOB = {"completionMode": str, "parallelism": int, "completions": int, "backoffLimit": int, "template": {"spec": POD}}
SCHEMA = {
    "apiVersion": str,
    "kind": str,
    "metadata": {"name": str},
    "spec": {
        "network": {"enableDNSHostnames": bool},
        "failurePolicy": {"maxRestarts": int},
        "replicatedJobs": [{"name": str, "replicas": int, "template": {"spec": JOB}}],
    },
}


def wrong_in(value: Any, schema: Any, place: str = "") -> list[str]:
    """Fields that the schema does not have, and values of another type."""
    match schema:
        case dict() if isinstance(value, dict):
            unknown = [f"{place}.{name}" for name in value.keys() - schema.keys()]
            names = [name for name in schema if name in value]
            return unknown + [wrong for name in names for wrong in wrong_in(value[name], schema[name], f"{place}.{name}")]
        case [element] if isinstance(value, list):
            return [wrong for index, item in enumerate(value) for wrong in wrong_in(item, element, f"{place}[{index}]")]
        case type() if type(value) is schema:
            return []
    return [place]


def test_the_jobset_has_known_fields_and_agrees_with_itself() -> None:
    jobset = yaml.safe_load(JOBSET.read_text())
    assert wrong_in(jobset, SCHEMA) == []
    assert (jobset["apiVersion"], jobset["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    (replicated,) = jobset["spec"]["replicatedJobs"]
    job = replicated["template"]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    options, script, *_ = parsed(container["args"])
    assert container["command"] == ["torchrun"]
    # JobSet's names of pods, of which the first serves the store.
    first_pod = f"{jobset['metadata']['name']}-{replicated['name']}-0-0.{jobset['metadata']['name']}"
    (port,) = (entry["containerPort"] for entry in container["ports"])
    assert options.rdzv_endpoint == f"{first_pod}:{port}"
    assert (job["completionMode"], options.nnodes) == ("Indexed", str(job["parallelism"]))
    assert job["completions"] == job["parallelism"]
    assert (ROOT / Path(script).relative_to("/app")).exists()
    mounts, volumes = container["volumeMounts"], job["template"]["spec"]["volumes"]
    assert [mount["name"] for mount in mounts] == [volume["name"] for volume in volumes]


def parsed(arguments: list[str]) -> tuple[Any, str, list[str]]:
    """What torchrun reads in its options, the script and the script's arguments."""
    options = get_args_parser().parse_args(arguments)
    assert options.rdzv_backend == "c10d"
    return options, options.training_script, options.training_script_args


@pytest.mark.parametrize(
    ("broken", "found"),
    [({"kind": 1}, [".kind"]), ({"sort": "JobSet"}, [".sort"]), ({"spec": {"replicatedJobs": {}}}, [".spec.replicatedJobs"])],
)
def test_a_mistake_in_a_jobset_is_found(broken: dict[str, Any], found: list[str]) -> None:
    assert wrong_in(broken, SCHEMA) == found


def test_a_job_that_reaches_its_time_limit_goes_back_into_the_queue(tmp_path: Path) -> None:
    scripts = {
        "srun": "echo started; exec sleep 60",
        "scontrol": '[[ $1 == show ]] && echo node0 || echo "scontrol $*"',
        "torchrun": "exit 1",
    }
    for name, text in scripts.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node0", "SLURM_JOB_NUM_NODES": "1", "SLURM_CPUS_PER_TASK": "2"}
    variables = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", **slurm}
    how = {"env": variables, "stdout": subprocess.PIPE, "text": True, "start_new_session": True}
    with subprocess.Popen(["bash", SBATCH, "script.py"], **how) as job:
        try:
            assert job.stdout is not None
            assert job.stdout.readline() == "started\n"
            job.send_signal(signal.SIGUSR1)
            said = [job.stdout.readline() for _ in range(2)]
        finally:
            os.killpg(job.pid, signal.SIGKILL)
    assert said == ["The time limit is near: job 7 goes back into the queue.\n", "scontrol requeue 7\n"]
