"""The plans that training tries on real steps, and the rule that keeps one.

Nothing here predicts anything. A window of steps runs under the present plan, the next one under a
candidate, and so on in turn. The candidate is taken if it was clearly faster.

Reasons, and what the rule does on recorded steps: docs/design/tuning.md.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import accumulate, pairwise
from statistics import mean, stdev

from undertow.plan import Groups, Plan, equal_groups, plan_from_groups
from undertow.plan.grouping import is_too_large
from undertow.wire import AUTO_WIRE

MOST_CANDIDATES = 6
# A candidate must be faster than the present plan by this share, in the mean over pairs.
LEAST_GAIN = 0.02
# A one-sided Student's t-test at 0.01 % must confirm it: critical values for 4, 5, ... pairs.
# A trial looks up to 15 times, two or more candidates are tried, and the windows of a busy machine
# are not independent; so a plan that is not better is taken in less than one run of a hundred.
_BEYOND_DOUBT = (
    *(22.20, 13.03, 9.68, 8.02, 7.06, 6.44, 6.01),
    *(5.69, 5.45, 5.26, 5.11, 4.99, 4.88, 4.79, 4.71),
)
_LEAST_PAIRS = 4
_MOST_PAIRS = _LEAST_PAIRS + len(_BEYOND_DOUBT) - 1
_HOPELESS = 0.10  # a first window that is longer by this share is the last one
# Pairs that agree by chance are not more certain than windows of a quiet machine (0.4 %).
_LEAST_SPREAD = 0.004
# The last bucket relative to the others. It is sent after backward, so nothing hides it.
_SMALL, _WHOLE = 0.25, 1.0
_LAST_BYTES = 0.25  # of all: the last buckets, which `wire="auto"` tries in int8 alone


class Verdict(Enum):
    """The result of the windows so far."""

    GO_ON = "so far"
    KEPT = "not taken"  # the present plan stays
    TAKEN = "taken"  # the candidate takes its place


def verdict(present: Sequence[float], candidate: Sequence[float]) -> Verdict:
    """Judges the times of windows that ran in turn, the first one under the present plan.

    A pair is a window of the candidate and the mean of its two neighbors, so a machine that
    slows down favors neither plan. Logarithms are used because it slows down by a factor.
    """
    num_pairs = len(candidate)
    if num_pairs == 1 and candidate[0] > (1 + _HOPELESS) * present[0]:
        return Verdict.KEPT
    if len(present) == num_pairs or num_pairs < 2:
        return Verdict.GO_ON  # the last pair lacks a neighbor, or one pair shows no spread
    gains = []  # logarithms of ratios, above zero if the candidate is faster
    for tried, (before, after) in zip(candidate, pairwise(present), strict=True):
        gains.append((math.log(before) + math.log(after)) / 2 - math.log(tried))
    gain, least_gain = mean(gains), -math.log(1 - LEAST_GAIN)
    error = max(stdev(gains), _LEAST_SPREAD) / math.sqrt(num_pairs)
    if num_pairs >= _LEAST_PAIRS:
        beyond_doubt = _BEYOND_DOUBT[num_pairs - _LEAST_PAIRS] * error
        if gain >= max(least_gain, beyond_doubt):
            return Verdict.TAKEN
    if gain + error < least_gain or num_pairs == _MOST_PAIRS:
        return Verdict.KEPT
    return Verdict.GO_ON


@dataclass(slots=True)
class Trial:
    """A candidate, and the median step of each window so far."""

    plan: Plan
    # of windows in turn, in milliseconds: the first one ran under the present plan
    times_ms: list[float] = field(default_factory=list)
    verdict: Verdict = Verdict.GO_ON
    failure: str = ""  # why it could not be tried

    @property
    def is_next(self) -> bool:
        """True if the next window is the candidate's."""
        return len(self.times_ms) % 2 == 1


