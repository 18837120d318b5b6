"""A rank's watch over the other ranks of a model: it knows which are alive, and which wait.

    NullWatch   knows nothing: of one rank alone, or where ranks cannot connect
    Watch       the ranks of one model: the wait of this rank, and the reason why it cannot continue
    Ring        the ranks of a process group, which its models share: messages beside the collectives

        rank 0 ── rank 1 ── rank 2 ── ... ── rank 0        a TCP connection each; of two ranks there is one

When a process ends for any reason, the kernel closes its connections, over every backend: a
connection that ends is a lost rank, unless the rank has said before that it leaves.

The ring is a ring because a rank then has two connections, of however many ranks; no rank is
special, so that any may be lost; and one cut link or one rank lost leaves the others connected. Two
lost ranks cut it in parts, and each part has a neighbor of a lost rank. News needs half a round: of
1,000 ranks, 500 hops of a fraction of a millisecond.

A message is a JSON object with its `kind`, the rank that says it (`from`), that rank's number of it
(`id`), and, if it is about one model, the `number` of the model. It goes both ways round. A rank
forwards a new message to its other neighbor before it acts on it, because the message may end it.

    kind     from whom, when                                  a rank that receives it
    fails    a rank that raises, or whose neighbor is lost    latches the error, interrupts its groups
    leaves   a rank that closes a model, or ends              fails if it waits for that rank
    meets    a rank that is about to make a process group     counts; the wait for all ranks ends
    gathers  a rank that gathers an optimizer's state         fails if it has begun a step without it
    asks     a rank that has waited for long                  says `does`, and reports all answers
    does     a rank that was asked                            keeps it for the report
    stands   a rank that is about to raise, with its place    keeps it for the error's text

Nothing is said while nobody waits for long. A fault is latched before groups are interrupted, so
that a thread whose collective breaks finds the reason.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import math
import re
import threading
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from reprlib import repr as brief
from typing import Any, Protocol

import torch.distributed as dist

from undertow.config import SyncConfig
from undertow.errors import PeerFailed, RankLost, UndertowError
from undertow.foreign import parsed_json
from undertow.runtime.peers import faults, patience
from undertow.runtime.peers.connections import Connection
from undertow.runtime.peers.faults import Activity, Fault, State
from undertow.runtime.peers.threads import WorkerThread, break_group

Message = dict[str, Any]

_log = logging.getLogger("undertow")
_MAX_SEEN = 256  # messages of one rank on their way at a time
_MAX_EARLY = 64  # models that other ranks have created and this one has not
# Timeouts of a collective (also of one whose connections another collective's timeout has closed: of several in flight, either
# may report first), of the stores that groups are made through, and of connecting. The kernel's messages about a connection are
# worded differently.
_TIME_IS_OVER = re.compile(
    r"time(d )?out waiting|operation timed out!|application timeout caused|(wait|socket|connect) timeout", re.IGNORECASE
)
# Texts of gloo that say less than the reason: a traceback leaves out such an error. It stays the reason's `__context__`.
_SAYS_LESS = re.compile(r"connection (?:closed|reset|was closed|to another rank)|timed out|broken pipe", re.IGNORECASE)
# Words of transports (gloo, NCCL, the store) when a connection breaks. Other errors are raised without waiting for a reason.
_OF_TRANSPORTS = re.compile(r"connection|closed|reset|broken pipe|time.?out|timed out|socket|gloo|nccl|peer|abort", re.IGNORECASE)


class Interrupted(Protocol):
    """A process group of a model."""

    def interrupt(self) -> None:
        """Ends every wait over the group."""

    def close(self) -> None:
        """Destroys the group."""


class NullWatch:
    """The watch of a rank that has no other ranks, or is connected to none."""

    fault: Fault | None = None  # why no collective can succeed

    def __init__(self) -> None:
        self.groups: list[weakref.ref[Interrupted]] = []

    def waiting(self, name: str) -> contextlib.AbstractContextManager[object]:
        """Context for a wait for other ranks; an error inside it is replaced by its reason if that is known.

        `name` names the wait in reports. Without one, the wait may take any time. Worker threads have
        none, because a rank reports one wait at a time, the training thread's.
        """
        return contextlib.nullcontext()

    def meet(self, within_s: float) -> None:
        """Waits until all ranks are about to create a group; the next `check` raises if one does not arrive in time."""

    def check(self) -> None:
        """Raises if a rank is gone or has failed."""

    def fail(self, reason: Fault | BaseException) -> None:
        """Makes all ranks give up: by a fault, or by an error of this rank, whose reason is raised if that is known."""

    def ask(self, text: str) -> dict[int, str]:
        """Returns the texts of the ranks that call this at about the same time, this one's included."""
        return {}

    def leave(self, error: BaseException | None) -> None:
        """Leaves the model; with an error, tells the ranks that wait for this one."""


