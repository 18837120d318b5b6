"""Tries plans on the steps of a run, and explains the plan in force."""

from undertow.tune.explain import Explanation, explanation
from undertow.tune.trials import Trial, Trials, Verdict, formats_text

__all__ = ["Explanation", "Trial", "Trials", "Verdict", "explanation", "formats_text"]
