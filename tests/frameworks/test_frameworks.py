"""Training through Undertow's class by frameworks has the bits of training through torch's; sharded, of training that goes on."""

import contextlib
import importlib
import importlib.metadata
import os
import re
import signal
import subprocess
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel
from torch.nn.parallel.distributed import _find_tensors
from torch.utils.data import DataLoader, TensorDataset

from frameworks.recipes import (
    TIMEOUT_S,
    OfTheUser,
    Recipe,
    Wrapper,
    as_launched,
    environment,
    fabric_strategy,
    gpt2_trainer,
    is_ours,
    prepared,
    require_installed,
    run_recipe,
    same_as_torch,
    state_of,
)
from support.errors import text_of
from support.models import mlp, noise
from support.naive import require_same, wrapped
from support.processes import free_port
from support.project import ROOT
from support.ranks import Ranks
from support.warm import python
from undertow import ConfigError, DistributedDataParallel, ShardedGradientError, ShardedOptimizer, SyncConfig


@pytest.fixture(scope="module")
def framework_ranks() -> Iterator[Ranks]:
    """Ranks of their own: frameworks leave traces in a process."""
    with Ranks(2) as ranks:
        yield ranks


def with_accelerate(
    wrapper: Wrapper, _folder: Path, settings: dict[str, Any], clip: str, ours: dict[str, Any]
) -> dict[str, Tensor]:
    from accelerate import Accelerator

    x = torch.randn(44, 6, generator=torch.Generator().manual_seed(3))
    net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
    accelerator = Accelerator(cpu=True, **settings)
    loader = DataLoader(TensorDataset(x, x.square().sum(1, keepdim=True)), batch_size=4)
    cls = OfTheUser if "whole" in ours else torch.optim.AdamW
    optimizer = cls(net.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    model, optimizer, loader, scheduler = prepared(wrapper, accelerator, net, optimizer, loader, scheduler, **ours)
    for x, y in (batch for _ in range(2) for batch in loader):
        with accelerator.accumulate(model):
            accelerator.backward(mse_loss(model(x), y))
            if accelerator.sync_gradients and clip:
                getattr(accelerator, clip)(model.parameters(), 0.1)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    accelerator.free_memory()
    return state_of(net)


def with_muon_and_adamw(wrapper: Wrapper, folder: Path, clip: bool, ours: dict[str, Any]) -> dict[str, Tensor]:
    """Two optimizers, each with a schedule, saved halfway; new ones go on from the folder."""
    from accelerate import Accelerator

    for half in range(2):
        accelerator, net = Accelerator(cpu=True), mlp()
        muon, adamw = muon_and_adamw(net)
        schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9) for optimizer in (muon, adamw)]
        model, muon, adamw, *schedulers = prepared(wrapper, accelerator, net, muon, adamw, *schedulers, **ours)
        if half:
            accelerator.load_state(folder / "state")
        for step in range(3):
            accelerator.backward(model(noise(3, 6, step=10 * half + step)).square().mean())
            if clip:
                accelerator.clip_grad_norm_(model.parameters(), 0.05)
            for each in (muon, adamw, *schedulers):
                each.step()
            for optimizer in (muon, adamw):
                optimizer.zero_grad()
        accelerator.save_state(folder / "state")
        accelerator.free_memory()
    return state_of(net)


def muon_and_adamw(net: nn.Module) -> list[torch.optim.Optimizer]:
    matrices, rest = ([param for param in net.parameters() if (param.dim() == 2) is is_matrix] for is_matrix in (True, False))
    return [torch.optim.Muon(matrices, lr=1e-2), torch.optim.AdamW(rest, lr=1e-2)]


def triggered(wrapper: Wrapper, _folder: Path) -> dict[str, Tensor]:
    """All forwards run under no_sync; the last backward is to synchronize all the same."""
    from accelerate import Accelerator

    accelerator, net = Accelerator(cpu=True), mlp()
    model, optimizer = prepared(wrapper, accelerator, net, torch.optim.AdamW(net.parameters(), lr=1e-2))
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
    from frameworks import lightning_recipes as recipes

    module, trainer = getattr(recipes, name)(), recipes.trainer_of(wrapper, **settings)
    trainer.fit(module, recipes.loader())
    wanted = is_ours(wrapper) and settings.get("ours", {}).get("shard_optimizer", False)
    assert isinstance(trainer.optimizers[0], ShardedOptimizer) == wanted
    return state_of(module)


