"""Frameworks save and load training with a sharded optimizer by their own means: the training that goes on has the same bits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from support.frameworks import (
    TIMEOUT_S,
    Wrapper,
    configured,
    gpt2_trainer,
    require_installed,
    run_recipe,
    torchs_name_is,
)
from support.naive import require_same
from support.pages import snippets
from support.project import ROOT
from support.ranks import Ranks
from undertow import ShardedOptimizer, SyncConfig

require_installed("lightning", "accelerate", "transformers", "safetensors")
pytestmark = pytest.mark.slow

Recipe = Callable[[Wrapper, Path, bool], dict[str, Tensor]]  # whether it is to be interrupted
PAGE = ROOT / "docs" / "checkpoints.md"
NUM_STEPS = 2  # before, and as many after


def resumed_as_uninterrupted(recipe: Recipe, strategy: str, folder: Path) -> None:
    wrapper = configured(SyncConfig(strategy=strategy))
    wanted = run_recipe(recipe, wrapper, folder / "whole", False)
    found = run_recipe(recipe, wrapper, folder / "cut", True)
    assert wanted, "the recipe returned nothing to compare"
    require_same(found, wanted)


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    inputs = [torch.randn(4, 6, generator=generator) for _ in range(2 * NUM_STEPS)]
    return [(x, x.sum(1, keepdim=True)) for x in inputs]


def lightning(wrapper: Wrapper, folder: Path, is_cut: bool) -> dict[str, Tensor]:
    import lightning.pytorch as pl

    from support.lightning_recipes import trainer_of

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def training_step(self, batch: Any, _index: int) -> Tensor:
            x, y = batch
            return nn.functional.mse_loss(self.net(x), y)

        def configure_optimizers(self) -> Any:
            optimizer = ShardedOptimizer(torch.optim.AdamW, self.trainer.strategy.model, lr=1e-2)
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

        def on_train_epoch_end(self) -> None:
            if self.current_epoch == 0:
                self.trainer.save_checkpoint(folder / "saved.ckpt")

    def trained(checkpoint: Path | None = None) -> dict[str, Tensor]:
        trainer, module = trainer_of(wrapper, max_epochs=2, use_distributed_sampler=False), Module()
        loader = torch.utils.data.DataLoader(batches()[:NUM_STEPS], batch_size=None)
        trainer.fit(module, loader, ckpt_path=checkpoint, weights_only=True)
        return dict(module.state_dict())

    whole = trained()
    return trained(folder / "saved.ckpt") if is_cut else whole


def accelerate(wrapper: Wrapper, folder: Path, is_cut: bool) -> dict[str, Tensor]:
    from accelerate import Accelerator
    from safetensors.torch import load_model

    def made() -> tuple[Any, nn.Module, Any, Any]:
        accelerator = Accelerator(cpu=True)
        with torchs_name_is(wrapper):
            model = accelerator.prepare(network())
        optimizer = accelerator.prepare(ShardedOptimizer(torch.optim.AdamW, model, lr=1e-2))
        return accelerator, model, optimizer, accelerator.prepare(torch.optim.lr_scheduler.StepLR(optimizer, step_size=1))

    def train(accelerator: Any, model: nn.Module, optimizer: Any, scheduler: Any, steps: slice) -> None:
        for x, y in batches()[steps]:
            optimizer.zero_grad()
            accelerator.backward(nn.functional.mse_loss(model(x), y))
            optimizer.step()
            scheduler.step()

    first = made()
    train(*first, slice(NUM_STEPS))
    last = first
    if is_cut:
        first[0].save_state(folder / "state")
        first[0].save_model(first[1], folder / "model")
        last = made()
        last[0].load_state(folder / "state")
        plain = network()
        load_model(plain, folder / "model" / "model.safetensors")
        require_same(dict(plain.state_dict()), dict(last[1].module.state_dict()))
    train(*last, slice(NUM_STEPS, None))
    return dict(last[1].module.state_dict())


def transformers(wrapper: Wrapper, folder: Path, is_cut: bool) -> dict[str, Tensor]:
    made: dict[str, Any] = {}
    steps = {"save_strategy": "steps", "save_steps": NUM_STEPS, "lr_scheduler_type": "constant", "max_grad_norm": 0.1}
    exec(next(snippet.code for snippet in snippets(PAGE) if snippet.mark == "with transformers"), made)

    def trained(num_steps: int, *, resumes: bool = False) -> dict[str, Tensor]:
        classes = {"trainer": made["ShardedTrainer"], "callbacks": [made["Consolidate"]()]}
        trainer = gpt2_trainer(folder, num_rows=32, max_steps=num_steps, **steps, **classes)
        trainer.train(resume_from_checkpoint=resumes)
        assert trainer.state.global_step == num_steps
        return dict(trainer.model.state_dict())

    with torchs_name_is(wrapper):
        if not is_cut:
            return trained(2 * NUM_STEPS)
        trained(NUM_STEPS)
        return trained(2 * NUM_STEPS, resumes=True)


@pytest.mark.parametrize("strategy", ["zero1", "zero2"])
@pytest.mark.parametrize("recipe", [lightning, accelerate, transformers])
def test_a_framework_saves_and_resumes_with_equal_bits(
    framework_ranks: Ranks, tmp_path: Path, recipe: Recipe, strategy: str
) -> None:
    for name in ("whole", "cut"):
        (tmp_path / name).mkdir()
    framework_ranks.run(resumed_as_uninterrupted, recipe, strategy, tmp_path, timeout_s=TIMEOUT_S)
