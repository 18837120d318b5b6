"""Decides when to move to another plan."""

from collections import deque
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from statistics import median
from typing import Any

from undertow.cost import CostCurve, curve_from_samples
from undertow.plan import (
    Groups,
    Optimum,
    Plan,
    finish_us,
    optimal_groups,
)
from undertow.profile import Profile
from undertow.tune.messages import Decision, Measurement, Outcome

# A plan must be predicted to gain at least this share of the time until gradients are reduced to be worth its new buckets.
_WORTHWHILE = 0.005
# A plan with at most this share of the buckets is tried anyway: the host packs, launches and binds each one in backward, which
# no curve includes.
_FEWER = 0.75
_HOST_US = 200.0  # per bucket, at least: 0.2 to 0.5 ms on the machine of docs/benchmarks.md
_QUICK_US = 25 * _HOST_US
# The gain of this many steps must pay for a move of optimizer state.
_PAID_BACK_AFTER_STEPS = 1_000
_NUM_STATES = 2  # tensors per parameter that an optimizer such as Adam has
# Larger models are not moved: every rank would hold gradients and state of all parameters for a moment, and a model may fit
# only because of sharding.
_MOST_MOVED_BYTES = 256 * 2**20
# Buckets cost memory: a packed bucket holds its gradients twice. Small ones may be as large as without a measurement.
_LEAST_CAP_BYTES, _LARGEST_SHARE = 25 * 2**20, 8
_NUM_WINDOWS = 4  # windows of samples of the same sizes, and checks of a plan, that count
_NUM_SIZES = 8  # sets of sizes that are remembered
_DRIFT = 1.25  # a network or computation that is slower or faster by this factor counts as changed
NUM_STEPS_BETWEEN_LOOKS = 100
_NUM_STEPS_IF_LIGHT = 400  # at a plan that stays where the network hardly counts, because a look times every gradient
_DIGITS, _DIGITS_OF_SHARES = 1, 4  # of microseconds in profiles: no clock is finer

_Samples = tuple[tuple[float, float], ...]  # bytes, microseconds
_Look = tuple[float, float]  # microseconds until all gradients are reduced, and their spread


