"""Measures the first steps of a run, and chooses its plan."""

from undertow.tune.explain import Explanation, explanation, table_of_choice
from undertow.tune.messages import (
    Decision,
    Measurement,
    Outcome,
    array_of_records,
    decision_from_array,
    measurement_from_array,
)
from undertow.tune.tuner import Tuner, bucket_us_of, wire_to_plan

__all__ = [
    "Decision",
    "Explanation",
    "Measurement",
    "Outcome",
    "Tuner",
    "array_of_records",
    "bucket_us_of",
    "decision_from_array",
    "explanation",
    "measurement_from_array",
    "table_of_choice",
    "wire_to_plan",
]
