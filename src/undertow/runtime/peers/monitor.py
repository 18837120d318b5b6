"""Messages between ranks outside of the collectives, so that no rank waits for one that will not arrive.

    PeerMonitor    one for a process: a thread that sleeps until a neighbor sends, a neighbor dies, or a wait is long
    Ring           the ranks of a process group: messages travel both ways round, and each rank forwards new ones
    ModelMonitor   the process groups of one model: its current wait, and the reason why it cannot continue

A fault is latched here before the groups are interrupted, so that a thread whose collective breaks finds the reason.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import logging
import math
import multiprocessing.util
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from reprlib import repr as brief
from typing import Any

from undertow.config import SyncConfig
from undertow.errors import PeerFailed, UndertowError
from undertow.runtime.peers import faults, patience
from undertow.runtime.peers.exit import raised, tell_before_end
from undertow.runtime.peers.faults import Fault, State
from undertow.runtime.peers.leaked_groups import FREEING
from undertow.runtime.peers.model_monitor import ModelMonitor
from undertow.runtime.peers.ring import Neighbor, close_all

__all__ = ["GUARD", "Ring"]

Message = dict[str, Any]
_Heard = tuple["Ring", Neighbor, list[Message], bool]

_log = logging.getLogger("undertow")
_MAX_SEEN = 4096


class Ring:
    """This rank's view of the ranks of a group."""

    def __init__(self, neighbors: Sequence[Neighbor], *, rank: int, num_ranks: int, world: object) -> None:
        self.rank = rank
        self.num_ranks = num_ranks
        self.neighbors = list(neighbors)
        # torch.distributed's default group. If a stuck thread held it until the interpreter ended, nothing is left to do.
        self.world: Callable[[], object] = weakref.ref(world, lambda _: None if GUARD is None else GUARD.ends(self))
        self.condition = threading.Condition(threading.RLock())
        self.fault: Fault | None = None  # of every group
        self.members: weakref.WeakValueDictionary[int, ModelMonitor] = weakref.WeakValueDictionary()
        self.opened: dict[tuple[int, int], set[int]] = {}  # ranks that have arrived at a meeting, by model and number
        self.ended: dict[int, Fault] = {}  # ranks whose process has ended without an error that is fatal to the others
        self._failed_s = math.inf  # since when a rank has ended with an error that all ranks may be about to raise
        self._num_members = 0  # models that this rank has created
        self._early: dict[int, list[Message]] = {}  # messages about models that this rank has not created yet
        self._said = itertools.count()
        self._seen: dict[str, None] = {}
        self._has_left = False

    def join(self, limits: SyncConfig) -> ModelMonitor:
        """Registers a new model of these ranks; each of them calls it, in the same order."""
        with self.condition:
            member = ModelMonitor(self, self._num_members, limits)
            self._num_members += 1
            self.members[member.number] = member
            for message in self._early.pop(member.number, ()):
                self.hear(message)
        GUARD.wake()  # there is something to watch now
        return member

    def say(self, kind: str, **content: Any) -> None:
        """Tells every rank, including this one."""
        message = {"kind": kind, "from": self.rank, "id": f"{self.rank}/{next(self._said)}", **content}
        with self.condition:
            self._seen[message["id"]] = None
        for neighbor in tuple(self.neighbors):
            neighbor.send(message)
        self.hear(message)

    def receive(self, message: Message, source: Neighbor) -> None:
        """Forwards a new message before handling it, because this process may not live long."""
        number = str(message.get("id"))
        with self.condition:
            if number in self._seen:
                return
            self._seen[number] = None
            if len(self._seen) > _MAX_SEEN:
                del self._seen[next(iter(self._seen))]
        for neighbor in self.neighbors:
            if neighbor is not source:
                neighbor.send(message)
        try:
            self.hear(message)
        except Exception as error:  # a malformed message can raise any exception
            reason = f"{type(error).__name__}: {brief(str(error))}"
            _log.warning("a message of another rank made no sense and is dropped (%s): %s", reason, brief(message))

    def is_cut_off(self, neighbor: Neighbor) -> None:
        """Handles a closed connection to a neighbor."""
        with self.condition:
            if neighbor not in self.neighbors:  # this rank has left the ring
                return
            self.neighbors.remove(neighbor)
        neighbor.close()
        if neighbor.rank not in self.ended and self.fault is None:
            self.say("lost", rank=neighbor.rank)

    def hear(self, message: Message) -> None:
        """Handles a message."""
        message = faults.printable(message)
        member = self.members.get(message.get("number", -1))
        source = self._checked_rank(message["from"])
        if member is None and message.get("number", -1) >= self._num_members and message["kind"] in ("stops", "left", "asks"):
            self._hears_early(message)
            return
        match message["kind"]:
            case "opens":
                with self.condition:
                    self.opened.setdefault((int(message["number"]), int(message["meeting"])), set()).add(source)
                    self.condition.notify_all()
            case "failed":
                self._latch(faults.failed(source, str(message["text"])))
            case "lost":
                self._latch(faults.lost(self._checked_rank(message["rank"])))
            case "ended":
                self._leaves_us(source, str(message["text"]), int(message["steps"]), member)
            case _ if member is not None:
                self._hears_of_model(message, source, member)

    def _hears_of_model(self, message: Message, source: int, member: ModelMonitor) -> None:
        match message["kind"]:
            case "left":
                self._leaves_us(source, str(message["text"]), int(message["steps"]), member)
            case "stops":
                self._latch(faults.fault_from(message), member)
            case "asks" if member.is_asked_by(faults.state_from(message)):
                self._answer(member, has_asked=source == self.rank)
            case "stands":
                member.hears_where(source, str(message["text"]))
            case "gathers":
                member.hears_of_gather(source, int(message["count"]), int(message["step"]))
            case "does":
                state = faults.state_from(message)
                member.states[state["rank"]] = state

    def _checked_rank(self, rank: Any) -> int:
        if type(rank) is not int or rank not in range(self.num_ranks):
            raise ValueError(f"there is no rank {brief(rank)}")
        return rank

    def _hears_early(self, message: Message) -> None:
        """Answers or keeps a message about a model that this rank has not created, so that a waiting rank learns that."""
        number = int(message["number"])
        if message["kind"] == "asks":
            thread = next((member.thread for member in list(self.members.values())), threading.main_thread().ident or 0)
            self.say("does", number=number, **faults.without_model(self.rank, thread))
        else:
            self._early.setdefault(number, []).append(message)

    def _leaves_us(self, rank: int, text: str, num_steps: int, member: ModelMonitor | None) -> None:
        fault = faults.failed(rank, text) if text else faults.finished(rank, num_steps)
        with self.condition:
            (self.ended if member is None else member.left)[rank] = fault
            self._failed_s = min(self._failed_s, time.monotonic()) if text else self._failed_s
            self.condition.notify_all()
        for other in [it for it in list(self.members.values()) if text and it.borrowed is not None]:
            self._latch(fault, other)  # its connections last as long as that process

    def counts_failures(self, member: ModelMonitor) -> None:
        """Latches the error of a rank that has left the model, if any, because this rank is about to wait for it."""
        for fault in self._failures(member):
            self._latch(fault, member)

    def _failures(self, member: ModelMonitor) -> list[Fault]:
        return [fault for fault in self._gone(member).values() if fault.kind is PeerFailed]

    def _answer(self, member: ModelMonitor, *, has_asked: bool) -> None:
        if not has_asked:
            self.say("does", number=member.number, **member.state())
        for neighbor in self.neighbors:
            if neighbor.is_stopped():  # it cannot answer for itself
                self.say("does", number=member.number, **faults.stopped(neighbor.rank))

    def look(self) -> None:
        """Checks from time to time whether this rank has waited too long."""
        for member in list(self.members.values()):
            if member.known_fault is None:
                self._look_at(member)

    def _look_at(self, member: ModelMonitor) -> None:
        now_s, waited_s = time.monotonic(), member.waited_s()
        # This rank may be about to raise the same error, and the failed process may take long to end.
        if min(waited_s, now_s - self._failed_s) > patience.ENDS_S:
            for fault in self._failures(member):
                member.fails(fault)
        if waited_s > patience.WAITS_S and (alone := member.missed_gather_of()) is not None:
            member.fails(faults.gathers_alone(alone, missed_by=self.rank))
        has_answers = member.asking is not None and now_s > member.asked_s + patience.ANSWERS_S
        if member.asking is not None and has_answers and not member.is_told:
            text = self.report(member, member.asking)
            member.is_told, member.told = True, (member.asking["step"], now_s, text)
            faults.tell(text)
        limits = member.limits
        is_over = waited_s > limits.stall_timeout_s
        if waited_s < limits.stall_warning_s and not is_over:
            return
        if now_s > member.asked_s + (2 * patience.ANSWERS_S if is_over else max(limits.stall_warning_s, 2 * patience.ANSWERS_S)):
            self.say("asks", number=member.number, **member.state())
        elif has_answers and member.asking is not None:
            gone, late = self._gone(member), faults.late_ranks(member.asking, member.states, ranks=range(self.num_ranks))
            if gone and not late - gone.keys():  # otherwise the wait may be for another rank
                member.fails(next(iter(gone.values())))
            elif is_over:
                member.fails(faults.stalled(self.report(member, member.asking)))

    def report(self, member: ModelMonitor, asking: State) -> str:
        """Returns the report for the rank that asked, from all answers."""
        gone = {rank: fault.what for rank, fault in self._gone(member).items()}
        return faults.stall_text(asking, member.states, gone, ranks=range(self.num_ranks))

    def _gone(self, member: ModelMonitor) -> dict[int, Fault]:
        """Returns the ranks that have left. A model's last message replaces a process's, because it tells the progress."""
        return self.ended | member.left

    def _latch(self, fault: Fault, member: ModelMonitor | None = None) -> None:
        """Latches the first fault and wakes all waits."""
        with self.condition:
            if self.fault is not None or (member is not None and member.fault is not None):
                return
            if member is None:
                self.fault = fault
            else:
                member.fault = fault
            self.condition.notify_all()
        GUARD.interrupts(list(self.members.values()) if member is None else [member])

    def leaves(self, error: BaseException | None) -> None:
        """Sends this rank's last message before the process ends."""
        if self._has_left:
            return
        self._has_left = True
        if self.fault is not None:
            return
        # All ranks are about to raise an UndertowError themselves, so it is fatal only if a rank waits for this one.
        if error is not None and not isinstance(error, UndertowError):
            self.say("failed", text=faults.text_of(error))
        else:
            steps = max((member.num_steps() for member in list(self.members.values())), default=0)
            self.say("ended", steps=steps, text="" if error is None else faults.text_of(error))


