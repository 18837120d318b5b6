"""The plans that training tries on real steps, and the rule that keeps one.

Nothing here predicts anything. A window of steps runs under the present plan, the next one under a
candidate, and so on in turn. The candidate is taken if it was clearly faster.

Reasons, and what the rule does on recorded steps: docs/design/tuning.md.
"""

import math
from collections import Counter
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import pairwise
from statistics import mean, median, stdev

from undertow.plan import Groups, Plan, Wires, equal_groups, plan_from_groups
from undertow.wire import AUTO, AUTO_WIRE

MOST_CANDIDATES = 6
# A candidate must be faster than the present plan by this share, in the mean over pairs.
LEAST_GAIN = 0.02
# A one-sided Student's t-test at 0.01 % must confirm it: critical values for 4, 5, ... pairs.
# A trial looks up to 13 times, two or more candidates are tried, and the windows of a busy machine
# are not independent; so a plan that is not better is taken in less than one run of a hundred.
_BEYOND_DOUBT = (
    *(22.20, 13.03, 9.68, 8.02, 7.06, 6.44, 6.01),
    *(5.69, 5.45, 5.26, 5.11, 4.99, 4.88),
)
_LEAST_PAIRS = 4
_MOST_PAIRS = _LEAST_PAIRS + len(_BEYOND_DOUBT) - 1
_HOPELESS = 0.10  # a first window that is longer by this share is the last one
# Pairs that agree by chance are not more certain than windows of a quiet machine (0.4 %).
_LEAST_SPREAD = 0.004
# Larger buckets cost memory: a packed bucket holds its gradients twice.
_LEAST_CAP_BYTES, _LARGEST_SHARE = 25 * 2**20, 8
# The last bucket relative to the others. It is sent after backward, so nothing hides it.
_LAST_SHARES = (0.25, 1.0)
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
    """A candidate, and the median step of each window so far, in milliseconds."""

    plan: Plan
    label: str
    present_ms: list[float] = field(default_factory=list)
    candidate_ms: list[float] = field(default_factory=list)
    verdict: Verdict = Verdict.GO_ON
    failure: str = ""  # why it could not be tried

    @property
    def is_next(self) -> bool:
        """True if the next window is the candidate's."""
        return len(self.candidate_ms) < len(self.present_ms)

    def __str__(self) -> str:
        if self.failure:
            return f"{self.label}: {self.failure}"
        if not self.candidate_ms:
            return f"{self.label}: not measured yet"
        before = f"{median(self.present_ms):.1f} ms before"
        return f"{self.label}: {median(self.candidate_ms):.1f} ms, {before}, {self.verdict.value}"


