"""The training library needs nothing of the lab: it imports nothing of it, and trains without its folder."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

import undertow
from support.warm import python

PACKAGE = Path(undertow.__file__).parent
TRAINS = """
import sys
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

for name in [name for name in sys.modules if name.partition(".")[0] == "undertow"]:
    del sys.modules[name]  # the interpreter has the checkout's, with the lab
import undertow


def train(rank, store):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    model = undertow.DistributedDataParallel(torch.nn.Linear(4, 4))
    optimizer = undertow.ShardedOptimizer(torch.optim.AdamW, model, lr=0.1)
    for _ in range(12):
        optimizer.zero_grad()
        model(torch.full((2, 4), float(rank))).sum().backward()
        optimizer.step()
    assert undertow.__file__.startswith(sys.argv[2]), undertow.__file__
    print(model.report(), model.explain())
    model.close()
    dist.destroy_process_group()
    loaded = [name for name in sys.modules if name.startswith("undertow.lab")]
    assert not loaded, loaded


if __name__ == "__main__":
    mp.start_processes(train, (sys.argv[1],), nprocs=2, start_method="fork")
"""


def run_without(folder: Path, source: Path, *, store: Path) -> None:
    script = folder / "trains.py"
    script.write_text(TRAINS)
    environment = os.environ | {"PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [python(), str(script), str(store), str(source)], env=environment, text=True, capture_output=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.deep
def test_a_run_trains_with_the_folder_of_the_lab_deleted(tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(PACKAGE, source / "undertow", ignore=shutil.ignore_patterns("lab", "__pycache__"))
    assert not (source / "undertow" / "lab").exists()
    run_without(tmp_path, source, store=tmp_path / "store")


def test_a_run_loads_nothing_of_the_lab(tmp_path: Path) -> None:
    run_without(tmp_path, PACKAGE.parent, store=tmp_path / "store")