class PeerMonitor:
    """All rings of this process, and the single thread that listens to them."""

    def __init__(self) -> None:
        self._rings: dict[tuple[int, ...], Ring] = {}
        self._heard: queue.SimpleQueue[_Heard | None] = queue.SimpleQueue()  # None wakes the thread
        self._is_over = False
        self._thread: threading.Thread | None = None
        self._breaking: list[tuple[ModelMonitor, float]] = []  # groups to interrupt, and when

    def ring_of(self, ranks: tuple[int, ...], world: object) -> Ring | None:
        """Returns the ring of these ranks, or None if torch.distributed was initialized again since it was made."""
        ring = self._rings.get(ranks)
        return ring if ring is not None and ring.world() is world else None

    def adopt(self, ranks: tuple[int, ...], ring: Ring) -> None:
        """Starts to listen to a ring."""
        if self._thread is None:
            self._begin()
        before = self._rings.get(ranks)
        self._rings[ranks] = ring
        if before is not None:
            self.ends(before)
        for neighbor in ring.neighbors:
            neighbor.listen(lambda *heard: self._heard.put((ring, *heard)))
        self.wake()

    def ends(self, ring: Ring) -> None:
        """Leaves a ring because its process groups are gone or the process is about to end."""
        ring.leaves(raised())
        ring.world = type(None)  # otherwise the weak reference would call this at interpreter exit, after modules are gone
        with ring.condition:
            neighbors, ring.neighbors = ring.neighbors, []
        for neighbor in neighbors:
            neighbor.flush(patience.FLUSH_S)
        close_all(neighbors)
        FREEING.finish()

    def wake(self) -> None:
        self._heard.put(None)

    def interrupts(self, members: Iterable[ModelMonitor]) -> None:
        """Interrupts all waits of these models after a short grace period."""
        due_s = time.monotonic() + patience.GRACE_S
        self._breaking += [(member, due_s) for member in members]
        self.wake()

    def leaves(self, error: BaseException | None = None) -> None:
        """Sends the last messages of this process."""
        for ring in self._rings.values():
            ring.leaves(error)

    def _begin(self) -> None:
        thread = threading.Thread(target=self._listen, name="undertow-guard", daemon=True)
        thread.start()
        self._thread = thread
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forget)
        # multiprocessing may end a process without atexit; its finalizers still run.
        multiprocessing.util.Finalize(None, self._at_exit, exitpriority=100)
        atexit.register(self._at_exit)
        tell_before_end(self.leaves, trains_in=self.trains_in)

    def _at_exit(self) -> None:
        self.leaves(raised())
        for ring in self._rings.values():
            for member in list(ring.members.values()):
                if member.known_fault is not None:  # the process may abort if broken groups still exist when it ends
                    # An error in one group must not stop the rest of the exit.
                    with contextlib.suppress(RuntimeError, ValueError):
                        member.destroy()
        for ring in list(self._rings.values()):
            self.ends(ring)
        self._is_over = True
        self.wake()
        if self._thread is not None:
            self._thread.join(patience.FLUSH_S)

    def trains_in(self, thread: int) -> bool:
        """Returns True if `thread` was the last to train or create one of the models."""
        return any(member.thread == thread for ring in self._rings.values() for member in list(ring.members.values()))

    def _forget(self) -> None:
        """Closes all connections in a child process."""
        for ring in self._rings.values():
            for neighbor in ring.neighbors:
                neighbor.forget()
            ring.neighbors, ring.world = [], type(None)
        self.__init__()  # type: ignore[misc]  # the thread does not exist in the child

    def _listen(self) -> None:
        while not self._is_over:
            try:
                self._listen_once()
            except Exception:
                _log.exception("the thread that listens to other ranks goes on after an error of its own.")
                time.sleep(patience.ANSWERS_S)

    def _listen_once(self) -> None:
        with contextlib.suppress(queue.Empty):
            heard = self._heard.get(timeout=self._tick_s())
            if heard is not None:
                self._hear(*heard)
        now_s = time.monotonic()
        due = [(member, due_s) for member, due_s in self._breaking if due_s <= now_s]
        for member, due_s in due:
            self._breaking.remove((member, due_s))
            member.interrupt()
        for ring in list(self._rings.values()):
            ring.look()

    def _hear(self, ring: Ring, neighbor: Neighbor, messages: list[Message], is_there: bool) -> None:
        for message in messages:
            ring.receive(message, neighbor)
        if not is_there:
            ring.is_cut_off(neighbor)

    def _tick_s(self) -> float | None:
        """Returns how long to sleep; None means forever, if nothing is trained."""
        if self._breaking:
            return max(0.0, self._breaking[0][1] - time.monotonic())
        members = [member for ring in list(self._rings.values()) for member in list(ring.members.values())]
        if not members:
            return None
        if any(not member.is_told for member in members):
            return 0.1 * patience.ANSWERS_S
        stalls_s = min(min(member.limits.stall_warning_s, member.limits.stall_timeout_s) for member in members)
        return min(patience.TICK_S, 0.25 * stalls_s)


GUARD = PeerMonitor()  # one for the process, like sys.excepthook
