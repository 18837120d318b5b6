"""Accelerate trains through Undertow's class as through torch's."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from support.frameworks import TIMEOUT_S, Wrapper, require_installed, same_as_torch, state_of, torchs_name_is
from support.models import mlp, noise
from support.naive import wrapped
from support.ranks import Ranks

require_installed("accelerate")


def net_and_loader() -> tuple[nn.Module, DataLoader[Any]]:
    x = torch.randn(44, 6, generator=torch.Generator().manual_seed(3))
    net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
    return net, DataLoader(TensorDataset(x, x.square().sum(1, keepdim=True)), batch_size=4)


def trained(wrapper: Wrapper, settings: dict[str, Any], clip: str) -> dict[str, Tensor]:
    from accelerate import Accelerator

    with torchs_name_is(wrapper):
        accelerator = Accelerator(cpu=True, **settings)
        net, loader = net_and_loader()
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
        model, optimizer, loader, scheduler = accelerator.prepare(net, optimizer, loader, scheduler)
        for _ in range(2):
            for x, y in loader:
                with accelerator.accumulate(model):
                    accelerator.backward(mse_loss(model(x), y))
                    if accelerator.sync_gradients:
                        getattr(accelerator, clip)(model.parameters(), 0.1)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
        accelerator.free_memory()
    return state_of(net)


@pytest.mark.parametrize(
    ("settings", "clip"),
    [
        ({"gradient_accumulation_steps": 4}, "clip_grad_norm_"),  # the last step of an epoch has two micro-batches
        ({"mixed_precision": "bf16"}, "clip_grad_value_"),
    ],
    ids=["accumulation and norm", "bf16 and value"],
)
def test_a_loop_with_accumulate_and_clipping_trains_as_with_torchs_class(
    framework_ranks: Ranks, settings: dict[str, Any], clip: str
) -> None:
    same_as_torch(framework_ranks, trained, settings, clip)


def triggered(wrapper: Wrapper) -> dict[str, Tensor]:
    """All forwards run under no_sync; the last backward is to synchronize all the same."""
    from accelerate import Accelerator

    with torchs_name_is(wrapper):
        accelerator = Accelerator(cpu=True)
        net = mlp()
        model, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
        for step in range(3):
            with accelerator.no_sync(model):
                losses = [model(noise(3, 6, step=2 * step + index)).square().mean() for index in range(2)]
                accelerator.backward(losses[0])
                with accelerator.trigger_sync_in_backward(model):
                    accelerator.backward(losses[1])
            optimizer.step()
            optimizer.zero_grad()
        accelerator.free_memory()
    return state_of(net)


def test_trigger_sync_in_backward_synchronizes_what_was_accumulated(framework_ranks: Ranks) -> None:
    same_as_torch(framework_ranks, triggered)


def resumed(wrapper: Wrapper, folder: Path) -> dict[str, Tensor]:
    from accelerate import Accelerator

    with torchs_name_is(wrapper):
        accelerator = Accelerator(cpu=True)
        for half in range(2):
            net = mlp()
            model, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
            if half:
                accelerator.load_state(str(folder / "state"))
            for step in range(2):
                accelerator.backward(model(noise(3, 6, step=10 * half + step)).square().mean())
                optimizer.step()
                optimizer.zero_grad()
            if not half:
                accelerator.save_state(str(folder / "state"))
                accelerator.save_model(model, str(folder / "model"))
                model, optimizer = accelerator.free_memory(model, optimizer)
        assert torch.equal(accelerator.get_state_dict(model)["0.weight"], net[0].weight)
        accelerator.free_memory()
    return state_of(net)


def test_a_state_is_saved_and_resumed(framework_ranks: Ranks, tmp_path: Path) -> None:
    same_as_torch(framework_ranks, resumed, tmp_path)


def unwrapped_by_accelerate() -> bool:
    accelerate = importlib.import_module("accelerate.utils")
    model = mlp()
    with wrapped(model) as ddp:
        return accelerate.extract_model_from_parallel(ddp) is model


def test_accelerate_unwraps_it(framework_ranks: Ranks) -> None:
    assert framework_ranks.run(unwrapped_by_accelerate, timeout_s=TIMEOUT_S) == [True, True]
