"""What one rank knows of the ranks of a model, and what it says to them."""

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

# Of a collective that has lasted for the timeout of its group, of one whose connections another one's timeout has closed (of
# several under way either may be the first), of the stores by which groups are made, and of connecting. The kernel's own words,
# of a connection, are others.
_TIME_IS_OVER = re.compile(
    r"time(d )?out waiting|operation timed out!|application timeout caused|(wait|socket|connect) timeout", re.IGNORECASE
)


class Speaker(Protocol):
    """The ring, as far as a model speaks over it."""

    rank: int
    num_ranks: int
    fault: Fault | None
    condition: threading.Condition
    members: Any  # those of this process, by their numbers
    opened: dict[tuple[int, int], set[int]]  # who has come to a group, by model and meeting
    ended: dict[int, Fault]

    def say(self, kind: str, **content: Any) -> None: ...


class ModelMonitor:
    """Groups of ours of one model, whose ranks are all of the ring or some: what this rank is doing there.

    Written where things happen, read when somebody asks.
    """

    def __init__(self, ring: Speaker, number: int, limits: SyncConfig) -> None:
        self.ring = ring
        self.number = number  # the same on every rank
        self.waits_for = ""  # empty where this rank does not wait
        self.since_s = 0.0
        self.limits = limits
        self.num_steps: Callable[[], int] = int  # synchronizations that this rank has completed
        self.is_idle: Callable[[], bool] = bool  # whether no step has begun since the last one
        self.module: Callable[[], Any] | None = None  # a weak reference
        self.thread = threading.get_ident()  # which trains, as far as is known: this one until another one does
        self.fault: Fault | None = None  # of these groups alone
        self.groups: list[tuple[Callable[[], object], Callable[[], object]]] = []  # what interrupts each, and destroys it
        self.asked_s = -math.inf  # when ranks were last asked, by anybody
        self.asking: State | None = None  # who has asked
        self.states: dict[int, State] = {}
        self.is_told = True
        self.told = 0, -math.inf, ""  # in which step, when, and what was reported last
        self.left: dict[int, Fault] = {}  # ranks that have closed the model
        self.borrowed: Any = None  # a group of the user's, to be interrupted as well
        self._num_meetings = 0
        self._places: dict[int, tuple[float, str]] = {}  # since when ranks stand there
        self._num_state_gathers = 0  # of an optimizer's state, that this rank has begun
        self._state_gathers: dict[int, tuple[int, int]] = {}  # by rank, its last one between two steps: number, synchronization

    @property
    def known_fault(self) -> Fault | None:
        return self.fault or self.ring.fault

    def waited_s(self) -> float:
        return time.monotonic() - self.since_s if self.waits_for else 0.0

    def state(self) -> State:
        """What this rank is doing."""
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
        """A rank has waited for long. Whether this rank should answer; of several that ask at once, the first one counts."""
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
        """Returns when all ranks have come to a group that is about to be made, or with a fault where one has not in time."""
        ring, at = self.ring, (self.number, self._num_meetings)
        self._num_meetings += 1
        ring.say("opens", number=self.number, meeting=at[1])
        with ring.condition:
            ring.condition.wait_for(lambda: self.known_fault or len(ring.opened[at]) == ring.num_ranks, timeout=patience_s)
            late = set(range(ring.num_ranks)) - ring.opened.pop(at, set())
        if late and self.known_fault is None:
            self.fails(faults.never_came(sorted(late), patience_s))

    def places(self, mine: str) -> dict[int, str]:
        """Where each rank stands, in its words, `mine` among them: of those that ask as well, and soon."""
        ring = self.ring
        ring.say("stands", number=self.number, text=mine)
        with ring.condition:
            earliest_s = time.monotonic() - patience.ANSWERS_S  # what is older was said about something else
            self._places = {rank: place for rank, place in self._places.items() if place[0] >= earliest_s}
            ring.condition.wait_for(lambda: self.known_fault or len(self._places) == ring.num_ranks, timeout=patience.ANSWERS_S)
            places, self._places = self._places, {}
        return {rank: text for rank, (_, text) in places.items()}

    def hears_where(self, rank: int, text: str) -> None:
        """From the thread that listens, or this rank's own."""
        with self.ring.condition:
            self._places[rank] = time.monotonic(), text
            self.ring.condition.notify_all()

    def gathers_state(self) -> None:
        """This rank needs the other ranks' parts of an optimizer's state; between two steps they are told of it."""
        self._num_state_gathers += 1
        if self.is_idle():
            self.ring.say("gathers", number=self.number, count=self._num_state_gathers, step=self.num_steps())

    def hears_of_gather(self, rank: int, count: int, step: int) -> None:
        self._state_gathers[rank] = count, step

    def missed_gather_of(self) -> int | None:
        """A rank that gathers the state, where this one has begun the next step without it: they wait for each other."""
        if self.is_idle():
            return None
        here = self.num_steps()
        gathers = self._state_gathers.items()
        return next((rank for rank, (count, step) in gathers if step == here and count > self._num_state_gathers), None)

    def reason(self, error: BaseException) -> Fault | None:
        """Why a collective has failed with `error`; all ranks learn of it. None where it is not known."""
        ring, is_over = self.ring, _TIME_IS_OVER.search(str(error)) is not None
        with ring.condition:
            # Nobody need be gone where the time is over. And it is told before the ranks speak whose connections that has closed.
            patience_s = patience.ANSWERS_S if is_over else patience.VERDICT_S
            ring.condition.wait_for(lambda: self.known_fault or self.left or ring.ended, timeout=patience_s)
            # A word that one has ended well may be overtaken by none that it has not.
            fault = self.known_fault or next(iter((ring.ended | self.left).values()), None)
        if fault is None and is_over:
            fault = faults.timed_out(ring.rank, self._last_report())
        if fault is None:
            ring.say("failed", text=faults.text_of(error))
        elif self.known_fault is None:
            self.fails(fault)
        return fault

    def _last_report(self) -> str:
        """Of the wait that has just ended; empty where nothing was told of it."""
        step, told_s, text = self.told
        return text if self.waits_for and step == self.num_steps() and told_s > self.since_s else ""

    def fails(self, fault: Fault) -> None:
        """All ranks of this group give up."""
        self.ring.say(
            "stops", number=self.number, error=fault.kind.__name__, what=fault.what, remedy=fault.remedy, told=fault.told
        )

    def interrupt(self) -> None:
        """Has whoever waits over one of the groups wake up."""
        for interrupt, _ in tuple(self.groups):
            interrupt()

    def destroy(self) -> None:
        """Destroys the groups."""
        for _, destroy in tuple(self.groups):
            destroy()

    def close(self) -> None:
        """This rank leaves; it may be about to fail, which others are told if they wait for it."""
        error = raised()
        text = "" if error is None or self.known_fault else faults.text_of(error)
        if self.known_fault is None:
            self.ring.say("left", number=self.number, steps=self.num_steps(), text=text)
        self.ring.members.pop(self.number, None)
