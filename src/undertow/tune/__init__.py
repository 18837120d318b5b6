"""Tries plans on the steps of a run, and explains the plan in force."""

from undertow.tune.explain import (
    Explanation,
    explanation,
    formats_text,
    progress_text,
    trial_text,
)
from undertow.tune.trials import Trial, Trials, Verdict

__all__ = [
    "Explanation",
    "Trial",
    "Trials",
    "Verdict",
    "explanation",
    "formats_text",
    "progress_text",
    "trial_text",
]
