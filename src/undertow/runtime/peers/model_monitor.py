"""One rank's knowledge of the other ranks of a model, and its messages to them."""

from __future__ import annotations

import contextlib
import math
import re
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

from undertow.config import SyncConfig
from undertow.runtime.peers import faults, patience
from undertow.runtime.peers.exit import raised
from undertow.runtime.peers.faults import Fault, State

# Timeouts of a collective (also of one whose connections another collective's timeout has closed: of several in flight, either
# may report first), of the stores that groups are made through, and of connecting. The kernel's messages about a connection are
# worded differently.
_TIME_IS_OVER = re.compile(
    r"time(d )?out waiting|operation timed out!|application timeout caused|(wait|socket|connect) timeout", re.IGNORECASE
)


class Speaker(Protocol):
    """The part of the ring that a model's monitor uses."""

    rank: int
    num_ranks: int
    fault: Fault | None
    condition: threading.Condition
    members: Any  # the monitors of this process, by number
    opened: dict[tuple[int, int], set[int]]  # ranks that have arrived at a meeting, by model and number of the meeting
    ended: dict[int, Fault]

    def say(self, kind: str, **content: Any) -> None: ...


class ModelMonitor:
    """This rank's activity in Undertow's groups of one model, whose ranks are all or some of the ring's.

    Each event writes its part; a query from another rank reads them.
    """

    def __init__(self, ring: Speaker, number: int, limits: SyncConfig) -> None:
        self.ring = ring
        self.number = number  # the same on every rank
        self.waits_for = ""  # empty if this rank does not wait
        self.since_s = 0.0
        self.limits = limits
        self.num_steps: Callable[[], int] = int  # synchronizations that this rank has completed
        self.is_idle: Callable[[], bool] = bool  # True if no step has begun since the last one
        self.module: Callable[[], Any] | None = None  # a weak reference
        self.thread = threading.get_ident()  # the training thread, as far as known: this one until another one trains
        self.fault: Fault | None = None  # of these groups alone
        # For each group, a function that interrupts it and one that destroys it.
        self.groups: list[tuple[Callable[[], object], Callable[[], object]]] = []
        self.asked_s = -math.inf  # when any rank last asked
        self.asking: State | None = None  # the state of the rank that asked
        self.states: dict[int, State] = {}
        self.is_told = True
        self.told = 0, -math.inf, ""  # step, time and text of the last report
        self.left: dict[int, Fault] = {}  # ranks that have closed the model
        self.borrowed: Any = None  # a group of the user's that is interrupted as well
        self._num_meetings = 0
        self._places: dict[int, tuple[float, str]] = {}  # each rank's position, with the time when it reported it
        self._num_state_gathers = 0  # gathers of an optimizer's state that this rank has begun
        # By rank, its last gather between two steps: number, synchronization.
        self._state_gathers: dict[int, tuple[int, int]] = {}

    @property
    def known_fault(self) -> Fault | None:
        return self.fault or self.ring.fault

    def waited_s(self) -> float:
        return time.monotonic() - self.since_s if self.waits_for else 0.0

    def state(self) -> State:
        """Returns this rank's current activity."""
        waits_for, frames = self.waits_for, faults.frames_of(self.thread)
        model = None if self.module is None else self.module()
        names: dict[int, str] = {}
        with contextlib.suppress(RuntimeError):  # the model may be changing at this moment
            names = {} if model is None else {id(module): name for name, module in model.named_modules()}
        return State(
            rank=self.ring.rank,
            step=self.num_steps(),
            doing=faults.activity(frames, names) + (faults.idle_since(self.num_steps()) if self.is_idle() else ""),
            waits_for=waits_for,
            waited_s=self.waited_s(),
            stack=faults.stack_lines(frames),
        )

    def is_asked_by(self, asking: State) -> bool:
        """Returns True if this rank should answer a rank that has waited long; if several ask at once, the first counts."""
        now_s = time.monotonic()
        if self.asking is not None and now_s < self.asked_s + patience.ANSWERS_S:
            self.states[asking["rank"]] = asking
            if asking["rank"] < self.asking["rank"]:
                self.asking = asking
            return False
        self.asking, self.asked_s, self.is_told = asking, now_s, False
        self.states = {asking["rank"]: asking}
        return True

    def meet(self, patience_s: float) -> None:
        """Waits until all ranks are about to create a group; latches a fault if one does not arrive in time."""
        ring, at = self.ring, (self.number, self._num_meetings)
        self._num_meetings += 1
        ring.say("opens", number=self.number, meeting=at[1])
        with ring.condition:
            ring.condition.wait_for(lambda: self.known_fault or len(ring.opened[at]) == ring.num_ranks, timeout=patience_s)
            late = set(range(ring.num_ranks)) - ring.opened.pop(at, set())
        if late and self.known_fault is None:
            self.fails(faults.never_came(sorted(late), patience_s))

    def places(self, mine: str) -> dict[int, str]:
        """Returns the positions that ranks report, `mine` included, from the ranks that ask at about the same time."""
        ring = self.ring
        ring.say("stands", number=self.number, text=mine)
        with ring.condition:
            earliest_s = time.monotonic() - patience.ANSWERS_S  # older reports answered another question
            self._places = {rank: place for rank, place in self._places.items() if place[0] >= earliest_s}
            ring.condition.wait_for(lambda: self.known_fault or len(self._places) == ring.num_ranks, timeout=patience.ANSWERS_S)
            places, self._places = self._places, {}
        return {rank: text for rank, (_, text) in places.items()}

    def hears_where(self, rank: int, text: str) -> None:
        """Called from the listening thread or this rank's own."""
        with self.ring.condition:
            self._places[rank] = time.monotonic(), text
            self.ring.condition.notify_all()

    def gathers_state(self) -> None:
        """Registers that this rank needs the other ranks' parts of an optimizer's state; between two steps it tells them."""
        self._num_state_gathers += 1
        if self.is_idle():
            self.ring.say("gathers", number=self.number, count=self._num_state_gathers, step=self.num_steps())

    def hears_of_gather(self, rank: int, count: int, step: int) -> None:
        self._state_gathers[rank] = count, step

    def missed_gather_of(self) -> int | None:
        """Returns a rank that gathers the state while this one has begun the next step without it: the two would deadlock."""
        if self.is_idle():
            return None
        here = self.num_steps()
        gathers = self._state_gathers.items()
        return next((rank for rank, (count, step) in gathers if step == here and count > self._num_state_gathers), None)

    def reason(self, error: BaseException) -> Fault | None:
        """Returns why a collective failed with `error` and tells all ranks, or None if the reason is not known."""
        ring, is_over = self.ring, _TIME_IS_OVER.search(str(error)) is not None
        with ring.condition:
            # After a timeout no rank need be gone. It must be reported before ranks speak whose connections the timeout has
            # closed.
            patience_s = patience.ANSWERS_S if is_over else patience.VERDICT_S
            ring.condition.wait_for(lambda: self.known_fault or self.left or ring.ended, timeout=patience_s)
            # A message that a rank exited normally cannot be overtaken by one that says it did not.
            fault = self.known_fault or next(iter((ring.ended | self.left).values()), None)
        if fault is None and is_over:
            fault = faults.timed_out(ring.rank, self._last_report())
        if fault is None:
            ring.say("failed", text=faults.text_of(error))
        elif self.known_fault is None:
            self.fails(fault)
        return fault

    def _last_report(self) -> str:
        """Returns the report on the wait that has just ended, or "" if there was none."""
        step, told_s, text = self.told
        return text if self.waits_for and step == self.num_steps() and told_s > self.since_s else ""

    def fails(self, fault: Fault) -> None:
        """Makes all ranks of this group give up."""
        self.ring.say(
            "stops", number=self.number, error=fault.kind.__name__, what=fault.what, remedy=fault.remedy, told=fault.told
        )

    def interrupt(self) -> None:
        """Interrupts every wait over one of the groups."""
        for interrupt, _ in tuple(self.groups):
            interrupt()

    def destroy(self) -> None:
        for _, destroy in tuple(self.groups):
            destroy()

    def close(self) -> None:
        """Leaves the model; if this rank is failing, tells the ranks that wait for it."""
        error = raised()
        text = "" if error is None or self.known_fault else faults.text_of(error)
        if self.known_fault is None:
            self.ring.say("left", number=self.number, steps=self.num_steps(), text=text)
        self.ring.members.pop(self.number, None)
