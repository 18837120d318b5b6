"""ResNet-50 on 32 ranks: torch's buckets and the planned ones on three networks.

Source: github.com/netx-repo/training-bottleneck, simulation/bk_time_logs: the backward pass of ResNet-50 on a V100, batch 32,
tensor by tensor, 102 MB in 64.8 ms; 128.1 ms per iteration on one GPU.
"""

import json
import math
from collections.abc import Sequence
from itertools import accumulate

from support.project import ROOT
from undertow.lab.cost import Costs, Link, RingCosts
from undertow.lab.planning import StepModel, StepTiming, choose
from undertow.lab.profile import Profile
from undertow.lab.simulate import IDEAL, simulate
from undertow.plan import ParamSpec, plan_from_groups
from undertow.schedule import DDP

NUM_RANKS, ITERATION_MS, _MIB = 32, 128.1, 1024 * 1024
TORCH_CAPS_BYTES = (_MIB, 25 * _MIB)  # of the first bucket, and of the others
# Payload: 10 GbE carries 9.43 Gb/s. How long a message takes is not published: from fast to slow of TCP, and of RDMA.
NETWORKS = [
    Link(name=name, hop_s=hop_us * 1e-6, bytes_per_s=gigabits * 1e9 / 8)
    for name, gigabits, hops_us in (("10 GbE", 9.43, (20, 50, 100)), ("56 Gb/s", 56, (2, 5)), ("100 Gb/s", 100, (2, 5)))
    for hop_us in hops_us
]


def profile() -> Profile:
    """Of the file that the benchmarks replay: elements, and microseconds since the gradient before, the last layer first."""
    found = json.loads((ROOT / "benchmarks" / "shaped" / "workloads" / "resnet50.json").read_text(encoding="utf-8"))
    ready_us = tuple(accumulate(gap_us for _, gap_us in found["tensors"]))
    params = tuple(
        ParamSpec(name=f"p{index}", shape=(numel,), dtype="float32", itemsize=4)
        for index, (numel, _) in enumerate(found["tensors"])
    )
    return Profile(
        params=params[::-1],
        ready_us=ready_us[::-1],
        backward_us=ready_us[-1],
        forward_us=ITERATION_MS * 1e3 - ready_us[-1],
        name="ResNet-50",
    )


def torch_groups(profile: Profile) -> list[list[int]]:
    """The default buckets of torch's DistributedDataParallel: in ready order, each ends with what reaches its cap."""
    groups: list[list[int]] = [[]]
    num_bytes = 0
    for param in profile.order:
        cap_bytes = TORCH_CAPS_BYTES[min(len(groups), len(TORCH_CAPS_BYTES)) - 1]
        groups[-1].append(param)
        num_bytes += profile.params[param].num_bytes
        if num_bytes >= cap_bytes:
            groups.append([])
            num_bytes = 0
    return [group for group in groups if group]


def torch_over_planned(profile: Profile, link: Link) -> float:
    """Returns the exposed time under torch's buckets over that under planned ones."""
    costs = RingCosts(link, num_ranks=NUM_RANKS, has_trees=False)
    timing = StepTiming(ready_us=profile.ready_us, backward_end_us=profile.backward_us)
    model = StepModel(params=profile.params, timing=timing, costs=costs)
    choice = choose(model, profile.order, max_bucket_bytes=math.inf)
    return exposed_us(profile, torch_groups(profile), costs) / exposed_us(profile, choice.best.groups, costs)


def exposed_us(profile: Profile, groups: Sequence[Sequence[int]], costs: Costs) -> float:
    plan = plan_from_groups(profile.params, groups, num_ranks=NUM_RANKS)
    return simulate(profile, plan, DDP, costs, IDEAL).overlap().exposed_us