class Trials:
    """The trials of one set of parameters, one after the other.

    Every rank gets the same times, so all take the same plan.

    Args:
        present: The plan in force. A candidate that is taken replaces it.
        order: Indices of the parameters in the order of the plans.
        tries_formats: Full width is tried against int8 in all buckets, and in the last ones.
        keeps_buckets: Candidates differ in formats only.
        block: As in `plan_from_groups`.
    """

    def __init__(
        self,
        present: Plan,
        order: Sequence[int],
        *,
        tries_formats: bool = False,
        keeps_buckets: bool = False,
        block: int = 1,
    ) -> None:
        self.present = present
        self.tried: list[Trial] = []  # the last one is under way until trials are over
        self.are_over = False
        self.stopped = ""  # why they ended before their time
        self._order, self._block = order, block
        self._search = self._candidates(tries_formats=tries_formats, keeps_buckets=keeps_buckets)
        self._begin_next()

    @property
    def plan(self) -> Plan:
        """The plan of the next window; once trials are over the one that stays."""
        if self.are_over or not self.tried[-1].is_next:
            return self.present
        return self.tried[-1].plan

    @property
    def is_new(self) -> bool:
        """True if the next window is the first one of a candidate."""
        return not self.are_over and len(self.tried[-1].times_ms) == 1

    def window_ends(self, time_ms: float) -> None:
        """Called after a window under `plan` with the median of its steps."""
        trial = self.tried[-1]
        trial.times_ms.append(time_ms)
        trial.verdict = verdict(trial.times_ms[::2], trial.times_ms[1::2])
        if trial.verdict is Verdict.GO_ON:
            return
        if trial.verdict is Verdict.TAKEN:
            self.present = trial.plan
        self._begin_next()
        if trial.verdict is Verdict.KEPT and trial.is_next and not self.are_over:
            # This window, of the present plan, is the first one of the next trial.
            self.tried[-1].times_ms.append(time_ms)

    def fail(self, reason: str) -> None:
        """Called before the first window of a candidate if some rank cannot run it."""
        self.tried[-1].failure = reason
        self.window_ends(math.inf)

    def drop(self) -> None:
        """Drops the windows of the trial under way: it begins again."""
        self.tried[-1].times_ms.clear()

    def stop(self, reason: str) -> None:
        """Ends the trials before their time. The present plan stays."""
        self.are_over, self.stopped = True, reason

    def _begin_next(self) -> None:
        """Begins the trial of the next candidate that is worth one."""
        for plan in self._search:
            if self._is_worth_a_trial(plan) and len(self.tried) < MOST_CANDIDATES:
                self.tried.append(Trial(plan))
                return
        self.are_over = True

    def _is_worth_a_trial(self, plan: Plan) -> bool:
        """Returns True unless the plan is known or takes too much memory."""
        known = (self.present, *(trial.plan for trial in self.tried))
        if any(plan.is_alike(other.groups, other.wires) for other in known):
            return False
        return plan.groups == self.present.groups or not is_too_large(plan)

    def _candidates(self, *, tries_formats: bool, keeps_buckets: bool) -> Iterator[Plan]:
        """Yields one plan after the other. If it was taken, it is `present` afterwards."""
        if tries_formats:
            every = [AUTO_WIRE] * len(self.present.buckets)
            yield self._planned(self.present.groups, every)
            yield self._planned(self.present.groups, wires_of_last(self.present))
        if keeps_buckets:
            return
        first = self.present
        for factor in (0.5, 2.0):
            helps = self.present is first  # otherwise the other direction has helped
            while helps:
                num_buckets = max(1, round(len(self.present.buckets) * factor))
                plan = self._equal_buckets(num_buckets, last_share=_SMALL)
                yield plan
                helps = self.present is plan
        yield self._equal_buckets(len(self.present.buckets), last_share=_WHOLE)

    def _equal_buckets(self, num_buckets: int, *, last_share: float) -> Plan:
        """Returns a plan whose buckets have the format of their last parameter in the present
        plan."""
        groups = equal_groups(
            self.present.params,
            self._order,
            num_buckets=num_buckets,
            last_share=last_share,
            joins_crumbs=True,
        )
        wire_of = {
            param: wire
            for group, wire in zip(self.present.groups, self.present.wires, strict=True)
            for param in group
        }
        return self._planned(groups, [wire_of[group[-1]] for group in groups])

    def _planned(self, groups: Groups, wires: Sequence[str | None]) -> Plan:
        return plan_from_groups(
            self.present.params,
            groups,
            num_ranks=self.present.num_ranks,
            num_shards=self.present.num_shards,
            wires=wires,
            block=self._block,
        )


def wires_of_last(plan: Plan) -> list[str | None]:
    """Returns int8 for the last buckets, at least one, which have a quarter of all bytes."""
    ends = list(accumulate(bucket.num_bytes for bucket in plan.buckets))
    return [AUTO_WIRE if end > (1 - _LAST_BYTES) * ends[-1] else None for end in ends]
