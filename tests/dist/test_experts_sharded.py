"""Experts whose optimizer is sharded over their ranks, and clipping that counts each parameter once."""

from __future__ import annotations

import contextlib
import copy
import time
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from support.alike import of_all_ranks, require_equal_values
from support.errors import text_of
from support.inside import post
from support.mixture import MATCH, WIDTH, experts_group, loss, mixture, reduce_naively, trained_naively, wrapped_mixture
from support.ranks import in_ranks
from undertow import (
    ConfigError,
    DistributedDataParallel,
    ExpertGroup,
    PhaseError,
    ShardedOptimizer,
    SyncConfig,
    WrongType,
    attach,
    clip_grad_norm_,
)

ADAMW = {"lr": 0.01}
# Norms are summed in fp64 and rounded once, and so is the reference: half a unit in the last place of fp32 each.
EPS = torch.finfo(torch.float32).eps


def distinct_norm(model: nn.Module, norm_type: float = 2.0) -> float:
    """Dense gradients once, experts of ranks 0 and 1."""
    found = of_all_ranks({name: param.grad for name, param in model.named_parameters() if param.grad is not None})
    grads = [grad for rank in (0, 1) for name, grad in found[rank].items() if ".experts." in f".{name}" or rank == 0]
    assert any(".experts." in f".{name}" for name in found[dist.get_rank()])
    return torch.linalg.vector_norm(torch.cat([grad.double().flatten() for grad in grads]), norm_type).item()


def require_clipped(model: Any, total: torch.Tensor, before: dict[str, torch.Tensor | None], wanted: float, most: float) -> None:
    assert abs(total.item() - wanted) <= EPS * wanted
    scale = (most / (total + 1e-6)).clamp(max=1.0)
    assert scale < 1.0
    found = {name: model.full_gradient(param) for name, param in model.module.named_parameters()}
    assert [name for name, grad in found.items() if (grad is None) != (before[name] is None)] == []
    assert [name for name, grad in found.items() if grad is not None and not torch.equal(grad, before[name] * scale)] == []


@in_ranks(4)
@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
def test_clipping_counts_each_parameter_once(norm_type: float) -> None:
    with wrapped_mixture(mixture()) as (ddp, _, _):
        ddp(torch.randn(3, WIDTH)).square().sum().backward()
        before = {name: param.grad.clone() for name, param in ddp.module.named_parameters()}
        wanted = distinct_norm(ddp.module, norm_type)
        total = clip_grad_norm_(ddp, 0.1, norm_type)
        require_clipped(ddp, total, before, wanted, 0.1)
        assert len(set(of_all_ranks(total.item()))) == 1
        assert torch.equal(clip_grad_norm_(ddp.sync, 1e9, norm_type), clip_grad_norm_(ddp, 1e9, norm_type))
        ddp.module.experts["0"].weight.grad[0, 0] = float("inf") if dist.get_rank() % 2 == 1 else 0.0
        with pytest.raises(RuntimeError, match="is inf"):
            clip_grad_norm_(ddp, 0.1, norm_type, error_if_nonfinite=True)


@in_ranks(2)
def test_clipping_goes_without_experts_as_well() -> None:
    torch.manual_seed(0)
    model, rows = nn.Linear(3, 2), torch.ones(2, 3) + dist.get_rank()
    with contextlib.closing(DistributedDataParallel(model)) as ddp:
        ddp(rows).square().sum().backward()
        wanted = torch.nn.utils.get_total_norm([param.grad.double() for param in model.parameters()])
        assert clip_grad_norm_(ddp, 1.0) == wanted.float()
    for strategy in ("zero1", "zero2"):
        with contextlib.closing(DistributedDataParallel(model, config=SyncConfig(strategy=strategy))) as ddp:
            optimizer = ShardedOptimizer(torch.optim.SGD, ddp, lr=0.1)
            ddp.zero_grad()
            ddp(rows).square().sum().backward()
            assert torch.equal(clip_grad_norm_(ddp, 1e9), optimizer.clip_grad_norm_(1e9))
    assert "target must be what attach()" in text_of(WrongType, lambda: clip_grad_norm_(model, 1.0))
    assert "norm_type must be above zero" in text_of(ConfigError, lambda: clip_grad_norm_(ddp, 1.0, 0.0))


