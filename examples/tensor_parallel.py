"""Data parallelism beside torch's tensor parallelism, on CPU: 2 x 2 ranks.

Run with:

    torchrun --nproc-per-node=4 examples/tensor_parallel.py
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import undertow


class Block(nn.Module):
    """A residual MLP. The ranks of a tensor-parallel group have parts of the sequence between
    blocks, and parts of the hidden units inside of one."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = nn.functional.gelu(self.up(self.norm(x)))
        added: Tensor = self.down(hidden)
        return added


PLAN = {
    "norm": SequenceParallel(),
    "up": ColwiseParallel(input_layouts=Shard(1)),
    "down": RowwiseParallel(),
}


def main() -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    replica = mesh["dp"].get_local_rank()
    torch.manual_seed(0)
    model = Block(64)
    parallelize_module(model, mesh["tp"], PLAN)  # first: parameters become DTensors
    sync = undertow.attach(model, device_mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    random = torch.Generator().manual_seed(replica)  # the same data in a tensor-parallel group
    for step in range(1, 31):
        inputs = torch.randn(8, 16, 64, generator=random)
        part = inputs.chunk(2, dim=1)[mesh["tp"].get_local_rank()]  # of the sequence, for the norm
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(part), inputs.roll(1, dims=2))
        loss.backward()
        optimizer.step()
        mean = sync.mean_over_ranks(loss.item()).wait().item()
        if dist.get_rank() == 0 and step % 10 == 0:
            print(f"step {step:3d}  loss {mean:.3f}")
    if dist.get_rank() == 0:
        weight = model.up.weight
        assert isinstance(weight, DTensor)
        print(f"up.weight: {tuple(weight.shape)}, here {tuple(weight.to_local().shape)}")
        print(sync.report())
    sync.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
