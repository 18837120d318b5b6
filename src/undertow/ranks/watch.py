"""A rank's watch over the other ranks of a model: it knows which are alive, and which wait.

    Ring       the ranks of a process group: messages of its models beside the collectives
    Watch      the ranks of one model: the wait of this rank, and the reason why it cannot continue
    NullWatch  takes its place if ranks cannot connect, or if there is only one
    Waiting    a wait for other ranks; if it fails, the reason is raised

        rank 0 ── rank 1 ── rank 2 ── ... ── rank 0        a TCP connection each; two ranks have one

When a process ends for any reason, the kernel closes its connections, over every backend: a
connection that ends is a lost rank, unless the rank has said before that it leaves.

A ring gives each rank two connections, for any number of ranks. No rank is special, so any rank can
be lost. One cut link or one lost rank leaves the others connected. Two lost ranks cut the ring in
parts, and each part has a neighbor of a lost rank. A message travels half a round: with 1,000
ranks, 500 hops of a fraction of a millisecond.

A message (`connections.MessageKind` has all kinds) goes both ways round, up to the rank that has
said it. A rank forwards a message to its other neighbor before it acts on it, because the message
may end it. Receiving a message twice changes nothing. A rank that knows a fault of the model
forwards no other one: its neighbors know one too.

Ranks send nothing unless one waits for long. A fault is latched before groups are interrupted, so
that a thread whose collective breaks finds the reason.

Reasons: docs/design/lost-ranks.md.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import threading
import time
import weakref
import zlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from reprlib import repr as brief
from typing import Any

from undertow.config import SyncConfig
from undertow.errors import PeerFailed, UndertowError
from undertow.foreign import parsed_json
from undertow.ranks import faults, patience
from undertow.ranks.activity import Activity
from undertow.ranks.answers import Alike, Answer, Call, alike
from undertow.ranks.connections import DIRECTED, SILENCE_S, Connection, Message, MessageKind
from undertow.ranks.faults import Fault, is_of_transport, is_timeout
from undertow.ranks.inquiry import Inquiries, Inquiry
from undertow.ranks.threads import WorkerThread
from undertow.ranks.torch_group import TorchGroup

_log = logging.getLogger("undertow")


class Ring:
    """This rank's view of the ranks of a group."""

    def __init__(self, neighbors: Sequence[Connection], *, rank: int, num_ranks: int) -> None:
        self.rank = rank
        self.num_ranks = num_ranks
        self.neighbors = list(neighbors)
        self.condition = threading.Condition(threading.RLock())
        self.fault: Fault | None = None  # of every model
        self.watches: weakref.WeakValueDictionary[int, Watch] = weakref.WeakValueDictionary()
        # ranks whose process has ended without an error that is fatal to the others
        self.left: dict[int, Fault] = {}
        self._num_watches = 0  # models that this rank has created
        self.inquiries = Inquiries(self)  # about the waits of all ranks

    def join(self, limits: SyncConfig, here: Activity | None = None) -> Watch:
        """Registers a new model of these ranks; each of them calls it, in the same order."""
        with self.condition:
            watch = Watch(self, self._num_watches, limits, here or Activity())
            self.watches[self._num_watches] = watch
            self._num_watches += 1
        return watch

    def say(self, kind: MessageKind, **content: Any) -> None:
        """Tells every rank, including this one. A message about one model has its `number`."""
        self._spread({"kind": kind, "from": self.rank, **content})

    def say_failed(self, error: BaseException) -> None:
        self.say(MessageKind.FAILS, **faults.failed(self.rank, error).content())

    def say_to(self, neighbor: Connection, kind: MessageKind, **content: Any) -> None:
        """Sends a message to one neighbor."""
        encoded = json.dumps({"kind": kind, "from": self.rank, **content}).encode()
        neighbor.send(encoded, about_wait=kind if kind == MessageKind.ASKS else "")

    def answer(self, number: int, about: Sequence[Call]) -> tuple[Answer, bool] | None:
        """Returns the answer of this rank's watch over a model, if it has that model."""
        watch = self.watches.get(number)
        return None if watch is None else watch.here.answer_again(self.rank, about)

    def look(self) -> None:
        """Answers queries whose time is over."""
        with self.condition:
            self.inquiries.look()

    def forget(self, number: int) -> None:
        """Drops a model that this rank has closed."""
        self.watches.pop(number, None)
        self.inquiries.forget(number)

    def hear(self, source: Connection, messages: Sequence[bytes], is_connected: bool) -> None:
        """Handles the messages of a neighbor, and the end of the connection to it."""
        for message in messages:
            try:
                self._receive(parsed_json(message), source)
            except Exception as error:  # a malformed message can raise any exception
                reason = f"{type(error).__name__}: {brief(str(error))}"
                _log.warning(
                    "a message of another rank made no sense and is dropped (%s): %s",
                    reason,
                    brief(message),
                )
        with self.condition:
            if is_connected or source not in self.neighbors:  # this rank has left the ring
                return
            self.neighbors.remove(source)
        if source.rank not in self.left and self.fault is None:
            lost = faults.lost(source.rank, source.host)
            if source.is_silent:
                lost = faults.silent(source.rank, SILENCE_S, source.host)
            self.say(MessageKind.FAILS, **lost.content())

    def _receive(self, message: Message, source: Connection) -> None:
        if message["kind"] in DIRECTED:
            with self.condition:
                self.inquiries.hear(message, source)
        else:
            self._spread(message, source)

    def _spread(self, message: Message, source: Connection | None = None) -> None:
        """Forwards a message before handling it, because this process may not live long."""
        if message["from"] not in range(self.num_ranks):
            raise ValueError("it is from no rank.")  # and would go round forever
        if not self._is_known(message):
            encoded, kind = json.dumps(message).encode(), message["kind"]
            about_wait = kind if kind == MessageKind.ANSWERS else ""
            for neighbor in tuple(self.neighbors):
                if neighbor is not source and neighbor.rank != message["from"]:
                    neighbor.send(encoded, about_wait=about_wait)
        self._tell_watches(message)

    def _is_known(self, message: Message) -> bool:
        """Returns True for a fault after another one: this rank has told both neighbors that one,
        or was told it by them. If all ranks find a fault, N^2 messages would go round."""
        number = message.get("number")
        failing = self if number is None else self.watches.get(number)
        is_fault = message["kind"] == MessageKind.FAILS
        return is_fault and failing is not None and failing.fault is not None

    def _tell_watches(self, message: Message) -> None:
        kind, rank, number = message["kind"], message["from"], message.get("number")
        with self.condition:  # `join` makes no model in between
            if number is None and kind == MessageKind.FAILS:
                self.fault = self.fault or faults.fault_from(message)
            elif number is None:
                self.left[rank] = faults.fault_from(message)
            for watch in list(self.watches.values()):
                if number in (None, watch.number):
                    watch.hear(kind, rank, message)
            self.condition.notify_all()

    def leave(self, error: BaseException | None) -> None:
        """Sends this rank's last message before the process ends, once."""
        if self.fault is not None or self.rank in self.left:
            return
        # All ranks are about to raise an UndertowError themselves, so it is fatal only if a rank
        # waits for this one.
        if error is not None and not isinstance(error, UndertowError):
            self.say_failed(error)
        else:
            num_steps = max(
                (watch.here.num_steps() for watch in list(self.watches.values())), default=0
            )
            self.say(MessageKind.LEAVES, **faults.left(self.rank, error, num_steps).content())


