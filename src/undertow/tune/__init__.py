"""Chooses a plan from measurements, and decides when to check again."""

from undertow.tune.decision import Decided, Decision, Outcome, decision_from_array
from undertow.tune.explain import Explanation, explanation
from undertow.tune.measurement import Measurement, array_of_records, measurement_from_array, measurement_of_one_rank
from undertow.tune.tuner import Tuner

__all__ = [
    "Decided",
    "Decision",
    "Explanation",
    "Measurement",
    "Outcome",
    "Tuner",
    "array_of_records",
    "decision_from_array",
    "explanation",
    "measurement_from_array",
    "measurement_of_one_rank",
]
