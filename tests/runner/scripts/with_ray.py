"""Ray Train: `python with_ray.py FILE`; the same without Ray: `torchrun with_ray.py FILE`."""

import sys
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from torch import nn


def train(config: dict[str, Any]) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(10, 10), nn.ReLU(), nn.Linear(10, 5))
    if dist.is_torchelastic_launched():
        dist.init_process_group("gloo")
        model = nn.parallel.DistributedDataParallel(net)
    else:
        import ray.train.torch

        model = ray.train.torch.prepare_model(net)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    rank = dist.get_rank()
    noise = torch.Generator().manual_seed(rank)
    for _ in range(6):
        optimizer.zero_grad()
        model(torch.randn(20, 10, generator=noise)).square().mean().backward()
        optimizer.step()
    if rank == 0:
        torch.save(model.module.state_dict(), config["path"])


def train_with_ray() -> None:
    import ray.train.torch

    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=80 * 2**20)
    with tempfile.TemporaryDirectory() as folder:
        scaling, run = ray.train.ScalingConfig(num_workers=2), ray.train.RunConfig(storage_path=folder)
        trainer = ray.train.torch.TorchTrainer(
            train, train_loop_config={"path": sys.argv[1]}, scaling_config=scaling, run_config=run
        )
        trainer.fit()
    ray.shutdown()


if __name__ == "__main__":
    if dist.is_torchelastic_launched():
        train({"path": sys.argv[1]})
        dist.destroy_process_group()
    else:
        train_with_ray()
