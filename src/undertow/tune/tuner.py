"""Learns what a step costs, and decides once on the plan.

Reasons: docs/design/tuning.md.
"""

from collections.abc import Sequence
from dataclasses import replace

from undertow.cost import CostCurve, curve_from_samples
from undertow.plan import Choice, Plan, StepModel, choose
from undertow.profile import Profile
from undertow.tune.messages import Decision, Measurement, Outcome
from undertow.wire import AUTO

# A plan must be predicted to gain at least this share of the time until gradients are reduced to be
# worth its new buckets.
_WORTHWHILE = 0.005
# Processor time of a bucket where processors are what is short: the host packs, launches and binds
# it, and the backend's threads copy and add. 0.2 to 0.5 ms on the machine of docs/benchmarks.md.
_HOST_US = 200.0
# Larger models are not moved: every rank would hold gradients and state of all parameters for a
# moment, and a model may fit only because of sharding.
_MOST_MOVED_BYTES = 256 * 2**20


class Tuner:
    """The measurements of one set of parameters, and the plan that follows from them.

    Args:
        order: The order of the plans if the user wants another one than the gradients' order of
            arrival.
        wire: The format of gradients, "auto" or None.
        param_wire: The format of gathered parameters, or None.
        keeps_buckets: True chooses formats only.
    """

    def __init__(
        self,
        order: Sequence[int] | None = None,
        *,
        wire: str | None = None,
        param_wire: str | None = None,
        keeps_buckets: bool = False,
    ) -> None:
        self._measured: Profile | None = None
        self._order, self._keeps_buckets = order, keeps_buckets
        self._wire, self._param_wire = wire, param_wire
        # by kind of collective: bytes, microseconds
        self._samples: dict[str, list[tuple[float, float]]] = {}

    @property
    def curves(self) -> dict[str, CostCurve]:
        """Costs of collectives by kind."""
        return {kind: curve_from_samples(samples) for kind, samples in self._samples.items()}

    def learn(self, measurement: Measurement) -> None:
        """Takes over a measurement of the present plan."""
        for kind, samples in measurement.samples.items():
            self.learn_costs(kind, samples)
        self._measured = measurement.profile

    def forget(self) -> None:
        """Forgets the measured steps; what collectives cost stays."""
        self._measured = None

    def learn_costs(self, kind: str, samples: Sequence[tuple[float, float]]) -> None:
        """Adds samples of collectives of that kind."""
        self._samples.setdefault(kind, []).extend(samples)

    def profile(self, plan: Plan, *, strategy: str) -> Profile | None:
        """Returns the measurements as a profile under `plan`; None before there are any."""
        if self._measured is None:
            return None
        return replace(
            self._measured,
            strategy=strategy,
            wire=self._wire,
            param_wire=self._param_wire,
            groups=plan.groups,
            wires=plan.wires if any(plan.wires) else None,
            curves=self.curves,
        )

    def choice(self, plan: Plan, *, has_shards: bool) -> tuple[Choice, float] | None:
        """Returns the best plan with its table, and the time of `plan` by the same costs.

        None if too little was measured.
        """
        profile = self.profile(plan, strategy="zero1" if has_shards else "ddp")
        if profile is None:
            return None
        curves = [profile.curves.get(kind) for kind in kinds_needed(has_shards=has_shards)]
        if any(curve is None or not curve.is_enough for curve in curves):
            return None  # they do not show the cost of buckets of other sizes
        model = StepModel(
            params=profile.params,
            timing=profile.timing,
            costs=profile.costs(),
            has_shards=has_shards,
            param_wire=self._param_wire,
            bucket_us=bucket_us_of(profile),
            num_shards=plan.num_shards,
        )
        chosen = choose(
            model,
            profile.order if self._order is None else self._order,
            wire=wire_to_plan(profile, self._wire),
            groups=plan.groups if self._keeps_buckets else None,
        )
        return chosen, model.finish_us(plan.groups, plan.wires)

    def decide(self, plan: Plan, *, has_shards: bool) -> Decision:
        """Decides on the plan from the measurement."""
        found = self.choice(plan, has_shards=has_shards)
        if found is None:
            return Decision(outcome=Outcome.UNKNOWN)
        chosen, present_us = found
        best = chosen.best
        outcome = Outcome.MOVE
        if present_us - best.finish_us <= _WORTHWHILE * present_us:
            outcome = Outcome.KEEP
        elif has_shards and sum(spec.num_bytes for spec in plan.params) > _MOST_MOVED_BYTES:
            outcome = Outcome.TOO_LARGE
        return Decision(
            outcome=outcome,
            present_us=present_us,
            predicted_us=best.finish_us,
            groups=best.groups if outcome is Outcome.MOVE else None,
            wires=best.wires if outcome is Outcome.MOVE else (),
        )


def bucket_us_of(profile: Profile) -> float:
    """Returns the processor time that a bucket costs in backward, in microseconds."""
    return _HOST_US if profile.is_bound_by_processors else profile.launch_us or 0.0


def wire_to_plan(profile: Profile, wire: str | None) -> str | None:
    """Returns the setting, or full width instead of "auto" if processors were the bottleneck of the
    measured run: encoding takes more of their time."""
    return None if wire == AUTO and profile.is_bound_by_processors else wire


def kinds_needed(*, has_shards: bool) -> tuple[str, ...]:
    """Returns the collectives of a step."""
    return ("reduce_scatter", "all_gather") if has_shards else ("all_reduce",)
