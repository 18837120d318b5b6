"""FSDP2 within a node, and int8 gradients across two of them, on CPU: 2 x 2 ranks.

Run with:

    torchrun --nproc-per-node=4 examples/outer_axis.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import undertow


def main() -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(512, 512), nn.GELU()) for _ in range(4)), nn.Linear(512, 1)
    )
    for part in (*model, model):
        fully_shard(part, mesh=mesh["dp_replicate", "dp_shard"])
    axis = undertow.outer_axis(model, wire="int8")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    random = torch.Generator().manual_seed(dist.get_rank())  # every rank sees its own data
    for step in range(1, 31):
        inputs = torch.randn(64, 512, generator=random)
        optimizer.zero_grad()
        target = inputs[:, :8].sum(dim=1, keepdim=True)
        loss = nn.functional.mse_loss(model(inputs), target)
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0 and step % 10 == 0:
            print(f"step {step:3d}  loss {loss.item():.3f}")
    if dist.get_rank() == 0:
        print(axis)
    axis.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
