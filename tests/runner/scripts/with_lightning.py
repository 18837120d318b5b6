"""Lightning starts the second rank itself: `python with_lightning.py FILE`."""

import sys

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


class Regression(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))

    def training_step(self, batch: tuple[Tensor, Tensor], _index: int) -> Tensor:
        x, y = batch
        return nn.functional.mse_loss(self.net(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


pl.seed_everything(0)
x = torch.randn(48, 6, generator=torch.Generator().manual_seed(3))
loader = DataLoader(TensorDataset(x, x.square().sum(1, keepdim=True)), batch_size=4)
quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
trainer = pl.Trainer(accelerator="cpu", devices=2, strategy="ddp", max_epochs=2, gradient_clip_val=0.5, **quiet)
trainer.fit(module := Regression(), loader)
if trainer.is_global_zero:
    torch.save(module.state_dict(), sys.argv[1])
