"""Messages between ranks outside of the collectives, so that no rank waits for one that will not arrive.

    Ring           the ranks of a process group: messages travel both ways round, and each rank forwards new ones
    ModelMonitor   the process groups of one model: its current wait, and the reason why it cannot continue

A fault is latched here before the groups are interrupted, so that a thread whose collective breaks finds the reason.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import re
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from reprlib import repr as brief
from typing import Any

from undertow.config import SyncConfig
from undertow.errors import PeerFailed, RankLost, UndertowError
from undertow.foreign import parsed_json
from undertow.runtime.peers import faults, patience
from undertow.runtime.peers.faults import Activity, Fault, State
from undertow.runtime.peers.neighbor import Neighbor

Message = dict[str, Any]

_log = logging.getLogger("undertow")
_MAX_SEEN = 4096
# Timeouts of a collective (also of one whose connections another collective's timeout has closed: of several in flight, either
# may report first), of the stores that groups are made through, and of connecting. The kernel's messages about a connection are
# worded differently.
_TIME_IS_OVER = re.compile(
    r"time(d )?out waiting|operation timed out!|application timeout caused|(wait|socket|connect) timeout", re.IGNORECASE
)


class Ring:
    """This rank's view of the ranks of a group. `wake` makes the thread that looks at the models look at once."""

    def __init__(self, neighbors: Sequence[Neighbor], *, rank: int, num_ranks: int, wake: Callable[[], object]) -> None:
        self.rank = rank
        self.num_ranks = num_ranks
        self.neighbors = list(neighbors)
        self.wake = wake
        self.condition = threading.Condition(threading.RLock())
        self.fault: Fault | None = None  # of every group
        self.members: weakref.WeakValueDictionary[int, ModelMonitor] = weakref.WeakValueDictionary()
        self.left: dict[int, Fault] = {}  # ranks whose process has ended without an error that is fatal to the others
        self._num_members = 0  # models that this rank has created
        self._early: defaultdict[int, list[Message]] = defaultdict(list)  # about models that this rank has not created yet
        self._said = itertools.count()
        self._seen: dict[str, None] = {}

    def join(self, limits: SyncConfig) -> ModelMonitor:
        """Registers a new model of these ranks; each of them calls it, in the same order."""
        with self.condition:
            member = ModelMonitor(self, self._num_members, limits)
            self._num_members += 1
            self.members[member.number] = member
            for message in self._early.pop(member.number, ()):
                self._handle(message)
        self.wake()  # there is something to watch now
        return member

    def say(self, kind: str, **content: Any) -> None:
        """Tells every rank, including this one. A message about one model has its `number`."""
        self._spread({"kind": kind, "from": self.rank, "id": f"{self.rank}/{next(self._said)}", **content})

    def says_failed(self, error: BaseException) -> None:
        self.say("stops", **faults.failed(self.rank, error).content())

    def hear(self, source: Neighbor, lines: Sequence[bytes], is_there: bool) -> None:
        """Handles the messages of a neighbor, lines of JSON, and the end of the connection to it."""
        for line in lines:
            try:
                self._spread(parsed_json(line), source)
            except Exception as error:  # a malformed message can raise any exception
                reason = f"{type(error).__name__}: {brief(str(error))}"
                _log.warning("a message of another rank made no sense and is dropped (%s): %s", reason, brief(line))
        if is_there:
            return
        with self.condition:
            if source not in self.neighbors:  # this rank has left the ring
                return
            self.neighbors.remove(source)
        source.close()
        if source.rank not in self.left and self.fault is None:
            self.say("stops", **faults.lost(source.rank).content())

    def _spread(self, message: Message, source: Neighbor | None = None) -> None:
        """Forwards a new message before handling it, because this process may not live long."""
        number = str(message.get("id"))
        with self.condition:
            if number in self._seen:
                return
            self._seen[number] = None
            if len(self._seen) > _MAX_SEEN:
                del self._seen[next(iter(self._seen))]
        line = json.dumps(message).encode()
        for neighbor in tuple(self.neighbors):
            if neighbor is not source:
                neighbor.send(line)
        self._handle(message)
        with self.condition:
            self.condition.notify_all()

    def _handle(self, message: Message) -> None:
        kind, rank, number = message["kind"], message["from"], message.get("number")
        if type(rank) is not int or rank not in range(self.num_ranks):
            raise ValueError(f"there is no rank {brief(rank)}")
        with self.condition:  # `join` must not create the model between the look for it and the note
            member = None if number is None else self.members.get(number)
            is_early = number is not None and number >= self._num_members
            if is_early and kind in ("opens", "stops", "left"):
                self._early[int(message["number"])].append(message)
        if number is not None and member is None:
            if is_early and kind == "asks":  # so that a waiting rank learns that this one has not created the model
                thread = next((other.here.thread for other in list(self.members.values())), threading.main_thread().ident or 0)
                self.say("does", number=number, **faults.without_model(self.rank, thread))
        elif kind == "stops":
            self.latch(faults.fault_from(message), member)
        elif kind == "left":
            fault = (member or self).left[rank] = faults.fault_from(message)
            for other in list(self.members.values()):
                if fault.kind is PeerFailed and other.borrowed is not None:
                    self.latch(fault, other)  # its connections last as long as that process
        elif member is not None:
            member.handle(kind, rank, message)

    def latch(self, fault: Fault, member: ModelMonitor | None = None) -> None:
        """Latches the first fault, of one model or of all, wakes all waits, and has those over groups interrupted."""
        latching = member or self
        with self.condition:
            if self.fault is not None or latching.fault is not None:
                return
            latching.fault = fault
            self.condition.notify_all()
        for broken in list(self.members.values()) if member is None else [member]:
            broken.interrupt_s = time.monotonic() + patience.GRACE_S
        self.wake()

    def leave(self, error: BaseException | None) -> None:
        """Sends this rank's last message before the process ends, once."""
        if self.fault is not None or self.rank in self.left:
            return
        # All ranks are about to raise an UndertowError themselves, so it is fatal only if a rank waits for this one.
        if error is not None and not isinstance(error, UndertowError):
            self.says_failed(error)
        else:
            num_steps = max((member.here.num_steps() for member in list(self.members.values())), default=0)
            self.say("left", **faults.left(self.rank, error, num_steps).content())


