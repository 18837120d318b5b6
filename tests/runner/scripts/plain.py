"""As in torch's DDP tutorial: `python -m torch.distributed.run plain.py FILE`."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(10, 10), nn.ReLU(), nn.Linear(10, 5)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    noise = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(12):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(torch.randn(20, 10, generator=noise)), torch.randn(20, 5, generator=noise))
        loss.backward()
        optimizer.step()
    if dist.get_rank() == 0:
        torch.save(model.module.state_dict(), sys.argv[1])
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
