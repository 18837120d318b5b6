"""The request to stop, which a signal makes on some rank and all ranks follow in the same step.

Reasons: docs/design/buckets.md.
"""

from __future__ import annotations

import time
import warnings

from undertow.engine.round import Round
from undertow.plan.facts import Fact
from undertow.ranks.transport import OwnGroup


class StopRequest:
    """The request of one model. A signal handler calls `ask`; other ranks are told in a trailer.

    On the host, all ranks read it when that synchronization ends. On a device they read it later;
    then they tell it too, and all follow it at the end of the first synchronization in which every
    rank has told it. `is_told_elsewhere`: the group has not all ranks that must stop together. Then
    exchanges of replicas tell it, or the places of a mesh (`told_elsewhere`).
    """

    def __init__(self, group: OwnGroup, *, is_told_elsewhere: bool) -> None:
        self.is_requested = False  # on all ranks, from the same step on
        self.is_closed = False  # the model is no longer synchronized
        self.grace_s: float | None = None  # after a signal, if the user has told it
        self._group, self._is_told_elsewhere = group, is_told_elsewhere
        self._is_here = False  # a signal has arrived on this rank
        self.is_heard_of = False  # on any rank, as far as this one knows
        self._synchronized_s = time.monotonic()

    def ask(self) -> None:
        """Called by a signal handler, between any two instructions of the main thread."""
        self._is_here = self.is_heard_of = True

    def follow_grace(self, seconds: float) -> None:
        """Warns from now on if ranks could not be told within `seconds`."""
        self.grace_s, self._synchronized_s = seconds, time.monotonic()

    def follow_alone(self) -> None:
        """Called on a rank that has no other ranks to tell."""
        self.is_requested |= self._is_here

    @property
    def is_pending(self) -> bool:
        """True if this rank knows of a signal that not all ranks follow yet."""
        return self.is_heard_of and not self.is_requested

    @property
    def is_told(self) -> bool:
        """True if the trailer of the next synchronization tells the others."""
        return self.is_pending and not self._is_told_elsewhere

    def round_ends(self, ended: Round) -> None:
        """Called after every synchronization, also one that has failed."""
        if self._is_told_elsewhere:
            return
        found = ended.found
        self._watch_time()
        if self.is_requested or not found.readings or not found.reported(Fact.STOPPING):
            return
        self.is_heard_of = True
        told_by = found.reported(Fact.STOPPING, overdue=False)
        self.is_requested = self._group.hardware.is_host or told_by == sorted(self._group.names)

    def told_elsewhere(self, *, is_told: bool) -> None:
        """Called after an exchange of replicas, or when the places of a mesh have told each other
        after a synchronization, in the same step on every rank."""
        self._watch_time()
        self.is_requested |= is_told

    def _watch_time(self) -> None:
        if self.grace_s is None:
            return
        before_s, self._synchronized_s = self._synchronized_s, time.monotonic()
        took_s = self._synchronized_s - before_s
        if took_s > self.grace_s:
            warnings.warn(
                f"{took_s:.1f} s passed between two synchronizations: a signal may end this "
                "process before all ranks know of it.\n"
                f"  stop_on_signal(seconds={self.grace_s:g}), rank {self._group.name}\n"
                "  Ask for more time between the signal and the end of the process, or synchronize "
                "more often.",
                stacklevel=2,
            )
            self.grace_s = None  # once
