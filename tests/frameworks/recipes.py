"""Runs a training recipe of a real framework on two ranks, with torch's DDP class and with Undertow's, and compares the results.

How to use it: add a recipe to tests/frameworks/test_frameworks.py,

    def recipe(wrapper: Wrapper, folder: Path) -> dict[str, Tensor]:  # runs on each rank, so it is a function of the module
        from frameworks import lightning_recipes as recipes  # frameworks are imported in ranks, never in pytest's own process
        module = recipes.Regression()
        recipes.trainer_of(wrapper, default_root_dir=folder).fit(module, recipes.loader())
        return state_of(module)  # tensors that must be the same with both classes

and name it in the table of recipes, with the packages that it needs: `require_installed` skips it if one is missing.

`same_as_torch` calls the recipe twice on each rank, from the same seed: with torch's class, then with a subclass of
Undertow's, of which it must construct one. Path arguments become a folder for each class, which both ranks share. Wrappers
are closed afterwards, and the frameworks' global state is reset.

How a framework gets the class: `lightning_strategy`, `fabric_strategy`, `prepared` and `gpt2_trainer` take torch's class as
the framework has it, and Undertow's by `undertow.integrations`, which get the arguments `ours`.
"""

import contextlib
import importlib
import importlib.util
import os
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel

import undertow
from support.naive import require_same
from undertow import DistributedDataParallel

Wrapper, Recipe = type[TorchDistributedDataParallel], Callable[..., dict[str, Tensor]]

TIMEOUT_S = 120.0  # the first recipe imports its framework, on both ranks at once

# Frameworks warn about their own and each other's calls; all other warnings are errors in ranks.
IGNORED_WARNINGS: tuple[tuple[str, type[Warning]], ...] = (
    (r"`isinstance\(treespec, LeafSpec\)` is deprecated", FutureWarning),  # Lightning's data loading, to torch
    (r"The '\w+' does not have many workers", UserWarning),  # Lightning's advice on data loading
)


def require_installed(*packages: str) -> None:
    """Skips the calling test if a package is missing; with --no-unexpected-skips, as in CI, the run fails then."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}; make works-with installs frameworks")


def is_ours(wrapper: Wrapper) -> bool:
    return issubclass(wrapper, DistributedDataParallel)


def same_as_torch(recipe: Recipe, *args: Any) -> None:
    """Requires that `recipe(wrapper, *args)` gives bit-identical tensors with torch's class and with Undertow's, on each rank."""
    wanted = run_recipe(recipe, TorchDistributedDataParallel, *_with_own_folders(args, "first"))
    found = run_recipe(recipe, DistributedDataParallel, *_with_own_folders(args, "second"))
    assert wanted, "the recipe returned nothing to compare"
    require_same(found, wanted)


def _with_own_folders(args: tuple[Any, ...], name: str) -> tuple[Any, ...]:
    own = tuple(arg / name if isinstance(arg, Path) else arg for arg in args)
    for folder in own:
        if isinstance(folder, Path):
            folder.mkdir(exist_ok=True)
    return own


def state_of(module: nn.Module) -> dict[str, Tensor]:
    """The parameters of an unwrapped module, and rank 0's buffers: other ranks' follow them once a step, here or there."""
    tensors = dict(module.named_parameters())
    return tensors if dist.get_rank() else {**tensors, **dict(module.named_buffers())}


def run_recipe(recipe: Recipe, wrapper: Wrapper, *args: Any) -> dict[str, Tensor]:
    """The recipe's tensors on this rank; it must have constructed a wrapper if it is to be Undertow's."""
    made: list[weakref.ref[Any]] = []

    class Recorded(DistributedDataParallel):
        def __init__(self, *args: Any, **arguments: Any) -> None:
            super().__init__(*args, **arguments)
            made.append(weakref.ref(self))

    with as_launched(), mock.patch.object(undertow, "DistributedDataParallel", Recorded):
        try:
            torch.manual_seed(0)
            tensors = recipe(Recorded if is_ours(wrapper) else wrapper, *args)
            tensors = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        finally:
            for ddp in (reference() for reference in made):
                if ddp is not None:
                    ddp.close()
    assert bool(made) == is_ours(wrapper), f"the recipe constructed {len(made)} of Undertow's wrappers"
    return tensors


@contextlib.contextmanager
def as_launched() -> Iterator[None]:
    variables = {
        **dict.fromkeys(("RANK", "LOCAL_RANK"), str(dist.get_rank())),
        **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(dist.get_world_size())),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",  # nobody connects: the group exists
        "HF_HUB_OFFLINE": "1",
        "ACCELERATE_USE_CPU": "true",
        "OMP_NUM_THREADS": "1",
    }
    with mock.patch.dict(os.environ, variables), warnings.catch_warnings():
        for message, category in IGNORED_WARNINGS:
            warnings.filterwarnings("ignore", message=message, category=category)
        try:
            yield
        finally:
            if "accelerate" in sys.modules:
                importlib.import_module("accelerate.state").AcceleratorState._reset_state(reset_partial_state=True)
                importlib.import_module("accelerate.state").GradientState._reset_state()


def environment() -> Any:
    """Lightning's for processes that run already."""
    return importlib.import_module("lightning.fabric.plugins.environments").LightningEnvironment()


