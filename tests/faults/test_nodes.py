"""With root and iproute2: the batch script for Slurm on two nodes, namespaces that have each a network and a hostname."""

import os
import shlex
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from benchmarks.links import Network, shaped_network

from support.checkpoints import require_equal
from support.elastic import EXAMPLE, run, run_under_torchrun
from support.project import ROOT
from support.warm import python

pytestmark = [pytest.mark.usefixtures("needs_namespaces"), pytest.mark.root, pytest.mark.slow]
SBATCH = ROOT / "examples" / "slurm" / "train.sbatch"
NODES, NUM_RANKS, PATIENCE_S = ("node0", "node1"), 4, 200.0
SCRIPT = """
import torch, torch.distributed as dist
from torch import nn
from undertow import DistributedDataParallel, ShardedOptimizer, SyncConfig

dist.init_process_group("gloo")
torch.manual_seed(0)
layers = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 1))
model = DistributedDataParallel(layers, config=SyncConfig(strategy="zero1", reduction="ordered"))
optimizer = ShardedOptimizer(torch.optim.AdamW, model, lr=1e-2)
for step in range(6):
    inputs = torch.randn(8, 32, generator=torch.Generator().manual_seed(100 * step + dist.get_rank()))
    optimizer.zero_grad()
    model(inputs).square().mean().backward()
    optimizer.step()
torch.save(model.module.state_dict(), f"rank{dist.get_rank()}.pt")
model.close()
dist.destroy_process_group()
"""
# What a node has of Slurm. `srun` runs a command on every node, and ends the others if one fails.
SCONTROL = """#!/bin/bash
[[ "$*" == "show hostnames node[0-1]" ]] && printf '%s\\n' {nodes}
"""
SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
{each} &
wait -n && wait -n
code=$?
kill $(jobs -p) 2> /dev/null
wait
exit $code
"""
TORCHRUN = """#!/bin/bash
exec {python} -m torch.distributed.run "$@"
"""


@pytest.fixture
def network(tmp_path: Path) -> Iterator[Network]:
    addresses = "".join(f"10.77.0.{number + 1} {node}\n" for number, node in enumerate(NODES))
    (tmp_path / "hosts").write_text(f"127.0.0.1 localhost\n{addresses}")
    with shaped_network("none", len(NODES)) as network:
        yield network


def on_node(network: Network, number: int, folder: Path) -> str:
    """Words of the shell that run a command on that node; its hostname and its /etc/hosts are the command's only."""
    become = f'hostname {NODES[number]} && mount --bind {shlex.quote(str(folder / "hosts"))} /etc/hosts && exec "$@"'
    return shlex.join(network.command(number, ["unshare", "--uts", "--mount", "sh", "-c", become, "sh"]))


def environment(network: Network, folder: Path) -> dict[str, str]:
    """What a batch script has from Slurm."""
    commands = folder / "bin"
    commands.mkdir()
    each = " &\n".join(f'{on_node(network, number, folder)} "$@"' for number in range(len(NODES)))
    scripts = {
        "scontrol": SCONTROL.format(nodes=" ".join(NODES)),
        "srun": SRUN.format(each=each),
        "torchrun": TORCHRUN.format(python=shlex.quote(python())),
    }
    for name, text in scripts.items():
        (commands / name).write_text(text)
        (commands / name).chmod(0o755)
    return {
        **os.environ,
        "PATH": f"{commands}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(str(path) for path in (ROOT / "src", ROOT / "tests")),
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "node[0-1]",
        "SLURM_JOB_NUM_NODES": str(len(NODES)),
        "SLURM_CPUS_PER_TASK": "2",
        "PROCESSES_PER_NODE": str(NUM_RANKS // len(NODES)),
        "INTERFACE": network.interface,
        "CUDA_VISIBLE_DEVICES": "",
    }


def batch(network: Network, folder: Path, *script: str | Path, max_restarts: int = 0) -> str:
    """What the batch script prints."""
    variables = environment(network, folder) | {"MAX_RESTARTS": str(max_restarts)}
    how = {"env": variables, "cwd": folder, "text": True, "start_new_session": True}
    with subprocess.Popen(["bash", SBATCH, *script], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **how) as job:
        try:
            out, _ = job.communicate(timeout=PATIENCE_S)
        finally:
            if job.poll() is None:
                os.killpg(job.pid, signal.SIGTERM)  # torchrun ends its ranks
    assert job.returncode == 0, out
    return out


def parameters(folder: Path, name: str = "model.pt") -> dict[str, torch.Tensor]:
    return torch.load(folder / name, weights_only=True)


@pytest.mark.timeout(PATIENCE_S + 60)
def test_ranks_on_two_nodes_train_as_on_one(network: Network, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "one").mkdir()
    batch(network, tmp_path, "script.py")
    alone = run_under_torchrun(tmp_path / "script.py", num_ranks=NUM_RANKS, folder=tmp_path / "one")
    assert alone.exit_code == 0, alone.log
    of_rank_0 = parameters(tmp_path / "one", "rank0.pt")
    for rank in range(NUM_RANKS):
        require_equal(parameters(tmp_path, f"rank{rank}.pt"), of_rank_0, f"rank {rank}")


@pytest.mark.timeout(PATIENCE_S + 60)
def test_both_nodes_start_again_after_a_rank_is_killed(network: Network, tmp_path: Path) -> None:
    # Eight samples a rank: MKL's product of six rows and a vector depends on where the vector lies in memory.
    options = ["--epochs=1", "--checkpoint-every=4", "--batch=32", "--save-model=model.pt"]
    (tmp_path / "one").mkdir()
    kill = ["--kill-rank=3", "--kill-step=11"]
    out = batch(network, tmp_path, EXAMPLE, *options, *kill, max_restarts=1)
    assert "4 ranks continue after sample 256, from elastic_checkpoint" in out
    for rank in run(tmp_path / "one", *options, num_ranks=NUM_RANKS):
        assert rank.exit_code == 0, rank.log
    require_equal(parameters(tmp_path), parameters(tmp_path / "one"))
