"""Ray Train: `python with_ray.py FILE`."""

import sys
import tempfile
from typing import Any

import ray
import ray.train.torch
import torch
from torch import nn


def train(config: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = ray.train.torch.prepare_model(nn.Sequential(nn.Linear(10, 10), nn.ReLU(), nn.Linear(10, 5)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    rank = ray.train.get_context().get_world_rank()
    noise = torch.Generator().manual_seed(rank)
    for _ in range(6):
        optimizer.zero_grad()
        model(torch.randn(20, 10, generator=noise)).square().mean().backward()
        optimizer.step()
    if rank == 0:
        torch.save(model.module.state_dict(), config["path"])


if __name__ == "__main__":
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=80 * 2**20)
    with tempfile.TemporaryDirectory() as folder:
        scaling, run = ray.train.ScalingConfig(num_workers=2), ray.train.RunConfig(storage_path=folder)
        trainer = ray.train.torch.TorchTrainer(
            train, train_loop_config={"path": sys.argv[1]}, scaling_config=scaling, run_config=run
        )
        trainer.fit()
    ray.shutdown()