def lightning_strategy(wrapper: Wrapper, **arguments: Any) -> Any:
    return _strategy(wrapper, "pytorch", "UndertowStrategy", **arguments)


def fabric_strategy(wrapper: Wrapper, **arguments: Any) -> Any:
    return _strategy(wrapper, "fabric", "UndertowFabricStrategy", **arguments)


def _strategy(wrapper: Wrapper, package: str, name: str, *, ours: dict[str, Any] | None = None, **arguments: Any) -> Any:
    if is_ours(wrapper):
        make, arguments = getattr(importlib.import_module("undertow.integrations.lightning"), name), arguments | (ours or {})
    else:
        make = importlib.import_module(f"lightning.{package}.strategies").DDPStrategy
    return make(cluster_environment=environment(), **arguments)


class OfTheUser(torch.optim.AdamW):
    """A class that Undertow does not know."""


def prepared(wrapper: Wrapper, accelerator: Any, *args: Any, **ours: Any) -> Any:
    if not is_ours(wrapper):
        return accelerator.prepare(*args)
    return importlib.import_module("undertow.integrations.accelerate").prepare(accelerator, *args, **ours)


def gpt2_trainer(
    wrapper: Wrapper, folder: Path, *, num_rows: int, ours: dict[str, Any] | None = None, brings: bool = False, **settings: Any
) -> Any:
    """A Trainer of transformers with a small language model and `num_rows` rows of tokens.

    `brings` gives it an optimizer of the user's class, with a schedule.
    """
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    sizes = {"vocab_size": 19, "n_positions": 8, "n_embd": 8, "n_layer": 2, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0}
    without_dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    quiet = {"report_to": "none", "disable_tqdm": True, "logging_strategy": "no", "dataloader_pin_memory": False}
    usual = {"use_cpu": True, "per_device_train_batch_size": 2, "learning_rate": 1e-2, "save_strategy": "no"}
    arguments = TrainingArguments(str(folder), **{**quiet, **usual, **settings})
    tokens = torch.randint(19, (num_rows, 8), generator=torch.Generator().manual_seed(3))
    rows = [{"input_ids": row, "labels": row} for row in tokens]
    make, model, given = Trainer, GPT2LMHeadModel(GPT2Config(**sizes, **without_dropout)), {}
    if brings:
        optimizer = OfTheUser(model.parameters(), lr=1e-2)
        given = {"optimizers": (optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5))}
    if is_ours(wrapper):
        make, given = importlib.import_module("undertow.integrations.transformers").UndertowTrainer, given | (ours or {})
    return make(model, arguments, train_dataset=rows, eval_dataset=rows[:4], **given)
