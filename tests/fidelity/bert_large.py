"""BERT-Large on 8, 16 and 32 V100s over three networks, measured by others, and what the simulator makes of it.

Source: github.com/HKBU-HPML/ddl-benchmarks, results of 2020-05-29: PyTorch 1.4, batch 8 per GPU, 4 GPUs per node, milliseconds
per iteration. Of the measured rows only those of one fused message and the 8-GPU row of one message per tensor calibrate
the model; the others are predicted.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import NamedTuple

from fidelity.solve import solve
from undertow.lab.cost import Costs, Link, RingCosts
from undertow.lab.profile import Profile
from undertow.lab.simulate import IDEAL, simulate
from undertow.plan import ParamSpec, plan_from_groups
from undertow.schedule import DDP

ONE_GPU_MS = 163.3
FUSED_MS: Mapping[str, Mapping[int, float]] = {  # one message, after backward
    "10 GbE": {8: 2209.9, 16: 2357.3, 32: 2435.8},
    "100 Gb/s InfiniBand": {8: 645.3, 16: 667.9, 32: 682.3},
    "100 GbE": {8: 1147.0, 16: 1238.6, 32: 1369.0},
}
PER_TENSOR_MS: Mapping[str, Mapping[int, float]] = {  # one message per tensor, under backward
    "10 GbE": {8: 2202.3, 16: 2396.1, 32: 2510.8},
    "100 Gb/s InfiniBand": {8: 629.4, 16: 690.3, 32: 753.3},
    "100 GbE": {8: 1167.5, 16: 1293.2, 32: 1464.7},
}
CALIBRATED_RANKS, TESTED_RANKS = 8, (16, 32)
_BACKWARD_SHARE = 2 / 3  # of an iteration: assumed, backward computes two gradients for each product of the forward
_WIDTH, _NUM_BLOCKS = 1024, 24


class Cell(NamedTuple):
    network: str
    num_ranks: int
    measured_ms: float
    predicted_ms: float
    error: float


@cache
def profile() -> Profile:
    """391 tensors, 335 M parameters."""
    return bert("BERT-Large", _WIDTH, _NUM_BLOCKS, one_gpu_us=ONE_GPU_MS * 1e3)


def bert(name: str, width: int, num_blocks: int, *, one_gpu_us: float) -> Profile:
    """A block's gradients become ready evenly within its share of backward."""
    embeddings = [30_522 * width, 512 * width, 2 * width, width, width]
    square = width * width
    attention = [square, width] * 4 + [width, width]
    feed_forward = [4 * square, 4 * width, 4 * square, width, width, width]
    numels = embeddings + (attention + feed_forward) * num_blocks + [square, width]
    # Blocks are the work; embeddings and the pooler come with the first and the last one.
    num_in_blocks = len(attention + feed_forward) * num_blocks
    places = [min(max(index - len(embeddings), 0), num_in_blocks) for index in range(len(numels))]
    backward_us = one_gpu_us * _BACKWARD_SHARE
    return Profile(
        params=tuple(ParamSpec(name=f"p{i}", shape=(numel,), dtype="float32", itemsize=4) for i, numel in enumerate(numels)),
        ready_us=tuple(backward_us * (1 - place / num_in_blocks) for place in places),
        forward_us=one_gpu_us - backward_us,
        backward_us=backward_us,
        name=name,
    )


def fused_ms(costs: Costs, num_ranks: int) -> float:
    bert = profile()
    plan = plan_from_groups(bert.params, [bert.order], num_ranks=num_ranks)
    return simulate(bert, plan, DDP, costs, replace(IDEAL, overlap=False)).step_us / 1e3


def per_tensor_ms(costs: Costs, num_ranks: int) -> float:
    bert = profile()
    plan = plan_from_groups(bert.params, [[param] for param in bert.order], num_ranks=num_ranks)
    return simulate(bert, plan, DDP, costs, IDEAL).step_us / 1e3


def link_of(network: str, num_ranks: int, *, hop_s: float) -> Link:
    one_byte_per_s = Link(name=network, hop_s=0.0, bytes_per_s=1.0)
    num_bytes = sum(spec.num_bytes for spec in profile().params)
    share = float(RingCosts(one_byte_per_s, num_ranks=num_ranks).collective_us("all_reduce", 1)) / 1e6
    latency_us = 1e6 * 2 * (num_ranks - 1) * hop_s
    wire_s = (FUSED_MS[network][num_ranks] - ONE_GPU_MS) / 1e3 - latency_us / 1e6
    return Link(name=network, hop_s=hop_s, bytes_per_s=share * num_bytes / wire_s)


def costs_of(network: str, num_ranks: int, *, hop_s: float) -> Costs:
    return RingCosts(link_of(network, num_ranks, hop_s=hop_s), num_ranks=num_ranks)


@cache
def hop_s_of(network: str) -> float:
    """The latency that explains the 8-GPU row of one message per tensor."""
    measured_ms = PER_TENSOR_MS[network][CALIBRATED_RANKS]

    def step_ms(hop_s: float) -> float:
        return per_tensor_ms(costs_of(network, CALIBRATED_RANKS, hop_s=hop_s), CALIBRATED_RANKS)

    return solve(step_ms, measured_ms, low=0.0, high=1e-3)


@cache
def cells() -> tuple[Cell, ...]:
    return tuple(_cell(network, num_ranks) for network in PER_TENSOR_MS for num_ranks in TESTED_RANKS)


def _cell(network: str, num_ranks: int) -> Cell:
    predicted_ms = per_tensor_ms(costs_of(network, num_ranks, hop_s=hop_s_of(network)), num_ranks)
    measured_ms = PER_TENSOR_MS[network][num_ranks]
    return Cell(network, num_ranks, measured_ms, predicted_ms, predicted_ms / measured_ms - 1)