def with_fabric(wrapper: Wrapper, folder: Path, ours: dict[str, Any], arguments: dict[str, Any]) -> dict[str, Tensor]:
    """Accumulates two micro-batches, clips, saves halfway, and goes on from the file with a new model."""
    import lightning.fabric as fabric

    launched = fabric.Fabric(accelerator="cpu", devices=2, strategy=fabric_strategy(wrapper, ours=ours))
    launched.launch()
    path = folder / "fabric.ckpt"
    for half in range(2):
        net = mlp()
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
        model, optimizer, scheduler = launched.setup(net, optimizer, scheduler=scheduler)
        if half:
            launched.load(path, {"model": model, "optimizer": optimizer})
        for step in range(4):
            with launched.no_backward_sync(model, enabled=step % 2 == 0):
                launched.backward(model(noise(3, 6, step=10 * half + step)).square().mean())
            if step % 2:
                if arguments:
                    launched.clip_gradients(model, optimizer, **arguments)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        launched.save(path, {"model": model, "optimizer": optimizer})
    return state_of(net)


def with_two_in_fabric(wrapper: Wrapper, _folder: Path, ours: dict[str, Any]) -> dict[str, Tensor]:
    import lightning.fabric as fabric

    launched = fabric.Fabric(accelerator="cpu", devices=2, strategy=fabric_strategy(wrapper, ours=ours))
    launched.launch()
    net = mlp()
    model, *optimizers = launched.setup(net, *muon_and_adamw(net))
    for step in range(4):
        launched.backward(model(noise(3, 6, step=step)).square().mean())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return state_of(net)


def with_transformers(wrapper: Wrapper, folder: Path, ours: dict[str, Any], settings: dict[str, Any]) -> dict[str, Tensor]:
    # Five batches on each rank: the last step of an epoch has one micro-batch less.
    trainer = gpt2_trainer(wrapper, folder, num_rows=20, num_train_epochs=2, gradient_accumulation_steps=3, ours=ours, **settings)
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


NUM_STEPS = 2  # before, and as many after


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))


def batches() -> list[tuple[Tensor, Tensor]]:
    return [(x, x.sum(1, keepdim=True)) for x in (noise(4, 6, step=step) for step in range(2 * NUM_STEPS))]


def lightning(wrapper: Wrapper, folder: Path, ours: dict[str, Any], is_cut: bool) -> dict[str, Tensor]:
    import lightning.pytorch as pl

    from frameworks.lightning_recipes import trainer_of

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def training_step(self, batch: Any, _index: int) -> Tensor:
            x, y = batch
            return nn.functional.mse_loss(self.net(x), y)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

        def on_train_epoch_end(self) -> None:
            if self.current_epoch == 0:
                self.trainer.save_checkpoint(folder / "saved.ckpt")

    def trained(checkpoint: Path | None = None) -> dict[str, Tensor]:
        trainer, module = trainer_of(wrapper, max_epochs=2, use_distributed_sampler=False, ours=ours), Module()
        trainer.fit(
            module, torch.utils.data.DataLoader(batches()[:NUM_STEPS], batch_size=None), ckpt_path=checkpoint, weights_only=True
        )
        return dict(module.state_dict())

    whole = trained()
    return trained(folder / "saved.ckpt") if is_cut else whole


def accelerate(wrapper: Wrapper, folder: Path, ours: dict[str, Any], is_cut: bool) -> dict[str, Tensor]:
    from accelerate import Accelerator
    from safetensors.torch import load_model

    def made() -> tuple[Any, nn.Module, Any, Any]:
        accelerator, net = Accelerator(cpu=True), network()
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)
        return accelerator, *prepared(wrapper, accelerator, net, optimizer, scheduler, **ours)

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


def transformers(wrapper: Wrapper, folder: Path, ours: dict[str, Any], is_cut: bool) -> dict[str, Tensor]:
    """The best model is loaded at the end, and saving may evaluate before."""
    steps = {"save_strategy": "steps", "save_steps": NUM_STEPS, "lr_scheduler_type": "constant", "max_grad_norm": 0.1}
    best = {"eval_strategy": "steps", "eval_steps": NUM_STEPS, "load_best_model_at_end": True}

    def trained(num_steps: int, *, resumes: bool = False) -> dict[str, Tensor]:
        trainer = gpt2_trainer(wrapper, folder, num_rows=32, max_steps=num_steps, ours=ours, **steps, **best)
        trainer.train(resume_from_checkpoint=resumes)
        assert trainer.state.global_step == num_steps
        return dict(trainer.model.state_dict())

    if not is_cut:
        return trained(2 * NUM_STEPS)
    trained(NUM_STEPS)
    return trained(2 * NUM_STEPS, resumes=True)