class Tuner:
    """Learns from measurements of one set of parameters, and decides on their plan.

    `order` is the order of the plans if the user wants another one than the gradients' order of arrival.
    """

    def __init__(self, order: Sequence[int] | None = None) -> None:
        self.measurement: Measurement | None = None  # the last one
        self.order = order
        # By kind, then by the sizes that were sent: a plan that stays must not push out the samples of other sizes.
        self._windows: dict[str, dict[frozenset[float], deque[_Samples]]] = {}
        self._looks: dict[Groups, deque[_Look]] = {}  # by plan: the last checks of it
        self._has_varied = self._has_tried_fewer = False
        self._is_new, self._num_moves = False, 0  # True if there is a measurement since the last decision
        # The predicted gain of the last move, and by how much a predicted gain was missed.
        self._promised_us, self._overrated_us = 0.0, 0.0

    @property
    def curves(self) -> dict[str, CostCurve]:
        """Costs of collectives by kind."""
        return {
            kind: curve_from_samples([sample for windows in of_sizes.values() for window in windows for sample in window])
            for kind, of_sizes in self._windows.items()
        }

    @property
    def is_bound_by_processors(self) -> bool:
        """True if communication takes more time from processors than the network adds; the same on all ranks."""
        return self.measurement is not None and self.measurement.processors_us > self.measurement.network_us

    def learn(self, measurement: Measurement) -> None:
        """Adds a measurement of the current plan."""
        self._forget_what_has_changed(measurement)
        for kind, samples in measurement.samples.items():
            self.learn_costs(kind, samples)
        self.measurement = measurement
        self._is_new = True

    def learn_costs(self, kind: str, samples: _Samples) -> None:
        """Adds samples of collectives of that kind."""
        of_sizes, sizes = self._windows.setdefault(kind, {}), frozenset(size for size, _ in samples)
        of_sizes[sizes] = deque([*of_sizes.pop(sizes, ()), samples], maxlen=_NUM_WINDOWS)  # the newest comes last
        for oldest in list(of_sizes)[:-_NUM_SIZES]:
            del of_sizes[oldest]

    def profile(self, plan: Plan, *, strategy: str) -> Profile | None:
        """Returns the measurements as a profile under `plan`; None before the first measurement."""
        now = self.measurement
        if now is None:
            return None
        return Profile(
            params=plan.params,
            ready_us=tuple(round(ready_us, _DIGITS) for ready_us in now.ready_us),
            forward_us=round(now.forward_us, _DIGITS),
            backward_us=round(now.backward_us, _DIGITS),
            update_us=round(now.rest_us, _DIGITS),
            num_ranks=plan.num_ranks,
            curves=self.curves,
            strategy=strategy,
            groups=plan.groups,
            step_us=round(now.synchronized_us + now.rest_us, _DIGITS),
            launch_us=now.launch_us,
            copy_us_per_mb=now.copy_us_per_mb,
            skew=now.skew,
            # Between the quartiles of a normal distribution are 1.349 standard deviations.
            spread=round(now.spread_us / 1.349 / max(1.0, now.synchronized_us), _DIGITS_OF_SHARES),
        )

    def decide(self, plan: Plan, *, has_shards: bool) -> Decision:
        """Decides on the plan from the latest measurement; keeps it without a new one."""
        now = self.measurement
        if now is None or not self._is_new:
            return Decision(outcome=Outcome.UNKNOWN, next_look=NUM_STEPS_BETWEEN_LOOKS)
        self._is_new = False
        if not knows_enough(self.curves, has_shards=has_shards):
            return self._try_other_sizes(plan, now, has_shards=has_shards)
        profile: Any = self.profile(plan, strategy="zero1" if has_shards else "ddp")  # there is a measurement
        best, present_us = self.best_and_present(profile, plan, has_shards=has_shards)
        # Gradients and optimizer state move to their owners under another plan.
        move_us = (1 + _NUM_STATES) * float(profile.costs().collective_us("all_gather", _num_bytes(plan))) if has_shards else 0.0
        outcome, groups = self._choose(plan, best.groups, now, gain_us=present_us - best.finish_us, move_us=move_us)
        if groups is not None and not _may_move(plan, has_shards=has_shards):
            outcome, groups = Outcome.TOO_LARGE, None
        return Decision(
            outcome=outcome,
            next_look=1
            if outcome in (Outcome.MOVE, Outcome.FEWER, Outcome.BACK)
            else _NUM_STEPS_IF_LIGHT
            if outcome in (Outcome.KEEP, Outcome.TRIED) and self.is_bound_by_processors
            else NUM_STEPS_BETWEEN_LOOKS,
            present_us=present_us,
            predicted_us=best.finish_us,
            limit_us=best.limit_us,
            groups=groups,
        )

    def best_and_present(self, profile: Profile, plan: Plan, *, has_shards: bool) -> tuple[Optimum, float]:
        """Returns the best known plan, in the user's order if given, and the time of the current plan by the same costs."""
        order, timing, costs = profile.order if self.order is None else self.order, profile.timing, profile.costs()
        most_bytes = _max_bucket_bytes(plan)
        best = optimal_groups(
            plan.params,
            order,
            timing,
            costs,
            num_ranks=plan.num_ranks,
            has_shards=has_shards,
            max_bucket_bytes=most_bytes,
            # Not after a plan was slower than promised.
            bucket_us=_HOST_US if self.is_bound_by_processors and not self._overrated_us else 0.0,
        )
        return best, finish_us(plan.params, plan.groups, timing, costs, has_shards=has_shards)

    def _try_other_sizes(self, plan: Plan, now: Measurement, *, has_shards: bool) -> Decision:
        """Tries another bucket size, once per network: buckets of one size do not show the cost of other sizes."""
        # The whole model is sent so fast that a second bucket would cost the host more than it could hide.
        least_us = [min(time_us for _, time_us in samples) for samples in now.samples.values() if samples]
        is_quick = len(plan.buckets) == 1 and max(least_us, default=0.0) < _QUICK_US
        is_possible = not (self._has_varied or is_quick) and _may_move(plan, has_shards=has_shards)
        if not is_possible or (groups := _varied(plan)) == plan.groups:
            return Decision(
                outcome=Outcome.QUICK if is_quick else Outcome.UNKNOWN,
                next_look=_NUM_STEPS_IF_LIGHT if is_quick else NUM_STEPS_BETWEEN_LOOKS,
            )
        self._has_varied = True
        return Decision(outcome=Outcome.LEARN, next_look=1, groups=groups)

    def _choose(
        self, plan: Plan, best: Groups, now: Measurement, *, gain_us: float, move_us: float
    ) -> tuple[Outcome, Groups | None]:
        """Chooses an outcome; measurements take precedence over predictions."""
        present = plan.groups
        self._looks.setdefault(present, deque(maxlen=_NUM_WINDOWS)).append((now.synchronized_us, now.spread_us))
        usual = {groups: (median(us for us, _ in looks), median(us for _, us in looks)) for groups, looks in self._looks.items()}
        fastest = min(usual, key=lambda groups: usual[groups][0])
        (fastest_us, fastest_spread_us), (present_us, present_spread_us) = usual[fastest], usual[present]
        # A plan has one chance if it promised nothing, or if no curve has what binds the step.
        is_trial = len(self._looks[present]) == 1 and (self.is_bound_by_processors or not self._promised_us)
        margin_us = _WORTHWHILE * fastest_us + (0.0 if is_trial else max(fastest_spread_us, present_spread_us))
        loss_us = present_us - fastest_us
        if fastest_us + margin_us < present_us and loss_us * _PAID_BACK_AFTER_STEPS > move_us:
            self._overrated_us = max(self._overrated_us, self._promised_us + loss_us)
            self._promised_us = 0.0
            return Outcome.BACK, fastest
        # Every move requires more gain than the previous one, so that random differences between checks soon stop causing moves.
        host_us = _HOST_US * (len(best) - len(present))  # in backward, for more buckets
        least_us = max(_WORTHWHILE * 2**self._num_moves * now.synchronized_us, self._overrated_us, host_us)
        if best not in usual and gain_us > least_us and gain_us * _PAID_BACK_AFTER_STEPS > move_us:
            self._num_moves, self._promised_us = self._num_moves + 1, gain_us
            return Outcome.MOVE, best
        # The best ones once per network, and half as many while processors bind: the next measurement shows whether it pays.
        tried = (() if self._has_tried_fewer else (best,)) + ((_halved(plan),) if self.is_bound_by_processors else ())
        fewer = next((it for it in tried if it not in usual and len(it) <= _FEWER * len(present)), present)
        if _HOST_US * (len(present) - len(fewer)) * _PAID_BACK_AFTER_STEPS > move_us:
            self._has_tried_fewer, self._promised_us = True, 0.0
            return Outcome.FEWER, fewer
        is_tried = best in usual or gain_us <= self._overrated_us
        return Outcome.TRIED if is_tried and gain_us > _WORTHWHILE * now.synchronized_us else Outcome.KEEP, None

    def _forget_what_has_changed(self, now: Measurement) -> None:
        before = self.measurement
        # Under another plan, different times say as much about the plan as about network and computation.
        if before is None or _sizes(before) != _sizes(now):
            return
        drifted = [kind for kind in _sizes(now) if _has_drifted(_usual_us(before, kind), _usual_us(now, kind))]
        for kind in drifted:
            del self._windows[kind]
        if drifted or _has_drifted(before.forward_us + before.backward_us, now.forward_us + now.backward_us):
            self._looks.clear()
            self._num_moves, self._overrated_us, self._has_varied, self._has_tried_fewer = 0, 0.0, False, False


