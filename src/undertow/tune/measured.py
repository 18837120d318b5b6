"""Makes a profile for `undertow plan` and `undertow simulate` of the measured steps."""

from collections.abc import Sequence
from dataclasses import replace

from undertow.cost import CostCurve, curve_from_samples
from undertow.plan import Plan
from undertow.profile import Profile
from undertow.tune.measurement import Measurement


class Measured:
    """The measurements of one set of parameters.

    Args:
        wire: The format of gradients, "auto" or None.
        param_wire: The format of gathered parameters, or None.
    """

    def __init__(self, *, wire: str | None = None, param_wire: str | None = None) -> None:
        self._profile: Profile | None = None
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
        self._profile = measurement.profile

    def forget(self) -> None:
        """Forgets the measured steps, but not the costs of collectives."""
        self._profile = None

    def learn_costs(self, kind: str, samples: Sequence[tuple[float, float]]) -> None:
        """Adds samples of collectives of that kind."""
        self._samples.setdefault(kind, []).extend(samples)

    def profile(self, plan: Plan, *, strategy: str) -> Profile | None:
        """Returns the measurements as a profile under `plan`; None before there are any."""
        if self._profile is None:
            return None
        return replace(
            self._profile,
            strategy=strategy,
            wire=self._wire,
            param_wire=self._param_wire,
            groups=plan.groups,
            wires=plan.wires if any(plan.wires) else None,
            curves=self.curves,
        )
