"""The bare model: compute alone, nothing is sent."""

from __future__ import annotations

from benchmarks.matrix.systems import Setting, System
from benchmarks.matrix.systems.plain import PlainSystem


def build(setting: Setting) -> System:
    return PlainSystem(setting.model, setting.model, collectives=0)
