"""Chooses a plan offline, by a model of a step's time."""

from undertow.lab.planning.choose import Candidate, Choice, choose
from undertow.lab.planning.timing import StepModel, StepTiming, payload_of

__all__ = ["Candidate", "Choice", "StepModel", "StepTiming", "choose", "payload_of"]
