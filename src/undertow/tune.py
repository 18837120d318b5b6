"""Chooses a plan from what was measured, and says when to look again."""

from __future__ import annotations
