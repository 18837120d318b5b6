"""A meeting of ranks: each waits until all have arrived, in the store of torch.distributed.

meeting_of  context: a meeting of these ranks
meet        a meeting before these ranks make a process group
Meeting     the texts and counters of a meeting in the store
Lateness    how long a rank waits for late ones

One process serves the store to all ranks. So a rank that is early makes one request a minute, which
the server answers when the last rank has arrived, from a thread and over a separate connection:
the rank still looks at faults, and Ctrl-C ends it. If the store has no such request, or no server,
the rank asks for one counter, less often the longer it has waited and the more ranks there are.
Which ranks are late is found by one rank, when it is needed, with few requests. A meeting that is
over leaves a counter and an empty text for each of its places, the name of its group, and counters
of reports, until the next meeting of these ranks is over. Only the number of its meetings stays, a
counter for each rank.

Reasons: docs/design/lost-ranks.md.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import count

from torch.distributed import FileStore  # type: ignore[attr-defined]  # its stub hides it
from torch.distributed.distributed_c10d import Store

from undertow.config import SyncConfig
from undertow.errors import RankLost, UndertowError, require
from undertow.ranks import faults, patience
from undertow.ranks.answers import Ranks
from undertow.ranks.answers import named as subject
from undertow.ranks.watch import NullWatch
from undertow.torch_private import process_groups

# Flags in the counter of a place, whose lower part counts the ranks that have arrived.
_FAILED = 1 << 40  # a rank that has arrived cannot go on
_GIVEN_UP = 1 << 50  # subtracted: a rank waits no longer
_MOST_RUNS = 8  # of late ranks in a key: it stays shorter than 200 bytes
_RANKS_AS_OFTEN = 16
_MOST_PAUSE_S = 2.0
_PAUSES_S = (0.005, 0.05)  # most ranks arrive so soon: they need no thread
# Of one request by the thread, which then looks if the rank still waits: `Lateness` decides that.
_REQUEST_S = 60.0
HOSTS = "hosts"  # the end of the key that tells that these ranks are on several hosts
# The end of the key with the name of the process group that the ranks are about to make. Rank 0's
# text at a place would not do: rank 0 deletes it before a slow rank reads it.
_NAME = "name"
_ALL = "all"  # the end of the key that tells that all have arrived at a place, or one has given up


@contextlib.contextmanager
def meeting_of(
    ranks: tuple[int, ...], rank: int, limits: SyncConfig, watch: NullWatch, within_s: float
) -> Iterator[Meeting]:
    """Context for a meeting of these ranks; each rank counts its meetings.

    Raises the error that `watch` has for a rank that is gone, or StallTimeout.
    """
    try:
        store = process_groups.default_store()
        # a list of thousands of ranks is longer than a store's key may be
        name = f"undertow/ring/{process_groups.name_of(ranks)}"
        number = store.add(f"{name}/tries/{rank}", 1)
        key = f"{name}/{number}"
        lateness = Lateness(store, f"{key}/over", rank, limits, watch, within_s=within_s)
        watch.check()
        meeting = Meeting(store, key, rank, len(ranks), lateness)
        yield meeting
        meeting.clear(before=f"{name}/{number - 1}")
    except UndertowError:
        raise
    except RuntimeError as error:  # from the store
        raise RankLost(
            "the store that connects the ranks is gone, most likely because the rank that served "
            "it has ended.",
            where=_where(rank),
            remedy="Find out why that process ended, often rank 0's, and start again.",
        ) from error


def meet(
    ranks: tuple[int, ...],
    rank: int,
    limits: SyncConfig,
    watch: NullWatch,
    *,
    within_s: float,
    obstacle: str = "",
) -> str:
    """Waits until all these ranks are about to make a process group, and returns its name: torch's
    own waits cannot be interrupted.

    `obstacle` says why this rank cannot make it, with a remedy in a second line. If one rank has
    one, all raise it as ConfigError. Raises StallTimeout if a rank does not arrive in time.
    """
    found = name = ""
    with meeting_of(ranks, rank, limits, watch, within_s) as meeting:
        if rank == 0:
            meeting.store.set(f"{meeting.key}/{_NAME}", process_groups.new_name())
        if obstacle:
            meeting.fail(obstacle)
        meeting.arrive("group")
        if meeting.has_failed:
            found = meeting.why()
        else:
            name = meeting.store.get(f"{meeting.key}/{_NAME}").decode()
    what, _, remedy = found.partition("\n")
    require(not found, what, where=f"the making of a process group, rank {rank}", remedy=remedy)
    return name


class Lateness:
    """How long a rank waits for those that have not arrived; all give up together.

    `over` is the key at which a rank that gives up names the late ranks.
    """

    def __init__(  # a meeting's limits come from several places
        self,
        store: Store,
        over: str,
        rank: int,
        limits: SyncConfig,
        watch: NullWatch,
        *,
        within_s: float,
    ) -> None:
        self._store, self._over, self._rank, self._watch = store, over, rank, watch
        self._warning_s = limits.stall_warning_s
        self._limit_s = min(limits.stall_timeout_s, within_s)
        self._began_s = time.monotonic()
        self._told_s = 0.0  # how long it had waited at its last report
        self._num_told = 0

    def is_due(self) -> bool:
        """Returns True if `check` has something to say; does not ask the store."""
        waited_s = time.monotonic() - self._began_s
        next_s = min(self._limit_s, self._told_s + self._warning_s)
        return waited_s > next_s or self._watch.fault is not None

    def check(self, late: Iterable[int]) -> None:
        """Raises if the ranks that have not arrived do not arrive in time.

        `late` asks the store for them when it is used.
        """
        waited_s = time.monotonic() - self._began_s
        gives_up = waited_s > self._limit_s or self._watch.fault is not None
        if gives_up and not self._store.check([self._over]):
            # tells ranks that arrive later, whose watch may be younger than the fault
            runs = Ranks.of(late).runs[:_MOST_RUNS]
            self._store.set(self._over, json.dumps(runs or [(self._rank, self._rank, 1)]))
        self._watch.check()
        if self._store.check([self._over]):
            named = list(Ranks(json.loads(self._store.get(self._over))))
            raise faults.never_came(named, self._limit_s).error(_where(self._rank))
        if waited_s > self._told_s + self._warning_s:
            self._told_s = waited_s
            self._num_told += 1
            # One rank asks who is late, and tells.
            if self._store.add(f"{self._over}/{self._num_told}", 1) == 1:
                faults.tell(
                    f"rank {self._rank} has waited {waited_s:.0f} s for {subject(late)} to "
                    "synchronize a model."
                )


def innermost(store: Store) -> Store:
    """Returns the store that prefixes of keys lead to."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return store