@in_ranks(4)
def test_clipping_what_is_not_synchronised_is_an_error() -> None:
    with wrapped_mixture(mixture()) as (ddp, _, _):
        with ddp.no_sync():
            loss(ddp, 0).backward()
        assert text_of(PhaseError, lambda: clip_grad_norm_(ddp, 1.0)) == (
            "gradients were accumulated and are not synchronised: each rank would find another norm.\n"
            f"  clip_grad_norm_, rank {dist.get_rank()}\n"
            "  Run the last backward of a step outside of accumulate() and no_sync()."
        )
        loss(ddp, 1).backward()
        assert clip_grad_norm_(ddp, 1.0) > 0.0


@in_ranks(2)
def test_clipping_takes_rows_of_sparse_gradients() -> None:
    model = nn.Embedding(4, 2, sparse=True)
    with contextlib.closing(DistributedDataParallel(model)) as ddp:
        ddp(torch.tensor([1, 1, 2 + dist.get_rank()])).sum().backward()
        dense = model.weight.grad.to_dense()
        assert dense.unique().tolist() == [0.0, 0.5, 2.0]
        assert clip_grad_norm_(ddp, 1.0) == 3.0  # 2 of 2 each, 4 of 0.5 each: the root of 9
        assert torch.equal(model.weight.grad.to_dense(), dense * torch.tensor(1.0 / (3.0 + 1e-6)))


def optimizers_of(ddp: DistributedDataParallel, *, eager: bool = False) -> list[ShardedOptimizer]:
    dense, (experts,) = [param for _, param in ddp.sync.named_parameters()], ddp.sync.experts
    parts: tuple[tuple[Any, Any], ...] = ((ddp, dense), (experts, None))
    return [ShardedOptimizer(torch.optim.AdamW, target, params, eager=eager, **ADAMW) for target, params in parts]


def train(model: nn.Module, optimizers: list[torch.optim.Optimizer], steps: range = range(8)) -> None:
    for step in steps:
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss(model, step).backward()
        for optimizer in optimizers:
            optimizer.step()


def require_same_model(model: nn.Module, bare: nn.Module, group: dist.ProcessGroup) -> None:
    trained_naively(bare, group, torch.optim.AdamW(bare.parameters(), **ADAMW), num_steps=8)
    require_equal_values(model, bare)


@in_ranks(4)
@pytest.mark.parametrize("strategy", ["zero1", "zero2"])
@pytest.mark.parametrize("is_eager", [False, True], ids=["barrier", "eager"])
@pytest.mark.parametrize("settings", [{}, {"bucket_cap_mb": 1e-4}], ids=str)
def test_shards_of_experts_over_their_group_make_the_same_model(strategy: str, is_eager: bool, settings: Any) -> None:
    with wrapped_mixture(mixture(), strategy=strategy, **settings) as (ddp, bare, group):
        train(ddp, optimizers_of(ddp, eager=is_eager))
        ddp.wait()
        require_same_model(ddp, bare, group)


@pytest.mark.slow
@in_ranks(4, is_fresh=True)
def test_a_dropped_wrapper_leaves_parameters_that_have_come() -> None:
    model = mixture()
    bare = copy.deepcopy(model)

    def train_and_drop(group: dist.ProcessGroup) -> None:
        experts = (ExpertGroup(match=MATCH, process_group=group, divisor=4),)
        ddp = DistributedDataParallel(model, config=SyncConfig(strategy="zero1", reduction="ordered", experts=experts))
        bare.load_state_dict(model.state_dict())
        optimizers = optimizers_of(ddp)
        train(ddp, optimizers, range(7))
        for part in (ddp.sync, *ddp.sync.experts):
            post(part, partial(time.sleep, 0.2))
        train(ddp, optimizers, range(7, 8))

    with experts_group() as group:
        train_and_drop(group)
        require_same_model(model, bare, group)


