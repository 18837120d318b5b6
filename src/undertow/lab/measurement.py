"""Makes profiles of the steps that were measured: medians, and the costs of collectives."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from undertow.lab.cost import Payload
from undertow.lab.cost.curves import curve_from_samples, line_through
from undertow.lab.cost.payloads import in_equal_parts
from undertow.lab.profile import Profile
from undertow.lab.samples import Transfer, cost_samples
from undertow.plan import Plan
from undertow.trace import BucketRecord, StepRecord
from undertow.trace.measured import NUM_TIMES, MeasuredSteps, Measurements

_LEAST_US, _MOST_SKEW = 1e-3, 0.2
_DIGITS, _DIGITS_OF_SHARES = 1, 4  # of microseconds in profiles: no clock is finer


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """The measurements of all ranks for the steps of a window."""

    profile: Profile  # medians over the steps, without costs
    # by kind of collective: bytes, microseconds
    samples: Mapping[str, tuple[tuple[float, float], ...]]


def profile_of(
    measurements: Measurements,
    plan: Plan,
    *,
    strategy: str,
    wire: str | None = None,
    param_wire: str | None = None,
) -> Profile | None:
    """Returns the measurements as a profile under `plan`; None before there are any.

    Args:
        measurements: The steps and collectives that were measured.
        plan: The plan in force.
        strategy: "ddp", "zero1", "zero2" or "hybrid".
        wire: The format of gradients, "auto" or None.
        param_wire: The format of gathered parameters, or None.
    """
    samples: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    samples["all_reduce"] += measurements.all_reduces
    profile = None
    for steps in measurements.steps:
        measurement = measurement_of(steps)
        if measurement is None:
            continue
        profile = measurement.profile
        for kind, pairs in measurement.samples.items():
            samples[kind] += pairs
    if profile is None or not measurements.is_current:
        return None
    return replace(
        profile,
        strategy=strategy,
        wire=wire,
        param_wire=param_wire,
        groups=plan.groups,
        wires=plan.wires if any(plan.wires) else None,
        curves={kind: curve_from_samples(pairs) for kind, pairs in samples.items() if pairs},
    )


def measurement_of(steps: MeasuredSteps) -> Measurement | None:
    """Returns None if this rank or all ranks have not recorded the steps."""
    if not steps.is_complete:
        return None
    plan, records, latest = steps.plan, steps.records, steps.latest
    before = NUM_TIMES + len(plan.params)
    times, ready, of_buckets = np.split(latest, [NUM_TIMES, before], axis=1)
    # [steps, reductions and gathers, launched and done, buckets]
    of_buckets = of_buckets.reshape(len(latest), 2, 2, len(plan.buckets))
    # In the planner's bytes, even if a mesh sends gradients over both axes, or a hook sends them.
    planned = [
        [replace(row, num_bytes=plan.buckets[row.bucket].wire_bytes) for row in record.buckets]
        for record in records
    ]
    reductions = [_in_equal_parts(rows, plan) for rows in planned]
    gathers = [_in_equal_parts(record.gathers, plan, is_gather=True) for record in records]
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


def _in_equal_parts(
    rows: Sequence[BucketRecord], plan: Plan, *, is_gather: bool = False
) -> list[BucketRecord]:
    """Returns records with the bytes that equal parts would have in the same time."""
    found = []
    for row in rows:
        payload = Payload(num_bytes=row.num_bytes)
        sent = in_equal_parts(plan, plan.buckets[row.bucket], payload, is_gather=is_gather)
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
