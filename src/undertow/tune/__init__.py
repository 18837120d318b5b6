"""Tries plans on the steps of a run, and explains the plan in force."""

from undertow.tune.explain import Explanation, explanation
from undertow.tune.trials import Trials, Verdict, formats_text

__all__ = ["Explanation", "Trials", "Verdict", "explanation", "formats_text"]
