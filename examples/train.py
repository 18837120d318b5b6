"""Data-parallel training with one line changed.

Run with:

    torchrun --nproc-per-node=2 examples/train.py
"""

import os

import torch
import torch.distributed as dist
from torch import nn

# Before: from torch.nn.parallel import DistributedDataParallel
from undertow import DistributedDataParallel


def main() -> None:
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    dist.init_process_group("nccl" if on_gpu else "gloo")

    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(512, 512), nn.GELU())]
    model = DistributedDataParallel(nn.Sequential(*layers, nn.Linear(512, 1)).to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    random = torch.Generator().manual_seed(dist.get_rank())  # every rank sees its own data
    for step in range(1, 21):
        inputs = torch.randn(64, 512, generator=random).to(device)
        wanted = inputs[:, :8].sum(dim=1, keepdim=True)
        loss = nn.functional.mse_loss(model(inputs), wanted)
        optimizer.zero_grad()
        loss.backward()  # gradients are the mean over ranks when this returns
        optimizer.step()
        if dist.get_rank() == 0 and step % 5 == 0:
            print(f"step {step:3d}  loss {loss.item():.3f}")

    if dist.get_rank() == 0:
        print(model.report())  # where the time of a step went, as tables; never communicates
    model.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
