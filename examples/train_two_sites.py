"""Training of replicas at two sites with a slow link between them.

Each site trains alone for 30 steps at a time. Its updates are sent while it computes.

One rank per site:

    torchrun --nproc-per-node=2 examples/train_two_sites.py

Several ranks per site, which are a row of the mesh and are synchronized in every step:

    torchrun --nproc-per-node=4 examples/train_two_sites.py --sites 2
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from undertow import (
    DistributedDataParallel,
    Outer,
    SyncConfig,
    has_checkpoint,
    load_checkpoint,
    save_checkpoint,
)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sites", type=int, default=2)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--every", type=int, default=30)
    parser.add_argument("--checkpoint", default="two_sites")
    asked = parser.parse_args()

    dist.init_process_group("gloo")
    num_ranks = dist.get_world_size()
    mesh = None
    if num_ranks > asked.sites:  # ranks are numbered site by site
        shape = (asked.sites, num_ranks // asked.sites)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("site", "rank"))

    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(256, 256), nn.GELU())]
    model = DistributedDataParallel(
        nn.Sequential(*layers, nn.Linear(256, 1)),
        device_mesh=mesh,
        config=SyncConfig(outer=Outer(every=asked.every)),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    # A site that starts again continues from here with the same bits.
    first = 0
    if has_checkpoint(asked.checkpoint):
        first = load_checkpoint(asked.checkpoint, model, optimizer)["step"]
    random = torch.Generator().manual_seed(dist.get_rank() + 1000 * first)
    for step in range(first + 1, asked.steps + 1):
        inputs = torch.randn(64, 256, generator=random)
        wanted = inputs[:, :8].sum(dim=1, keepdim=True)
        loss = nn.functional.mse_loss(model(inputs), wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0 and step % 30 == 0:
            print(f"step {step:3d}  loss {loss.item():.3f}")
        if step % 60 == 0:
            save_checkpoint(asked.checkpoint, model, optimizer, extra={"step": step})

    # Evaluate and deploy the global parameters, which are the same at every site.
    outer = model.outer
    assert outer is not None  # with SyncConfig(outer=...)
    with torch.no_grad(), outer.synchronized():
        inputs = torch.randn(512, 256, generator=torch.Generator().manual_seed(99))
        wanted = inputs[:, :8].sum(dim=1, keepdim=True)
        new = nn.functional.mse_loss(model.module(inputs), wanted)
    if dist.get_rank() == 0:
        print(f"loss of new data: {new.item():.3f}")
        print(model.report())
    model.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
