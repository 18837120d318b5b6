"""The likeliest mistakes of a first run: the whole text of each error, which has to say what to do.

Elsewhere: a command that is not found (tests/runner/test_run.py), models that differ (tests/docs/test_snippets.py), a forgotten
close (tests/dist/test_scripts.py), and `state_dict()` on rank 0 only (tests/faults/test_stalls.py).
"""

import contextlib
import re
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.constants import default_pg_timeout

from support.errors import refusal, text_of
from support.processes import free_port
from support.project import ROOT
from support.ranks import in_ranks
from undertow import DistributedDataParallel, PhaseError, ShardedGradientError, ShardedOptimizer, SyncConfig, WrongType, attach

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
NO_GROUP = """torch.distributed is not initialized.
  no default process group exists in this process
  Call torch.distributed.init_process_group("gloo") (or "nccl") first, and start the ranks with \
torchrun --nproc-per-node=2 script.py."""
OUTSIDE = """process_group must be a torch.distributed.ProcessGroup, got int.
  the group over which gradients are averaged
  Pass what torch.distributed.new_group() returned; a rank outside of the group does not wrap."""
WRAPPED = """this module is wrapped already, by torch's own DistributedDataParallel.
  DistributedDataParallel(torch.nn.parallel.DistributedDataParallel(...))
  Wrap the bare module once, without torch's class."""
TWICE = """this module is wrapped already, by undertow.DistributedDataParallel.
  attach(undertow.DistributedDataParallel(...))
  Wrap the bare module once: it is `module` of the wrapper."""
UNWRAPPED = """target must be the result of attach() or DistributedDataParallel, got Linear.
  ShardedOptimizer
  Wrap the model first, then write ShardedOptimizer(torch.optim.AdamW, model, lr=...). Parameters or groups come third: \
ShardedOptimizer(torch.optim.AdamW, model, groups, lr=...)."""
INSTANCE = """cls must be a class of optimizers, got an instance of AdamW.
  ShardedOptimizer
  Pass the class, such as torch.optim.AdamW, and its settings by name. An optimizer that exists is sharded by \
undertow.shard_optimizer(optimizer, model)."""
PLAIN = """strategy='zero1' needs a sharded optimizer, and AdamW is not one.
  the first step of the optimizer
  Make it with undertow.ShardedOptimizer(torch.optim.AdamW, model, ...), or with undertow.shard_optimizer(optimizer, model)."""
CLIPPED = """the gradient of 'weight' is sharded: no rank has all of it.
  aten.linalg_vector_norm.default
  Clip with optimizer.clip_grad_norm_(), read it with model.full_gradient(param), or call zero_grad() before writing."""
OF_TORCH = (
    "target must be the result of attach() or DistributedDataParallel, got torch's class of that name: import it from undertow."
)
NO_NUMBER = """max_norm must be a number, got generator.
  clip_grad_norm_
  Write optimizer.clip_grad_norm_(1.0) or undertow.clip_grad_norm_(model, 1.0): both know the parameters."""
NO_PARAMS = """params must be parameters or groups of them, got float.
  ShardedOptimizer
  Give settings by name: ShardedOptimizer(torch.optim.AdamW, model, lr=...)."""
POSITIONAL = """settings are given by name, got 'zero1' without one.
  SyncConfig
  Write SyncConfig(strategy=...)."""
A_DICT = """config must be a SyncConfig, got dict.
  the settings of a wrapper or of attach
  Write config=SyncConfig(**settings) for a dict of settings."""


@pytest.mark.parametrize("wrap", [DistributedDataParallel, attach])
def test_without_a_group_the_error_says_how_to_make_one(wrap: type) -> None:
    assert not dist.is_initialized()
    assert refusal(lambda: wrap(nn.Linear(2, 2))) == NO_GROUP


def test_the_page_quotes_what_torch_says_without_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    quoted = "environment variable RANK expected, but not set"
    assert f"| `{quoted}` |" in PAGE
    assert quoted in text_of(ValueError, lambda: dist.init_process_group("gloo"))


