"""A subclass of torch's class, which calls its constructor by name."""

import sys

import torch
import torch.distributed as dist
from torch import nn


class Counting(nn.parallel.DistributedDataParallel):
    def __init__(self, module: nn.Module) -> None:
        nn.parallel.DistributedDataParallel.__init__(self, module, find_unused_parameters=True)
        self.num_forwards = 0

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        self.num_forwards += 1
        return super().forward(*inputs)


dist.init_process_group("gloo")
torch.manual_seed(0)
model = Counting(nn.Sequential(nn.Linear(10, 10), nn.BatchNorm1d(10), nn.Linear(10, 5)))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
noise = torch.Generator().manual_seed(dist.get_rank())
for _ in range(6):
    with model.no_sync():
        model(torch.randn(20, 10, generator=noise)).square().mean().backward()
    model(torch.randn(20, 10, generator=noise)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
assert type(model).__name__ == "Counting", type(model)
assert model.num_forwards == 12, model.num_forwards
if dist.get_rank() == 0:
    torch.save(model.module.state_dict(), sys.argv[1])
dist.barrier()
dist.destroy_process_group()
