"""Accelerate with a sharded optimizer, on CPU.

Run with:

    torchrun --nproc-per-node=2 examples/accelerate_train.py
"""

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from undertow.integrations.accelerate import prepare


def main() -> None:
    accelerator = Accelerator(cpu=True)
    set_seed(0)
    inputs = torch.randn(2 * 20 * 32, 64)
    data = DataLoader(
        TensorDataset(inputs, inputs[:, :8].sum(dim=1, keepdim=True)), batch_size=32, shuffle=True
    )
    net = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 1))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(
        optimizer, T_max=80
    )  # Accelerate steps it once for each rank
    model, optimizer, data, schedule = prepare(
        accelerator, net, optimizer, data, schedule, shard_optimizer=True
    )
    step = 0
    for _ in range(2):
        for x, y in data:
            loss = nn.functional.mse_loss(model(x), y)
            accelerator.backward(loss)
            norm = accelerator.clip_grad_norm_(model.parameters(), 10.0)
            assert norm is not None  # it is None with DeepSpeed only
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            step += 1
            if step % 10 == 0:
                accelerator.print(
                    f"step {step:3d}  gradient norm {norm.item():.2f}  loss {loss.item():.3f}"
                )
    accelerator.save_state("accelerate_state")  # on every rank
    model.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
