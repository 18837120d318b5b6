"""The processor time of a step of a model of DTensors, next to torch's `replicate` on the same mesh."""

import statistics
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate

from support.ranks import in_ranks
from support.tensor_parallel import gpt, mesh_of_four, tokens
from undertow import DistributedDataParallel

pytestmark = [pytest.mark.bench, pytest.mark.alone]
NUM_FIRST, NUM_STEPS = 20, 60


@in_ranks(4, is_fresh=True, timeout_s=400.0)
def test_a_step_costs_at_most_a_tenth_more_than_with_replicate() -> None:
    with mesh_of_four() as mesh:
        ours = DistributedDataParallel(gpt(mesh), device_mesh=mesh["dp"])
        nets: dict[str, Any] = {"undertow": ours, "replicate": replicate(gpt(mesh), mesh=mesh["dp"])}
        optimizers = {name: torch.optim.AdamW(net.parameters(), lr=1e-3) for name, net in nets.items()}
        times: dict[str, list[float]] = {name: [] for name in nets}
        batch = tokens(0, mesh["dp"].get_local_rank())
        for step in range(NUM_FIRST + NUM_STEPS):
            for name, net in nets.items():
                dist.barrier()
                begun_s = time.process_time()  # of all threads
                one_step(net, optimizers[name], batch)
                if step >= NUM_FIRST:
                    times[name].append(time.process_time() - begun_s)
        own = [statistics.median(times[name]) for name in ("undertow", "replicate")]
        found = torch.tensor(own, dtype=torch.float64)
        dist.all_reduce(found)
        if dist.get_rank() == 0:
            print(f"{found[0] * 250:.2f} ms with Undertow, {found[1] * 250:.2f} ms with replicate: {found[0] / found[1]:.2f}")
        assert found[0] <= 1.1 * found[1], f"{own}"
        ours.close()


def one_step(net: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> None:
    net(batch).backward()
    optimizer.step()
    optimizer.zero_grad()
