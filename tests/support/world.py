"""A model and a network that a tuner can be let loose on: what it would measure of any plan."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from support.strategies import spec
from undertow.plan import ParamSpec, Plan, SizeCaps, default_caps, group_by_size, plan_from_groups
from undertow.profile import Profile
from undertow.trace import Transfer, cost_samples
from undertow.tune import Measurement

Cost = Callable[[float], float]

NUM_STEPS, FORWARD_US = 5, 10_000.0


def line(latency_us: float, us_per_byte: float) -> Cost:
    return lambda num_bytes: latency_us + us_per_byte * num_bytes


def stairs(latency_us: float, us_per_byte: float) -> Cost:
    """As NCCL's curves are where it changes its protocol: three times the latency from 1 MB on."""
    return lambda num_bytes: (3.0 if num_bytes >= 1e6 else 1.0) * latency_us + us_per_byte * num_bytes


def model(*, num_layers: int = 24, layer_bytes: int = 1_000_000) -> tuple[ParamSpec, ...]:
    sizes = [size for _ in range(num_layers) for size in (layer_bytes, layer_bytes // 200)]
    return tuple(spec(f"p{i}", size // 4) for i, size in enumerate(sizes))


@dataclass(kw_only=True)
class World:
    """Backward runs through the layers evenly; collectives go one after another, each as soon as it may.

    A collective takes its cost, and `contention_us` of computation from every one of them; times vary by `noise`, a share.
    """

    cost: Cost
    params: tuple[ParamSpec, ...] = field(default_factory=model)
    backward_us: float = 40_000.0
    contention_us: Callable[[Plan], float] = lambda _: 0.0
    noise: float = 0.0
    is_queued: bool = True  # collectives count from their launch, also while others are on the link
    has_shards: bool = False
    num_ranks: int = 4
    seed: int = 1
    processors_us: float = 0.0  # that communication adds to a step, as they are measured
    network_us: float = 0.0

    def __post_init__(self) -> None:
        self._random = np.random.default_rng(self.seed)

    def plan(self, groups: Sequence[Sequence[int]]) -> Plan:
        return plan_from_groups(self.params, groups, num_ranks=self.num_ranks)

    def plan_of_size(self, cap_bytes: float) -> Plan:
        return self.plan_of_caps(SizeCaps(cap_bytes=cap_bytes))

    def plan_of_caps(self, caps: SizeCaps) -> Plan:
        order = range(len(self.params))[::-1]
        return self.plan(group_by_size(self.params, order, caps))

    def first_plan(self) -> Plan:
        """As training begins with it."""
        return self.plan_of_caps(default_caps(sum(spec.num_bytes for spec in self.params), has_shards=self.has_shards))

    def finish_us(self, plan: Plan) -> float:
        return replace(self, noise=0.0).measure(plan).profile.step_us - 1_000.0

    def best_us(self) -> float:
        """Under the best plan of buckets of one size."""
        total = sum(spec.num_bytes for spec in self.params)
        return min(self.finish_us(self.plan_of_size(cap)) for cap in np.geomspace(total / 200, total * 1.01, 60))

    def measure(self, plan: Plan) -> Measurement:
        steps = [self._step(plan) for _ in range(NUM_STEPS)]
        through = np.array([end for end, _, _, _ in steps])
        ready = np.median([ready_us for _, _, _, ready_us in steps], axis=0)
        middle = np.median(through)
        kind = "reduce_scatter" if self.has_shards else "all_reduce"
        samples = {kind: cost_samples([sent for _, sent, _, _ in steps])}
        if self.has_shards:
            samples["all_gather"] = cost_samples([gathers for _, _, gathers, _ in steps])
        profile = Profile(
            params=self.params,
            ready_us=tuple(ready.clip(0.0, self.backward_us).round(1).tolist()),
            forward_us=FORWARD_US,
            backward_us=self.backward_us,
            update_us=1_000.0,
            num_ranks=self.num_ranks,
            step_us=float(middle) + 1_000.0,
            processors_us=self.processors_us,
            network_us=self.network_us,
        )
        return Measurement(profile=profile, samples=samples)

    def _wobble(self) -> float:
        return float(np.exp(self.noise * self._random.standard_normal()))

    def _step(self, plan: Plan) -> tuple[float, list[Transfer], list[Transfer], NDArray[np.float64]]:
        """When it is through, its reductions, its gathers, which begin with forward, and when its gradients came."""
        shares = 1 - np.arange(len(self.params)) / len(self.params)
        ready = self.backward_us * shares * self._wobble() + self.contention_us(plan)
        launches = [FORWARD_US + max(ready[param] for param in group) for group in plan.groups]
        launches[-1] = max(launches[-1], FORWARD_US + self.backward_us + self.contention_us(plan))
        launches = np.maximum.accumulate(launches).tolist()
        reductions, end = self._lane(plan, launches)
        gathers, gathered = self._lane(plan, [0.0] * len(launches))
        return (end + max(0.0, gathered - FORWARD_US) if self.has_shards else end), reductions, gathers, ready

    def _lane(self, plan: Plan, launches: Sequence[float]) -> tuple[list[Transfer], float]:
        sent, free = [], 0.0
        for bucket, launched in zip(plan.buckets, launches, strict=True):
            start = max(free, launched)
            free = start + self.cost(bucket.num_bytes) * self._wobble()
            sent.append(Transfer(num_bytes=bucket.num_bytes, start_us=launched if self.is_queued else start, stop_us=free))
        return sent, free
