"""Simulates a step: the runtime's schedule and its release of ops, driven by a clock and a cost model."""

import math
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from undertow.cost import Costs
from undertow.errors import require
from undertow.plan import Plan, plan_from_groups
from undertow.profile import Profile
from undertow.schedule import Op, OpKind, Releases, Strategy, lower_data_parallel
from undertow.trace import BucketRecord, StepRecord

__all__ = ["DEFAULTS", "IDEAL", "Conditions", "simulate"]

_Times = NDArray[np.float64]  # by rank; one entry if all ranks are equal

_WHERE = "conditions of a simulated step"
# Values for a profile that nobody measured; docs/fidelity.md has the published rows that they come from.
DEFAULTS = {"skew": 0.02, "contention": 0.12, "launch_us": 90.0, "copy_us_per_mb": 25.0}
_LIMITS = {
    # The fastest of a million ranks is 4.9 deviations below the mean: it must still take some time.
    "skew": (
        "0 to 0.2",
        math.nextafter(0.2, 1),
        "0.05 is a standard deviation of 5 % between ranks.",
    ),
    "contention": (
        "0 or more and below 1",
        1.0,
        "0.1 slows computation by 10 % while the network works.",
    ),
    "launch_us": ("0 or more", math.inf, "Give microseconds per collective."),
    "copy_us_per_mb": ("0 or more", math.inf, "Give microseconds per megabyte."),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """Conditions of a step other than its costs.

    A number that is None is the profile's; if it has none, it is 0 for a profile with measured costs,
    whose times contain it, and the one in `DEFAULTS` for any other. `IDEAL` has zeros.

    Args:
        overlap: False sends every bucket after backward, and waits for gathers before the forward.
        skew: Standard deviation of the ranks' computing times relative to their mean, which is the
            profile's; 0 to 0.2. Ranks are the quantiles of a normal distribution. Measured times
            belong to the slowest rank.
        contention: Share of its speed that computation loses while the communication stream is
            busy; 0 to below 1.
        launch_us: Microseconds of computing time that a rank needs to launch one collective.
        copy_us_per_mb: Microseconds of computing time that a rank needs to copy a megabyte into a bucket.

    Raises:
        ConfigError: For impossible values.
    """

    overlap: bool = True
    skew: float | None = None
    contention: float | None = None
    launch_us: float | None = None
    copy_us_per_mb: float | None = None

    def __post_init__(self) -> None:
        for name, (limit, least_impossible, remedy) in _LIMITS.items():
            value = getattr(self, name)
            require(
                value is None or 0 <= value < least_impossible,
                f"{name} must be {limit}, got {value}.",
                where=_WHERE,
                remedy=remedy,
            )

    def of(self, profile: Profile) -> dict[str, float]:
        """Returns the numbers by name, with the values of `profile` and of `DEFAULTS` for None."""
        numbers = {}
        for name, assumed in DEFAULTS.items():
            given = (getattr(self, name), getattr(profile, name))
            default = 0.0 if profile.is_measured else assumed
            numbers[name] = next((value for value in given if value is not None), default)
        return numbers


IDEAL = Conditions(skew=0.0, contention=0.0, launch_us=0.0, copy_us_per_mb=0.0)


def simulate(profile: Profile, plan: Plan, strategy: Strategy, costs: Costs, conditions: Conditions | None = None) -> StepRecord:
    """Simulates one step of steady training on the ranks that `plan` is for and returns its record.

    The code that orders and releases ops in training does so here too. A collective starts when
    every rank has launched it and the communication stream is free. Parameters are first read at
    the times of `profile.used_us`. The update takes as long as in the profile. On a mesh of two
    axes the cost of a reduce-scatter includes the transfer of shards across the second axis, as
    in `NodeCosts` and in measured profiles.

    Args:
        profile: The computation of a step.
        plan: The buckets, and the number of ranks.
        strategy: The strategy of sharding.
        costs: The time of a collective by kind and bytes, such as `costs_for` or a profile
            gives.
        conditions: None is `Conditions()`.

    Returns:
        The record of the fastest rank, which shows all waiting, for the network and for other
        ranks; as training would have recorded it.

    Raises:
        ConfigError: If the plan is for another model.

    ```python
    from undertow.schedule import ZERO1

    record = simulate(profile, plan, ZERO1, costs_for("25gbit", num_ranks=plan.num_ranks))
    overlap_of(record.trace()).exposed_us
    ```
    """
    conditions = Conditions() if conditions is None else conditions
    require(
        plan.params == profile.params,
        "the plan is for other parameters than the profile.",
        where=f"the plan has {len(plan.params)} parameters, the profile {len(profile.params)}",
        remedy="Make the plan from the parameters of this profile.",
    )
    return _Step(profile, plan, strategy, costs, conditions).run()


class _Clocks:
    """Tracks the time of every rank and of the lane. The lane carries one collective at a time and slows all computation."""

    def __init__(self, slowness: _Times, *, contention: float) -> None:
        self.now_us = np.zeros_like(slowness)
        self._slowness = slowness
        self._contention = contention
        self._free_us = 0.0  # time from which the lane is free
        # Computation has lost this much to contention by these times; linear in between.
        self._times_us = array("d", [0.0])
        self._lost_us = array("d", [0.0])

    def compute(self, us: float) -> None:
        """Advances every rank by a computation that takes a mean rank `us` while the lane is idle."""
        alone_us = self._slowness * us
        if self._contention == 0 or us == 0:
            self.now_us = self.now_us + alone_us
            return
        # Ranks never go back in time: knots before the last one that all ranks have passed are not needed.
        first = bisect_right(self._times_us, float(self.now_us.min())) - 1
        times_us, lost_us = np.asarray(self._times_us[first:]), np.asarray(self._lost_us[first:])
        computed_us = self.now_us - np.interp(self.now_us, times_us, lost_us) + alone_us
        self.now_us = computed_us + np.interp(computed_us, times_us - lost_us, lost_us)

    def wait(self, until_us: float) -> None:
        self.now_us = np.maximum(self.now_us, until_us)

    def send(self, us: float, *, not_before_us: float) -> float:
        """Launches a collective of duration `us` on all ranks and returns when it ends."""
        start_us = max(self._free_us, float(self.now_us.max()), not_before_us)
        self._free_us = start_us + us
        if us > 0:
            lost_us = self._lost_us[-1]
            if start_us == self._times_us[-1] and len(self._times_us) > 1:
                self._times_us.pop()  # the lane stays busy: the last knot moves on
                self._lost_us.pop()
            else:
                self._times_us.append(start_us)
                self._lost_us.append(lost_us)
            self._times_us.append(self._free_us)
            self._lost_us.append(lost_us + self._contention * us)
        return self._free_us


class _Step:
    """Issues the ops of one step, from the end of the previous step's last bucket to the end of this step's."""

    def __init__(self, profile: Profile, plan: Plan, strategy: Strategy, costs: Costs, conditions: Conditions) -> None:
        profile = _without_packing(profile)
        self._profile = profile
        self._plan = plan
        effects = (conditions if plan.num_ranks > 1 else IDEAL).of(profile)
        self._overlaps = conditions.overlap
        self._effects = effects
        self._uses = _uses(profile, plan)
        self._num_bytes = {strategy.reduction: [bucket.wire_bytes for bucket in plan.buckets]}
        if strategy.gather is not None:
            self._num_bytes[strategy.gather] = _gathered_bytes(plan)
        self._cost_us = {kind: costs.collective_us(kind, sizes) for kind, sizes in self._num_bytes.items()}
        self._schedule = lower_data_parallel(
            len(plan.buckets),
            strategy,
            overlap=conditions.overlap,
        )
        self._clocks = _Clocks(_slowness(plan.num_ranks, effects["skew"], profile), contention=effects["contention"])
        self._ready_us: dict[int, float] = {}  # by bucket: when it is packed, or its parameters are updated
        # By bucket, as the recorded rank sees them.
        self._reductions: dict[int, BucketRecord] = {}
        self._gathers: dict[int, BucketRecord] = {}

    def run(self) -> StepRecord:
        """Returns the step as the recorder of one rank would have recorded it."""
        releases = Releases(self._schedule)
        start_us, starts_us = self._now_us, self._clocks.now_us
        begin_us = self._update()
        self._forward()
        forward_stop_us, gathers = self._now_us, tuple(self._gathers.values())
        self._backward(releases)
        left_us, busy_us = self._now_us, np.broadcast_to(self._clocks.now_us - starts_us, self._plan.num_ranks)
        self._issue(releases.happen(releases.join))
        return StepRecord(
            step=0,
            rank=0,
            # Ranks begin their forwards at different times, but the last bucket ends on all of them at once.
            step_us=self._now_us - start_us,
            forwards=((0.0, forward_stop_us - begin_us),),
            backwards=((forward_stop_us - begin_us, left_us - begin_us),),
            buckets=_since(begin_us, self._reductions.values()),
            busy_ms=tuple((busy_us / 1e3).tolist()),
            gathers=_since(begin_us, gathers),
        )

    @property
    def _now_us(self) -> float:
        """Time of the recorded rank, the fastest one."""
        return float(self._clocks.now_us[0])

    def _update(self) -> float:
        """Runs the optimizer and launches the gathers. Returns when the forward begins."""
        self._clocks.compute(self._profile.update_us)
        for op in self._schedule.ops:
            if op.kind is OpKind.ALL_GATHER:
                self._ready_us[op.bucket or 0] = self._now_us
                self._issue([op])
        begin_us = self._now_us
        if not self._overlaps:
            for bucket in self._gathers:
                self._wait(self._gathers, bucket)
        return begin_us

    def _forward(self) -> None:
        computed_us = 0.0
        for bucket, used_us in self._uses:
            if bucket in self._gathers and self._overlaps:
                self._clocks.compute(used_us - computed_us)
                computed_us = used_us
                self._wait(self._gathers, bucket)
        self._clocks.compute(self._profile.forward_us - computed_us)

    def _backward(self, releases: Releases) -> None:
        profile = self._profile
        order = profile.order
        place = {param: place for place, param in enumerate(order)}
        full: list[tuple[int, int]] = []  # the last gradient of each bucket, by its place, and the bucket
        for bucket in self._plan.buckets:
            if bucket.params:
                full.append((max(place[param] for param in bucket.params), bucket.index))
        computed_us = 0.0
        for last, bucket_index in sorted(full):
            ops = releases.happen(releases.fills[bucket_index])
            if ops:
                ready_us = min(profile.ready_us[order[last]], profile.backward_us)
                self._clocks.compute(ready_us - computed_us)
                computed_us = ready_us
                self._issue(ops)
        self._clocks.compute(profile.backward_us - computed_us)
        self._issue(releases.happen(releases.end))

    def _issue(self, ops: Sequence[Op]) -> None:
        for op in ops:
            bucket = op.bucket or 0
            match op.kind:
                case OpKind.PACK:
                    self._ready_us[bucket] = self._now_us
                    self._clocks.compute(self._effects["copy_us_per_mb"] * self._plan.buckets[bucket].num_bytes / 1e6)
                case OpKind.BIND:
                    self._wait(self._reductions, bucket)
                case OpKind.ALL_GATHER:
                    if self._num_bytes[op.kind][bucket]:
                        self._gathers[bucket] = self._send(op)
                case reduction if reduction in self._num_bytes:
                    self._reductions[bucket] = self._send(op)
                case _:  # the second half of a hybrid reduction, whose cost the first half includes
                    self._clocks.compute(self._effects["launch_us"])

    def _send(self, op: Op) -> BucketRecord:
        bucket, launched_us = op.bucket or 0, self._now_us
        self._clocks.compute(self._effects["launch_us"])
        return BucketRecord(
            bucket=bucket,
            num_bytes=self._num_bytes[op.kind][bucket],
            kind=op.kind,
            ready_us=self._ready_us[bucket],
            launched_us=launched_us,
            done_us=self._clocks.send(float(self._cost_us[op.kind][bucket]), not_before_us=self._ready_us[bucket]),
            waited=(0.0, 0.0),
        )

    def _wait(self, sent: dict[int, BucketRecord], bucket: int) -> None:
        start_us = self._now_us
        self._clocks.wait(sent[bucket].done_us)
        sent[bucket] = replace(sent[bucket], waited=(start_us, self._now_us))


def _since(begin_us: float, records: Iterable[BucketRecord]) -> tuple[BucketRecord, ...]:
    """Returns the records with times since `begin_us`."""
    return tuple(record.shifted(-begin_us) for record in records)


def _slowness(num_ranks: int, skew: float, profile: Profile) -> _Times:
    """Returns how long each rank computes, relative to the profile: of the slowest rank if it is measured, else of the mean."""
    if skew == 0:
        return np.ones(1)
    slowest = NormalDist(sigma=skew).inv_cdf(1 - 0.5 / (profile.num_ranks if profile.is_measured else 1))
    ranks = NormalDist(mu=1.0 - slowest, sigma=skew)
    return np.maximum(0.02, [ranks.inv_cdf((rank + 0.5) / num_ranks) for rank in range(num_ranks)])


def _without_packing(profile: Profile) -> Profile:
    """Returns a measured profile without the time for packing and launching its own buckets in backward.

    The last one was launched after backward.
    """
    if profile.groups is None or profile.launch_us is None or profile.copy_us_per_mb is None:
        return profile
    buckets = plan_from_groups(profile.params, profile.groups, num_ranks=profile.num_ranks).buckets
    full_us = np.maximum.accumulate([max((profile.ready_us[param] for param in it.params), default=0.0) for it in buckets])
    packing_us = np.cumsum([0.0, *(profile.launch_us + profile.copy_us_per_mb * it.num_bytes / 1e6 for it in buckets[:-1])])
    times_us = np.array([*profile.ready_us, profile.backward_us])
    *ready_us, backward_us = np.maximum(0.0, times_us - packing_us[np.searchsorted(full_us[:-1], times_us)]).tolist()
    return replace(profile, ready_us=tuple(np.minimum(ready_us, backward_us).tolist()), backward_us=backward_us)


def _uses(profile: Profile, plan: Plan) -> list[tuple[int, float]]:
    """Returns every bucket with the time at which the forward first reads one of its parameters, sorted by that time."""
    used_us = profile.used_us
    first_us = [min((used_us[param] for param in bucket.params), default=0.0) for bucket in plan.buckets]
    # If two buckets are read at once, the one that is reduced last comes first: its layer is the earlier one.
    return sorted(enumerate(first_us), key=lambda use: (use[1], -use[0]))


def _gathered_bytes(plan: Plan) -> list[int]:
    return [bucket.shard_numel * plan.num_ranks * bucket.itemsize for bucket in plan.buckets]
