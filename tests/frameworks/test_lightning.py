"""Lightning's Trainer and Fabric train through Undertow's class as through torch's."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from support.frameworks import TIMEOUT_S, Wrapper, fabric_strategy, require_installed, same_as_torch, state_of
from support.models import mlp, noise
from support.naive import wrapped
from support.ranks import Ranks

require_installed("lightning")


def automatic(wrapper: Wrapper, settings: dict[str, Any]) -> dict[str, Tensor]:
    from support import lightning_recipes as recipes

    module = recipes.Regression()
    recipes.trainer_of(wrapper, max_epochs=2, **settings).fit(module, recipes.loader())
    return state_of(module)


@pytest.mark.parametrize(
    "settings",
    [
        {"accumulate_grad_batches": 4, "gradient_clip_val": 0.5},  # the last step of an epoch has two micro-batches
        {"gradient_clip_val": 0.05, "gradient_clip_algorithm": "value", "strategy": {"gradient_as_bucket_view": True}},
        {"precision": "bf16-mixed", "accumulate_grad_batches": 2, "strategy": {"find_unused_parameters": True}},
    ],
    ids=["accumulation and norm", "value", "bf16-mixed"],
)
def test_the_trainer_trains_as_with_torchs_class(framework_ranks: Ranks, settings: dict[str, Any]) -> None:
    same_as_torch(framework_ranks, automatic, settings)


MANUAL = {
    "plain": ("ManualRegression", {}),
    "accumulation": ("AccumulatingRegression", {}),
    "unused parameters": ("SometimesUnused", {"find_unused_parameters": True}),
    "static graph": ("ManualRegression", {"static_graph": True}),
    "two optimizers": ("TwoOptimizers", {"find_unused_parameters": True}),
    "toggled optimizers": ("Adversarial", {"find_unused_parameters": True}),
}


def manual(wrapper: Wrapper, flavour: str) -> dict[str, Tensor]:
    from support import lightning_recipes as recipes

    name, arguments = MANUAL[flavour]
    module = getattr(recipes, name)()
    recipes.trainer_of(wrapper, strategy=arguments).fit(module, recipes.loader())
    return state_of(module)


@pytest.mark.parametrize("flavour", MANUAL)
def test_manual_optimization_trains_as_with_torchs_class(framework_ranks: Ranks, flavour: str) -> None:
    same_as_torch(framework_ranks, manual, flavour)


def resumed(wrapper: Wrapper, folder: Path) -> dict[str, Tensor]:
    from support import lightning_recipes as recipes

    path = folder / "after-one-epoch.ckpt"
    first = recipes.trainer_of(wrapper, max_epochs=1)
    first.fit(recipes.Regression(), recipes.loader())
    first.save_checkpoint(path)
    module = recipes.Regression()
    recipes.trainer_of(wrapper, max_epochs=2).fit(module, recipes.loader(), ckpt_path=path, weights_only=False)
    return state_of(module)


def test_the_trainer_saves_and_resumes(framework_ranks: Ranks, tmp_path: Path) -> None:
    same_as_torch(framework_ranks, resumed, tmp_path)


def with_fabric(wrapper: Wrapper, folder: Path) -> dict[str, Tensor]:
    """Accumulates two micro-batches, clips, saves halfway, and goes on from the file with a new model."""
    import lightning.fabric as fabric

    launched = fabric.Fabric(accelerator="cpu", devices=2, strategy=fabric_strategy(wrapper))
    launched.launch()
    path = folder / "fabric.ckpt"
    for half in range(2):
        model, optimizer = launched.setup(net := mlp(), torch.optim.AdamW(net.parameters(), lr=1e-2))
        if half:
            launched.load(path, {"model": model, "optimizer": optimizer})
        for step in range(4):
            with launched.no_backward_sync(model, enabled=step % 2 == 0):
                launched.backward(model(noise(3, 6, step=10 * half + step)).square().mean())
            if step % 2:
                launched.clip_gradients(model, optimizer, max_norm=0.1)
                optimizer.step()
                optimizer.zero_grad()
        launched.save(path, {"model": model, "optimizer": optimizer})
    return state_of(net)


def test_fabric_accumulates_clips_saves_and_resumes(framework_ranks: Ranks, tmp_path: Path) -> None:
    same_as_torch(framework_ranks, with_fabric, tmp_path)


def saved_by_lightning() -> list[str]:
    strategies = importlib.import_module("lightning.fabric.strategies.ddp")
    with wrapped(mlp()) as ddp:
        return list(strategies.DDPStrategy().get_module_state_dict(ddp))


def test_lightning_unwraps_it(framework_ranks: Ranks) -> None:
    assert framework_ranks.run(saved_by_lightning, timeout_s=TIMEOUT_S) == [["0.weight", "0.bias", "2.weight", "2.bias"]] * 2
