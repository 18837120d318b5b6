"""Makes all ranks measure the same steps early in training, for profiles.

Reasons: docs/design/tuning.md.
"""

from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from undertow.buckets.recorder import Recorder
from undertow.engine.arrivals import Arrivals
from undertow.plan import Plan
from undertow.ranks.handle import Handle
from undertow.ranks.transport import OwnGroup
from undertow.trace import StepRecord
from undertow.trace.measured import MeasuredSteps, Measurements, array_of_records

NUM_STEPS_MEASURED = 5
# The first step allocates memory. The second has the plan in the order of arrival.
NUM_STEPS_BEFORE = 2
_EXCHANGES_AT = NUM_STEPS_BEFORE + NUM_STEPS_MEASURED + 1  # the last measured step is complete then


@dataclass(frozen=True, slots=True, kw_only=True)
class Present:
    """A plan in force, as a value."""

    plan: Plan
    generation: int
    has_shards: bool


@dataclass(frozen=True, slots=True)
class _Exchange:
    """The times of all ranks, on their way."""

    measured: Present
    records: tuple[StepRecord, ...]  # this rank's
    latest: Tensor  # a row of times for each step; in the last column 1 if rank 0 lacks them
    handle: Handle


class Measuring:
    """Measures the steps of one set of parameters.

        round   1   2 | 3 ... 7 | 8                    9
                      | measure | exchange times ────> learn

    The exchange is started at the end of a synchronization that every rank has found sound, and
    awaited at the end of the next one. If rank 0 has not recorded all steps, all measure again.
    """

    def __init__(
        self, arrivals: Arrivals, recorder: Recorder, group: OwnGroup, measured: Measurements
    ) -> None:
        self.is_over = False
        self._arrivals, self._recorder, self._group = arrivals, recorder, group
        self._measured = measured
        self._num_rounds = 0
        self._exchange: _Exchange | None = None  # the last one

    @property
    def communicates_next(self) -> bool:
        """True if the end of the next sound round starts a message, or awaits one."""
        return not self.is_over and self._num_rounds >= _EXCHANGES_AT - 1

    def round_ends(self, present: Present) -> None:
        """Called at the end of a sound round under this plan."""
        self._num_rounds += 1
        if self._num_rounds == NUM_STEPS_BEFORE:
            self._arrivals.at_each = self._recorder.gradient_arrives
        elif self._num_rounds == NUM_STEPS_BEFORE + NUM_STEPS_MEASURED:
            self._arrivals.at_each = None
        elif self._num_rounds == _EXCHANGES_AT:
            self._exchange_times(present)
        elif self._num_rounds > _EXCHANGES_AT:
            self._learn()

    def lays_out(self) -> None:
        """Called when a sharded optimizer lays parameters out: measures again if the collectives of
        shards were not measured."""
        exchange = self._exchange
        if self.is_over and exchange is not None and not exchange.measured.has_shards:
            self._measured.is_current = False
            self.is_over, self._num_rounds = False, 0

    def _exchange_times(self, present: Present) -> None:
        records = self._recorder.records(generation=present.generation, at_most=NUM_STEPS_MEASURED)
        times = array_of_records(records, present.plan, num_steps=NUM_STEPS_MEASURED)
        is_missing = self._group.rank == 0 and not np.isfinite(times).any()
        column = np.full((len(times), 1), float(is_missing))
        latest = torch.from_numpy(np.hstack((times, column))).to(self._group.device)
        handle = self._group.all_reduce(latest, "the times of all ranks", dist.ReduceOp.MAX)
        self._exchange = _Exchange(present, records, latest, handle)

    def _learn(self) -> None:
        exchange = self._exchange
        assert exchange is not None  # it was started in the round before
        exchange.handle.wait()
        latest = exchange.latest.cpu().numpy()
        if latest[0, -1] == 1:
            self._num_rounds = NUM_STEPS_BEFORE
            self._arrivals.at_each = self._recorder.gradient_arrives
            return
        found = MeasuredSteps(exchange.measured.plan, exchange.records, latest[:, :-1])
        if found.is_complete:
            self._measured.learn(found)
        self.is_over = True
