"""Several steps under one plan as measured by all ranks, for profiles.

Ranks exchange rows of numbers, one row per step, and take the maximum over ranks. A row has times
in microseconds since the end of the previous synchronization, which ends on all ranks at once:

    begin | backward begins | backward ends | rest | synchronized | packing | -waiting | -processors
    | ready ... | launched ... | done ... | launched ... | done ...
    by param    reductions, by bucket     gathers, by bucket

Each rank subtracts the time that its forward waited for parameters from the times before and in
backward, but not from the begins and ends of collectives.

A gradient is ready when the last rank has it. A collective begins when the last rank launches it,
and ends when the last rank has its result: all are maxima. Values that a rank does not know are
minus infinity.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from undertow.cost import Payload
from undertow.cost.curves import curve_from_samples, line_through
from undertow.plan import Plan
from undertow.plan.timing import in_equal_parts
from undertow.profile import Profile
from undertow.trace import BucketRecord, StepRecord, Transfer, cost_samples

_NUM_TIMES = 8
_UNKNOWN = -np.inf
_LEAST_US, _MOST_SKEW = 1e-3, 0.2
_DIGITS, _DIGITS_OF_SHARES = 1, 4  # of microseconds in profiles: no clock is finer


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """The measurements of all ranks for the steps of a window."""

    profile: Profile  # medians over the steps, without costs
    # by kind of collective: bytes, microseconds
    samples: Mapping[str, tuple[tuple[float, float], ...]]


def array_of_records(
    records: Sequence[StepRecord], plan: Plan, *, num_steps: int
) -> NDArray[np.float64]:
    """Returns this rank's measurements of `num_steps` steps, [steps, numbers].

    All unknown if it has not recorded that many.
    """
    if not _is_complete(records, num_steps):
        return np.full((num_steps, _NUM_TIMES + len(plan.params) + 4 * len(plan.buckets)), _UNKNOWN)
    return np.array([_row(record, plan) for record in records])


def _row(record: StepRecord, plan: Plan) -> list[float]:
    waits = [gather.waited for gather in record.gathers]
    computing = record.idle_us - sum(max(0.0, stop - max(0.0, start)) for start, stop in waits)
    backward_end, last_wait = (
        record.backwards[-1][1],
        max(bucket.waited[1] for bucket in record.buckets),
    )
    of_buckets: list[float] = []
    for sent in (record.buckets, record.gathers):
        times = np.full((2, len(plan.buckets)), _UNKNOWN)
        for row in sent:
            times[:, row.bucket] = row.launched_us, row.done_us
        of_buckets += (record.idle_us + times).ravel().tolist()
    return [
        record.idle_us,
        *(computing + at for at in record.backwards[-1]),
        record.step_us - last_wait,
        record.idle_us + last_wait,
        record.packing_us(),
        backward_end - last_wait,  # with the packing that comes after the end of backward
        -record.cpu_us,
        *(computing + record.arrivals.get(param, _UNKNOWN) for param in range(len(plan.params))),
        *of_buckets,
    ]


def measurement_from_array(
    latest: NDArray[np.float64], records: Sequence[StepRecord], plan: Plan
) -> Measurement | None:
    """Builds the measurement of `plan` from `latest`, the maximum over all ranks' arrays, and from
    this rank's `records`.

    Returns None if this rank or all ranks have not recorded the steps.
    """
    if not _is_complete(records, len(latest)) or not np.isfinite(latest[:, :_NUM_TIMES]).all():
        return None
    before = _NUM_TIMES + len(plan.params)
    times, ready, of_buckets = np.split(latest, [_NUM_TIMES, before], axis=1)
    # [steps, reductions and gathers, launched and done, buckets]
    of_buckets = of_buckets.reshape(len(latest), 2, 2, len(plan.buckets))
    # In the planner's bytes, even if a mesh sends gradients over both axes, or a hook sends them.
    planned = [
        [replace(row, num_bytes=plan.buckets[row.bucket].wire_bytes) for row in record.buckets]
        for record in records
    ]
    reductions = [_in_equal_parts(rows, plan) for rows in planned]
    gathers = [_in_equal_parts(record.gathers, plan) for record in records]
    samples = _samples(reductions, of_buckets[:, 0]) | _samples(gathers, of_buckets[:, 1])
    launch_us, us_per_byte = line_through(curve_from_samples(_packed(records, plan)).points)
    skews = [
        float(np.std(busy)) / max(_LEAST_US, float(np.mean(busy)))
        for busy in (record.busy_ms or (1.0,) for record in records)
    ]
    begins, backward_begins, backward_ends, rest, synchronized, host_us, waited, computed = times.T
    # Median over steps: a parameter whose gradient arrived only once counts as one that never does.
    ready = np.where(np.isfinite(ready), ready, backward_ends[:, None]) - backward_begins[:, None]
    backward_us = max(0.0, _rounded(np.median(backward_ends - backward_begins)))
    waited_us = max(0.0, -float(np.median(waited)))
    computed_us = min(waited_us, -float(np.median(computed)))
    synchronized_us = float(np.median(synchronized - begins))
    rest_us = max(0.0, float(np.median(rest)))
    profile = Profile(
        params=plan.params,
        ready_us=tuple(np.clip(np.median(ready, axis=0), 0.0, backward_us).round(_DIGITS).tolist()),
        forward_us=max(0.0, _rounded(np.median(backward_begins - begins))),
        backward_us=backward_us,
        update_us=_rounded(rest_us),
        num_ranks=plan.num_ranks,
        groups=plan.groups,
        step_us=_rounded(synchronized_us + rest_us),
        # This rank's processor time per collective and per megabyte.
        launch_us=_rounded(launch_us),
        copy_us_per_mb=_rounded(us_per_byte * 1e6),
        skew=round(min(float(np.median(skews)), _MOST_SKEW), _DIGITS_OF_SHARES),
        # Packing in backward and waiting afterwards. The backend's threads work in these waits
        # (copies, additions) or wait for the link.
        processors_us=_rounded(np.median(host_us) + computed_us),
        network_us=_rounded(waited_us - computed_us),
    )
    return Measurement(profile=profile, samples=samples)


def _rounded(time_us: float) -> float:
    return round(float(time_us), _DIGITS)


def _in_equal_parts(rows: Sequence[BucketRecord], plan: Plan) -> list[BucketRecord]:
    """Returns records with the bytes that equal parts would have in the same time."""
    found = []
    for row in rows:
        sent = in_equal_parts(plan, plan.buckets[row.bucket], Payload(num_bytes=row.num_bytes))
        found.append(replace(row, num_bytes=sent.num_bytes))
    return found


def _packed(records: Sequence[StepRecord], plan: Plan) -> list[tuple[float, float]]:
    """Returns the bytes of each bucket, and the time that packing and launching it took."""
    packed = []
    for record in records:
        for row, begin_us in record.packings():
            packed.append(
                (
                    float(plan.buckets[row.bucket].num_bytes),
                    max(_LEAST_US, row.launched_us - begin_us),
                )
            )
    return packed


def _is_complete(records: Sequence[StepRecord], num_steps: int) -> bool:
    return len(records) == num_steps and all(
        record.backwards and record.buckets and record.arrivals for record in records
    )


def _samples(
    steps: Sequence[Sequence[BucketRecord]], times: NDArray[np.float64]
) -> dict[str, tuple[tuple[float, float], ...]]:
    """Returns the costs of the rows' collectives by kind.

    times: [steps, launched and done, buckets]
    """
    transfers = [
        [
            Transfer(
                num_bytes=row.num_bytes, start_us=launched[row.bucket], stop_us=done[row.bucket]
            )
            for row in rows
        ]
        for rows, (launched, done) in zip(steps, times.tolist(), strict=True)
    ]
    return {kind: cost_samples(transfers) for kind in {row.kind for rows in steps for row in rows}}
