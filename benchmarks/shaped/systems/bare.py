"""The bare model: compute alone, nothing is sent."""

from __future__ import annotations

from benchmarks.shaped.systems import Setting, System
from benchmarks.shaped.systems.plain import PlainSystem


def build(setting: Setting) -> System:
    return PlainSystem(setting.model, setting.model)
