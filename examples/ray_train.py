"""Training on Ray Train with a sharded optimizer, which continues from its last checkpoint if a
worker dies.

Run with:

    python examples/ray_train.py --workers 2 --kill-rank 1 --kill-step 17

Without --address, Ray is started on this machine. With it, the program runs on the cluster there.
All nodes need undertow, and --storage must be on a file system that all of them see. Run it again
with the same --name, and it continues.
"""

import argparse
import os
import signal
import tempfile
from pathlib import Path
from typing import Any

import ray
import ray.train
import torch
import torch.distributed as dist
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from torch import nn

from undertow import DistributedDataParallel, ShardedOptimizer, SyncConfig
from undertow.integrations.ray import prepare_model


def train(settings: dict[str, Any]) -> None:
    """Runs on every worker; Ray Train has made the process group."""
    torch.manual_seed(0)
    layers = nn.Sequential(
        nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1)
    )
    # Sums in rank order give the same bits after a restart.
    model = prepare_model(layers, config=SyncConfig(strategy="zero1", reduction="ordered"))
    optimizer = ShardedOptimizer(torch.optim.AdamW, model, lr=1e-2)

    first_step, checkpoint = 1, ray.train.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as folder:
            saved = torch.load(Path(folder) / "state.pt", map_location="cpu")
        model.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(
            saved["optimizer"]
        )  # each worker keeps its shards, with any number of workers
        first_step = saved["step"] + 1

    for step in range(first_step, settings["steps"] + 1):
        random = torch.Generator().manual_seed(
            1000 * step + dist.get_rank()
        )  # every worker sees its own data
        inputs = torch.randn(32, 32, generator=random).to(next(model.parameters()).device)
        if (
            step == settings["kill_step"]
            and dist.get_rank() == settings["kill_rank"]
            and checkpoint is None
        ):
            # Ray collects reports every two seconds: the last one might be lost
            ray.train.get_all_reported_checkpoints()
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        loss = (model(inputs) - inputs[:, :4].sum(dim=1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        if step % settings["checkpoint_every"] == 0 or step == settings["steps"]:
            report(model, optimizer, step=step, first_step=first_step, loss=loss.item())
    model.close()


def report(
    model: DistributedDataParallel, optimizer: ShardedOptimizer, *, step: int, **metrics: float
) -> None:
    """Reports metrics and a checkpoint; a collective call, as is every `optimizer.state_dict()`."""
    state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = None
        if dist.get_rank() == 0:
            torch.save(state, Path(folder) / "state.pt")
            checkpoint = Checkpoint.from_directory(folder)
        ray.train.report(
            {"step": step, **metrics}, checkpoint=checkpoint
        )  # copies the folder to the storage


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--workers", type=int, default=2, help="processes that train (2)")
    add("--gpus", action="store_true", help="one GPU for each worker")
    add("--address", help='of a cluster: "auto" on one of its nodes, or ray://HOST:10001')
    add(
        "--storage",
        type=Path,
        default=Path("ray_results"),
        help="folder for checkpoints, which all nodes see",
    )
    add("--name", help="of the run; its checkpoints are in a folder of this name (the time)")
    add("--steps", type=int, default=30, help="number of steps (30)")
    add(
        "--checkpoint-every",
        type=int,
        default=5,
        metavar="STEPS",
        help="steps between checkpoints (5)",
    )
    add("--max-failures", type=int, default=1, help="how often Ray starts the workers again (1)")
    add("--kill-rank", type=int, metavar="RANK", help="have this worker killed, once")
    add("--kill-step", type=int, metavar="STEP", help="in this step, after the first checkpoint")
    return parser.parse_args()


def main() -> None:
    options = parsed()
    if not ray.is_initialized():
        is_elsewhere = options.address is not None or "RAY_ADDRESS" in os.environ
        ray.init(
            address=options.address, **({} if is_elsewhere else {"num_cpus": options.workers + 1})
        )
    trainer = TorchTrainer(
        train,
        train_loop_config={
            name: getattr(options, name)
            for name in ("steps", "checkpoint_every", "kill_rank", "kill_step")
        },
        scaling_config=ScalingConfig(num_workers=options.workers, use_gpu=options.gpus),
        run_config=RunConfig(
            name=options.name,
            storage_path=str(options.storage.resolve()),
            failure_config=FailureConfig(max_failures=options.max_failures),
        ),
    )
    result = trainer.fit()
    metrics, checkpoint = result.metrics, result.checkpoint
    assert metrics is not None  # the last step reports both
    assert checkpoint is not None
    print(
        f"step {metrics['step']}  loss {metrics['loss']:.4f}  began in step "
        f"{metrics['first_step']}  {checkpoint.path}"
    )


if __name__ == "__main__":
    main()
