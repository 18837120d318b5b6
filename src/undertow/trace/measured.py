"""Steps under one plan as all ranks have measured them: the data that a profile is made of.

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

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from undertow.plan import Plan
from undertow.trace.record import StepRecord

NUM_TIMES = 8  # in a row, before those of parameters and buckets
_UNKNOWN = -np.inf


@dataclass(frozen=True, slots=True)
class MeasuredSteps:
    """Consecutive steps under one plan."""

    plan: Plan
    records: tuple[StepRecord, ...]  # this rank's
    latest: NDArray[np.float64]  # the maximum over ranks, [steps, numbers]

    @property
    def is_complete(self) -> bool:
        """True if this rank and all others have recorded the steps."""
        has_all = is_complete(self.records, len(self.latest))
        return has_all and bool(np.isfinite(self.latest[:, :NUM_TIMES]).all())


@dataclass(slots=True)
class Measurements:
    """All that was measured for one set of parameters."""

    steps: list[MeasuredSteps] = field(default_factory=list)
    is_current: bool = False  # if the last steps are those of the parameters as they are laid out
    # of all-reduces that were sent only to measure them: bytes, microseconds
    all_reduces: list[tuple[float, float]] = field(default_factory=list)

    def learn(self, steps: MeasuredSteps) -> None:
        """Adds steps of the present plan."""
        self.steps.append(steps)
        self.is_current = True


def array_of_records(
    records: Sequence[StepRecord], plan: Plan, *, num_steps: int
) -> NDArray[np.float64]:
    """Returns this rank's measurements of `num_steps` steps, [steps, numbers].

    All unknown if it has not recorded that many.
    """
    if not is_complete(records, num_steps):
        return np.full((num_steps, NUM_TIMES + len(plan.params) + 4 * len(plan.buckets)), _UNKNOWN)
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


def is_complete(records: Sequence[StepRecord], num_steps: int) -> bool:
    """Returns True if so many steps are recorded, each with its gradients and buckets."""
    return len(records) == num_steps and all(
        record.backwards and record.buckets and record.arrivals for record in records
    )