SHARDS = {"config": SyncConfig(strategy="zero1"), "shard_optimizer": True}
OF_TRAINER = {"sync_config": SyncConfig(strategy="zero1"), "shard_optimizer": True}
UNUSED, TWICE = {"find_unused_parameters": True}, {"max_epochs": 2}
Needed = tuple[str, Recipe, tuple[Any, ...]]  # the packages of a recipe, the recipe, and its arguments


def compare(ranks: Ranks, comparison: Callable[..., None], needed: Needed, folder: Path) -> None:
    packages, recipe, args = needed
    require_installed(*packages.split())
    ranks.run(comparison, recipe, folder, *args, timeout_s=TIMEOUT_S)


RECIPES: dict[str, Needed] = {
    # The last step of an epoch has two micro-batches.
    "accelerate: accumulation and norm": (
        "accelerate",
        with_accelerate,
        ({"gradient_accumulation_steps": 4}, "clip_grad_norm_", {}),
    ),
    "accelerate: bf16 and value": ("accelerate", with_accelerate, ({"mixed_precision": "bf16"}, "clip_grad_value_", {})),
    "accelerate: shards, accumulation": ("accelerate", with_accelerate, ({"gradient_accumulation_steps": 4}, "", SHARDS)),
    "accelerate: shards, optimizer of the user's class": (
        "accelerate",
        with_accelerate,
        ({}, "", SHARDS | {"whole": True}),
    ),
    "accelerate: shards, bf16": ("accelerate", with_accelerate, ({"mixed_precision": "bf16"}, "", SHARDS)),
    "accelerate: shards, two optimizers": ("accelerate", with_muon_and_adamw, (False, SHARDS)),
    "accelerate: trigger_sync_in_backward": ("accelerate", triggered, ()),
    "accelerate: saved and resumed": ("accelerate safetensors", accelerate, ({}, True)),
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
    "lightning: shards, accumulation": (
        "lightning",
        with_trainer,
        ("Regression", TWICE | {"accumulate_grad_batches": 4, "ours": SHARDS}),
    ),
    "lightning: shards, bf16-mixed": (
        "lightning",
        with_trainer,
        ("Regression", TWICE | {"precision": "bf16-mixed", "ours": SHARDS}),
    ),
    "lightning: shards, optimizer of the user's class": (
        "lightning",
        with_trainer,
        ("UsersOptimizer", {"ours": SHARDS | {"whole": True}}),
    ),
    "lightning: bf16-true": ("lightning", with_trainer, ("Plain", {"precision": "bf16-true"})),
    "lightning: shards, schedule by a metric": ("lightning", with_trainer, ("OnPlateau", TWICE | {"ours": SHARDS})),
    "lightning by hand: shards": ("lightning", with_trainer, ("ManualRegression", {"ours": SHARDS})),
    "lightning by hand: shards, accumulation": ("lightning", with_trainer, ("AccumulatingRegression", {"ours": SHARDS})),
    "lightning by hand: shards, two optimizers": ("lightning", with_trainer, ("MuonAndAdamW", {"ours": SHARDS})),
    "lightning by hand: shards, each of two optimizers after its own backward": (
        "lightning",
        with_trainer,
        ("TwoOptimizers", {"strategy": UNUSED, "ours": SHARDS}),
    ),
    "lightning by hand: shards, toggled optimizers": (
        "lightning",
        with_trainer,
        ("Adversarial", {"strategy": UNUSED, "ours": SHARDS}),
    ),
    "lightning by hand": ("lightning", with_trainer, ("ManualRegression", {})),
    "lightning by hand: accumulation": ("lightning", with_trainer, ("AccumulatingRegression", {})),
    "lightning by hand: unused parameters": ("lightning", with_trainer, ("SometimesUnused", {"strategy": UNUSED})),
    "lightning by hand: static graph": ("lightning", with_trainer, ("ManualRegression", {"strategy": {"static_graph": True}})),
    "lightning by hand: two optimizers": ("lightning", with_trainer, ("TwoOptimizers", {"strategy": UNUSED})),
    "lightning by hand: toggled optimizers": ("lightning", with_trainer, ("Adversarial", {"strategy": UNUSED})),
    "lightning: saved and resumed": ("lightning", lightning, ({}, True)),
    "lightning: shards, saved and resumed": ("lightning", lightning, (SHARDS, True)),
    "fabric: accumulation, clipping, saved and resumed": ("lightning", with_fabric, ({}, {"max_norm": 0.1})),
    "fabric: value": ("lightning", with_fabric, ({}, {"clip_val": 0.01})),
    "fabric: shards, accumulation, saved and resumed": ("lightning", with_fabric, (SHARDS, {})),
    "fabric: shards, two optimizers": ("lightning", with_two_in_fabric, (SHARDS,)),
    "transformers: accumulation and norm": ("transformers accelerate", with_transformers, ({}, {"max_grad_norm": 0.1})),
    "transformers: shards, accumulation, tokens of all ranks": (
        "transformers accelerate",
        with_transformers,
        (OF_TRAINER, {"max_grad_norm": 0.0, "average_tokens_across_devices": True, "optim": "adamw_torch"}),
    ),
    "transformers: shards, optimizer and schedule of the user": (
        "transformers accelerate",
        with_transformers,
        (OF_TRAINER | {"whole": True}, {"max_grad_norm": 0.0, "brings": True}),
    ),
    "transformers: saved and resumed": ("transformers accelerate", transformers, ({}, True)),
    "pipelining: 1F1B": ("", pipelined, (1,)),
    "pipelining: interleaved 1F1B": ("", pipelined, (2,)),
    "a subclass that runs the module past forward": ("", past_forward, ()),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_trains_as_with_torchs_class(framework_ranks: Ranks, tmp_path: Path, name: str) -> None:
    compare(framework_ranks, same_as_torch, RECIPES[name], tmp_path)


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
    ours = {"sync_config" if recipe is transformers else "config": SyncConfig(strategy=strategy), "shard_optimizer": True}
    wanted = run_recipe(recipe, DistributedDataParallel, folder / "whole", ours, False)
    found = run_recipe(recipe, DistributedDataParallel, folder / "cut", ours, True)
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


# A signal to one rank stops both after the same step, by the framework's own way; the run that goes on has the same bits.


def sent_after(step: int) -> None:
    """Called after each step: SIGTERM to this process, if it is rank 1, after its third one."""
    if step == 2 and dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGTERM)


