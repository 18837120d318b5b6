"""A communication stream in time: what every prediction counts with."""

from dataclasses import dataclass


@dataclass(slots=True)
class Lane:
    """Carries one collective at a time, in the order of sending.

    Plans, simulated steps, and exchanges of fragments are timed with it.
    """

    free_us: float = 0.0  # the time from which nothing is on its way

    def send(self, us: float, *, ready_us: float) -> tuple[float, float]:
        """Sends a collective that takes `us` and may start at `ready_us`; returns its start and
        its end."""
        start_us = max(self.free_us, ready_us)
        self.free_us = start_us + us
        return start_us, self.free_us
