"""The cost of a collective as it was measured."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CostCurve:
    """Points (bytes, microseconds), by increasing bytes."""

    points: tuple[tuple[float, float], ...]