@contextlib.contextmanager
def keeping_handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def lightning_stops(wrapper: Wrapper, folder: Path, is_cut: bool) -> dict[str, Tensor]:
    import lightning.pytorch as pl

    from frameworks.lightning_recipes import trainer_of
    from undertow.integrations.lightning import StopOnSignal

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def training_step(self, batch: Any, _index: int) -> Tensor:
            if is_cut:
                sent_after(self.trainer.global_step)
            return mse_loss(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def trained(checkpoint: Path | None = None) -> tuple[int, dict[str, Tensor]]:
        heard: list[int] = []
        signal.signal(signal.SIGTERM, lambda number, _frame: heard.append(number))  # of the user: it is called too
        stop = StopOnSignal(save_to=folder / "stopped.ckpt")
        trainer, module = trainer_of(wrapper, use_distributed_sampler=False, callbacks=[stop]), Module()
        # The loader begins with its first batch again, of which a warning tells: all are alike here.
        data = torch.utils.data.DataLoader(2 * NUM_STEPS * batches()[:1], batch_size=None)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "You're resuming from a checkpoint that ended before the epoch ended")
            trainer.fit(module, data, ckpt_path=checkpoint, weights_only=True)
        assert heard == ([signal.SIGTERM] if is_cut and dist.get_rank() == 1 else [])
        return trainer.global_step, dict(module.state_dict())

    num_steps, found = trained()
    assert num_steps == (3 if is_cut else 2 * NUM_STEPS)
    if is_cut:
        is_cut = False
        num_steps, found = trained(folder / "stopped.ckpt")
        assert num_steps == 2 * NUM_STEPS
    return found


def compiled_accelerate_stops(wrapper: Wrapper, folder: Path, is_cut: bool) -> dict[str, Tensor]:
    return accelerate_stops(wrapper, folder, is_cut, dynamo_backend="eager")


