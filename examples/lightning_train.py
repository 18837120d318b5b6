"""Lightning with a sharded optimizer, on CPU.

Run with:

    torchrun --nproc-per-node=2 examples/lightning_train.py
"""

import os
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from undertow.integrations.lightning import UndertowStrategy


class Regression(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 1))

    def training_step(self, batch: Any, index: int) -> Tensor:
        inputs, targets = batch
        loss = nn.functional.mse_loss(self.net(inputs), targets)
        if index % 10 == 9:
            self.print(f"step {self.global_step + 1:3d}  loss {loss.item():.3f}")
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=40)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def main() -> None:
    pl.seed_everything(0, verbose=False)
    inputs = torch.randn(2 * 20 * 32, 64)
    data = DataLoader(TensorDataset(inputs, inputs[:, :8].sum(dim=1, keepdim=True)), batch_size=32)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        strategy=UndertowStrategy(shard_optimizer=True),
        gradient_clip_val=10.0,
        max_epochs=2,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    trainer.fit(Regression(), data)
    trainer.save_checkpoint("lightning.ckpt")  # on every rank
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
