"""Runs a training recipe of a real framework on two ranks, with torch's DDP class and with Undertow's, and compares the results.

How to use it: add a recipe to tests/frameworks/test_frameworks.py,

    def recipe(wrapper: Wrapper, folder: Path) -> dict[str, Tensor]:  # runs on each rank, so it is a function of the module
        from support import lightning_recipes as recipes  # frameworks are imported in ranks, never in pytest's own process
        module = recipes.Regression()
        recipes.trainer_of(wrapper, default_root_dir=folder).fit(module, recipes.loader())
        return state_of(module)  # tensors that must be the same with both classes

and name it in the table of recipes, with the packages that it needs: `require_installed` skips it, or fails under CI=true,
if one is missing.

`same_as_torch` calls the recipe twice on each rank, from the same seed: with a subclass of torch's class, then with a
subclass of Undertow's. The recipe must construct a wrapper of the class it is given. Path arguments become a folder for
each class, which both ranks share. Wrappers are closed afterwards, and the frameworks' global state is reset.

A recipe that torch's class cannot do (a sharded optimizer) runs by itself: `run_recipe(recipe, configured(SyncConfig(...)))`.

How a framework gets the class: `lightning_strategy(wrapper)` and `fabric_strategy(wrapper)` make a strategy for
Trainer and Fabric; within `torchs_name_is(wrapper)` Accelerate and the HF Trainer find the class under torch's name.
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

from support.naive import require_same
from undertow import DistributedDataParallel, SyncConfig

Wrapper, Recipe = type[TorchDistributedDataParallel], Callable[..., dict[str, Tensor]]

TIMEOUT_S = 120.0  # the first recipe imports its framework, on both ranks at once

# Frameworks warn about their own and each other's calls; all other warnings are errors in ranks.
IGNORED_WARNINGS: tuple[tuple[str, type[Warning]], ...] = (
    (r"`isinstance\(treespec, LeafSpec\)` is deprecated", FutureWarning),  # Lightning's data loading, to torch
    (r"The '\w+' does not have many workers", UserWarning),  # Lightning's advice on data loading
)


def require_installed(*packages: str) -> None:
    """Skips the calling test module if a package is missing; a failure instead under CI=true."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if not missing:
        return
    reason = f"not installed: {', '.join(missing)}. Install the extra: pip install 'undertow[integrations]'"
    if os.environ.get("CI", "").lower() in ("1", "true"):
        pytest.fail(f"CI must not skip tests of frameworks; {reason}", pytrace=False)
    pytest.skip(reason, allow_module_level=True)


def configured(config: SyncConfig) -> Wrapper:
    """Undertow's class with settings: frameworks that construct the wrapper do not know of `config`."""

    class Configured(DistributedDataParallel):
        def __init__(self, *args: Any, **arguments: Any) -> None:
            super().__init__(*args, **arguments, config=config)

    return Configured


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


def run_recipe(recipe: Recipe, chosen: Wrapper, *args: Any) -> dict[str, Tensor]:
    """The recipe's tensors on this rank; it must have constructed a wrapper of the class `chosen`."""
    wrapper, made = _recorded(chosen)
    with as_launched():
        try:
            torch.manual_seed(0)
            tensors = {name: tensor.detach().clone() for name, tensor in recipe(wrapper, *args).items()}
        finally:
            for ddp in (reference() for reference in made):
                if isinstance(ddp, DistributedDataParallel):
                    ddp.close()
    assert made, f"the recipe never constructed {wrapper.__mro__[1].__name__}"
    return tensors


def _recorded(wrapper: Wrapper) -> tuple[Wrapper, list[weakref.ref[Any]]]:
    made: list[weakref.ref[Any]] = []

    class Recorded(wrapper):
        def __init__(self, *args: Any, **arguments: Any) -> None:
            super().__init__(*args, **arguments)
            made.append(weakref.ref(self))

    return Recorded, made


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


@contextlib.contextmanager
def torchs_name_is(wrapper: Wrapper) -> Iterator[None]:
    with mock.patch.object(torch.nn.parallel, "DistributedDataParallel", wrapper):
        yield


def lightning_strategy(wrapper: Wrapper, **arguments: Any) -> Any:
    """Lightning's DDP strategy for `Trainer(strategy=...)`, which wraps by `wrapper`; `arguments` are the wrapper's."""
    return _strategy("pytorch", "_setup_model", "determine_ddp_device_ids", wrapper, arguments)


def fabric_strategy(wrapper: Wrapper, **arguments: Any) -> Any:
    return _strategy("fabric", "setup_module", "_determine_ddp_device_ids", wrapper, arguments)


def _strategy(package: str, method: str, devices: str, wrapper: Wrapper, arguments: dict[str, Any]) -> Any:
    strategies = importlib.import_module(f"lightning.{package}.strategies")
    environments = importlib.import_module("lightning.fabric.plugins.environments")

    def wrap(self: Any, model: Any) -> Any:
        return wrapper(model, device_ids=getattr(self, devices)(), **self._ddp_kwargs)

    made = type("Strategy", (strategies.DDPStrategy,), {method: wrap})
    return made(cluster_environment=environments.LightningEnvironment(), **arguments)


def gpt2_trainer(folder: Path, *, num_rows: int, trainer: Any = None, callbacks: Any = (), **settings: Any) -> Any:
    """A Trainer of transformers, or what `trainer` makes, with a small language model and `num_rows` rows of tokens."""
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    sizes = {"vocab_size": 19, "n_positions": 8, "n_embd": 8, "n_layer": 2, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0}
    without_dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    quiet = {"report_to": "none", "disable_tqdm": True, "logging_strategy": "no", "dataloader_pin_memory": False}
    usual = {"use_cpu": True, "per_device_train_batch_size": 2, "learning_rate": 1e-2, "save_strategy": "no"}
    arguments = TrainingArguments(str(folder), **{**quiet, **usual, **settings})
    tokens = torch.randint(19, (num_rows, 8), generator=torch.Generator().manual_seed(3))
    return (trainer or Trainer)(
        GPT2LMHeadModel(GPT2Config(**sizes, **without_dropout)),
        arguments,
        train_dataset=[{"input_ids": row, "labels": row} for row in tokens],
        callbacks=list(callbacks),
    )
