"""Accelerate: `accelerate launch with_accelerate.py FILE`."""

import sys

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))
x = torch.randn(48, 6, generator=torch.Generator().manual_seed(3))
loader = DataLoader(TensorDataset(x, x.square().sum(1, keepdim=True)), batch_size=4)
model, optimizer, loader = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=1e-2), loader)
for x, y in (batch for _ in range(3) for batch in loader):
    with accelerator.accumulate(model):
        accelerator.backward(nn.functional.mse_loss(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
if accelerator.is_main_process:
    torch.save(accelerator.unwrap_model(model).state_dict(), sys.argv[1])
accelerator.end_training()
