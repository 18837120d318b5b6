"""Jobs on Ray, as a script of its own, because Ray leaves threads and hooks in a process: python ray_jobs.py FOLDER.

It writes results.pt into the folder: what each job has trained, by name.
"""

import contextlib
import os
import runpy
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_TRAIN_ENABLE_PRINT_PATCH": "0"}  # read on import

import ray
import ray.train.torch
import torch
import torch.distributed as dist
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from support.models import mlp, noise
from support.pages import execute, snippets
from support.project import ROOT
from undertow import ConfigError, ShardedOptimizer, SyncConfig, shard_optimizer
from undertow.integrations.ray import prepare_model

EXAMPLE, PAGE = ROOT / "examples" / "ray_train.py", ROOT / "docs" / "integrations" / "ray.md"
NUM_WORKERS = 2


@contextlib.contextmanager
def small_cluster() -> Iterator[None]:
    """Ray on this machine with its files in a folder that is removed; a socket's path may have 107 characters only."""
    folder = tempfile.mkdtemp(prefix="ray-")
    variables = {name: os.environ[name] for name in ("PYTHONPATH", "GLOO_SOCKET_IFNAME", "OMP_NUM_THREADS")}
    try:
        ray.init(
            num_cpus=NUM_WORKERS,
            include_dashboard=False,
            object_store_memory=80 * 1024**2,
            log_to_driver=False,
            _temp_dir=folder,
            runtime_env={"env_vars": variables},
        )
        yield
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


def train_in_each_way(settings: dict[str, Any]) -> None:
    """On every worker: torch's class by Ray's `prepare_model`, Undertow's by its own, from the same seed."""
    plain = lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2)  # noqa: E731
    ways = {
        "torch": (ray.train.torch.prepare_model, {}, plain),
        "ddp": (prepare_model, {}, plain),
        "zero1": (
            prepare_model,
            {"config": SyncConfig(strategy="zero1")},
            lambda model: ShardedOptimizer(torch.optim.AdamW, model, lr=1e-2),
        ),
        "zero2, taken over": (
            prepare_model,
            {"config": SyncConfig(strategy="zero2")},
            lambda model: shard_optimizer(plain(model), model),
        ),
    }
    found = {}
    for name, (prepare, arguments, make) in ways.items():
        torch.manual_seed(0)
        model = prepare(mlp(), **arguments)
        optimizer = make(model)
        for step in range(4):
            optimizer.zero_grad()
            model(noise(4, 6, step=step, rank=dist.get_rank())).square().mean().backward()
            optimizer.step()
        found[name] = {key: value.clone() for key, value in model.module.state_dict().items()}
        getattr(model, "close", lambda: None)()
    settings["page"]({"lr": 1e-3})
    torch.save(found, Path(settings["folder"]) / f"worker-{dist.get_rank()}.pt")


def function_of_the_page() -> Any:
    """The training function of the page's snippet, which would start a job of its own."""
    (snippet,) = (snippet for snippet in snippets(PAGE) if snippet.language == "python")
    with mock.patch.object(ray.train.torch, "TorchTrainer") as trainer:
        execute(snippet)
    return trainer.call_args.args[0]


def parity(folder: Path) -> list[Any]:
    trainer = TorchTrainer(
        train_in_each_way,
        train_loop_config={"folder": str(folder), "page": function_of_the_page()},
        scaling_config=ScalingConfig(num_workers=NUM_WORKERS),
        run_config=RunConfig(storage_path=str(folder / "parity")),
    )
    trainer.fit()
    return [torch.load(folder / f"worker-{rank}.pt") for rank in range(NUM_WORKERS)]


def example(folder: Path, name: str, *options: str) -> dict[str, Any]:
    """What the example's last checkpoint has, and what it prints."""
    arguments = [str(EXAMPLE), "--steps=12", "--checkpoint-every=4", f"--storage={folder}", f"--name={name}", *options]
    out = folder / f"{name}.out"
    with mock.patch.object(sys, "argv", arguments), out.open("w") as file, contextlib.redirect_stdout(file):
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    text = out.read_text()
    return {"out": text, "state": torch.load(Path(text.split()[-1]) / "state.pt")}


def error_of_a_driver() -> str:
    try:
        prepare_model(mlp())
    except ConfigError as error:
        return str(error)
    return ""


def main(folder: Path) -> None:
    results: dict[str, Any] = {}
    with small_cluster():
        results["driver"] = error_of_a_driver()
        results["parity"] = parity(folder)
        results["undisturbed"] = example(folder, "undisturbed")
        results["disturbed"] = example(folder, "disturbed", "--kill-rank=1", "--kill-step=7")
    torch.save(results, folder / "results.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