def accelerate_stops(wrapper: Wrapper, folder: Path, is_cut: bool, **settings: Any) -> dict[str, Tensor]:
    from accelerate import Accelerator

    def trained(steps: range, *, loads: bool = False, ends: bool = False) -> tuple[int, nn.Module]:
        accelerator, net = Accelerator(cpu=True, **settings), network()
        given = accelerator, net, torch.optim.AdamW(net.parameters(), lr=1e-2)
        model, optimizer = prepared(wrapper, *given, stop_signals=(signal.SIGTERM,))
        if loads:
            accelerator.load_state(folder / "state")
        step = -1
        for step in steps:
            if ends:
                sent_after(step)
            optimizer.zero_grad()
            accelerator.backward(mse_loss(model(batches()[step][0]), batches()[step][1]))
            optimizer.step()
            if accelerator.check_trigger():
                accelerator.save_state(folder / "state")
                break
        return step, model.module

    last, net = trained(range(2 * NUM_STEPS), ends=is_cut)
    assert last == (2 if is_cut else 2 * NUM_STEPS - 1)
    if is_cut:
        _, net = trained(range(3, 2 * NUM_STEPS), loads=True)
    return dict(net.state_dict())


def transformers_stops(wrapper: Wrapper, folder: Path, is_cut: bool) -> dict[str, Tensor]:
    import transformers

    class Sends(transformers.TrainerCallback):
        def on_step_begin(self, _args: Any, state: Any, _control: Any, **_others: Any) -> None:
            sent_after(state.global_step)

    def trained(*, resumes: bool = False, ends: bool = False) -> tuple[int, dict[str, Tensor]]:
        steps = {"lr_scheduler_type": "constant", "max_steps": 2 * NUM_STEPS}
        trainer = gpt2_trainer(wrapper, folder, num_rows=32, ours={"stop_signals": (signal.SIGTERM,)}, **steps)
        if ends:
            trainer.add_callback(Sends())
        trainer.train(resume_from_checkpoint=resumes)
        return trainer.state.global_step, dict(trainer.model.state_dict())

    num_steps, found = trained(ends=is_cut)
    assert num_steps == (3 if is_cut else 2 * NUM_STEPS)
    if is_cut:
        num_steps, found = trained(resumes=True)
        assert num_steps == 2 * NUM_STEPS
    return found


def stopped_as_uninterrupted(recipe: Recipe, folder: Path) -> None:
    with keeping_handlers():
        wanted = run_recipe(recipe, DistributedDataParallel, folder / "whole", False)
        found = run_recipe(recipe, DistributedDataParallel, folder / "cut", True)
    require_same(found, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [lightning_stops, accelerate_stops, compiled_accelerate_stops, transformers_stops])
def test_a_framework_stops_by_its_own_way_when_a_signal_has_reached_one_rank(
    framework_ranks: Ranks, tmp_path: Path, recipe: Recipe
) -> None:
    require_installed("lightning", "accelerate", "transformers", "safetensors")
    for name in ("whole", "cut"):
        (tmp_path / name).mkdir()
    framework_ranks.run(stopped_as_uninterrupted, recipe, tmp_path, timeout_s=TIMEOUT_S)


NORM = {"gradient_clip_val": 0.05}
CLIPPED: dict[str, Needed] = {
    "lightning": ("lightning", with_trainer, ("Regression", NORM | {"ours": SHARDS})),
    "fabric": ("lightning", with_fabric, (SHARDS, {"max_norm": 0.05})),
    "accelerate": ("accelerate", with_accelerate, ({}, "clip_grad_norm_", SHARDS)),
    "accelerate, two optimizers": ("accelerate", with_muon_and_adamw, (True, SHARDS)),
    "transformers": ("transformers accelerate", with_transformers, (OF_TRAINER, {"max_grad_norm": 0.05})),
}


