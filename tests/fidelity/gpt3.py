"""GPT-3 175B on 64 data-parallel ranks, as a guide to large models describes it, and what that implies.

Its inputs: 96 layers, buckets of 40 MB, gradients of 2 bytes (about 350 GB), backward in 4 to 5 s, 3.2 s of communication. Its
result: 0.3 s of it exposed, 90 % hidden, 30 % more throughput. And 50 to 100 ms per bucket.
"""

import math
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fidelity.solve import solve
from undertow.plan import ParamSpec, StepTiming, choose, plan_from_groups
from undertow.profile import Profile
from undertow.schedule import DDP
from undertow.simulate import IDEAL, Conditions, simulate

NUM_RANKS, BUCKET_BYTES = 64, 40e6
COMMUNICATION_S, EXPOSED_S, BACKWARD_S = 3.2, 0.3, 4.5
BACKWARDS_S = (4.0, BACKWARD_S, 5.0)
CLAIMED_BUCKETS_MS = (50, 100)
_NUM_LAYERS, _WIDTH = 96, 12_288
_FORWARD_SHARE = 0.5  # of backward, which computes two gradients for each product of the forward


@dataclass(frozen=True)
class TrainCosts:
    """What is larger than a bucket goes as a train of buckets, each of which takes as long."""

    bucket_us: float

    def collective_us(self, kind: str, num_bytes: ArrayLike) -> NDArray[np.float64]:
        return self.bucket_us * np.asarray(num_bytes, dtype=np.float64) / BUCKET_BYTES


@cache
def profile(*, backward_s: float = BACKWARD_S) -> Profile:
    """Uniform layers of four matrices; each gradient is ready when its share of the layer's backward is over."""
    square = _WIDTH * _WIDTH
    numels = [3 * square, square, 4 * square, 4 * square] * _NUM_LAYERS
    still_to_come = np.cumsum([0, *numels[:-1]]) / sum(numels)
    return Profile(
        params=tuple(ParamSpec(name=f"p{i}", shape=(numel,), dtype="float16", itemsize=2) for i, numel in enumerate(numels)),
        ready_us=tuple((1e6 * backward_s * (1 - still_to_come)).tolist()),
        forward_us=1e6 * backward_s * _FORWARD_SHARE,
        backward_us=1e6 * backward_s,
        name="GPT-3 175B",
    )


def num_bytes() -> int:
    return sum(spec.num_bytes for spec in profile().params)


def num_buckets() -> int:
    return math.ceil(num_bytes() / BUCKET_BYTES)


def given_costs() -> TrainCosts:
    return TrainCosts(bucket_us=1e6 * COMMUNICATION_S * BUCKET_BYTES / num_bytes())


@cache
def step_s(costs: TrainCosts | None = None, conditions: Conditions | None = None, *, backward_s: float = BACKWARD_S) -> float:
    """Of a step that sends every gradient as soon as it is ready."""
    gpt = profile(backward_s=backward_s)
    plan = plan_from_groups(gpt.params, [[param] for param in gpt.order], num_ranks=NUM_RANKS)
    return simulate(gpt, plan, DDP, given_costs() if costs is None else costs, conditions or IDEAL).step_us / 1e6


def compute_s(*, backward_s: float = BACKWARD_S) -> float:
    return backward_s * (1 + _FORWARD_SHARE)


def exposed_s(costs: TrainCosts | None = None, conditions: Conditions | None = None, *, backward_s: float = BACKWARD_S) -> float:
    """By how much communication, and what else stands in its way, makes a step longer than computing."""
    return step_s(costs, conditions, backward_s=backward_s) - compute_s(backward_s=backward_s)


def needed_compute_s(*, speedup: float) -> float:
    """Computing time for which sending 3.2 s after backward is that much slower than exposing 0.3 s of them."""
    return (COMMUNICATION_S - speedup * EXPOSED_S) / (speedup - 1)


def planned_exposed_s() -> float:
    gpt = profile()
    timing = StepTiming(ready_us=gpt.ready_us, backward_end_us=gpt.backward_us)
    choice = choose(gpt.params, gpt.order, timing, given_costs())
    plan = plan_from_groups(gpt.params, choice.best.groups, num_ranks=NUM_RANKS)
    return simulate(gpt, plan, DDP, given_costs(), IDEAL).step_us / 1e6 - compute_s()


def inputs_table() -> str:
    lines = ["| backward, s | exposed, ms | hidden | throughput with overlap |", "|---|---|---|---|"]
    for backward_s in BACKWARDS_S:
        exposed = exposed_s(backward_s=backward_s)
        after_s = step_s(conditions=replace(IDEAL, overlap=False), backward_s=backward_s)
        gain = after_s / step_s(backward_s=backward_s) - 1
        lines.append(f"| {backward_s:.1f} | {exposed * 1e3:.1f} | {1 - exposed / COMMUNICATION_S:.2%} | {gain:+.0%} |")
    return "\n".join(lines) + "\n"


def claim_table() -> str:
    skew = solve(lambda skew: exposed_s(conditions=replace(IDEAL, skew=skew)), EXPOSED_S, low=0.0, high=0.1)
    contention = solve(lambda share: exposed_s(conditions=replace(IDEAL, contention=share)), EXPOSED_S, low=0.0, high=0.5)
    bucket_us = solve(lambda us: exposed_s(TrainCosts(bucket_us=us)), EXPOSED_S, low=0.0, high=1e3)
    rows = [
        (
            "skew between ranks, standard deviation",
            f"{skew:.1%}",
            "waits for the slowest of 64 ranks, not for the wire",
        ),
        ("contention, speed lost while sending", f"{contention:.1%}", "a longer backward, nothing waits"),
        ("time of a 40 MB bucket", f"{bucket_us:.0f} us", f"{bucket_us * num_buckets() / 1e6:.1f} s of communication, not 3.2 s"),
    ]
    return "\n".join(["| cause | how much | effect |", "|---|---|---|", *(f"| {' | '.join(row)} |" for row in rows)]) + "\n"
