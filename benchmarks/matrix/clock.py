"""Moments of a step: on the processor when the host is there, on a CUDA device when its current stream is.

A stream has waited for what the step's result depends on (gradients that are the mean), the host has not.
Imports nothing of the project: it runs in every virtual environment.
"""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch

Moment = Any  # seconds, or an event


class Clock(Protocol):
    def now(self) -> Moment:
        """Marks this moment; costs a microsecond or some, and waits for nothing."""

    def seconds(self, begin: Moment, end: Moment) -> float:
        """From one moment to another, once both are past (see `settle`)."""

    def settle(self) -> None:
        """Waits until everything that was asked for has been done."""


class HostClock:
    def now(self) -> float:
        return time.perf_counter()

    def seconds(self, begin: float, end: float) -> float:
        return end - begin

    def settle(self) -> None:
        pass


class DeviceClock:
    """Of the current CUDA device."""

    def now(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return begin.elapsed_time(end) / 1e3

    def settle(self) -> None:
        torch.cuda.synchronize()


def clock_of(device: torch.device) -> Clock:
    return DeviceClock() if device.type == "cuda" else HostClock()