@dataclass(slots=True)
class _Peer:
    """The last messages of one rank about a model."""

    num_meetings: int = 0  # groups that it has been about to create
    num_gathers: int = 0  # gathers of an optimizer's state that it has begun, as far as known
    gathers_at: int = -1  # its completed synchronizations at the last one that it has begun between two steps
    place: str = ""  # its position
    placed_s: float = -math.inf  # when it reported that


@dataclass(slots=True)
class _Inquiry:
    """A question of ranks that have waited long, for what every rank does."""

    asking: State  # of the lowest rank of those that have asked
    states: dict[int, State]  # all answers
    asked_s: float

    @property
    def has_answers(self) -> bool:
        return time.monotonic() > self.asked_s + patience.ANSWERS_S


class ModelMonitor:
    """This rank's knowledge of the other ranks of a model, which are all or some of the ring's, and its messages to them."""

    def __init__(self, ring: Ring, number: int, limits: SyncConfig) -> None:
        self.ring = ring
        self.number = number  # the same on every rank
        self.limits = limits
        self.here = Activity()
        self.fault: Fault | None = None  # of these groups alone
        self.interrupt_s = math.inf  # when waits over the groups are interrupted
        self.groups: list[weakref.ref[Any]] = []  # each an OwnGroup
        self.borrowed: Any = None  # a group of the user's that is interrupted as well
        self.left: dict[int, Fault] = {}  # ranks that have closed the model
        self.inquiry: _Inquiry | None = None
        self.told = 0, -math.inf, ""  # step, time and text of the last report
        self._peers = [_Peer() for _ in range(ring.num_ranks)]

    @property
    def known_fault(self) -> Fault | None:
        return self.fault or self.ring.fault

    def gone(self) -> dict[int, Fault]:
        """Returns the ranks that have left, and what this means for a wait of this rank.

        A model's last message replaces a process's, because it tells the progress.
        """
        return {
            rank: faults.gathers_alone(self.ring.rank, missed_by=rank, told=fault.what)
            if self.here.wait[0] == faults.STATE and fault.kind is RankLost
            else fault
            for rank, fault in (self.ring.left | self.left).items()
        }

    def failures(self) -> list[Fault]:
        """Returns the errors of ranks that have left, which count only if this rank waits for them."""
        return [fault for fault in self.gone().values() if fault.kind is PeerFailed]

    def say(self, kind: str, **content: Any) -> None:
        self.ring.say(kind, number=self.number, **content)

    def fails(self, fault: Fault) -> None:
        """Makes all ranks of this group give up."""
        self.say("stops", **fault.content())

    def handle(self, kind: str, rank: int, message: Message) -> None:
        peer = self._peers[rank]
        match kind:
            case "opens":
                peer.num_meetings += 1
            case "stands":
                peer.place, peer.placed_s = str(message["text"]), time.monotonic()
            case "gathers":
                peer.num_gathers, peer.gathers_at = int(message["count"]), int(message["step"])
            case "asks":
                self._is_asked(faults.state_from(message), rank)
            case "does" if self.inquiry is not None:
                state = faults.state_from(message)
                self.inquiry.states[state["rank"]] = state

    def _is_asked(self, asking: State, rank: int) -> None:
        """Answers a rank that has waited long; if several ask at once, the first counts."""
        if self.inquiry is None or self.inquiry.has_answers:
            self.inquiry = _Inquiry(asking, {}, time.monotonic())
            if rank != self.ring.rank:
                self.say("does", **self.here.state(self.ring.rank))
            for neighbor in self.ring.neighbors:
                if neighbor.is_stopped():  # it cannot answer for itself
                    self.say("does", **faults.stopped(neighbor.rank))
        self.inquiry.asking = min(self.inquiry.asking, asking, key=lambda state: state["rank"])
        self.inquiry.states[asking["rank"]] = asking

    def meet(self, patience_s: float) -> None:
        """Waits until all ranks are about to create a group; latches a fault if one does not arrive in time."""
        self.say("opens")
        number = self._peers[self.ring.rank].num_meetings

        def late() -> list[int]:
            return [rank for rank, peer in enumerate(self._peers) if peer.num_meetings < number]

        self._wait_for(lambda: not late(), patience_s)
        if late() and self.known_fault is None:
            self.fails(faults.never_came(late(), patience_s))

    def places(self, mine: str) -> dict[int, str]:
        """Returns the positions that ranks report, `mine` included, from the ranks that ask at about the same time."""
        earliest_s = time.monotonic() - patience.ANSWERS_S  # older reports answered another question
        self.say("stands", text=mine)

        def placed() -> dict[int, str]:
            return {rank: peer.place for rank, peer in enumerate(self._peers) if peer.placed_s >= earliest_s}

        self._wait_for(lambda: len(placed()) == self.ring.num_ranks, patience.ANSWERS_S)
        found = placed()
        for peer in self._peers:
            peer.placed_s = -math.inf
        return found

    def _wait_for(self, arrived: Callable[[], object], patience_s: float) -> None:
        """Waits until a message makes `arrived` true or brings a fault."""
        with self.ring.condition:
            self.ring.condition.wait_for(lambda: self.known_fault or arrived(), timeout=patience_s)

    def gathers_state(self) -> None:
        """Registers that this rank needs the other ranks' parts of an optimizer's state; between two steps it tells them."""
        own = self._peers[self.ring.rank]
        own.num_gathers += 1
        if self.here.is_idle():
            self.say("gathers", count=own.num_gathers, step=self.here.num_steps())

    def _missed_gather_of(self) -> int | None:
        """Returns a rank that gathers the state while this one has begun the next step without it: the two would deadlock."""
        if self.here.is_idle():
            return None
        num_mine, step = self._peers[self.ring.rank].num_gathers, self.here.num_steps()
        return next(
            (rank for rank, peer in enumerate(self._peers) if peer.gathers_at == step and peer.num_gathers > num_mine), None
        )

    def reason(self, error: BaseException) -> Fault | None:
        """Returns why a collective failed with `error` and tells all ranks, or None if the reason is not known."""
        is_over = _TIME_IS_OVER.search(str(error)) is not None
        # After a timeout no rank need be gone. It must be reported before ranks speak whose connections the timeout has closed.
        self._wait_for(self.gone, patience.ANSWERS_S if is_over else patience.VERDICT_S)
        # A message that a rank exited normally cannot be overtaken by one that says it did not.
        fault = self.known_fault or next(iter(self.gone().values()), None)
        if fault is None and is_over:
            step, told_s, text = self.told
            waits_for, since_s = self.here.wait
            is_about_this = waits_for and step == self.here.num_steps() and told_s > since_s
            fault = faults.timed_out(self.ring.rank, text if is_about_this else "")
        if fault is None:
            self.ring.says_failed(error)
        elif self.known_fault is None:
            self.fails(fault)
        return fault

    def pause_s(self) -> float:
        if self.interrupt_s < math.inf:
            return max(0.0, self.interrupt_s - time.monotonic())
        if self.inquiry is not None and self.told[1] < self.inquiry.asked_s:
            return 0.1 * patience.ANSWERS_S
        return min(patience.TICK_S, 0.25 * self.limits.stall_warning_s, 0.25 * self.limits.stall_timeout_s)

    def look(self) -> None:
        """Interrupts groups that cannot continue. Otherwise checks whether this rank has waited too long."""
        now_s, waited_s, failures = time.monotonic(), self.here.waited_s(), self.failures()
        if self.known_fault is not None:
            if now_s >= self.interrupt_s:
                self.interrupt_s = math.inf
                self.interrupt()
            return
        # This rank may be about to raise the same error, and the failed process may take long to end.
        if failures and min(waited_s, now_s - failures[0].known_s) > patience.ENDS_S:
            self.fails(failures[0])
        if waited_s > patience.WAITS_S and (alone := self._missed_gather_of()) is not None:
            self.fails(faults.gathers_alone(alone, missed_by=self.ring.rank))
        inquiry = self.inquiry
        if inquiry is not None and inquiry.has_answers and self.told[1] < inquiry.asked_s:
            self.told = inquiry.asking["step"], now_s, self.report(inquiry)
            faults.tell(self.told[-1])
        self._look_at_stall(now_s, waited_s)

    def _look_at_stall(self, now_s: float, waited_s: float) -> None:
        inquiry, warning_s = self.inquiry, self.limits.stall_warning_s
        is_over = waited_s > self.limits.stall_timeout_s
        if waited_s < warning_s and not is_over:
            return
        pause_s = 2 * patience.ANSWERS_S if is_over else max(warning_s, 2 * patience.ANSWERS_S)
        if inquiry is None or now_s > inquiry.asked_s + pause_s:
            self.say("asks", **self.here.state(self.ring.rank))
        elif inquiry.has_answers:
            gone = self.gone()
            if gone and faults.late_ranks(inquiry.asking, inquiry.states, ranks=range(self.ring.num_ranks)) <= gone.keys():
                self.fails(next(iter(gone.values())))  # if others are late, the wait may be for another rank
            elif is_over:
                self.fails(faults.stalled(self.report(inquiry)))

    def report(self, inquiry: _Inquiry) -> str:
        """Returns the report for the rank that asked, from all answers."""
        return faults.stall_text(
            inquiry.asking,
            inquiry.states,
            {rank: fault.what for rank, fault in self.gone().items()},
            ranks=range(self.ring.num_ranks),
        )

    def interrupt(self) -> None:
        """Interrupts every wait over one of the groups."""
        for group in filter(None, [ref() for ref in self.groups]):
            group.interrupt()

    def destroy(self) -> None:
        for group in filter(None, [ref() for ref in self.groups]):
            group.close()

    def close(self) -> None:
        """Leaves the model; if this rank is failing, tells the ranks that wait for it."""
        if self.known_fault is None:
            self.say("left", **faults.left(self.ring.rank, faults.raised(), self.here.num_steps()).content())
        elif self.interrupt_s < math.inf:  # from now on nobody looks at this model
            self.interrupt()
        self.ring.members.pop(self.number, None)