class NullWatch:
    """The watch of a rank that has no other ranks, or is connected to none."""

    fault: Fault | None = None  # why no collective can succeed
    here: Activity | None = None  # of this rank, if others may ask for it

    def __init__(self) -> None:
        # that this rank may wait for: `OwnGroup.open` and `over_users` add to them
        self.groups: list[weakref.ref[TorchGroup]] = []

    def waiting(self, name: str) -> contextlib.AbstractContextManager[object]:
        """Context for a wait for other ranks; an error inside it is replaced by its reason if that
        is known.

        `name` names the wait in reports. Without one, the wait may take any time. Worker threads
        have none, because a rank reports one wait at a time, the training thread's.
        """
        return contextlib.nullcontext()

    def check(self) -> None:
        """Raises if a rank is gone or has failed."""

    def makes_call(self, name: str, ranks: tuple[int, ...]) -> None:
        """Counts a collective call of `ranks`, or of all ranks if that is empty."""

    def fail(self, reason: Fault | BaseException) -> None:
        """Tells all ranks of a fault, or of an error after which this rank cannot continue.

        A fault ends the waits of all ranks at once, and so does an error of this rank alone; raises
        the reason of the error if it is known. An UndertowError may be one that all ranks are about
        to raise: it ends the waits for this rank, a little later.
        """

    def ask(self, text: str, of: Sequence[int] = (), *, most: int = 2) -> list[Alike]:
        """Tells all ranks a text, and returns the texts of the ranks `of`, by default all, that
        call this for the same ranks within a second.

        A rank without a text is not among them. Texts may be long, and ranks many: each rank tells
        a digest, and only the lowest rank of each of the first `most` texts tells all of it.
        """
        return []

    def leave(self, error: BaseException | None) -> None:
        """Leaves the model; with an error, tells the ranks that wait for this one."""