@dataclass(frozen=True, slots=True)
class _Late:
    """The ranks that have not left a text at a place, found when they are iterated over."""

    store: Store
    key: str
    num_ranks: int

    def __iter__(self) -> Iterator[int]:
        return self._among(range(self.num_ranks))

    def _among(self, ranks: range) -> Iterator[int]:
        """Asks for all keys at once, and for halves of them if one is missing."""
        if self.store.check([f"{self.key}/{rank}" for rank in ranks]):
            return
        if len(ranks) == 1:
            yield ranks[0]
            return
        middle = len(ranks) // 2
        yield from self._among(ranks[:middle])
        yield from self._among(ranks[middle:])


class _LastArrival:
    """Waits for a key in the store, in a thread and over a separate connection.

    The request would keep other threads from the store, and signal handlers from this one. A
    FileStore is not waited for: it has no server, and would read its file all the time.
    """

    def __init__(self, store: Store, key: str) -> None:
        self.came = threading.Event()  # also set if it cannot wait
        self.cannot_wait = False
        self.is_needed = True  # set to False by the rank
        thread = threading.Thread(
            target=self._wait, args=(store, key), name="undertow-meets", daemon=True
        )
        try:
            if not isinstance(innermost(store), FileStore):
                thread.start()
                return
        except RuntimeError:
            pass  # the process has too many threads
        self._give_up()

    def _wait(self, store: Store, key: str) -> None:
        # torch's own stores can be cloned, but a user's may not, and may raise any error
        try:
            own: Store = store.clone()  # type: ignore[attr-defined]  # missing in torch's stub
            while self.is_needed and not self._comes(own, key):
                pass
        except Exception:
            self._give_up()
        self.came.set()

    def _give_up(self) -> None:
        self.cannot_wait = True
        self.came.set()

    def _comes(self, store: Store, key: str) -> bool:
        """Makes one request; returns False if it has ended without the key."""
        began_s = time.monotonic()
        try:
            store.wait([key], timedelta(seconds=_REQUEST_S))
        except RuntimeError:
            if time.monotonic() - began_s < _REQUEST_S / 2:
                raise  # its time was not over
            return False
        return True


