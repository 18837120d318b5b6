"""Starts its own ranks: `python spawns.py FILE`."""

import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn


def train(rank: int, port: int, path: str) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(10, 10), nn.Tanh(), nn.Linear(10, 5)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    noise = torch.Generator().manual_seed(rank)
    for _ in range(6):
        optimizer.zero_grad()
        model(torch.randn(20, 10, generator=noise)).square().mean().backward()
        optimizer.step()
    if rank == 0:
        torch.save(model.module.state_dict(), path)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # finds a free port
    port = store.port
    del store
    mp.spawn(train, args=(port, sys.argv[1]), nprocs=2)