class Watch(NullWatch):
    """This rank's knowledge of the other ranks of a model, and its messages to them."""

    here: Activity

    def __init__(self, ring: Ring, number: int, limits: SyncConfig, here: Activity) -> None:
        super().__init__()
        self.ring = ring
        self.number = number  # the same on every rank
        self.limits = limits
        self.here = here
        self.fault = ring.fault
        # when waits over the groups are interrupted at the latest; inf if that is done or not due
        self.interrupt_at_s = math.inf
        self.left = dict(ring.left)  # ranks that have closed the model, or ended
        self.own_failure: Fault | None = None  # the error with which this rank has left
        # By the ranks that are asked: a question of one data axis of a mesh is not another one's.
        self._asks: defaultdict[tuple[int, ...], int] = defaultdict(int)
        self._texts: defaultdict[str, dict[int, str]] = defaultdict(dict)  # of each, by rank

    def waiting(self, name: str) -> Waiting:
        return Waiting(self, name)

    def check(self) -> None:
        fault = self.fault or self.own_failure
        if fault is not None:
            raise self.give_up(fault)

    def makes_call(self, name: str, ranks: tuple[int, ...]) -> None:
        here = self.here
        here.num_calls[name, ranks] += 1
        here.last_calls[ranks] = name

    def fail(self, reason: Fault | BaseException) -> None:
        if isinstance(reason, Fault):
            self.say(MessageKind.FAILS, **reason.content())
            return
        if isinstance(reason, UndertowError):
            if self.fault is None and self.own_failure is None:
                self.own_failure = faults.failed(self.ring.rank, reason)
                self.say(MessageKind.LEAVES, **self.own_failure.content())
            return
        self.raise_reason(reason)
        if self.fault is None:
            # The other ranks would take the next message for one that is missing, and gloo ends a
            # process for that.
            self.ring.say_failed(reason)

    def ask(self, text: str, of: Sequence[int] = (), *, most: int = 2) -> list[Alike]:
        ranks = tuple(of) or tuple(range(self.ring.num_ranks))
        question = f"{zlib.crc32(repr(ranks).encode())}, {self._asks[ranks]}"
        self._asks[ranks] += 1
        digest = hashlib.sha256(text.encode()).hexdigest() if text else ""
        found = [one for one in alike(self._told(question, digest, ranks)) if one.text]
        # All whole texts would be N^2 times their length in the job, and a connection drops
        # messages when too many wait: ranks would have different texts.
        tellers = [one.ranks[0] for one in found[:most]]
        whole = text if self.ring.rank in tellers else None
        texts = self._told(f"{question}, whole", whole, tellers)
        return [Alike(one.ranks, texts.get(one.ranks[0])) for one in found]

    def _told(self, question: str, text: str | None, by: Sequence[int]) -> dict[int, str]:
        """Tells all ranks a text, or nothing, and returns the texts that arrive in time from the
        ranks `by`."""
        if text is not None:
            self.say(MessageKind.TELLS, ask=question, text=text)
        texts = self._texts[question]
        limit_s = patience.answers_s(self.ring.num_ranks)
        self._wait_for_fault_or(lambda: len(texts) == len(by), limit_s)
        return texts

    def leave(self, error: BaseException | None) -> None:
        if self.fault is None and self.ring.rank not in self.left:
            self.say(
                MessageKind.LEAVES,
                **faults.left(self.ring.rank, error, self.here.num_steps()).content(),
            )
        elif self.interrupt_at_s < math.inf:  # this model is not watched any more
            self.interrupt()
        self.ring.forget(self.number)

    def say(self, kind: MessageKind, **content: Any) -> None:
        self.ring.say(kind, number=self.number, **content)

    def hear(self, kind: str, rank: int, message: Message) -> None:
        """Handles a message about this model, or about all models of the ring."""
        match kind:
            case MessageKind.FAILS if self.fault is None:
                # The guard's thread interrupts waits over the groups a little later.
                self.fault = faults.fault_from(message)
                self.interrupt_at_s = time.monotonic() + patience.GRACE_S
            # a model's last message tells its progress
            case MessageKind.LEAVES if "number" in message or rank not in self.left:
                self.left[rank] = faults.fault_from(message)
            case MessageKind.TELLS:
                self._texts[str(message["ask"])][rank] = str(message["text"])
            case MessageKind.ANSWERS:
                self.inquiry.end(message)

    @property
    def inquiry(self) -> Inquiry:
        """The queries about this model."""
        return self.ring.inquiries.of(self.number)

    def _wait_for_fault_or(self, arrived: Callable[[], object], patience_s: float) -> None:
        """Waits until a message makes `arrived` true or brings a fault."""
        with self.ring.condition:
            self.ring.condition.wait_for(lambda: self.fault or arrived(), timeout=patience_s)

    def give_up(self, fault: Fault) -> UndertowError:
        """Interrupts the waits over these groups, and returns the error to raise: RankLost,
        PeerFailed, StallTimeout, or an error that other ranks have agreed on.

        It also interrupts the waits of Undertow's threads, because the script may do anything after
        this error. Waits of other ranks end because connections close.
        """
        self.interrupt()
        where = f"synchronization {self.here.num_steps()}, rank {self.ring.rank}"
        return fault.error(where, waits_for=self.here.wait[0])

    def raise_reason(self, error: BaseException) -> None:
        """Raises the reason of an error in a wait for other ranks, if it is known."""
        if isinstance(error, UndertowError) or not isinstance(error, RuntimeError):
            return
        if self.fault is None and not is_of_transport(error):
            return
        fault = self.reason_of(error)
        if fault is not None:
            # a transport's error says less; it stays the `__context__`
            raise self.give_up(fault) from None

    def reason_of(self, error: BaseException) -> Fault | None:
        """Waits until it is known why a collective failed with `error`, and tells all ranks.

        Returns the reason, or None if it stays unknown.
        """
        is_over = is_timeout(error)
        # After a timeout no rank need be gone. It must be reported before ranks speak whose
        # connections the timeout has closed.
        self._wait_for_fault_or(
            lambda: self.left, patience.ANSWERS_S if is_over else patience.VERDICT_S
        )
        # A message that a rank exited normally cannot be overtaken by one that says it did not.
        fault = self.fault or next(iter(self.left.values()), None)
        if fault is None and is_over:
            fault = faults.timed_out(self.ring.rank, self.inquiry.told_about(self.here.wait))
        if fault is None:
            self.ring.say_failed(error)
        elif self.fault is None:
            self.fail(fault)
        return fault

    def judge(self) -> None:
        """Interrupts groups that cannot continue.

        Otherwise checks whether this rank has waited too long.
        """
        now_s, waited_s = time.monotonic(), self.here.waited_s()
        if self.fault is not None:
            if now_s >= self.interrupt_at_s:
                self.interrupt_at_s = math.inf
                self.interrupt()
            return
        # A rank that has failed may live on, so that no connection ends.
        failed = self._failed_peer()
        if failed is not None and min(waited_s, now_s - failed.known_s) > patience.ENDS_S:
            self.fail(failed)
        stall = self.inquiry.stall(waited_s, self.limits, self.left)
        if stall is not None:
            self.fail(stall)

    def _failed_peer(self) -> Fault | None:
        """Returns the fault of another rank that has left with an error."""
        for rank, fault in self.left.items():
            if rank != self.ring.rank and fault.kind is PeerFailed:
                return fault
        return None

    def interrupt(self) -> None:
        """Interrupts every wait over one of the groups."""
        for weak in tuple(self.groups):
            group = weak()
            if group is None:
                continue
            has_others = group.interrupt()
            if has_others and self.fault is not None and not self.here.wait[0]:
                # The user's wait ends with an error that names no rank.
                faults.tell(self.fault.what)


class Waiting:
    """The context that `Watch.waiting` returns."""

    def __init__(self, watch: Watch, name: str) -> None:
        self._watch = watch
        # Asked in every round, hence by number.
        self._name = "" if threading.get_ident() in WorkerThread.idents else name

    def __enter__(self) -> None:
        if self._name:
            here = self._watch.here
            self._before, here.wait = here.wait, (self._name, time.monotonic())

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        try:
            if error is not None:
                self._watch.raise_reason(error)
        finally:
            # Only now: while it looks for the reason, this rank still counts as waiting, not late.
            if self._name:
                self._watch.here.wait = self._before