@in_ranks(4)
def test_experts_on_one_rank_each_go_with_a_plain_optimizer() -> None:
    """Dense state in shards, all of the experts' on each rank that holds them, in groups of one rank."""
    model = mixture()
    alone = [dist.new_group([rank]) for rank in range(4)][dist.get_rank()]
    experts = (ExpertGroup(match=MATCH, process_group=alone, divisor=4),)
    sync = attach(model, config=SyncConfig(experts=experts, reduction="ordered"))
    bare = copy.deepcopy(model)
    dense = ShardedOptimizer(torch.optim.AdamW, sync, [param for _, param in sync.named_parameters()], **ADAMW)
    train(model, [dense, torch.optim.AdamW([param for _, param in sync.experts[0].named_parameters()], **ADAMW)])
    sync.wait()
    require_same_model(model, bare, alone)
    assert text_of(ConfigError, lambda: ShardedOptimizer(torch.optim.AdamW, sync.experts[0], **ADAMW)) == (
        "these experts are on one rank only, which has nobody to share an optimizer with.\n"
        "  ShardedOptimizer, ExpertGroup(match='*experts.*')\n"
        "  Give them to a plain optimizer."
    )
    sync.close()
    dist.destroy_process_group(alone)


@in_ranks(4)
@pytest.mark.parametrize("strategy", ["zero1", "zero2"])
def test_clipping_is_exact_over_shards_of_both(strategy: str) -> None:
    with wrapped_mixture(mixture(), strategy=strategy) as (ddp, bare, group):
        optimizers = optimizers_of(ddp)
        for step in (0, 4, 8):
            bare.load_state_dict(ddp.module.state_dict())
            for model in (ddp, bare):
                model.zero_grad()
                loss(model, step).backward()
            reduce_naively(bare, group)
            before = {name: param.grad for name, param in bare.named_parameters()}
            require_clipped(ddp, clip_grad_norm_(ddp, 0.01), before, distinct_norm(bare), 0.01)
            for optimizer in optimizers:
                optimizer.step()
            ddp.wait()


@in_ranks(4)
@pytest.mark.parametrize("way", ["clip", "look", "unscale", "step"])
def test_a_rank_without_gradients_joins_all_parts_before_a_collective_of_one(way: str) -> None:
    """In the last step rank 1's backward reaches nothing, and a collective call about one part only comes before the other's."""
    with wrapped_mixture(mixture(), strategy="zero1", overlap=way != "step") as (ddp, bare, group):
        optimizers, scaler = optimizers_of(ddp), torch.amp.GradScaler("cpu", init_scale=2.0, enabled=way == "unscale")
        theirs = torch.optim.AdamW(bare.parameters(), **ADAMW)
        for step in range(3):
            for optimizer in (*optimizers, theirs):
                optimizer.zero_grad()
            is_without = step == 2 and dist.get_rank() == 1
            for model in (ddp, bare):
                value = loss(model, step)
                value = value.detach().requires_grad_() if is_without else value
                (scaler.scale(value) if model is ddp else value).backward()
            if way == "clip":
                optimizers[0].clip_grad_norm_(float("inf"))
            elif way == "look":
                ddp.full_gradient(ddp.module.before.weight)
            for optimizer in optimizers:
                if way == "unscale":
                    scaler.unscale_(optimizer)
                scaler.step(optimizer)
            scaler.update()
            reduce_naively(bare, group)  # collectives that rank 1 would begin while others are in backward
            theirs.step()
        ddp.wait()
        require_equal_values(ddp, bare)
