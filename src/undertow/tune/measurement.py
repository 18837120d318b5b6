"""Several steps under one plan, as measured by all ranks.

Ranks exchange rows of numbers, one row per step, and take the maximum over ranks. A row has times in microseconds since the end
of the previous synchronization, which ends on all ranks at once:

    begin | backward begins | backward ends | rest | synchronized | ready ... | -reductions ... | -gathers ...
                                                                    by param    by bucket         by bucket

Each rank subtracts the time for which its forward waited for parameters from the times before and in backward.

A gradient is ready when the last rank has it: the maximum. A collective takes as long as on the rank that launched it last,
because the others waited for that rank: the minimum, which is the maximum of the negatives. Values that a rank does not know are
minus infinity.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from undertow.plan import Plan
from undertow.trace import BucketRecord, StepRecord, Transfer, cost_samples

_BEGIN, _BACKWARD_BEGINS, _BACKWARD_ENDS, _REST, _SYNCHRONIZED = range(5)
_NUM_SINGLE = 5
_UNKNOWN = -np.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """Medians over the steps of a window; microseconds."""

    ready_us: tuple[float, ...]  # by parameter, since backward began; the end of backward if its gradient never arrived
    forward_us: float  # until backward begins, without waits for parameters
    backward_us: float
    rest_us: float  # from the last wait to the next forward
    synchronized_us: float  # from the start of the step until all gradients were reduced
    spread_us: float  # between the quartiles of synchronized_us
    samples: Mapping[str, tuple[tuple[float, float], ...]]  # by kind of collective: bytes, microseconds


def array_of_records(records: Sequence[StepRecord], plan: Plan, *, num_steps: int) -> NDArray[np.float64]:
    """Returns this rank's measurements of `num_steps` steps, [steps, numbers]; all unknown if it has not recorded that many."""
    num_params, num_buckets = len(plan.params), len(plan.buckets)
    rows = np.full((num_steps, _NUM_SINGLE + num_params + 2 * num_buckets), _UNKNOWN)
    if not _is_complete(records, num_steps):
        return rows
    for row, record in zip(rows, records, strict=True):
        begin, ready = record.idle_us, row[_NUM_SINGLE : _NUM_SINGLE + num_params]
        computing = begin - sum(max(0.0, stop - max(0.0, start)) for start, stop in (gather.waited for gather in record.gathers))
        row[_BEGIN] = begin
        row[_BACKWARD_BEGINS : _BACKWARD_ENDS + 1] = [computing + at for at in record.backwards[-1]]
        last_wait = max(bucket.waited[1] for bucket in record.buckets)
        row[_REST], row[_SYNCHRONIZED] = record.step_us - last_wait, begin + last_wait
        for param, arrived_us in record.arrivals.items():
            ready[param] = computing + arrived_us
        for at, sent in chain(_places(record.buckets, first=0), _places(record.gathers, first=num_buckets)):
            row[_NUM_SINGLE + num_params + at] = sent.launched_us - sent.done_us
    return rows


def measurement_from_array(latest: NDArray[np.float64], records: Sequence[StepRecord], plan: Plan) -> Measurement | None:
    """Builds the measurement of `plan` from `latest`, the maximum over all ranks' arrays, and from this rank's `records`.

    Returns None if this rank or all ranks have not recorded the steps.
    """
    if not _is_complete(records, len(latest)) or not np.isfinite(latest[:, :_NUM_SINGLE]).all():
        return None
    num_params, num_buckets = len(plan.params), len(plan.buckets)
    begins, backward_begins, backward_ends, rest, synchronized = latest[:, :_NUM_SINGLE].T
    ready = latest[:, _NUM_SINGLE : _NUM_SINGLE + num_params]
    # Median over steps: a parameter whose gradient arrived only once counts as one that never does.
    ready = np.where(np.isfinite(ready), ready, backward_ends[:, None]) - backward_begins[:, None]
    backward_us = float(np.median(backward_ends - backward_begins))
    low_us, median_us, high_us = np.quantile(synchronized - begins, [0.25, 0.5, 0.75])
    durations = -latest[:, _NUM_SINGLE + num_params :]
    return Measurement(
        ready_us=tuple(np.clip(np.median(ready, axis=0), 0.0, backward_us).tolist()),
        forward_us=max(0.0, float(np.median(backward_begins - begins))),
        backward_us=backward_us,
        rest_us=max(0.0, float(np.median(rest))),
        synchronized_us=float(median_us),
        spread_us=float(high_us - low_us),
        # In the planner's bytes, even if gradients are sent in a narrower dtype.
        samples=_samples(records, durations[:, :num_buckets], lambda record: _as_planned(record, plan))
        | _samples(records, durations[:, num_buckets:], lambda record: record.gathers),
    )


def measurement_of_one_rank(records: Sequence[StepRecord], plan: Plan) -> Measurement | None:
    """Builds the measurement of a single rank, which sends nothing; None if the steps were not recorded.

    Its backward ends with its last gradient.
    """
    if not records or not all(record.forwards and record.arrivals for record in records):
        return None
    forwards = np.array([record.forwards[-1][1] for record in records])
    ends = np.array([max(record.arrivals.values()) for record in records])
    ready = np.array([[record.arrivals.get(param, np.inf) for param in range(len(plan.params))] for record in records])
    backward_us = max(0.0, float(np.median(ends - forwards)))
    low_us, median_us, high_us = np.quantile(ends, [0.25, 0.5, 0.75])
    return Measurement(
        ready_us=tuple(np.clip(np.median(ready - forwards[:, None], axis=0), 0.0, backward_us).tolist()),
        forward_us=float(np.median(forwards)),
        backward_us=backward_us,
        rest_us=max(0.0, float(np.median([record.step_us for record in records] - ends))),
        synchronized_us=float(median_us),
        spread_us=float(high_us - low_us),
        samples={},
    )


def _is_complete(records: Sequence[StepRecord], num_steps: int) -> bool:
    return len(records) == num_steps and all(record.backwards and record.buckets and record.arrivals for record in records)


def _places(sent: Sequence[BucketRecord], *, first: int) -> list[tuple[int, BucketRecord]]:
    return [(first + row.bucket, row) for row in sent]


def _as_planned(record: StepRecord, plan: Plan) -> list[BucketRecord]:
    return [replace(row, num_bytes=plan.buckets[row.bucket].wire_bytes) for row in record.buckets]


def _samples(
    records: Sequence[StepRecord],
    durations: NDArray[np.float64],
    rows_of: Callable[[StepRecord], Sequence[BucketRecord]],
) -> dict[str, tuple[tuple[float, float], ...]]:
    steps = [
        [
            Transfer(num_bytes=row.num_bytes, start_us=row.done_us - float(duration[row.bucket]), stop_us=row.done_us)
            for row in rows_of(record)
        ]
        for record, duration in zip(records, durations, strict=True)
    ]
    kinds = {row.kind for record in records for row in rows_of(record)}
    return {kind: cost_samples(steps) for kind in kinds}