def close_to_torch(recipe: Recipe, folder: Path, *args: Any) -> None:
    """torch's norm is of fp32. Biases before a batch norm, and the mean there, are not compared: their gradients are noise."""
    wanted, found = (run_recipe(recipe, cls, folder, *args) for cls in (TorchDistributedDataParallel, DistributedDataParallel))
    assert any(name.endswith("weight") for name in wanted)
    for name in (name for name in wanted if name.endswith("weight")):
        torch.testing.assert_close(found[name], wanted[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", CLIPPED)
def test_a_framework_clips_by_the_norm_of_all_shards(framework_ranks: Ranks, tmp_path: Path, name: str) -> None:
    compare(framework_ranks, close_to_torch, CLIPPED[name], tmp_path)


def refusals_of_lightning() -> dict[str, str]:
    from frameworks import lightning_recipes as recipes

    class NoOptimizer(recipes.Regression):
        def configure_optimizers(self) -> None:
            return None

    found = {}
    for what, module, settings in (
        ("no optimizer", NoOptimizer(), {}),
        ("an optimizer of matrices", recipes.Matrices(), {}),
        ("an optimizer of the user's class", recipes.UsersOptimizer(), {}),
        ("clipping by value", recipes.Regression(), {"gradient_clip_val": 0.1, "gradient_clip_algorithm": "value"}),
    ):
        with as_launched():
            warnings.filterwarnings("ignore", message=".*configure_optimizers. returned")
            trainer = recipes.trainer_of(DistributedDataParallel, ours=SHARDS, **settings)
            error = ShardedGradientError if what == "clipping by value" else ConfigError
            found[what] = text_of(error, lambda trainer=trainer, module=module: trainer.fit(module, recipes.loader()))
    return found


@pytest.mark.slow
def test_lightning_refuses_what_shards_cannot_do(framework_ranks: Ranks) -> None:
    require_installed("lightning")
    for texts in framework_ranks.run(refusals_of_lightning, timeout_s=TIMEOUT_S):
        assert texts["no optimizer"].startswith("shard_optimizer=True takes one optimizer or several, got none.\n  UndertowS")
        assert texts["an optimizer of matrices"].startswith("no ShardedOptimizer updates 'net.0.bias', 'net.1.weight',")
        assert texts["an optimizer of the user's class"].startswith("OfTheUser cannot be sharded: Undertow does not know that")
        assert "is sharded: no rank has all of it." in texts["clipping by value"]


def fabric_without_its_model() -> str:
    import lightning.fabric as fabric

    with as_launched():
        launched = fabric.Fabric(
            accelerator="cpu", devices=2, strategy=fabric_strategy(DistributedDataParallel, ours={"shard_optimizer": True})
        )
        launched.launch()
        optimizer = torch.optim.AdamW(mlp().parameters(), lr=1e-2)
        return text_of(ConfigError, lambda: launched.setup_optimizers(optimizer))


def fabric_with_a_scaler_and_two() -> str:
    import lightning.fabric as fabric

    with as_launched():
        strategy = fabric_strategy(DistributedDataParallel, ours={"shard_optimizer": True})
        launched = fabric.Fabric(accelerator="cpu", devices=2, strategy=strategy)
        launched.launch()
        net = mlp()
        model, muon, _adamw = launched.setup(net, *muon_and_adamw(net))
        launched.strategy.precision.scaler = torch.amp.GradScaler("cpu")  # as "16-mixed" has it on a GPU
        launched.backward(model(noise(3, 6)).square().mean())
        return text_of(ConfigError, lambda: launched.clip_gradients(model, muon, max_norm=1.0))


@pytest.mark.slow
def test_fabric_does_not_clip_several_optimizers_of_a_scaler(framework_ranks: Ranks) -> None:
    require_installed("lightning")
    assert (
        framework_ranks.run(fabric_with_a_scaler_and_two, timeout_s=TIMEOUT_S)
        == [
            "16-mixed precision unscales one optimizer at a time, so several have no common norm.\n  fabric.clip_gradients\n"
            '  Set precision="bf16-mixed", or use one optimizer.'
        ]
        * 2
    )


@pytest.mark.slow
def test_fabric_needs_the_model_with_its_optimizer(framework_ranks: Ranks) -> None:
    require_installed("lightning")
    assert (
        framework_ranks.run(fabric_without_its_model, timeout_s=TIMEOUT_S)
        == [
            "shard_optimizer=True needs the model together with its optimizer.\n  Fabric.setup_optimizers\n"
            "  Call fabric.setup(model, optimizer)."
        ]
        * 2
    )


def on_one_device() -> None:
    from frameworks import lightning_recipes as recipes

    with as_launched():
        trainer = recipes.trainer_of(DistributedDataParallel, devices=1, gradient_clip_val=0.1, ours=SHARDS)
        trainer.fit(recipes.Regression(), recipes.loader())


@pytest.mark.slow
def test_lightning_trains_in_shards_on_one_device() -> None:
    require_installed("lightning")
    with Ranks(1) as alone:
        alone.run(on_one_device, timeout_s=TIMEOUT_S)


def registered() -> list[str]:
    from lightning.fabric import Fabric

    from frameworks import lightning_recipes as recipes
    from undertow.integrations import lightning  # noqa: F401  # registers

    found: list[str] = []
    with as_launched():
        found.append(type(Fabric(accelerator="cpu", devices=2, strategy="undertow").strategy).__name__)
        trainer = recipes.pl.Trainer(strategy="undertow", max_epochs=1, plugins=environment(), **recipes.SETTINGS)
        found.append(type(trainer.strategy).__name__)
    return found


@pytest.mark.slow
def test_the_strategies_have_a_name(framework_ranks: Ranks) -> None:
    require_installed("lightning")
    for found in framework_ranks.run(registered, timeout_s=TIMEOUT_S):
        assert found == ["UndertowFabricStrategy", "UndertowStrategy"]


def prepared_twice(folder: Path) -> None:
    """Prepares anew what is prepared, and loads a checkpoint of a plain Accelerate."""
    from accelerate import Accelerator

    def made(wrapper: Wrapper) -> Any:
        accelerator, net = Accelerator(cpu=True), mlp()
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        return accelerator, *prepared(wrapper, accelerator, net, optimizer, **(SHARDS if is_ours(wrapper) else {}))

    def step(accelerator: Any, model: nn.Module, optimizer: Any, number: int) -> None:
        accelerator.backward(model(noise(3, 6, step=number)).square().mean())
        optimizer.step()
        optimizer.zero_grad()

    with as_launched():
        plain = made(TorchDistributedDataParallel)
        for number in range(2):
            step(*plain, number)
        plain[0].save_state(folder / "plain")
        plain[0].free_memory()
        accelerator, model, optimizer = made(DistributedDataParallel)
        again = prepared(DistributedDataParallel, accelerator, model, optimizer, **SHARDS)
        assert (again[0] is model, again[1] is optimizer) == (True, True)
        accelerator.load_state(folder / "plain")
        for each in ((accelerator, model, optimizer), plain):
            step(*each, 2)
        require_same(state_of(model.module), state_of(plain[1].module))
        accelerator.free_memory()


@pytest.mark.slow
def test_accelerate_prepares_twice_and_loads_checkpoints_of_plain_training(framework_ranks: Ranks, tmp_path: Path) -> None:
    require_installed("accelerate")
    framework_ranks.run(prepared_twice, tmp_path, timeout_s=TIMEOUT_S)


def accelerate_refuses() -> list[str]:
    from accelerate import Accelerator
    from accelerate.utils import DistributedType

    found = []
    with as_launched():
        accelerator, net, other = Accelerator(cpu=True), mlp(), mlp()
        optimizer = torch.optim.AdamW(other.parameters(), lr=1e-2)
        torch.optim.lr_scheduler.StepLR(optimizer, 1)
        ours = {"shard_optimizer": True}
        for args in ((net,), (other, optimizer)):
            found.append(text_of(ConfigError, lambda args=args: prepared(DistributedDataParallel, accelerator, *args, **ours)))
        accelerator.state.distributed_type = DistributedType.FSDP
        found.append(text_of(ConfigError, lambda: prepared(DistributedDataParallel, accelerator, net)))
    return found


@pytest.mark.slow
def test_accelerate_refuses_what_shards_cannot_do(framework_ranks: Ranks) -> None:
    require_installed("accelerate")
    for count, scheduler, kind in framework_ranks.run(accelerate_refuses, timeout_s=TIMEOUT_S):
        assert count.startswith("shard_optimizer=True takes one model and its optimizers, got 1 and 0.")
        assert scheduler.startswith("AdamW cannot be taken over: it has a scheduler that is not given.")
        assert "schedulers=[...]" in scheduler
        assert kind.startswith("Accelerate distributes by DistributedType.FSDP, and Undertow replaces DDP only.")


EXAMPLES = {"lightning_train.py": "lightning", "accelerate_train.py": "accelerate", "hf_trainer.py": "transformers"}


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_learns(tmp_path: Path, name: str) -> None:
    require_installed(EXAMPLES[name])
    interpreter = python("lightning", "transformers", "accelerate")
    command = [interpreter, "-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, ROOT / "examples" / name],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    first, *_, last = [float(loss) for loss in re.findall(r"^step +\d+ .*loss (\S+)$", done.stdout, re.MULTILINE)]
    assert last < 0.8 * first
