"""Makes a profile for `undertow plan` and `undertow simulate` of the steps that were measured."""

from collections import defaultdict
from dataclasses import replace

from undertow.lab.cost import curve_from_samples
from undertow.lab.measurement import measurement_of
from undertow.lab.profile import Profile
from undertow.plan import Plan
from undertow.trace.measured import Measurements


def profile_of(
    measurements: Measurements,
    plan: Plan,
    *,
    strategy: str,
    wire: str | None = None,
    param_wire: str | None = None,
) -> Profile | None:
    """Returns the measurements as a profile under `plan`; None before there are any.

    Args:
        measurements: The steps and collectives that were measured.
        plan: The plan in force.
        strategy: "ddp", "zero1", "zero2" or "hybrid".
        wire: The format of gradients, "auto" or None.
        param_wire: The format of gathered parameters, or None.
    """
    samples: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    samples["all_reduce"] += measurements.all_reduces
    profile = None
    for steps in measurements.steps:
        measurement = measurement_of(steps)
        if measurement is None:
            continue
        profile = measurement.profile
        for kind, pairs in measurement.samples.items():
            samples[kind] += pairs
    if profile is None or not measurements.is_current:
        return None
    return replace(
        profile,
        strategy=strategy,
        wire=wire,
        param_wire=param_wire,
        groups=plan.groups,
        wires=plan.wires if any(plan.wires) else None,
        curves={kind: curve_from_samples(pairs) for kind, pairs in samples.items() if pairs},
    )
