"""A step without running it: the runtime's schedule and tracker, driven by a clock and a cost model."""

from __future__ import annotations