class Ring:
    """This rank's view of the ranks of a group. `wake` makes the thread that looks at the models look at once."""

    def __init__(self, neighbors: Sequence[Connection], *, rank: int, num_ranks: int, wake: Callable[[], object]) -> None:
        self.rank = rank
        self.num_ranks = num_ranks
        self.neighbors = list(neighbors)
        self.wake = wake
        self.condition = threading.Condition(threading.RLock())
        self.fault: Fault | None = None  # of every model
        self.watches: weakref.WeakValueDictionary[int, Watch] = weakref.WeakValueDictionary()
        self.left: dict[int, Fault] = {}  # ranks whose process has ended without an error that is fatal to the others
        self._num_watches = 0  # models that this rank has created
        self._early: defaultdict[int, list[Message]] = defaultdict(list)  # about models that this rank has not created yet
        self._said = itertools.count()
        self._seen: defaultdict[int, deque[int]] = defaultdict(partial(deque, maxlen=_MAX_SEEN))

    def join(self, limits: SyncConfig, here: Activity | None = None) -> Watch:
        """Registers a new model of these ranks; each of them calls it, in the same order."""
        with self.condition:
            watch = Watch(self, self._num_watches, limits, here or Activity())
            self._num_watches += 1
            self.watches[watch.number] = watch
            for message in self._early.pop(watch.number, ()):
                self._handle(message)
        self.wake()  # there is something to watch now
        return watch

    def say(self, kind: str, **content: Any) -> None:
        """Tells every rank, including this one. A message about one model has its `number`."""
        self._spread({"kind": kind, "from": self.rank, "id": next(self._said), **content})

    def say_failed(self, error: BaseException) -> None:
        self.say("fails", **faults.failed(self.rank, error).content())

    def hear(self, source: Connection, messages: Sequence[bytes], is_there: bool) -> None:
        """Handles the messages of a neighbor, and the end of the connection to it."""
        for message in messages:
            try:
                self._spread(parsed_json(message), source)
            except Exception as error:  # a malformed message can raise any exception
                reason = f"{type(error).__name__}: {brief(str(error))}"
                _log.warning("a message of another rank made no sense and is dropped (%s): %s", reason, brief(message))
        if is_there:
            return
        with self.condition:
            if source not in self.neighbors:  # this rank has left the ring
                return
            self.neighbors.remove(source)
        if source.rank not in self.left and self.fault is None:
            self.say("fails", **faults.lost(source.rank).content())

    def _spread(self, message: Message, source: Connection | None = None) -> None:
        """Forwards a new message before handling it, because this process may not live long."""
        rank, number, model = message["from"], message["id"], message.get("number")
        if type(rank) is not int or rank not in range(self.num_ranks):
            raise ValueError(f"there is no rank {brief(rank)}")
        if type(number) is not int or type(model) not in (int, type(None)):
            raise ValueError(f"there is no message {brief(number)} about model {brief(model)}")
        with self.condition:
            if number in self._seen[rank]:
                return
            self._seen[rank].append(number)
        encoded = json.dumps(message).encode()
        for neighbor in tuple(self.neighbors):
            if neighbor is not source:
                neighbor.send(encoded)
                if neighbor.has_unsent:
                    self.wake()  # the thread sends the rest
        self._handle(message)
        with self.condition:
            self.condition.notify_all()

    def _handle(self, message: Message) -> None:
        kind, rank = message["kind"], message["from"]
        number: Any = message.get("number")
        with self.condition:  # `join` must not create the model between the look for it and the note
            watch = None if number is None else self.watches.get(number)
            is_early = number in range(self._num_watches, self._num_watches + _MAX_EARLY)
            if is_early and kind in ("meets", "fails", "leaves"):
                self._early[number].append(message)
        if number is not None and watch is None:
            if is_early and kind == "asks":  # so that a waiting rank learns that this one has not created the model
                self.say("does", number=number, **faults.without_model(self.rank, self._training_thread()))
        elif kind == "fails":
            self.latch(faults.fault_from(message), watch)
        elif kind == "leaves":
            fault = (watch or self).left[rank] = faults.fault_from(message)
            for other in list(self.watches.values()):
                if fault.kind is PeerFailed and other.borrowed is not None:
                    self.latch(fault, other)  # its connections last as long as that process
        elif watch is not None:
            watch.handle(kind, rank, message)

    def _training_thread(self) -> int:
        """Returns the thread that trains another model, or else the main one."""
        threads = [watch.here.thread for watch in list(self.watches.values())]
        return threads[0] if threads else threading.main_thread().ident or 0

    def latch(self, fault: Fault, watch: Watch | None = None) -> None:
        """Latches the first fault, of one model or of all, wakes all waits, and has those over groups interrupted."""
        watches = list(self.watches.values()) if watch is None else [watch]
        with self.condition:
            if self.fault is not None or (watch is not None and watch.fault is not None):
                return
            if watch is None:
                self.fault = fault
            for broken in watches:
                broken.fault = broken.fault or fault
                broken.interrupt_s = time.monotonic() + patience.GRACE_S
            self.condition.notify_all()
        self.wake()

    def leave(self, error: BaseException | None) -> None:
        """Sends this rank's last message before the process ends, once."""
        if self.fault is not None or self.rank in self.left:
            return
        # All ranks are about to raise an UndertowError themselves, so it is fatal only if a rank waits for this one.
        if error is not None and not isinstance(error, UndertowError):
            self.say_failed(error)
        else:
            num_steps = max((watch.here.num_steps() for watch in list(self.watches.values())), default=0)
            self.say("leaves", **faults.left(self.rank, error, num_steps).content())


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


