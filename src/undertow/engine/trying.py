"""Runs windows of steps under one plan after the other, and tells all ranks how long they took.

Reasons: docs/design/tuning.md.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from itertools import pairwise
from statistics import median
from typing import ClassVar

import torch
import torch.distributed as dist

from undertow.buckets.recorder import Mark, Recorder
from undertow.plan import Plan
from undertow.ranks.handle import Handle
from undertow.ranks.transport import OwnGroup
from undertow.tune import Trials

NUM_STEPS_COUNTED = 5  # of a window. The step that ends with a new plan's first round is left out
# The first steps in a format are left out too: over a link of 1 Gb/s up to five took 40 % longer
# than later ones of the same plan.
NUM_FIRST_STEPS = 5
MOST_DROPS = 2  # a trial that is dropped begins again once


class Trying:
    """The windows of the trials of one set of parameters.

        move ──> a round ──> five rounds, whose steps are timed ──> one more round ──> move
                                                        times are sent    and received

    Every rank receives the same times, and so moves to the same plan in the same round. Windows
    count only if all their steps accumulate as many forwards, on every rank: a step of another kind
    drops the trial under way, which begins again once. Nor does a window count in which a model
    that was made earlier has tried plans: two trials at a time would be measured in the same steps.

    `number` is the place of the model in the order in which a rank makes its models. `num_drops`
    counts trials that were dropped, of earlier parameters too.
    """

    # By rank of the world: other ones run as threads of this process in tests only.
    _of_ranks: ClassVar[defaultdict[int, weakref.WeakSet[Trying]]] = defaultdict(weakref.WeakSet)

    def __init__(
        self,
        trials: Trials,
        recorder: Recorder,
        group: OwnGroup,
        *,
        number: int,
        num_drops: int,
    ) -> None:
        self.trials = trials
        self.num_drops = num_drops
        self.num_steps = 0  # in all windows so far
        self._recorder, self._group = recorder, group
        # of the rounds of this window: the end, and the training forwards of the step
        self._rounds: list[tuple[Mark, int]] = []
        self._sent: Handle | None = None  # brings this window's times; see `_send`
        self._num_forwards = 0.0  # of a step, in all windows; 0 before the first one
        self._number = number
        self._is_disturbed = False  # an earlier model of this rank has tried plans in this window
        self._of_this_rank = self._of_ranks[group.user.ranks[group.rank]]
        self._of_this_rank.add(self)

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
        for other in self._of_this_rank:
            if other._number > self._number:
                other._is_disturbed = True
        if self._sent is not None:
            return self._receive(self._sent)
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
                self._is_disturbed,
                torch.are_deterministic_algorithms_enabled(),
            ],
            dtype=torch.float64,
            device=self._group.device,
        )
        self._sent = self._group.all_reduce(values, "the times of all ranks", dist.ReduceOp.MAX)

    def _receive(self, sent: Handle) -> Plan:
        """Receives the times of the slowest rank, and returns the plan of the next window."""
        time_ms, most, minus_least, is_disturbed, is_deterministic = sent.result().tolist()
        self._sent = None
        self._is_disturbed = False
        if is_deterministic:
            self.trials.stop(
                "torch.use_deterministic_algorithms is on, and another plan rounds differently"
            )
        elif is_disturbed:
            if self.trials.plan is not self.trials.present:
                self.trials.drop()  # the candidate may be slow: no model waits under it
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