def test_too_few_processes_wait_inside_of_torchs_call_as_the_page_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the library runs before the processes have met."""
    names = {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    for name, value in names.items():
        monkeypatch.setenv(name, value)
    (row,) = [line for line in PAGE.splitlines() if line.startswith("| nothing, inside `init_process_group` |")]
    assert "torch waits for 30 minutes, then says how many `clients joined`" in row
    assert default_pg_timeout == timedelta(minutes=30)
    begun = partial(dist.init_process_group, "gloo", timeout=timedelta(seconds=1))
    assert "1/3 clients joined" in text_of(dist.DistStoreError, begun)


def test_one_process_trains_alone_and_its_report_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """No error: one rank is a job too."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with contextlib.closing(DistributedDataParallel(nn.Linear(2, 2))) as model:
        model(torch.ones(1, 2)).sum().backward()
        advice = model.report().advice
    dist.destroy_process_group()
    assert advice == (
        "A single rank has nothing to communicate: no step is recorded. Start two or more: torchrun --nproc-per-node=2 script.py."
    )
    assert f"| nothing, and `model.report()` says `{advice.partition(':')[0]}` |" in PAGE


@pytest.mark.filterwarnings("ignore:Attempted to get default timeout")
def test_the_page_quotes_what_torch_says_without_nccl() -> None:
    quoted = "Distributed package doesn't have NCCL built in"
    assert f"| `{quoted}`" in PAGE
    if dist.is_nccl_available():
        return
    store = dist.HashStore()
    assert quoted in text_of(RuntimeError, lambda: dist.init_process_group("nccl", store=store, rank=0, world_size=1))


def test_settings_are_given_by_name() -> None:
    assert text_of(WrongType, lambda: SyncConfig("zero1")) == POSITIONAL  # type: ignore[misc]


@in_ranks(2)
def test_a_rank_outside_of_the_group_does_not_wrap() -> None:
    group = dist.new_group([0])
    if dist.get_rank() == 1:
        assert text_of(WrongType, lambda: DistributedDataParallel(nn.Linear(2, 2), process_group=group)) == OUTSIDE
    else:
        dist.destroy_process_group(group)


@in_ranks(2)
def test_a_model_of_torchs_class_is_not_wrapped_again() -> None:
    wrapped = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
    assert refusal(lambda: DistributedDataParallel(wrapped)) == WRAPPED


@in_ranks(2)
def test_a_wrapper_is_not_wrapped_again() -> None:
    with contextlib.closing(DistributedDataParallel(nn.Linear(2, 2))) as model:
        assert refusal(lambda: attach(model)) == TWICE


@in_ranks(2)
def test_a_dict_is_no_settings() -> None:
    assert text_of(WrongType, lambda: DistributedDataParallel(nn.Linear(2, 2), config={"wire": "int8"})) == A_DICT  # type: ignore[arg-type]


@in_ranks(2)
def test_a_sharded_optimizer_needs_the_wrapped_model_and_a_class() -> None:
    with contextlib.closing(DistributedDataParallel(nn.Linear(2, 2))) as model:
        assert text_of(WrongType, lambda: ShardedOptimizer(torch.optim.AdamW, model.module, lr=1e-3)) == UNWRAPPED
        made = torch.optim.AdamW(model.parameters())
        assert text_of(WrongType, lambda: ShardedOptimizer(made, model)) == INSTANCE  # type: ignore[arg-type]
        assert text_of(WrongType, lambda: ShardedOptimizer(torch.optim.AdamW, model, 1e-3)) == NO_PARAMS  # type: ignore[arg-type]
    wrapped = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
    assert text_of(WrongType, lambda: ShardedOptimizer(torch.optim.AdamW, wrapped)).splitlines()[0] == OF_TORCH


@in_ranks(2)
def test_a_plain_optimizer_does_not_step_where_a_sharded_one_is_asked_for() -> None:
    net = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(net.parameters())  # made before wrapping
    with contextlib.closing(DistributedDataParallel(net, config=SyncConfig(strategy="zero1"))) as model:
        model(torch.ones(1, 2)).sum().backward()
        assert text_of(PhaseError, optimizer.step) == PLAIN


@in_ranks(2)
def test_plain_clipping_names_the_call_for_shards() -> None:
    with contextlib.closing(DistributedDataParallel(nn.Linear(2, 2))) as model:
        optimizer = ShardedOptimizer(torch.optim.AdamW, model, lr=1e-3)
        model(torch.ones(1, 2)).sum().backward()
        assert text_of(ShardedGradientError, lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0)) == CLIPPED
        assert text_of(WrongType, lambda: optimizer.clip_grad_norm_(model.parameters(), 1.0)) == NO_NUMBER  # type: ignore[arg-type]
        optimizer.zero_grad()


def test_the_page_has_every_first_mistake() -> None:
    rows = PAGE.split("## The first run fails\n")[1].split("\n## ")[0]
    for said in (NO_GROUP, WRAPPED, UNWRAPPED, PLAIN, CLIPPED):
        first = said.splitlines()[0]
        quoted = re.findall(r"^\| `([^`]*)`", rows, re.MULTILINE)
        assert any(text in first for text in quoted), first
