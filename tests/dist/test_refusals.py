"""Every pair of features works together, or is in the table of pairs that are refused."""

import contextlib
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from support.errors import text_of
from support.levels import some
from support.ranks import in_ranks
from support.sharded import destroy
from undertow import (
    DistributedDataParallel,
    ExpertGroup,
    Outer,
    ShardedOptimizer,
    SyncConfig,
    UndertowError,
    save_checkpoint,
)
from undertow.config import REFUSED

FEATURES = (
    "checkpoint",
    "closure",
    "experts",
    "hook",
    "hybrid",
    "join",
    "mean_over_ranks",
    "op",
    "outer",
    "shards",
    "skip",
    "sparse",
    "tensor_parallel",
    "wire",
)
# A strategy with shards has a sharded optimizer; the pair is no pair.
SAME = {("hybrid", "shards")}
PAIRS = [pair for pair in combinations(FEATURES, 2) if pair not in SAME]
ON_A_MESH = [pair for pair in PAIRS if "tensor_parallel" in pair]


class Net(nn.Module):
    def __init__(self, *, is_sparse: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 4, sparse=is_sparse)
        self.experts = nn.Linear(4, 160)  # more than a block of a wire format
        self.head = nn.Linear(160, 1)

    def forward(self, rows: Tensor) -> Tensor:
        return self.head(self.experts(self.table(rows))).square().mean()


def refusal_of(first: str, second: str) -> tuple[type[UndertowError], str, str] | None:
    """Returns the row of the table. Hybrid refuses like any sharded optimizer."""
    rows = [(first, second), (second, first)]
    if "hybrid" in (first, second):
        other = second if first == "hybrid" else first
        rows += [("shards", other), (other, "shards")]
    return next((REFUSED[row] for row in rows if row in REFUSED), None)


def train(features: tuple[str, str], folder: Path) -> None:
    """Runs two steps with these features."""
    torch.manual_seed(0)
    shards = {"hybrid", "shards"} & set(features)
    settings: dict[str, Any] = {"nonfinite": "skip"} if "skip" in features else {}
    if "wire" in features:
        settings |= {"wire": "int8", "param_wire": "int8"}
    how: dict[str, Any] = {}
    with contextlib.ExitStack() as ends:
        names = ("replicate", "shard")
        if "hybrid" in features or "tensor_parallel" in features:
            mesh = init_device_mesh("cpu", (1, 2, 1), mesh_dim_names=(*names, "tp"))
            how["device_mesh"] = mesh["shard"]
            ends.callback(destroy, mesh)
        if "hybrid" in features:
            settings["strategy"] = "hybrid"
            how["device_mesh"] = mesh[names]
        if "outer" in features:
            settings["outer"] = Outer(every=1, fragments=1, delay=0)
        if "experts" in features:
            settings["experts"] = (ExpertGroup(match="experts.*", process_group=dist.group.WORLD),)
        net = Net(is_sparse="sparse" in features)
        if "tensor_parallel" in features:
            parallelize_module(net, mesh["tp"], {"experts": ColwiseParallel(), "head": RowwiseParallel()})
        model = ends.enter_context(contextlib.closing(DistributedDataParallel(net, config=SyncConfig(**settings), **how)))
        if "hook" in features:
            model.register_comm_hook(None, allreduce_hook)
        optimizer = optimizer_of(model, has_shards=bool(shards), has_experts="experts" in features)
        with model.join() if "join" in features else contextlib.nullcontext():
            for _ in range(2):
                step(model, optimizer, features)
        if "checkpoint" in features:
            save_checkpoint(folder, model, optimizer)


def optimizer_of(model: DistributedDataParallel, *, has_shards: bool, has_experts: bool) -> torch.optim.Optimizer:
    if not has_shards:
        return torch.optim.SGD(model.parameters(), lr=0.1)
    # An optimizer for each group of ranks; that of the dense parameters is enough here.
    params = [param for name, param in model.named_parameters() if not has_experts or "experts" not in name]
    return ShardedOptimizer(torch.optim.SGD, model, params, lr=0.1)


def step(model: DistributedDataParallel, optimizer: torch.optim.Optimizer, features: tuple[str, str]) -> None:
    rows = torch.tensor([0, 1 + dist.get_rank()])

    def backward() -> Tensor:
        optimizer.zero_grad()
        loss = model(rows)
        if "mean_over_ranks" in features:
            loss = loss / model.mean_over_ranks(len(rows)).wait()
        with model.no_sync() if "op" in features else contextlib.nullcontext():
            loss.backward()
        if "op" in features:
            model.reduce_gradients_async("sum").wait()
        return loss

    if "closure" in features:
        optimizer.step(backward)
    else:
        backward()
        optimizer.step()


@in_ranks(2)
@pytest.mark.parametrize("features", some([(pair,) for pair in PAIRS if pair not in ON_A_MESH], most=13), ids="-".join)
def test_two_features_work_together_or_their_refusal_is_in_the_table(features: tuple[str, str], tmp_path: Path) -> None:
    require_works_or_is_refused(features, tmp_path)


@pytest.mark.deep
@in_ranks(2, is_fresh=True)  # torch caches operations by mesh, with groups that a test has destroyed
@pytest.mark.parametrize("features", some([(pair,) for pair in ON_A_MESH], most=4), ids="-".join)
def test_a_feature_works_with_tensor_parallelism_or_its_refusal_is_in_the_table(
    features: tuple[str, str], tmp_path: Path
) -> None:
    require_works_or_is_refused(features, tmp_path)


def require_works_or_is_refused(features: tuple[str, str], tmp_path: Path) -> None:
    call = partial(train, features, tmp_path / "checkpoint")
    refusal = refusal_of(*features)
    if refusal is None:
        call()
        return
    error, what, remedy = refusal
    told = text_of(error, call).splitlines()
    assert (told[0], told[-1].strip()) == (what, remedy)


def test_the_table_has_known_features() -> None:
    assert {name for row in REFUSED for name in row} <= set(FEATURES)
