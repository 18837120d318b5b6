"""When another plan is worth moving to."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from undertow.cost import CostCurve, MeasuredCosts, curve_from_samples
from undertow.plan import GathersBehind, Member, Optimum, Plan, eager_order, finish_us, optimal_groups
from undertow.profile import Profile
from undertow.simulate import lane_times
from undertow.tune.decision import Decision, Outcome
from undertow.tune.eager import best_eager_groups, eager_period_us
from undertow.tune.measurement import Measurement

# A plan that is predicted to gain less than this share of the time until gradients are through is not worth its new buckets.
_WORTHWHILE = 0.005
# A move of optimizer state has to be paid for by what so many steps gain.
_PAID_BACK_AFTER_STEPS = 1_000
_NUM_STATES = 2  # tensors per parameter that an optimizer such as Adam has
_NUM_WINDOWS = 4  # of which samples count, and of each plan so many looks
_DRIFT = 1.25  # a network, or a computation, that is so much slower or faster than it was is another one
NUM_STEPS_BETWEEN_LOOKS = 100

_Groups = tuple[tuple[Member, ...], ...]


class _Known:
    """What a plan was measured to take, in the last looks at it."""

    def __init__(self) -> None:
        self._looks: deque[tuple[float, float]] = deque(maxlen=_NUM_WINDOWS)

    def add(self, measurement: Measurement) -> None:
        self._looks.append((measurement.synchronised_us, measurement.spread_us))

    @property
    def synchronised_us(self) -> float:
        return median(synchronised_us for synchronised_us, _ in self._looks)

    @property
    def spread_us(self) -> float:
        return median(spread_us for _, spread_us in self._looks)

    def is_better_than(self, other: _Known) -> bool:
        """By more than steps differ from one another."""
        margin_us = _WORTHWHILE * self.synchronised_us + max(self.spread_us, other.spread_us)
        return self.synchronised_us + margin_us < other.synchronised_us


class Tuner:
    """Learns from measurements of one set of parameters, and decides on their plan.

    `order` is that of the plans, where the user wants another one than that in which gradients become ready.
    """

    def __init__(self, order: Sequence[int] | None = None) -> None:
        self.measurement: Measurement | None = None  # the last one
        self._order = order
        self._windows: dict[str, deque[tuple[tuple[float, float], ...]]] = {}
        self._is_new = False  # since the last decision
        self._known: dict[_Groups, _Known] = {}
        self._num_moves = 0
        self._promised_us = 0.0  # what the last move was to gain
        self._overrated_us = 0.0  # by so much a promise was not kept

    @property
    def curves(self) -> dict[str, CostCurve]:
        """What collectives cost, by kind."""
        return {
            kind: curve_from_samples([sample for window in windows for sample in window])
            for kind, windows in self._windows.items()
        }

    def learn(self, measurement: Measurement) -> None:
        """Takes a measurement of the present plan in."""
        self._forget_what_has_changed(measurement)
        for kind, samples in measurement.samples.items():
            if samples:
                self._windows.setdefault(kind, deque(maxlen=_NUM_WINDOWS)).append(samples)
        self.measurement = measurement
        self._is_new = True

    def profile(self, plan: Plan, *, strategy: str) -> Profile | None:
        """What was learned, as measured under `plan`; None before anything was."""
        now = self.measurement
        if now is None:
            return None
        return Profile(
            params=plan.params,
            ready_us=tuple(_rounded(ready_us) for ready_us in now.ready_us),
            forward_us=_rounded(now.forward_us),
            backward_us=_rounded(now.backward_us),
            update_us=_rounded(now.rest_us),
            num_ranks=plan.num_ranks,
            curves=self.curves,
            strategy=strategy,
            groups=plan.groups,
            step_us=_rounded(now.synchronised_us + now.rest_us),
        )

    def decide(self, plan: Plan, *, has_shards: bool, is_eager: bool = False) -> Decision:
        """What to do now that the present plan was measured; nothing, where it was not since the last decision.

        `is_eager`: its buckets are stepped in backward.
        """
        now = self.measurement if self._is_new else None
        self._is_new = False
        if now is None or not self._knows_enough(has_shards=has_shards):
            return Decision(outcome=Outcome.UNKNOWN, next_look=NUM_STEPS_BETWEEN_LOOKS)
        profile = self.profile(plan, strategy="zero1" if has_shards else "ddp")
        assert profile is not None  # there is a measurement
        costs = profile.costs()
        best, present_us = self._best_and_present(profile, plan, has_shards=has_shards, is_eager=is_eager)
        move_us = _move_us(plan, costs) if has_shards else 0.0
        outcome, groups = self._choose(plan.groups, best.groups, now, gain_us=present_us - best.finish_us, move_us=move_us)
        return Decision(
            outcome=outcome,
            next_look=1 if outcome is Outcome.MOVE else NUM_STEPS_BETWEEN_LOOKS,
            present_us=present_us,
            predicted_us=best.finish_us,
            limit_us=best.limit_us,
            groups=groups,
        )

    def _best_and_present(self, profile: Profile, plan: Plan, *, has_shards: bool, is_eager: bool) -> tuple[Optimum, float]:
        """The best plan that is known, and what the present one takes by the same costs."""
        order, costs = profile.order if self._order is None else self._order, profile.costs()
        if is_eager:
            return best_eager_groups(profile, order, num_ranks=plan.num_ranks), eager_period_us(profile, plan, costs)
        timing = profile.timing
        best = optimal_groups(plan.params, order, timing, costs, num_ranks=plan.num_ranks, has_shards=has_shards)
        return best, finish_us(plan.params, plan.groups, timing, costs, has_shards=has_shards)

    def gathers_behind(self, plan: Plan) -> GathersBehind | None:
        """When its buckets are best gathered, where they are stepped in backward; None where too little is known."""
        profile = self.profile(plan, strategy="zero1")
        if profile is None or not self._knows_enough(has_shards=True):
            return None
        # What the update takes is in no measurement of a step whose buckets are stepped in backward: it is little.
        return eager_order(lane_times(replace(profile, update_us=0.0), plan, profile.costs()))

    def _choose(
        self, present: _Groups, best: _Groups, now: Measurement, *, gain_us: float, move_us: float
    ) -> tuple[Outcome, _Groups | None]:
        """What was measured goes before what is predicted."""
        known = self._known.setdefault(present, _Known())
        known.add(now)
        fastest = min(self._known, key=lambda groups: self._known[groups].synchronised_us)
        if self._known[fastest].is_better_than(known):
            loss_us = known.synchronised_us - self._known[fastest].synchronised_us
            self._overrated_us = max(self._overrated_us, self._promised_us + loss_us)
            self._promised_us = 0.0
            return Outcome.BACK, fastest
        # Every move asks for more gain than the one before: what differs from look to look by chance ends soon.
        least_us = max(_WORTHWHILE * 2**self._num_moves * now.synchronised_us, self._overrated_us)
        if best not in self._known and gain_us > least_us and gain_us * _PAID_BACK_AFTER_STEPS > move_us:
            self._num_moves, self._promised_us = self._num_moves + 1, gain_us
            return Outcome.MOVE, best
        return Outcome.KEEP, None

    def _knows_enough(self, *, has_shards: bool) -> bool:
        kinds = ("reduce_scatter", "all_gather") if has_shards else ("all_reduce",)
        curves = self.curves
        return all(kind in curves and curves[kind].is_enough for kind in kinds)

    def _forget_what_has_changed(self, now: Measurement) -> None:
        before = self.measurement
        # Under another plan other times say as much of the plan as of network and computation.
        if before is None or _sizes(before) != _sizes(now):
            return
        drifted = [kind for kind in _sizes(now) if _has_drifted(_usual_us(before, kind), _usual_us(now, kind))]
        for kind in drifted:
            self._windows[kind].clear()
        if drifted or _has_drifted(before.forward_us + before.backward_us, now.forward_us + now.backward_us):
            self._known.clear()
            self._num_moves, self._overrated_us = 0, 0.0


def _sizes(measurement: Measurement) -> dict[str, set[float]]:
    return {kind: {size for size, _ in samples} for kind, samples in measurement.samples.items() if samples}


def _usual_us(measurement: Measurement, kind: str) -> float:
    return median(time_us for _, time_us in measurement.samples[kind])


def _has_drifted(before_us: float, now_us: float) -> bool:
    return max(before_us, now_us) > _DRIFT * min(before_us, now_us)


def _rounded(time_us: float) -> float:
    """No clock is finer."""
    return round(time_us, 1)


def _move_us(plan: Plan, costs: MeasuredCosts) -> float:
    """What it takes to bring gradients and optimizer state to where another plan has them."""
    num_bytes = sum(bucket.num_bytes for bucket in plan.buckets)
    return (1 + _NUM_STATES) * float(costs.collective_us("all_gather", num_bytes))
