"""Tries plans on the steps of a run, measures what profiles need, and explains the plan."""

from undertow.tune.explain import Explanation, explanation
from undertow.tune.measured import Measured
from undertow.tune.measurement import Measurement, array_of_records, measurement_from_array
from undertow.tune.trials import Trials, Verdict, formats_text

__all__ = [
    "Explanation",
    "Measured",
    "Measurement",
    "Trials",
    "Verdict",
    "array_of_records",
    "explanation",
    "formats_text",
    "measurement_from_array",
]