def _where(rank: int) -> str:
    return f"the making of a process group, rank {rank}"


@dataclass(slots=True)
class Meeting:
    """The meeting of one rank with the others, at several places one after another."""

    store: Store
    key: str
    rank: int
    num_ranks: int
    lateness: Lateness
    has_failed: bool = False  # a rank that has arrived has called `fail`
    _is_failing: bool = False  # this rank has
    _places: list[str] = field(default_factory=list)  # where this rank has arrived

    def arrive(self, place: str, told: str = "") -> None:
        """Leaves the text `told` at a place, and waits until all ranks have arrived there."""
        key = f"{self.key}/{place}"
        self.store.set(f"{key}/{self.rank}", told)
        self._places.append(place)
        num_here = self.store.add(key, 1 + self._is_failing * _FAILED)
        if num_here % _FAILED == self.num_ranks:
            self.store.set(f"{key}/{_ALL}", "")
        with contextlib.closing(self._pauses(key)) as pauses:
            while num_here < 0 or num_here % _FAILED < self.num_ranks:
                next(pauses)
                num_here = self.store.add(key, 0)
                is_here = num_here % _FAILED >= self.num_ranks
                if num_here < 0 or (not is_here and self.lateness.is_due()):
                    self._look(key)
        self.has_failed = self.has_failed or num_here >= _FAILED

    def _pauses(self, key: str) -> Generator[None, None, None]:
        """Pauses at each step: in the end until all have arrived, or `lateness` is due."""
        for pause_s in _PAUSES_S:
            time.sleep(pause_s)
            yield
        pause_s = _PAUSES_S[-1]
        last = _LastArrival(self.store, f"{key}/{_ALL}")
        try:
            while True:
                while not (last.came.wait(patience.LOOK_S) or self.lateness.is_due()):
                    pass
                if last.cannot_wait:
                    break
                yield
                if last.came.is_set():  # and the counter is not complete
                    time.sleep(pause_s)
        finally:
            last.is_needed = False
        most_s = min(_MOST_PAUSE_S, 0.25 * (1 + self.num_ranks / _RANKS_AS_OFTEN))
        while True:
            pause_s = min(most_s, 1.5 * pause_s)
            time.sleep(pause_s)
            yield

    def _look(self, key: str) -> None:
        """Raises if the ranks that have not arrived do not arrive in time."""
        try:
            self.lateness.check(_Late(self.store, key, self.num_ranks))
        except Exception:
            self.store.add(key, -_GIVEN_UP)  # for ranks that arrive later
            self.store.set(f"{key}/{_ALL}", "")  # and for those that wait
            raise

    def clear(self, before: str) -> None:
        """Deletes this rank's texts, and the counters of the meeting `before`, which all have left.

        Called when all ranks have arrived everywhere.
        """
        keys = [f"{self.key}/{place}/{self.rank}" for place in self._places]
        if self.rank == 0:
            places = [f"{before}/{name}" for name in ("at", "through", "group")]
            keys += [*places, *(f"{place}/{_ALL}" for place in places)]
            keys += [f"{before}/{name}" for name in ("over", "why", HOSTS, _NAME)]
        with contextlib.suppress(RuntimeError):  # some stores cannot
            for key in keys:
                self.store.delete_key(key)
            if self.rank == 0:
                self._forget_reports(f"{before}/over")

    def _forget_reports(self, over: str) -> None:
        """Deletes the counters of reports about late ranks, which are numbered from 1 on."""
        for number in count(1):
            key = f"{over}/{number}"
            if not (self.store.check([key]) and self.store.delete_key(key)):
                return

    def told_by(self, rank: int, place: str) -> str:
        """Returns the text that a rank has left at a place where all have arrived."""
        return str(self.store.get(f"{self.key}/{place}/{rank}").decode())

    def is_failing(self) -> bool:
        """Returns True if a rank has called `fail`, also one that has not arrived."""
        return self.has_failed or bool(self.store.check([f"{self.key}/why"]))

    def why(self) -> str:
        """Returns the reason that a rank has given to `fail`."""
        return str(self.store.get(f"{self.key}/why").decode())

    def fail(self, why: str) -> None:
        """Tells all ranks the reason, unless they have one: later ranks fail because of it."""
        self._is_failing = True
        if not self.store.check([f"{self.key}/why"]):
            self.store.set(f"{self.key}/why", why)
