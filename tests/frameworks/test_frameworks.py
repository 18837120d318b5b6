"""Training through Undertow's class by frameworks has the bits of training through torch's; sharded, of training that goes on."""

import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.nn.functional import mse_loss
from torch.nn.parallel.distributed import _find_tensors
from torch.utils.data import DataLoader, TensorDataset

from support.errors import text_of
from support.frameworks import (
    TIMEOUT_S,
    Recipe,
    Wrapper,
    configured,
    fabric_strategy,
    gpt2_trainer,
    require_installed,
    run_recipe,
    same_as_torch,
    state_of,
    torchs_name_is,
)
from support.models import mlp, noise
from support.naive import require_same, wrapped
from support.pages import snippets
from support.project import ROOT
from support.ranks import Ranks
from undertow import ShardedOptimizer, SyncConfig


@pytest.fixture(scope="module")
def framework_ranks() -> Iterator[Ranks]:
    """Ranks of their own: frameworks leave traces in a process."""
    with Ranks(2) as ranks:
        yield ranks


def with_accelerate(wrapper: Wrapper, _folder: Path, settings: dict[str, Any], clip: str) -> dict[str, Tensor]:
    from accelerate import Accelerator

    x = torch.randn(44, 6, generator=torch.Generator().manual_seed(3))
    net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
    with torchs_name_is(wrapper):
        accelerator = Accelerator(cpu=True, **settings)
        loader = DataLoader(TensorDataset(x, x.square().sum(1, keepdim=True)), batch_size=4)
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
        model, optimizer, loader, scheduler = accelerator.prepare(net, optimizer, loader, scheduler)
        for x, y in (batch for _ in range(2) for batch in loader):
            with accelerator.accumulate(model):
                accelerator.backward(mse_loss(model(x), y))
                if accelerator.sync_gradients:
                    getattr(accelerator, clip)(model.parameters(), 0.1)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        accelerator.free_memory()
    return state_of(net)


def triggered(wrapper: Wrapper, _folder: Path) -> dict[str, Tensor]:
    """All forwards run under no_sync; the last backward is to synchronize all the same."""
    from accelerate import Accelerator

    with torchs_name_is(wrapper):
        accelerator, net = Accelerator(cpu=True), mlp()
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


def with_trainer(wrapper: Wrapper, _folder: Path, name: str, settings: dict[str, Any]) -> dict[str, Tensor]:
    from support import lightning_recipes as recipes

    module = getattr(recipes, name)()
    recipes.trainer_of(wrapper, **settings).fit(module, recipes.loader())
    return state_of(module)


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


def with_transformers(wrapper: Wrapper, folder: Path) -> dict[str, Tensor]:
    with torchs_name_is(wrapper):
        # Five batches on each rank: the last step of an epoch has one micro-batch less.
        trainer = gpt2_trainer(folder, num_rows=20, num_train_epochs=2, gradient_accumulation_steps=3, max_grad_norm=0.1)
        trainer.train()
    return state_of(trainer.model)


def pipelined(wrapper: Wrapper, _folder: Path, num_stages: int) -> dict[str, Tensor]:
    """Each rank has all stages of its own pipeline, and the two ranks are replicas of each stage."""
    nets = [nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(num_stages)]
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    stages = []
    for index, net in enumerate(nets):
        # With shapes to be found out torch's class reduces the first micro-batch by itself, and rounds differently.
        received, sent = torch.zeros(2, 6, requires_grad=index > 0), torch.zeros(2, 6, requires_grad=True)
        stages.append(PipelineStage(wrapper(net), index, num_stages, torch.device("cpu"), received, sent, group=alone))
    kind, whole = (Schedule1F1B, stages[0]) if num_stages == 1 else (ScheduleInterleaved1F1B, stages)
    schedule = kind(whole, n_microbatches=4, loss_fn=mse_loss)
    optimizer = torch.optim.AdamW(nn.ModuleList(nets).parameters(), lr=1e-2)
    for step in range(3):
        schedule.step(noise(8, 6, step=step), target=noise(8, 6, step=100 + step))
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group(alone)
    return state_of(nn.ModuleList(nets))