def _sizes(measurement: Measurement) -> dict[str, set[float]]:
    return {kind: {size for size, _ in samples} for kind, samples in measurement.samples.items()}


def _usual_us(measurement: Measurement, kind: str) -> float:
    return median(time_us for _, time_us in measurement.samples[kind])


def _has_drifted(before_us: float, now_us: float) -> bool:
    return max(before_us, now_us) > _DRIFT * min(before_us, now_us)


def kinds_needed(*, has_shards: bool) -> tuple[str, ...]:
    """Returns the collectives of a step."""
    return ("reduce_scatter", "all_gather") if has_shards else ("all_reduce",)


def knows_enough(curves: Mapping[str, CostCurve], *, has_shards: bool) -> bool:
    """Returns True if the measurements show the cost of buckets of other sizes."""
    return all(kind in curves and curves[kind].is_enough for kind in kinds_needed(has_shards=has_shards))


def _max_bucket_bytes(plan: Plan) -> float:
    return max(_LEAST_CAP_BYTES, _num_bytes(plan) / _LARGEST_SHARE)


def _varied(plan: Plan) -> Groups:
    """Returns the groups with one cut, or joined in pairs if none can be cut; the groups of the plan if neither is possible."""
    thirds = ((at, group, max(1, len(group) // 3)) for at, group in enumerate(plan.groups) if len(group) > 1)
    cut = ((*plan.groups[:at], group[:third], group[third:], *plan.groups[at + 1 :]) for at, group, third in thirds)
    return next(cut, _halved(plan))


def _halved(plan: Plan) -> Groups:
    """Returns every two neighbors in one bucket; the groups of the plan if some cannot be joined."""
    is_simple = len({bucket.kind for bucket in plan.buckets}) == 1 and not plan.split_params
    is_small = 2 * max(bucket.num_bytes for bucket in plan.buckets) <= _max_bucket_bytes(plan)
    pairs = zip_longest(plan.groups[::2], plan.groups[1::2], fillvalue=())
    return tuple(first + second for first, second in pairs) if is_simple and is_small else plan.groups


def _may_move(plan: Plan, *, has_shards: bool) -> bool:
    return not has_shards or _num_bytes(plan) <= _MOST_MOVED_BYTES


def _num_bytes(plan: Plan) -> int:
    return sum(bucket.num_bytes for bucket in plan.buckets)
