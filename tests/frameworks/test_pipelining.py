"""torch's pipeline schedules run stages that Undertow's class wraps as stages that torch's class wraps."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.nn.functional import mse_loss

from support.frameworks import Wrapper, same_as_torch, state_of
from support.models import noise
from support.ranks import Ranks

NUM_MICRO_BATCHES = 4


def pipelined(wrapper: Wrapper, num_stages: int) -> dict[str, Tensor]:
    """Each rank has all stages of its own pipeline, and the two ranks are replicas of each stage."""
    nets = [nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(num_stages)]
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    stages = []
    for index, net in enumerate(nets):
        # With shapes to be found out torch's class reduces the first micro-batch by itself, and rounds differently.
        received, sent = torch.zeros(2, 6, requires_grad=index > 0), torch.zeros(2, 6, requires_grad=True)
        stages.append(PipelineStage(wrapper(net), index, num_stages, torch.device("cpu"), received, sent, group=alone))
    if num_stages == 1:
        schedule = Schedule1F1B(stages[0], NUM_MICRO_BATCHES, loss_fn=mse_loss)
    else:
        schedule = ScheduleInterleaved1F1B(stages, NUM_MICRO_BATCHES, loss_fn=mse_loss)
    optimizer = torch.optim.AdamW(nn.ModuleList(nets).parameters(), lr=1e-2)
    for step in range(3):
        schedule.step(noise(8, 6, step=step), target=noise(8, 6, step=100 + step))
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group(alone)
    return state_of(nn.ModuleList(nets))


@pytest.mark.parametrize("num_stages", [1, 2], ids=["1F1B", "interleaved 1F1B"])
def test_stages_train_as_with_torchs_class(framework_ranks: Ranks, num_stages: int) -> None:
    same_as_torch(framework_ranks, pipelined, num_stages)
