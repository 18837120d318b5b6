"""Data-parallel training with one line changed. Run with: torchrun --nproc-per-node=2 examples/train.py"""

import os

import torch
import torch.distributed as dist
from torch import nn

# Before: from torch.nn.parallel import DistributedDataParallel
from undertow import DistributedDataParallel

NUM_STEPS = 20


def main() -> None:
    use_cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if use_cuda else "gloo")
    rank = dist.get_rank()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if use_cuda else torch.device("cpu")

    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(512, 512), nn.GELU())]
    model = DistributedDataParallel(nn.Sequential(*layers, nn.Linear(512, 1)).to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    random = torch.Generator().manual_seed(rank)  # every rank sees data of its own
    for step in range(NUM_STEPS):
        inputs = torch.randn(64, 512, generator=random).to(device)
        wanted = inputs[:, :8].sum(dim=1, keepdim=True)
        loss = nn.functional.mse_loss(model(inputs), wanted)
        optimizer.zero_grad()
        loss.backward()  # gradients are the mean over ranks when this returns
        optimizer.step()
        if rank == 0 and step % 5 == 4:
            print(f"step {step + 1:3d}  loss {loss.item():.3f}")

    if rank == 0:
        model.report()  # where the time of a step went; prints tables, never communicates
    model.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
