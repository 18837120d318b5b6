"""Chooses a plan from measurements, and decides when to check again."""

from undertow.tune.explain import Explanation, explanation
from undertow.tune.messages import (
    Decided,
    Decision,
    Measurement,
    Outcome,
    array_of_records,
    decision_from_array,
    measurement_from_array,
    measurement_of_one_rank,
)
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
