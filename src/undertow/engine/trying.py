"""Runs windows of steps under one plan after the other, and tells all ranks how long they took.

Reasons: docs/design/tuning.md.
"""

from __future__ import annotations

import weakref
from itertools import pairwise
from statistics import median
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from undertow.buckets.recorder import Mark, Recorder
from undertow.plan import Plan
from undertow.ranks.handle import Handle
from undertow.ranks.transport import OwnGroup
from undertow.tune import Trials, Verdict

NUM_STEPS_COUNTED = 5  # of a window. The step that ends with a new plan's first round is left out
# The first steps in a format are left out too: over a link of 1 Gb/s up to five took 40 % longer
# than later ones of the same plan.
NUM_FIRST_STEPS = 5
MOST_DROPS = 2  # a trial that is dropped begins again once
# Windows that wait for another model, whose trials took up to 56 on recorded steps. If ranks give
# two models of one backward their turns in opposite orders, both would wait forever.
MOST_WAITS = 100
_DETERMINISTIC = "torch.use_deterministic_algorithms is on, and another plan rounds differently"
_WAITED = f"it was the turn of another model of the process for {MOST_WAITS} windows"


class Trying:
    """The windows of the trials of one set of parameters.

        move ──> a round ──> five rounds, whose steps are timed ──> one more round ──> move
                                                        times are sent    and received

    Every rank receives the same times, and so moves to the same plan in the same round. Windows
    count only if all their steps accumulate as many forwards, on every rank: a step of another kind
    drops the trial under way, which begins again once.

    `num_drops` counts trials that were dropped, of earlier parameters too.
    """

    # Of the models of a rank, the one whose turn it is: two trials at a time would be measured in
    # the same steps.
    _turns: ClassVar[weakref.WeakValueDictionary[int, Trying]] = weakref.WeakValueDictionary()

    def __init__(
        self, trials: Trials, recorder: Recorder, group: OwnGroup, *, num_drops: int
    ) -> None:
        self.trials = trials
        self.num_drops = num_drops
        self.num_steps = 0  # in all windows so far
        self._recorder, self._group = recorder, group
        # of the rounds of this window: the end, and the training forwards of the step
        self._rounds: list[tuple[Mark, int]] = []
        self._sent: tuple[Tensor, Handle] | None = None  # this window's times; see `_send`
        self._num_forwards = 0.0  # of a step, in all windows; 0 before the first one
        self._num_steps_of_other = 0  # of the model whose turn it is, at the last look
        self._num_waits = 0  # windows in which it was another model's turn, on some rank

    @property
    def communicates_next(self) -> bool:
        """True if the end of the next sound round sends or receives the times of a window."""
        return self._sent is not None or len(self._rounds) == self._num_steps_of_window

    @property
    def _num_steps_of_window(self) -> int:
        is_first_in_format = self.trials.is_new and any(self.trials.plan.wires)
        return NUM_STEPS_COUNTED + (NUM_FIRST_STEPS if is_first_in_format else 0)

    def round_ends(self, num_forwards: int) -> Plan | None:
        """Called at the end of a sound round, after so many training forwards.

        Returns the plan of the next window in the round after the last one of a window, when the
        times of all ranks have arrived.
        """
        self.num_steps += 1
        if self._sent is not None:
            return self._receive(*self._sent)
        self._rounds.append((self._recorder.mark(), num_forwards))
        if len(self._rounds) > self._num_steps_of_window:
            self._send()
        return None

    def forget_window(self) -> None:
        """Begins the window again, under the same plan."""
        self._rounds.clear()

    def close(self) -> None:
        """Ends the trials. Counts a drop if one is under way."""
        if not self.trials.are_over:
            self.num_drops += 1
            self.trials.stop("the parameters have changed")

    def told(self) -> str:
        """Returns the progress of the trials in words."""
        trials, num_tried = self.trials, len(self.trials.tried)
        plans = f"{num_tried} other plan{'' if num_tried == 1 else 's'}"
        if trials.stopped:
            return f"trials have ended after {self.num_steps} steps: {trials.stopped}"
        if not trials.are_over:
            return f"trials are under way: {self.num_steps} steps, {plans} so far"
        if any(trial.verdict is Verdict.TAKEN for trial in trials.tried):
            return f"its steps were the fastest: {plans} tried in {self.num_steps} steps"
        if num_tried == 0:
            return "no other plan is worth a trial"
        return f"{plans} tried in {self.num_steps} steps, none 2 % faster"

    def _send(self) -> None:
        """Sends the median step of this window, and what might keep it from counting."""
        rounds = self._rounds[-NUM_STEPS_COUNTED - 1 :]
        self._rounds.clear()
        step_us = [
            self._recorder.us_between(start, stop) for (start, _), (stop, _) in pairwise(rounds)
        ]
        num_forwards = [num for _, num in rounds]
        values = torch.tensor(  # [5], the largest of all ranks counts
            [
                median(step_us) / 1e3,
                max(num_forwards),
                -min(num_forwards),
                not self._takes_turn(),
                torch.are_deterministic_algorithms_enabled(),
            ],
            dtype=torch.float64,
            device=self._group.device,
        )
        name = "the times of all ranks"
        self._sent = values, self._group.all_reduce(values, name, dist.ReduceOp.MAX)

    def _receive(self, values: Tensor, handle: Handle) -> Plan:
        """Receives the times of the slowest rank, and returns the plan of the next window."""
        handle.wait()
        self._sent = None
        time_ms, most, minus_least, waits, is_deterministic = values.tolist()
        if is_deterministic:
            self.trials.stop(_DETERMINISTIC)
        elif waits:
            self._leave_turn()  # ranks that have given it to different models must agree
            self._num_waits += 1
            if self._num_waits == MOST_WAITS:
                self.trials.stop(_WAITED)
        elif most != -minus_least or most != (self._num_forwards or most):
            self._drop()
        else:
            self._num_forwards = most
            self.trials.window_ends(time_ms)
        return self.trials.plan

    def _drop(self) -> None:
        self.num_drops += 1
        self._num_forwards = 0.0
        self.trials.drop()
        if self.num_drops >= MOST_DROPS:
            self.trials.stop("steps have accumulated more or fewer backwards again")

    def _takes_turn(self) -> bool:
        """Takes the turn unless another model has it, and has trained since the last look."""
        other = self._turns.setdefault(self._group.name, self)
        before, self._num_steps_of_other = self._num_steps_of_other, other.num_steps
        if other.trials.are_over or other.num_steps == before:
            self._turns[self._group.name] = self
        return self._turns[self._group.name] is self

    def _leave_turn(self) -> None:
        if self._turns.get(self._group.name) is self:
            del self._turns[self._group.name]