class Trainable(nn.Module):
    """A module that is trained by a method other than forward; every second step leaves a layer out."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.extra = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)), nn.Linear(6, 1)

    def train_step(self, x: Tensor, *, with_extra: bool) -> dict[str, Tensor]:
        return {"loss": (self.net(x) + (self.extra(x) if with_extra else 0.0)).square().mean()}


def past_forward(wrapper: Wrapper, _folder: Path) -> dict[str, Tensor]:
    """As OpenMMLab's wrapper: what torch's forward does around the module, done around another method of it."""

    class Redirecting(wrapper):
        def train_step(self, *inputs: Any, **kwargs: Any) -> Any:
            self.reducer._rebuild_buckets()
            if self._check_sync_bufs_pre_fwd():
                self._sync_buffers()
            outputs = self.module.train_step(*inputs, **kwargs)
            if self._check_sync_bufs_post_fwd():
                self._sync_buffers()
            self.reducer.prepare_for_backward(list(_find_tensors(outputs)))
            return outputs

    ddp = Redirecting(module := Trainable(), find_unused_parameters=True)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-2)
    for step in range(4):
        loss = ddp.train_step(noise(4, 6, step=step), with_extra=step % 2 == 0)["loss"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return state_of(module)


MakesOptimizer, PAGE = Callable[..., torch.optim.Optimizer], ROOT / "docs" / "checkpoints.md"
NUM_STEPS = 2  # before, and as many after


def plain(cls: type[torch.optim.Optimizer], model: nn.Module, **settings: Any) -> torch.optim.Optimizer:
    return cls(model.parameters(), **settings)


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))


def batches() -> list[tuple[Tensor, Tensor]]:
    return [(x, x.sum(1, keepdim=True)) for x in (noise(4, 6, step=step) for step in range(2 * NUM_STEPS))]


def lightning(wrapper: Wrapper, folder: Path, make: MakesOptimizer, is_cut: bool) -> dict[str, Tensor]:
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
            optimizer = make(torch.optim.AdamW, self.trainer.strategy.model, lr=1e-2)
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

        def on_train_epoch_end(self) -> None:
            if self.current_epoch == 0:
                self.trainer.save_checkpoint(folder / "saved.ckpt")

    def trained(checkpoint: Path | None = None) -> dict[str, Tensor]:
        trainer, module = trainer_of(wrapper, max_epochs=2, use_distributed_sampler=False), Module()
        trainer.fit(
            module, torch.utils.data.DataLoader(batches()[:NUM_STEPS], batch_size=None), ckpt_path=checkpoint, weights_only=True
        )
        return dict(module.state_dict())

    whole = trained()
    return trained(folder / "saved.ckpt") if is_cut else whole


def accelerate(wrapper: Wrapper, folder: Path, make: MakesOptimizer, is_cut: bool) -> dict[str, Tensor]:
    from accelerate import Accelerator
    from safetensors.torch import load_model

    def made() -> tuple[Any, nn.Module, Any, Any]:
        accelerator = Accelerator(cpu=True)
        with torchs_name_is(wrapper):
            model = accelerator.prepare(network())
        optimizer = accelerator.prepare(make(torch.optim.AdamW, model, lr=1e-2))
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
        loaded = network()
        load_model(loaded, folder / "model" / "model.safetensors")
        require_same(dict(loaded.state_dict()), dict(last[1].module.state_dict()))
    train(*last, slice(NUM_STEPS, None))
    require_same(last[0].get_state_dict(last[1]), dict(last[1].module.state_dict()))
    return dict(last[1].module.state_dict())


def transformers(wrapper: Wrapper, folder: Path, make: MakesOptimizer, is_cut: bool) -> dict[str, Tensor]:
    made: dict[str, Any] = {}
    steps = {"save_strategy": "steps", "save_steps": NUM_STEPS, "lr_scheduler_type": "constant", "max_grad_norm": 0.1}
    exec(next(snippet.code for snippet in snippets(PAGE) if snippet.mark == "with transformers"), made)

    def trained(num_steps: int, *, resumes: bool = False) -> dict[str, Tensor]:
        classes = {} if make is plain else {"trainer": made["ShardedTrainer"], "callbacks": [made["Consolidate"]()]}
        trainer = gpt2_trainer(folder, num_rows=32, max_steps=num_steps, **steps, **classes)
        trainer.train(resume_from_checkpoint=resumes)
        assert trainer.state.global_step == num_steps
        return dict(trainer.model.state_dict())

    with torchs_name_is(wrapper):
        if not is_cut:
            return trained(2 * NUM_STEPS)
        trained(NUM_STEPS)
        return trained(2 * NUM_STEPS, resumes=True)


UNUSED, TWICE = {"find_unused_parameters": True}, {"max_epochs": 2}
# What a recipe needs, the recipe, and its arguments.
RECIPES: dict[str, tuple[str, Recipe, tuple[Any, ...]]] = {
    # The last step of an epoch has two micro-batches.
    "accelerate: accumulation and norm": (
        "accelerate",
        with_accelerate,
        ({"gradient_accumulation_steps": 4}, "clip_grad_norm_"),
    ),
    "accelerate: bf16 and value": ("accelerate", with_accelerate, ({"mixed_precision": "bf16"}, "clip_grad_value_")),
    "accelerate: trigger_sync_in_backward": ("accelerate", triggered, ()),
    "accelerate: saved and resumed": ("accelerate safetensors", accelerate, (plain, True)),
    "lightning: accumulation and norm": (
        "lightning",
        with_trainer,
        ("Regression", TWICE | {"accumulate_grad_batches": 4, "gradient_clip_val": 0.5}),
    ),
    "lightning: value": (
        "lightning",
        with_trainer,
        (
            "Regression",
            TWICE
            | {"gradient_clip_val": 0.05, "gradient_clip_algorithm": "value", "strategy": {"gradient_as_bucket_view": True}},
        ),
    ),
    "lightning: bf16-mixed": (
        "lightning",
        with_trainer,
        ("Regression", TWICE | {"precision": "bf16-mixed", "accumulate_grad_batches": 2, "strategy": UNUSED}),
    ),
    "lightning by hand": ("lightning", with_trainer, ("ManualRegression", {})),
    "lightning by hand: accumulation": ("lightning", with_trainer, ("AccumulatingRegression", {})),
    "lightning by hand: unused parameters": ("lightning", with_trainer, ("SometimesUnused", {"strategy": UNUSED})),
    "lightning by hand: static graph": ("lightning", with_trainer, ("ManualRegression", {"strategy": {"static_graph": True}})),
    "lightning by hand: two optimizers": ("lightning", with_trainer, ("TwoOptimizers", {"strategy": UNUSED})),
    "lightning by hand: toggled optimizers": ("lightning", with_trainer, ("Adversarial", {"strategy": UNUSED})),
    "lightning: saved and resumed": ("lightning", lightning, (plain, True)),
    "fabric: accumulation, clipping, saved and resumed": ("lightning", with_fabric, ()),
    "transformers: accumulation and norm": ("transformers accelerate", with_transformers, ()),
    "transformers: saved and resumed": ("transformers accelerate", transformers, (plain, True)),
    "pipelining: 1F1B": ("", pipelined, (1,)),
    "pipelining: interleaved 1F1B": ("", pipelined, (2,)),
    "a subclass that runs the module past forward": ("", past_forward, ()),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_trains_as_with_torchs_class(framework_ranks: Ranks, tmp_path: Path, name: str) -> None:
    packages, recipe, args = RECIPES[name]
    require_installed(*packages.split())
    framework_ranks.run(same_as_torch, recipe, tmp_path, *args, timeout_s=TIMEOUT_S)


def is_unwrapped(package: str) -> bool:
    with wrapped(mlp()) as ddp:
        if package == "accelerate":
            return importlib.import_module("accelerate.utils").extract_model_from_parallel(ddp) is ddp.module
        strategy = importlib.import_module("lightning.fabric.strategies.ddp").DDPStrategy()
        return list(strategy.get_module_state_dict(ddp)) == ["0.weight", "0.bias", "2.weight", "2.bias"]


@pytest.mark.slow
@pytest.mark.parametrize("package", ["accelerate", "lightning"])
def test_a_framework_unwraps_it(framework_ranks: Ranks, package: str) -> None:
    require_installed(package)
    assert framework_ranks.run(is_unwrapped, package, timeout_s=TIMEOUT_S) == [True, True]


def resumed_as_uninterrupted(recipe: Recipe, strategy: str, folder: Path) -> None:
    wrapper = configured(SyncConfig(strategy=strategy))
    wanted = run_recipe(recipe, wrapper, folder / "whole", ShardedOptimizer, False)
    found = run_recipe(recipe, wrapper, folder / "cut", ShardedOptimizer, True)
    assert wanted, "the recipe returned nothing to compare"
    require_same(found, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["zero1", "zero2"])
@pytest.mark.parametrize("recipe", [lightning, accelerate, transformers])
def test_a_framework_saves_and_resumes_sharded_training_with_equal_bits(
    framework_ranks: Ranks, tmp_path: Path, recipe: Recipe, strategy: str
) -> None:
    require_installed("lightning", "accelerate", "transformers", "safetensors")
    for name in ("whole", "cut"):
        (tmp_path / name).mkdir()
    framework_ranks.run(resumed_as_uninterrupted, recipe, strategy, tmp_path, timeout_s=TIMEOUT_S)


REASON = "not installed: no_such_framework. Install the extra: pip install 'undertow[integrations]'"


@pytest.mark.parametrize(
    ("ci", "outcome", "text"),
    [
        ("", pytest.skip.Exception, REASON),
        ("true", pytest.fail.Exception, f"CI must not skip tests of frameworks; {REASON}"),
    ],
)
def test_a_missing_framework_skips_or_is_a_failure_in_ci_and_says_what_to_install(
    ci: str, outcome: type[Exception], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CI", ci)
    assert text_of(outcome, lambda: require_installed("torch", "no_such_framework")) == text