class Trials:
    """The trials of one set of parameters, one after the other.

    Every rank gets the same times, so all take the same plan.

    Args:
        present: The plan in force. A candidate that is taken replaces it.
        order: Indices of the parameters in the order of the plans.
        wire: The format of gradients as in `SyncConfig`. "auto" tries int8 for all buckets, and
            for the last ones.
        keeps_buckets: Candidates differ in formats only.
        block: As in `plan_from_groups`.
    """

    def __init__(
        self,
        present: Plan,
        order: Sequence[int],
        *,
        wire: str | None = None,
        keeps_buckets: bool = False,
        block: int = 1,
    ) -> None:
        self.present = present
        self.done: list[Trial] = []
        self._known = [present]
        self._order, self._block = order, block
        self._wire = AUTO_WIRE if wire == AUTO else wire
        self._narrow_share = 0.0 if wire == AUTO else 1.0  # of the bytes of the present plan
        self._search = self._candidates(keeps_buckets=keeps_buckets, keeps_formats=wire != AUTO)
        self._now = next(self._search, None)

    @property
    def are_over(self) -> bool:
        """True if no candidate is left."""
        return self._now is None

    @property
    def plan(self) -> Plan:
        """The plan of the next window; once trials are over the one that stays."""
        trial = self._now
        return self.present if trial is None or not trial.is_next else trial.plan

    @property
    def is_new(self) -> bool:
        """True if the next window is the first one of a candidate."""
        trial = self._now
        return trial is not None and trial.is_next and not trial.candidate_ms

    def texts(self) -> tuple[str, ...]:
        """Returns a line for each trial, and for the one under way."""
        now = () if self._now is None else (self._now,)
        return tuple(str(trial) for trial in (*self.done, *now))

    def window_ends(self, time_ms: float) -> None:
        """Called after a window under `plan` with the median of its steps."""
        trial = self._now
        assert trial is not None  # otherwise no window is measured
        times = trial.candidate_ms if trial.is_next else trial.present_ms
        times.append(time_ms)
        trial.verdict = verdict(trial.present_ms, trial.candidate_ms)
        if trial.verdict is Verdict.GO_ON:
            return
        # The present plan's last window is the first one of the next trial, if the plan stays.
        is_next_known = trial.verdict is Verdict.KEPT and trial.is_next
        self._try_next()
        if is_next_known and self._now is not None:
            self._now.present_ms.append(time_ms)

    def fail(self, reason: str) -> None:
        """Called if some rank cannot run the candidate."""
        assert self._now is not None  # the candidate
        self._now.failure = reason
        self._try_next()

    def _try_next(self) -> None:
        assert self._now is not None  # it has just ended
        is_taken = self._now.verdict is Verdict.TAKEN
        if is_taken:
            self.present = self._now.plan
        self.done.append(self._now)
        try:
            self._now = self._search.send(is_taken)
        except StopIteration:
            self._now = None

    def _candidates(
        self, *, keeps_buckets: bool, keeps_formats: bool
    ) -> Generator[Trial, bool, None]:
        """Yields candidates. Each time it is sent whether the candidate was taken."""
        for share in () if keeps_formats else (1.0, _LAST_BYTES):
            if (yield from self._try(self.present.groups, "the same buckets", narrow_share=share)):
                self._narrow_share = share
        if keeps_buckets:
            return
        last_share, other_share = _LAST_SHARES
        first = self.present
        for factor in (0.5, 2.0):
            num_buckets = len(self.present.buckets)
            while (yield from self._try_equal(round(num_buckets * factor), last_share)):
                num_buckets = len(self.present.buckets)
            if self.present is not first:
                break
        yield from self._try_equal(len(self.present.buckets), other_share)

    def _try_equal(self, num_buckets: int, last_share: float) -> Generator[Trial, bool, bool]:
        groups = equal_groups(
            self.present.params,
            self._order,
            num_buckets=max(1, num_buckets),
            last_share=last_share,
        )
        label = f"{len(groups)} bucket{'' if len(groups) == 1 else 's'}"
        if last_share != 1 and len(groups) > 1:
            label += f", the last one {last_share:g} of the others"
        return (yield from self._try(groups, label, narrow_share=self._narrow_share))

    def _try(
        self, groups: Groups, label: str, *, narrow_share: float
    ) -> Generator[Trial, bool, bool]:
        """Yields this candidate unless it is known or too large.

        Returns True if it was taken.
        """
        present = self.present
        wires = _wires_of_last(present, groups, self._wire, narrow_share)
        plan = plan_from_groups(
            present.params,
            groups,
            num_ranks=present.num_ranks,
            num_shards=present.num_shards,
            wires=wires,
            block=self._block,
        )
        is_known = any(plan.is_alike(known.groups, known.wires) for known in self._known)
        is_too_large = groups != present.groups and _is_too_large(plan)
        if is_known or is_too_large or len(self.done) == MOST_CANDIDATES:
            return False
        self._known.append(plan)
        return (yield Trial(plan=plan, label=label + formats_text(plan.wires)))


def formats_text(wires: Wires) -> str:
    """Returns ", all in int8" or ", 3 of them in int8"; empty in full width."""
    numbers = Counter(filter(None, wires))
    return "".join(
        f", {'all' if number == len(wires) else f'{number} of them'} in {wire}"
        for wire, number in numbers.items()
    )


def _wires_of_last(plan: Plan, groups: Groups, wire: str | None, share: float) -> list[str | None]:
    """Returns `wire` for the last groups, which have `share` of all bytes, and at least for one."""
    wires: list[str | None] = [None] * len(groups)
    left = share * sum(spec.num_bytes for spec in plan.params)
    for index in reversed(range(len(groups) if share else 0)):
        wires[index] = wire
        left -= sum(plan.params[param].num_bytes for param in groups[index])
        if left <= 0:
            break
    return wires


def _is_too_large(plan: Plan) -> bool:
    cap = max(_LEAST_CAP_BYTES, sum(spec.num_bytes for spec in plan.params) / _LARGEST_SHARE)
    return any(len(bucket.params) > 1 and bucket.num_bytes > cap for bucket in plan.buckets)
