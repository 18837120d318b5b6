"""Runs windows of steps under one plan after the other, and tells all ranks how long they took.

Reasons: docs/design/tuning.md.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from enum import IntEnum
from itertools import pairwise
from statistics import median
from typing import ClassVar

import torch
import torch.distributed as dist

from undertow.buckets.recorder import Mark, Recorder
from undertow.plan import Plan
from undertow.ranks.handle import Handle
from undertow.ranks.transport import OwnGroup
from undertow.tune import Trials, Verdict

NUM_STEPS_COUNTED = 5  # of a window. The step that ends with a new plan's first round is left out
# The first steps in a format are left out too: over a link of 1 Gb/s up to five took 40 % longer
# than later ones of the same plan.
NUM_FIRST_STEPS = 5
MOST_DROPS = 2  # trials that are dropped begin again once
_MOST_TIMES_BLOCKED = 100  # windows in which another model of the process tried plans


class _Obstacle(IntEnum):
    """Reasons why a rank cannot try plans; the largest of all ranks counts."""

    NONE = 0
    OTHER_MODEL = 1  # two trials at a time would be measured in the same steps
    DETERMINISTIC = 2  # another plan rounds differently


class Trying:
    """The windows of the trials of one set of parameters.

        move ──> a round ──> five rounds, whose steps are timed ──> one more round ──> move
                                                        times are sent    and received

    Every rank receives the same times, and so moves to the same plan in the same round. Windows
    count only if all their steps accumulate as many forwards, on every rank: a step of another kind
    drops the trials, which begin again once.

    Args:
        make_trials: Makes the trials of a plan in force.
        num_drops: How often trials were dropped, of earlier parameters too.
    """

    # Of the models of a rank, the one that tries plans.
    _of_rank: ClassVar[weakref.WeakValueDictionary[int, Trying]] = weakref.WeakValueDictionary()

    def __init__(
        self,
        recorder: Recorder,
        group: OwnGroup,
        make_trials: Callable[[Plan], Trials],
        *,
        num_drops: int = 0,
    ) -> None:
        self.trials: Trials | None = None  # from the first window on
        self.num_steps = 0  # in all windows so far
        self.stopped = ""  # why it ended before its time
        self.num_drops = num_drops
        self._sent: Handle | None = None  # `_times` on their way
        self._times = torch.empty(0)  # of the last window on all ranks; see `_send`
        self._recorder, self._group, self._make_trials = recorder, group, make_trials
        self._marks: list[Mark] = []  # the ends of the rounds of this window
        self._forwards: list[int] = []  # the training forwards of each of these steps
        self._num_forwards: float | None = None  # of a step, in all windows
        self._num_times_blocked = 0
        self._steps_of_other = 0  # of the model that tries plans, when it was last looked at

    @property
    def is_over(self) -> bool:
        return bool(self.stopped) or (self.trials is not None and self.trials.are_over)

    @property
    def is_under_way(self) -> bool:
        """True if a candidate is in force or may be next."""
        return self.trials is not None and not self.is_over

    @property
    def is_new(self) -> bool:
        """True if the plan of the next window is a candidate that has not been in force."""
        return self.trials is not None and not self.stopped and self.trials.is_new

    @property
    def communicates_next(self) -> bool:
        """True if the end of the next sound round sends or receives the times of a window."""
        return self._sent is not None or len(self._marks) == self._num_steps_of_window

    @property
    def _num_steps_of_window(self) -> int:
        is_first_in_format = self.is_new and self.trials is not None and any(self.trials.plan.wires)
        return NUM_STEPS_COUNTED + (NUM_FIRST_STEPS if is_first_in_format else 0)

    def round_ends(self, plan: Plan, num_forwards: int) -> Plan | None:
        """Called at the end of a sound round under `plan`, after so many training forwards.

        Returns the plan of the next window in the round after the last one of a window, when the
        times of all ranks have arrived.
        """
        if self.trials is None:
            self.trials = self._make_trials(plan)
        self.num_steps += 1
        if self._sent is not None:
            return self._next_plan(self._sent)
        self._marks.append(self._recorder.mark())
        self._forwards.append(num_forwards)
        if len(self._marks) > self._num_steps_of_window:
            self._send()
        return None

    def forget_window(self) -> None:
        """Begins the window again, under the same plan."""
        self._marks, self._forwards = [], []

    def _next_plan(self, sent: Handle) -> Plan:
        """Receives the times of all ranks, and returns the plan of the next window."""
        assert self.trials is not None
        sent.wait()
        self._sent = None
        *times_ms, most, minus_least, obstacle = self._times.tolist()
        if obstacle != _Obstacle.NONE:
            self._meet(_Obstacle(int(obstacle)))
        elif most != -minus_least or most != (self._num_forwards or most):
            self._drop()
        else:
            self._num_forwards = most
            self.trials.window_ends(median(times_ms))
        if self.is_over:
            self._leave()
        return self.trials.present if self.stopped else self.trials.plan

    def candidate_fails(self, rank: int) -> None:
        """Called if `rank` cannot make the buckets of the candidate."""
        assert self.trials is not None
        self.trials.fail(f"rank {rank} could not make its buckets")
        if self.is_over:
            self._leave()

    def told(self) -> str:
        """Returns the progress of the trials in words."""
        if self.trials is None:
            return "sizes follow from the size of the model; others will be tried"
        num_tried = len(self.trials.done)
        plans = f"{num_tried} other plan{'' if num_tried == 1 else 's'}"
        if self.stopped:
            return f"trials have ended after {self.num_steps} steps: {self.stopped}"
        if not self.trials.are_over:
            return f"trials are under way: {self.num_steps} steps, {plans} so far"
        if any(trial.verdict is Verdict.TAKEN for trial in self.trials.done):
            return f"its steps were the fastest: {plans} tried in {self.num_steps} steps"
        if num_tried == 0:
            return "no other plan is worth a trial"
        return f"{plans} tried in {self.num_steps} steps, none 2 % faster"

    @property
    def failures(self) -> tuple[str, ...]:
        """A text for each plan that some rank could not make."""
        done = () if self.trials is None else self.trials.done
        return tuple(str(trial) for trial in done if trial.failure)

    def texts(self) -> tuple[str, ...]:
        """Returns a line for each plan that was tried."""
        return () if self.trials is None else self.trials.texts()

    def close(self) -> None:
        """Ends the trials. Counts a drop if a trial is under way, and not if the trials have ended
        already."""
        if self.is_under_way:
            self.num_drops += 1
        elif not self.stopped:
            self.num_drops = 0
        self.stopped = "the parameters have changed"
        self._leave()

    def _send(self) -> None:
        marks = self._marks[-NUM_STEPS_COUNTED - 1 :]
        times_ms = [self._recorder.us_between(start, stop) / 1e3 for start, stop in pairwise(marks)]
        num_forwards = self._forwards[-NUM_STEPS_COUNTED - 1 :]
        forwards = (max(num_forwards), -min(num_forwards))
        # [steps + 3] float64
        times = torch.tensor([*times_ms, *forwards, self._obstacle()], dtype=torch.float64)
        self._times = times.to(self._group.device)
        self._marks, self._forwards = [], []
        name = "the times of all ranks"
        self._sent = self._group.all_reduce(self._times, name, dist.ReduceOp.MAX)

    def _obstacle(self) -> _Obstacle:
        if torch.are_deterministic_algorithms_enabled():
            return _Obstacle.DETERMINISTIC
        other = self._of_rank.setdefault(self._group.name, self)
        if other is self:
            return _Obstacle.NONE
        before, self._steps_of_other = self._steps_of_other, other.num_steps
        if before == other.num_steps:  # it is trained no more
            self._of_rank[self._group.name] = self
            return _Obstacle.NONE
        return _Obstacle.OTHER_MODEL

    def _meet(self, obstacle: _Obstacle) -> None:
        self._leave()
        self._num_times_blocked += 1
        if obstacle is _Obstacle.DETERMINISTIC:
            self.stopped = (
                "torch.use_deterministic_algorithms is on, and another plan rounds differently"
            )
        elif self._num_times_blocked == _MOST_TIMES_BLOCKED:
            self.stopped = "another model of this process is trying plans"

    def _drop(self) -> None:
        assert self.trials is not None
        self.num_drops += 1
        if self.num_drops >= MOST_DROPS:
            self.stopped = "steps have accumulated more or fewer backwards again"
            return
        self._num_forwards = None
        self.trials = self._make_trials(self.trials.present)

    def _leave(self) -> None:
        if self._of_rank.get(self._group.name) is self:
            del self._of_rank[self._group.name]
