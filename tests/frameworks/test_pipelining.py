"""Pipelines of torch whose stages have sharded optimizers."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel

import undertow
from support.levels import some
from support.models import noise
from support.naive import require_same, wrapped
from support.pages import execute, snippets
from support.project import ROOT
from support.ranks import in_ranks
from undertow import DistributedDataParallel, ShardedGradientError, ShardedOptimizer, SyncConfig

NUM_MICROBATCHES = 4
Wrapper, MakesOptimizer = Callable[[nn.Module], nn.Module], Callable[[nn.Module], torch.optim.Optimizer]


def share_of_the_mean(output: Tensor, target: Tensor) -> Tensor:
    """Has the schedule's scaling in the loss: gradients of shards cannot be divided after they are reduced."""
    return mse_loss(output, target) / NUM_MICROBATCHES


def train(wrap: Wrapper, make: MakesOptimizer, num_stages: int, **schedule: Any) -> dict[str, Tensor]:
    """The parameters after three steps. Each pair of ranks has replicas of a stage; stages of a rank are `num_stages` apart."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    depth = num_ranks // 2  # ranks of a pipeline
    pipelines = [dist.new_group(list(range(first, num_ranks, 2))) for first in range(2)]
    replicas = [dist.new_group([2 * place, 2 * place + 1]) for place in range(depth)]
    place, group = rank // 2, replicas[rank // 2]
    total = num_stages * depth
    torch.manual_seed(place)
    nets = [nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(num_stages)]
    models = [wrap(net, group) for net in nets]
    stages = []
    for turn, model in enumerate(models):
        index = turn * depth + place
        received, sent = torch.zeros(2, 6, requires_grad=index > 0), torch.zeros(2, 6, requires_grad=True)
        stages.append(PipelineStage(model, index, total, torch.device("cpu"), received, sent, group=pipelines[rank % 2]))
    kind, whole = (Schedule1F1B, stages[0]) if num_stages == 1 else (ScheduleInterleaved1F1B, stages)
    steps = kind(whole, n_microbatches=NUM_MICROBATCHES, **schedule)
    optimizers = [make(model) for model in models]
    for step in range(3):
        first = (noise(8, 6, step=step, rank=rank % 2),) if place == 0 else ()
        last = {"target": noise(8, 6, step=100 + step, rank=rank % 2)} if place == depth - 1 else {}
        steps.step(*first, **last)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    found = {
        f"{turn}.{key}": value.clone() for turn, model in enumerate(models) for key, value in model.module.state_dict().items()
    }
    for model in models:
        getattr(model, "close", lambda: None)()
    for opened in (*pipelines, *replicas):
        if opened is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(opened)
    return found


def plain(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def sharded(model: nn.Module) -> torch.optim.Optimizer:
    return ShardedOptimizer(torch.optim.AdamW, model, lr=1e-2)


@in_ranks(4)
@pytest.mark.parametrize("strategy", ["zero1", "zero2"])
@pytest.mark.parametrize("num_stages", some([1, 2], most=1))
def test_a_pipeline_with_the_scaling_in_the_loss_trains_sharded(num_stages: int, strategy: str) -> None:
    config = SyncConfig(strategy=strategy)
    wanted = train(lambda net, group: TorchDistributedDataParallel(net, process_group=group), plain, num_stages, loss_fn=mse_loss)
    found = train(
        lambda net, group: DistributedDataParallel(net, process_group=group, config=config),
        sharded,
        num_stages,
        loss_fn=share_of_the_mean,
        scale_grads=False,
    )
    require_same(found, wanted)


@in_ranks(2)
def test_the_snippet_of_the_page_trains() -> None:
    (snippet,) = snippets(ROOT / "docs" / "integrations" / "pipelines.md")
    pipeline = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    names = execute(
        snippet,
        undertow=undertow,
        torch=torch,
        PipelineStage=PipelineStage,
        Schedule1F1B=Schedule1F1B,
        mse_loss=mse_loss,
        stage_module=nn.Linear(6, 6),
        replicas=dist.group.WORLD,
        pipeline=pipeline,
        index=0,
        num_stages=1,
        device=torch.device("cpu"),
    )
    losses = []
    for _ in range(5):
        found: list[Tensor] = []
        names["schedule"].step(noise(8, 6), target=noise(8, 6, step=1), losses=found)
        losses.append(torch.stack(found).sum().item())
        names["optimizer"].step()
        names["optimizer"].zero_grad()
    assert losses == sorted(losses, reverse=True)
    names["model"].close()
    dist.destroy_process_group(pipeline)


@in_ranks(2)
def test_the_scaling_of_a_schedule_says_that_gradients_are_sharded() -> None:
    with wrapped(nn.Sequential(nn.Linear(6, 6), nn.Tanh()), strategy="zero1") as model:
        pipeline = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
        shapes = torch.zeros(2, 6), torch.zeros(2, 6, requires_grad=True)
        stage = PipelineStage(model, 0, 1, torch.device("cpu"), *shapes, group=pipeline)
        schedule = Schedule1F1B(stage, n_microbatches=NUM_MICROBATCHES, loss_fn=mse_loss)
        sharded(model)
        with pytest.raises(ShardedGradientError):
            schedule.step(noise(8, 6), target=noise(8, 6, step=1))
        dist.destroy_process_group(pipeline)
