"""Each rank keeps its share of the optimizer, on CPU.

Run with:

    torchrun --nproc-per-node=2 examples/train_sharded.py
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from undertow import DistributedDataParallel, ShardedOptimizer, SyncConfig


def loss_of(model: nn.Module, inputs: Tensor) -> Tensor:
    return nn.functional.mse_loss(model(inputs), inputs[:, :8].sum(dim=1, keepdim=True))


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(512, 512), nn.GELU())]
    model = DistributedDataParallel(
        nn.Sequential(*layers, nn.Linear(512, 1)), config=SyncConfig(strategy="zero2")
    )
    optimizer = ShardedOptimizer(
        torch.optim.AdamW, model, lr=1e-3
    )  # instead of AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=30)
    random = torch.Generator().manual_seed(dist.get_rank())  # every rank sees its own data
    for step in range(1, 31):
        optimizer.zero_grad()
        loss = loss_of(model, torch.randn(64, 512, generator=random))
        loss.backward()
        norm = optimizer.clip_grad_norm_(1.0)  # torch's function raises
        optimizer.step()  # updated parameters arrive in the next forward
        schedule.step()
        if dist.get_rank() == 0 and step % 10 == 0:
            print(f"step {step:3d}  gradient norm {norm.item():.2f}  loss {loss.item():.3f}")
    state = optimizer.state_dict()  # on every rank; the state of a plain AdamW
    if dist.get_rank() == 0:
        with torch.no_grad():
            print(
                "loss of new data: "
                f"{loss_of(model.eval(), torch.randn(256, 512, generator=random)).item():.3f}"
            )
        torch.save({"model": model.module.state_dict(), "optimizer": state}, "checkpoint.pt")
        print(model.report())
    model.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