class Watch(NullWatch):
    """This rank's knowledge of the other ranks of a model, which are all or some of the ring's, and its messages to them."""

    def __init__(self, ring: Ring, number: int, limits: SyncConfig, here: Activity) -> None:
        super().__init__()
        self.ring = ring
        self.number = number  # the same on every rank
        self.limits = limits
        self.here = here
        self.fault = ring.fault
        self.interrupt_s = math.inf  # when waits over the groups are interrupted
        self.borrowed: dist.ProcessGroup | None = None  # a group of the user's that is interrupted as well
        self.left: dict[int, Fault] = {}  # ranks that have closed the model
        self.inquiry: _Inquiry | None = None
        self.told = 0, -math.inf, ""  # step, time and text of the last report
        self._peers = [_Peer() for _ in range(ring.num_ranks)]

    def waiting(self, name: str) -> Waiting:
        if name == faults.STATE:
            self._gathers_state()
        return Waiting(self, name)

    def meet(self, within_s: float) -> None:
        self.say("meets")
        number = self._peers[self.ring.rank].num_meetings

        def late() -> list[int]:
            return [rank for rank, peer in enumerate(self._peers) if peer.num_meetings < number]

        self._wait_for(lambda: not late(), within_s)
        if late() and self.fault is None:
            self.fail(faults.never_came(late(), within_s))

    def check(self) -> None:
        if self.fault is not None:
            raise self.last_error(self.fault)

    def fail(self, reason: Fault | BaseException) -> None:
        if isinstance(reason, Fault):
            self.say("fails", **reason.content())
            return
        self.explain(reason)
        if self.fault is None:
            # The other ranks would take the next message for one that is missing, and gloo ends a process for that.
            self.ring.say_failed(reason)

    def ask(self, text: str) -> dict[int, str]:
        earliest_s = time.monotonic() - patience.ANSWERS_S  # older reports answered another question
        self.say("stands", text=text)

        def placed() -> dict[int, str]:
            return {rank: peer.place for rank, peer in enumerate(self._peers) if peer.placed_s >= earliest_s}

        self._wait_for(lambda: len(placed()) == self.ring.num_ranks, patience.ANSWERS_S)
        found = placed()
        for peer in self._peers:
            peer.placed_s = -math.inf
        return found

    def leave(self, error: BaseException | None) -> None:
        if self.fault is None:
            self.say("leaves", **faults.left(self.ring.rank, error, self.here.num_steps()).content())
        elif self.interrupt_s < math.inf:  # from now on nobody looks at this model
            self.interrupt()
        self.ring.watches.pop(self.number, None)

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

    def handle(self, kind: str, rank: int, message: Message) -> None:
        peer = self._peers[rank]
        match kind:
            case "meets":
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

    def _wait_for(self, arrived: Callable[[], object], patience_s: float) -> None:
        """Waits until a message makes `arrived` true or brings a fault."""
        with self.ring.condition:
            self.ring.condition.wait_for(lambda: self.fault or arrived(), timeout=patience_s)

    def _gathers_state(self) -> None:
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

    def last_error(self, fault: Fault) -> UndertowError:
        """Ends waits of Undertow's threads over these groups first, because the script may do anything after this error."""
        self.interrupt()
        return fault.error(f"synchronization {self.here.num_steps()}, rank {self.ring.rank}")

    def explain(self, error: BaseException) -> None:
        """Raises the reason of an error in a wait for other ranks, if it is known."""
        if isinstance(error, RuntimeError) and not isinstance(error, UndertowError):
            is_broken = self.fault is not None or _OF_TRANSPORTS.search(str(error))
            if is_broken and (fault := self.reason(error)) is not None:
                raise self.last_error(fault) from None if _SAYS_LESS.search(str(error)) else error

    def reason(self, error: BaseException) -> Fault | None:
        """Returns why a collective failed with `error` and tells all ranks, or None if the reason is not known."""
        is_over = _TIME_IS_OVER.search(str(error)) is not None
        # After a timeout no rank need be gone. It must be reported before ranks speak whose connections the timeout has closed.
        self._wait_for(self.gone, patience.ANSWERS_S if is_over else patience.VERDICT_S)
        # A message that a rank exited normally cannot be overtaken by one that says it did not.
        fault = self.fault or next(iter(self.gone().values()), None)
        if fault is None and is_over:
            step, told_s, text = self.told
            waits_for, since_s = self.here.wait
            is_about_this = waits_for and step == self.here.num_steps() and told_s > since_s
            fault = faults.timed_out(self.ring.rank, text if is_about_this else "")
        if fault is None:
            self.ring.say_failed(error)
        elif self.fault is None:
            self.fail(fault)
        return fault

    def pause_s(self) -> float:
        """Returns how long the process's thread may sleep before it looks at this model again."""
        if self.interrupt_s < math.inf:
            return max(0.0, self.interrupt_s - time.monotonic())
        if self.inquiry is not None and self.told[1] < self.inquiry.asked_s:
            return 0.1 * patience.ANSWERS_S
        return min(patience.TICK_S, 0.25 * self.limits.stall_warning_s, 0.25 * self.limits.stall_timeout_s)

    def look(self) -> None:
        """Interrupts groups that cannot continue. Otherwise checks whether this rank has waited too long."""
        now_s, waited_s, failures = time.monotonic(), self.here.waited_s(), self.failures()
        if self.fault is not None:
            if now_s >= self.interrupt_s:
                self.interrupt_s = math.inf
                self.interrupt()
            return
        # This rank may be about to raise the same error, and the failed process may take long to end.
        if failures and min(waited_s, now_s - failures[0].known_s) > patience.ENDS_S:
            self.fail(failures[0])
        if waited_s > patience.WAITS_S and (alone := self._missed_gather_of()) is not None:
            self.fail(faults.gathers_alone(alone, missed_by=self.ring.rank))
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
                self.fail(next(iter(gone.values())))  # if others are late, the wait may be for another rank
            elif is_over:
                self.fail(faults.stalled(self.report(inquiry)))

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
        if self.borrowed is not None:
            break_group(self.borrowed)

    def destroy(self) -> None:
        for group in filter(None, [ref() for ref in self.groups]):
            group.close()


class Waiting:
    """The context that `Watch.waiting` returns."""

    def __init__(self, watch: Watch, name: str) -> None:
        self._watch = watch
        self._name = "" if name and isinstance(threading.current_thread(), WorkerThread) else name

    def __enter__(self) -> None:
        if self._name:
            here = self._watch.here
            self._before, here.wait = here.wait, (self._name, time.monotonic())

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        try:
            if error is not None:
                self._watch.explain(error)
        finally:  # only now: while it looks for the reason, this rank still counts as waiting and not as late
            if self._name:
                self._watch.here.wait = self._before
