"""Modules and loaders for recipes with Lightning; imported in ranks only, since loading Lightning takes seconds."""

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, mse_loss
from torch.utils.data import DataLoader, TensorDataset

from frameworks.recipes import OfTheUser, Wrapper, lightning_strategy

# A Trainer that trains and writes nothing.
SETTINGS: dict[str, Any] = {
    "accelerator": "cpu",
    "devices": 2,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def trainer_of(wrapper: Wrapper, *, max_epochs: int = 1, **settings: Any) -> pl.Trainer:
    """A Trainer that wraps by `wrapper`; `strategy` holds arguments of the wrapper, `ours` arguments of Undertow's strategy."""
    strategy = lightning_strategy(wrapper, ours=settings.pop("ours", None), **settings.pop("strategy", {}))
    return pl.Trainer(strategy=strategy, max_epochs=max_epochs, **{**SETTINGS, **settings})


def loader() -> DataLoader[Any]:
    x = torch.randn(48, 6, generator=torch.Generator().manual_seed(3))
    return DataLoader(TensorDataset(x, x.square().sum(1, keepdim=True)), batch_size=4)


class Regression(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return mse_loss(self.net(x), y)

    def training_step(self, batch: Any, index: int) -> Tensor:
        return self.loss(batch)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


class ManualRegression(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, index: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class AccumulatingRegression(ManualRegression):
    """Manual optimization: a step for every third batch, and no synchronization before it."""

    def training_step(self, batch: Any, index: int) -> None:
        optimizer, steps = self.optimizers(), index % 3 == 2
        with optimizer.toggle_model(sync_grad=steps):
            self.manual_backward(self.loss(batch) / 3)
            if steps:
                optimizer.step()
                optimizer.zero_grad()


class SometimesUnused(ManualRegression):
    """Manual optimization: a layer that only every second loss uses, on one of the ranks only."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(6, 1)

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        outputs = self.net(x)
        if self.trainer.global_step % 2 and self.global_rank == 1:
            outputs = outputs + self.extra(x)
        return mse_loss(outputs, y)


class TwoOptimizers(ManualRegression):
    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(6, 1)

    def training_step(self, batch: Any, index: int) -> None:
        first, second = self.optimizers()
        x, y = batch
        for optimizer, net in ((first, self.net), (second, self.other)):
            optimizer.zero_grad()
            self.manual_backward(mse_loss(net(x), y))
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.AdamW(net.parameters(), lr=1e-2) for net in (self.net, self.other)]


class MuonAndAdamW(ManualRegression):
    def training_step(self, batch: Any, index: int) -> None:
        self.manual_backward(self.loss(batch))
        for optimizer in self.optimizers():
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        matrices = [param for param in self.parameters() if param.dim() == 2]
        rest = [param for param in self.parameters() if param.dim() != 2]
        return [torch.optim.Muon(matrices, lr=1e-2), torch.optim.AdamW(rest, lr=1e-2)]


class Plain(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return mse_loss(self.net(x.to(self.dtype)), y.to(self.dtype))


class OnPlateau(Regression):
    def training_step(self, batch: Any, index: int) -> Tensor:
        self.log("metric", 1.0)  # that never falls
        return self.loss(batch)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "metric"}}


class UsersOptimizer(Regression):
    def configure_optimizers(self) -> Any:
        return OfTheUser(self.parameters(), lr=1e-2)


class Matrices(Regression):
    def configure_optimizers(self) -> Any:
        return torch.optim.Muon([param for param in self.parameters() if param.dim() == 2], lr=1e-2)


class Adversarial(pl.LightningModule):
    """A GAN as Lightning's documentation has it: each optimizer is toggled, stepped and untoggled within one training step."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 6))
        self.discriminator = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))
        self.automatic_optimization = False

    def verdict(self, x: Tensor, *, is_real: bool) -> Tensor:
        logits = self.discriminator(x)
        return binary_cross_entropy_with_logits(logits, torch.full_like(logits, float(is_real)))

    def training_step(self, batch: Any, index: int) -> None:
        real, _ = batch
        noise = real[:, :3]
        generator, discriminator = self.optimizers()

        self.toggle_optimizer(generator)
        self.manual_backward(self.verdict(self.generator(noise), is_real=True))
        generator.step()
        generator.zero_grad()
        self.untoggle_optimizer(generator)

        self.toggle_optimizer(discriminator)
        self.manual_backward((self.verdict(real, is_real=True) + self.verdict(self.generator(noise).detach(), is_real=False)) / 2)
        discriminator.step()
        discriminator.zero_grad()
        self.untoggle_optimizer(discriminator)

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(net.parameters(), lr=1e-2) for net in (self.generator, self.discriminator)]
