"""GPT-3 175B on 64 data-parallel ranks, as a guide to large models describes it, and what that implies.

Its inputs: 96 layers, buckets of 40 MB, gradients of 2 bytes (about 350 GB), backward in 4 to 5 s, 3.2 s of communication. Its
result: 0.3 s of it exposed, 90 % hidden, 30 % more throughput. And 50 to 100 ms per bucket.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fidelity.solve import solve
from undertow.plan import ParamSpec, plan_from_groups
from undertow.profile import Profile
from undertow.schedule import DDP
from undertow.simulate import Conditions, simulate

NUM_RANKS = 64
BUCKET_BYTES = 40e6
COMMUNICATION_S, EXPOSED_S = 3.2, 0.3
BACKWARD_S = 4.5
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
    """3.2 s for all buckets."""
    return TrainCosts(bucket_us=1e6 * COMMUNICATION_S * BUCKET_BYTES / num_bytes())


def step_s(costs: TrainCosts | None = None, conditions: Conditions | None = None, *, backward_s: float = BACKWARD_S) -> float:
    """Of a step that sends every gradient as soon as it is ready."""
    gpt = profile(backward_s=backward_s)
    plan = plan_from_groups(gpt.params, [[param] for param in gpt.order], num_ranks=NUM_RANKS)
    return simulate(gpt, plan, DDP, given_costs() if costs is None else costs, conditions).step_us / 1e6


def compute_s(*, backward_s: float = BACKWARD_S) -> float:
    """Of the mean rank."""
    return backward_s * (1 + _FORWARD_SHARE)


def exposed_s(costs: TrainCosts | None = None, conditions: Conditions | None = None, *, backward_s: float = BACKWARD_S) -> float:
    """By how much communication, and what else stands in its way, makes a step longer than computing."""
    return step_s(costs, conditions, backward_s=backward_s) - compute_s(backward_s=backward_s)


def skew_for_claim() -> float:
    """Relative standard deviation of computing times between ranks."""
    return solve(lambda skew: exposed_s(conditions=Conditions(skew=skew)), EXPOSED_S, low=0.0, high=0.1)


def contention_for_claim() -> float:
    """Share of its speed that computation loses while the network works."""
    return solve(lambda share: exposed_s(conditions=Conditions(contention=share)), EXPOSED_S, low=0.0, high=0.5)


def bucket_us_for_claim() -> float:
    """Time of one 40 MB bucket."""
    return solve(lambda us: exposed_s(TrainCosts(bucket_us=us)), EXPOSED_S, low=0.0, high=1e3)
