"""Simulates a step.

The runtime's schedule and its release of ops, driven by a clock and a cost model.
"""

import math
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from undertow.errors import require
from undertow.lab.cost import Costs, Payload, payloads_us
from undertow.lab.cost.payloads import in_equal_parts, payload_of
from undertow.lab.profile import NUMBERS, Profile
from undertow.plan import Bucket, Plan
from undertow.plan.lane import Lane
from undertow.plan.owners import totals_by_rank, update_work
from undertow.schedule import (
    Op,
    OpKind,
    Releases,
    Strategy,
    lower_data_parallel,
    strategy_named,
)
from undertow.trace import BucketRecord, StepRecord

__all__ = ["DEFAULTS", "IDEAL", "Conditions", "simulate"]

_Times = NDArray[np.float64]  # by rank; one entry if all ranks are equal

# Values for a profile without measurements, from the published rows in docs/fidelity.md.
DEFAULTS = {"skew": 0.02, "contention": 0.12, "launch_us": 90.0, "copy_us_per_mb": 25.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """Conditions of a step other than its costs.

    A number that is None is the profile's; if it has none, it is 0 for a profile with measured
    costs, whose times contain it, and the one in `DEFAULTS` for any other. `IDEAL` has zeros.

    Args:
        overlap: False sends every bucket after backward, and waits for gathers before the forward.
        skew: Standard deviation of the ranks' computing times relative to their mean, which is the
            profile's; 0 to 0.2. Ranks are the quantiles of a normal distribution. Measured times
            belong to the slowest rank.
        contention: Share of its speed that computation loses while the communication stream is
            busy; 0 to 0.99.
        launch_us: Microseconds of computing time that a rank needs to launch one collective. On
            processors one in a format needs `undertow.wire.Wire.bucket_us` more.
        copy_us_per_mb: Microseconds of computing time that a rank needs to copy a megabyte into a
            bucket.

    Raises:
        ConfigError: For impossible values.
    """

    overlap: bool = True
    skew: float | None = None
    contention: float | None = None
    launch_us: float | None = None
    copy_us_per_mb: float | None = None

    def __post_init__(self) -> None:
        for name in DEFAULTS:
            value, most = getattr(self, name), NUMBERS[name]
            require(
                value is None or 0 <= value <= most,
                f"{name} must be {'0 or more' if math.isinf(most) else f'0 to {most}'}, got "
                f"{value}.",
                where="conditions of a simulated step",
                remedy="skew and contention are shares, 0.1 is 10 %; the others are microseconds.",
            )

    def of(self, profile: Profile) -> dict[str, float]:
        """Returns the numbers by name, with the values of `profile` and of `DEFAULTS` for None."""
        numbers = {}
        for name, assumed in DEFAULTS.items():
            value = getattr(self, name)
            if value is None:
                value = getattr(profile, name)
            if value is None:
                value = 0.0 if profile.is_measured else assumed
            numbers[name] = value
        return numbers


IDEAL = Conditions(skew=0.0, contention=0.0, launch_us=0.0, copy_us_per_mb=0.0)


def simulate(
    profile: Profile,
    plan: Plan,
    strategy: Strategy,
    costs: Costs,
    conditions: Conditions | None = None,
    *,
    param_wire: str | None = None,
) -> StepRecord:
    """Simulates one step of steady training on the ranks that `plan` is for and returns its record.

    The same code orders and releases ops in training. A collective starts when every rank has
    launched it and the communication stream is free. Parameters are first read at the times of
    `profile.used_us`. The update takes as long as in the profile. A bucket with one owner for each
    parameter takes as long as its busiest rank exchanges bytes. On a mesh of two axes
    the cost of a reduce-scatter includes the transfer of shards across the second axis, as in
    `NodeCosts` and in measured profiles.

    Args:
        profile: The computation of a step.
        plan: The buckets, and the number of ranks.
        strategy: The strategy of sharding.
        costs: The time of a collective by kind and bytes, such as `costs_for` or a profile
            gives.
        conditions: None is `Conditions()`.
        param_wire: The format of gathered parameters. The plan has the formats of gradients.

    Returns:
        The record of a typical rank: half of the others are slower, and it waits for the network
        and for the slowest rank; as training would have recorded it.

    Raises:
        ConfigError: If the plan is for another model.

    ```python
    from undertow.schedule import ZERO1

    record = simulate(profile, plan, ZERO1, costs_for("25gbit", num_ranks=plan.num_ranks))
    record.overlap().exposed_us
    ```
    """
    conditions = Conditions() if conditions is None else conditions
    require(
        plan.params == profile.params,
        "the plan is for other parameters than the profile.",
        where=f"the plan has {len(plan.params)} parameters, the profile {len(profile.params)}",
        remedy="Make the plan from the parameters of this profile.",
    )
    payloads = {strategy.reduction: [_gradients(bucket, plan) for bucket in plan.buckets]}
    if strategy.gather is not None:
        payloads[strategy.gather] = [
            _parameters(bucket, plan, param_wire) for bucket in plan.buckets
        ]
        for kind, sent in payloads.items():
            in_parts = partial(in_equal_parts, plan, is_gather=kind == strategy.gather)
            payloads[kind] = list(map(in_parts, plan.buckets, sent))
    return _Step(profile, plan, strategy, costs, conditions, payloads).run()


def _gradients(bucket: Bucket, plan: Plan) -> Payload:
    planned = payload_of(plan.params, bucket.params, bucket.wire)
    return replace(planned, num_bytes=bucket.wire_bytes)  # with trailer and padding


def _parameters(bucket: Bucket, plan: Plan, wire: str | None) -> Payload:
    if wire is None:
        return Payload(num_bytes=bucket.shard_numel * plan.num_ranks * bucket.itemsize)
    return payload_of(plan.params, bucket.params, wire)


def with_divided_update(profile: Profile, plan: Plan, strategy: Strategy) -> Profile:
    """Returns the profile with the time of an update that is divided as `plan` and `strategy`
    divide it.

    The measured time belongs to the rank with the largest share under the plan and the strategy of
    the profile. It counts as time of the optimizer alone.
    """
    measured = 1.0
    if strategy_named(profile.strategy).gather is not None:
        measured = 1 / profile.num_ranks if profile.plan is None else _largest_share(profile.plan)
    share = 1.0 if strategy.gather is None else _largest_share(plan)
    return replace(profile, update_us=profile.update_us * share / measured)


def _largest_share(plan: Plan) -> float:
    """Returns the largest rank's share of the work of all updates."""
    work = [update_work(spec) if spec.is_whole else spec.numel for spec in plan.params]
    owned = totals_by_rank(work, plan.groups, plan.owners, num_ranks=plan.num_shards)
    equal = sum(work) - sum(owned)
    return (max(owned) + equal / plan.num_shards) / (sum(work) or 1)


class _Clocks:
    """Tracks the time of every rank and of the lane.

    The lane carries one collective at a time and slows all computation.
    """

    def __init__(self, slowness: _Times, *, contention: float) -> None:
        self.now_us = np.zeros_like(slowness)
        self._slowness = slowness
        self._contention = contention
        self._lane = Lane()
        # Computation has lost this much to contention by these times; linear in between.
        self._times_us = array("d", [0.0])
        self._lost_us = array("d", [0.0])

    def compute(self, us: float) -> None:
        """Advances every rank by a computation that takes a mean rank `us` while the lane is
        idle."""
        alone_us = self._slowness * us
        if self._contention == 0 or us == 0:
            self.now_us = self.now_us + alone_us
            return
        # Ranks never go back in time: knots before the last one that all ranks have passed are not
        # needed.
        first = bisect_right(self._times_us, float(self.now_us.min())) - 1
        times_us, lost_us = np.asarray(self._times_us[first:]), np.asarray(self._lost_us[first:])
        computed_us = self.now_us - np.interp(self.now_us, times_us, lost_us) + alone_us
        self.now_us = computed_us + np.interp(computed_us, times_us - lost_us, lost_us)

    def wait(self, until_us: float) -> None:
        self.now_us = np.maximum(self.now_us, until_us)

    def send(self, us: float, *, not_before_us: float) -> float:
        """Launches a collective of duration `us` on all ranks and returns when it ends."""
        ready_us = max(float(self.now_us.max()), not_before_us)
        start_us, stop_us = self._lane.send(us, ready_us=ready_us)
        lost_us = self._lost_us[-1]
        self._times_us.extend((start_us, stop_us))
        self._lost_us.extend((lost_us, lost_us + self._contention * us))
        return stop_us


class _Step:
    """Issues the ops of one step, from the end of the previous step's last bucket to the end of
    this step's."""

    def __init__(
        self,
        profile: Profile,
        plan: Plan,
        strategy: Strategy,
        costs: Costs,
        conditions: Conditions,
        payloads: Mapping[OpKind, Sequence[Payload]],
    ) -> None:
        self._profile = _without_packing(profile)
        self._plan = plan
        self._reduction = strategy.reduction
        self._overlaps = conditions.overlap
        self._effects = (conditions if plan.num_ranks > 1 else IDEAL).of(self._profile)
        self._uses = _uses(self._profile, plan)
        self._payloads = payloads
        self._cost_us = {
            kind: payloads_us(costs, kind, sent).tolist() for kind, sent in payloads.items()
        }
        self._schedule = lower_data_parallel(
            len(plan.buckets),
            strategy,
            overlap=conditions.overlap,
        )
        slowness = _slowness(plan.num_ranks, self._effects["skew"], self._profile)
        self._clocks = _Clocks(slowness, contention=self._effects["contention"])
        self._recorded = (len(slowness) - 1) // 2  # the middle of the ranks, or all of them
        self._packed_us: dict[int, float] = {}  # by bucket
        # By kind and bucket, as the recorded rank sees them.
        self._sent: dict[str, dict[int, BucketRecord]] = {
            strategy.reduction: {},
            OpKind.ALL_GATHER: {},
        }

    def run(self) -> StepRecord:
        """Returns the step as the recorder of one rank would have recorded it."""
        releases = Releases(self._schedule)
        start_us, starts_us = self._now_us, self._clocks.now_us
        self._clocks.compute(self._profile.update_us)
        self._issue([op for op in self._schedule.ops if op.kind is OpKind.ALL_GATHER])
        begin_us = self._now_us
        self._forward()
        forward_us = self._now_us - begin_us
        gathers = [
            record.shifted(-begin_us) for record in self._sent.pop(OpKind.ALL_GATHER).values()
        ]
        self._backward(releases)
        launched_us = self._now_us - begin_us
        busy_us = np.broadcast_to(self._clocks.now_us - starts_us, self._plan.num_ranks)
        self._issue(releases.happen(releases.join))
        return StepRecord(
            step=0,
            rank=self._recorded,
            # Ranks begin their forwards at different times, but the last bucket ends on all of them
            # at once.
            step_us=self._now_us - start_us,
            forwards=((0.0, forward_us),),
            backwards=((forward_us, launched_us),),
            buckets=tuple(
                record.shifted(-begin_us) for record in self._sent[self._reduction].values()
            ),
            busy_ms=tuple((busy_us / 1e3).tolist()),
            gathers=tuple(gathers),
        )

    @property
    def _now_us(self) -> float:
        """Time of the recorded rank."""
        return float(self._clocks.now_us[self._recorded])

    def _forward(self) -> None:
        computed_us = 0.0
        for bucket, used_us in self._uses:
            if bucket in self._sent[OpKind.ALL_GATHER]:
                read_us = used_us if self._overlaps else 0.0
                self._clocks.compute(read_us - computed_us)
                computed_us = read_us
                self._wait(OpKind.ALL_GATHER, bucket)
        self._clocks.compute(self._profile.forward_us - computed_us)

    def _backward(self, releases: Releases) -> None:
        profile = self._profile
        order = profile.order
        place = {param: place for place, param in enumerate(order)}
        full = []  # the last gradient of each bucket, by its place, and the bucket
        for bucket in self._plan.buckets:
            if bucket.params:
                full.append((max(place[param] for param in bucket.params), bucket.index))
        computed_us = 0.0
        for last, index in sorted(full):
            ops = releases.happen(releases.fills[index])
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
                    self._packed_us[bucket] = self._now_us
                    self._clocks.compute(
                        self._effects["copy_us_per_mb"] * self._plan.buckets[bucket].num_bytes / 1e6
                    )
                case OpKind.BIND:
                    self._wait(self._reduction, bucket)
                case kind if kind in self._payloads:
                    if self._payloads[kind][bucket].num_bytes:
                        self._sent[kind][bucket] = self._send(kind, bucket)
                case _:  # the second half of a hybrid reduction, whose cost the first half includes
                    self._clocks.compute(self._effects["launch_us"])

    def _send(self, kind: OpKind, bucket: int) -> BucketRecord:
        launched_us = self._now_us
        ready_us = self._packed_us.get(bucket, launched_us)
        sent = self._payloads[kind][bucket]
        format_us = sent.host_us if kind is self._reduction else 0.0
        self._clocks.compute(self._effects["launch_us"] + format_us)
        return BucketRecord(
            bucket=bucket,
            num_bytes=sent.num_bytes,
            kind=kind,
            ready_us=ready_us,
            launched_us=launched_us,
            done_us=self._clocks.send(self._cost_us[kind][bucket], not_before_us=ready_us),
            waited=(0.0, 0.0),
        )

    def _wait(self, kind: OpKind, bucket: int) -> None:
        start_us, record = self._now_us, self._sent[kind][bucket]
        self._clocks.wait(record.done_us)
        self._sent[kind][bucket] = replace(record, waited=(start_us, self._now_us))


def _slowness(num_ranks: int, skew: float, profile: Profile) -> _Times:
    """Returns how long each rank computes, relative to the profile.

    The profile is the slowest rank's if it is measured, else a mean rank's.
    """
    if skew == 0:
        return np.ones(1)
    slowest = NormalDist(sigma=skew).inv_cdf(
        1 - 0.5 / (profile.num_ranks if profile.is_measured else 1)
    )
    ranks = NormalDist(mu=1.0 - slowest, sigma=skew)
    return np.maximum(0.02, [ranks.inv_cdf((rank + 0.5) / num_ranks) for rank in range(num_ranks)])


def _without_packing(profile: Profile) -> Profile:
    """Returns a measured profile without the time for packing and launching its own buckets in
    backward.

    The last one was launched after backward.
    """
    measured = profile.plan
    if measured is None or profile.launch_us is None or profile.copy_us_per_mb is None:
        return profile
    full_us, packing_us = (
        [0.0],
        [0.0],
    )  # when each bucket but the last was full, and the packing until then
    for bucket in measured.buckets[:-1]:
        last_us = max(profile.ready_us[param] for param in bucket.params)
        full_us.append(max(full_us[-1], last_us))
        launch_us = profile.launch_us + _gradients(bucket, measured).host_us
        packing_us.append(
            packing_us[-1] + launch_us + profile.copy_us_per_mb * bucket.num_bytes / 1e6
        )

    def without(time_us: float) -> float:
        return max(0.0, time_us - packing_us[bisect_left(full_us, time_us, lo=1) - 1])

    backward_us = without(profile.backward_us)
    ready_us = tuple(min(without(time_us), backward_us) for time_us in profile.ready_us)
    return replace(profile, ready_us=ready_us, backward_us=backward_us)


def _uses(profile: Profile, plan: Plan) -> list[tuple[int, float]]:
    """Returns every bucket with the time at which the forward first reads one of its parameters,
    sorted by that time."""
    used_us = profile.used_us
    first_us = [
        min((used_us[param] for param in bucket.params), default=0.0) for bucket in plan.buckets
    ]
    # If two buckets are read at once, the one that is reduced last comes first: its layer is the
    # earlier one.
    return sorted(enumerate(first_us), key=lambda use: (use[1], -use[0]))
