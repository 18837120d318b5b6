"""Waits for other ranks, and the process's monitor, which ends them with the reason if a rank does not arrive.

Waiting              context: a wait has a name while it lasts
join_ring            makes the connections through which ranks tell each other of faults
PeerMonitor          the thread that listens to them: it sleeps until a neighbor sends, a neighbor dies, or a wait is long
"""

import atexit
import contextlib
import json
import logging
import multiprocessing.util
import os
import queue
import re
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch.distributed as dist

from undertow.config import SyncConfig
from undertow.errors import RankLost, UndertowError
from undertow.plan import Bucket, Plan
from undertow.runtime.peers import faults, patience
from undertow.runtime.peers.faults import Fault
from undertow.runtime.peers.neighbor import make_ring
from undertow.runtime.peers.ring import ModelMonitor, Ring
from undertow.runtime.peers.threads import FREEING, WorkerThread
from undertow.runtime.torch_private import private

_log = logging.getLogger("undertow")
# Texts of gloo that say less than the reason: a traceback leaves out such an error. It stays the reason's `__context__`.
_SAYS_LESS = re.compile(r"connection (?:closed|reset|was closed|to another rank)|timed out|broken pipe", re.IGNORECASE)
# Words of transports (gloo, NCCL, the store) when a connection breaks. Other errors are raised without waiting for a reason.
_OF_TRANSPORTS = re.compile(r"connection|closed|reset|broken pipe|time.?out|timed out|socket|gloo|nccl|peer|abort", re.IGNORECASE)


class Waiting:
    """Context for a wait for other ranks; an error inside it is replaced by its reason if that is known.

    `what` names the wait in reports. It is ignored in Undertow's worker threads, because a rank reports one wait at a time, the
    training thread's.
    """

    def __init__(self, member: ModelMonitor | None, what: str = "") -> None:
        self._member = member
        self._what = "" if what and isinstance(threading.current_thread(), WorkerThread) else what

    def __enter__(self) -> None:
        if self._member is not None and self._what:
            here = self._member.here
            self._before, here.wait = here.wait, (self._what, time.monotonic())

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        member = self._member
        try:
            if error is not None and member is not None:
                explain(error, member)
        finally:  # only now: while it looks for the reason, this rank still counts as waiting and not as late
            if self._what and member is not None:
                member.here.wait = self._before


def explain(error: BaseException, member: ModelMonitor) -> None:
    """Raises the reason of an error in a wait for other ranks, if it is known."""
    if isinstance(error, RuntimeError) and not isinstance(error, UndertowError):
        is_broken = member.known_fault is not None or _OF_TRANSPORTS.search(str(error))
        if is_broken and (fault := member.reason(error)) is not None:
            raise _last_error(member, fault) from None if _SAYS_LESS.search(str(error)) else error


def tell_of_failure(error: BaseException, member: ModelMonitor) -> None:
    """Raises the reason of an error while a set of messages was sent that must be complete, or tells the other ranks of it."""
    explain(error, member)
    if not isinstance(error, UndertowError) and member.known_fault is None:
        # The other ranks would take the next message for the missing one, and gloo ends a process for that.
        member.ring.says_failed(error)


def label_of(bucket: Bucket, plan: Plan) -> str:
    names = [repr(plan.params[index].name) for index in dict.fromkeys(bucket.params)]
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return f"bucket {bucket.index} ({shown or 'flags only'})"


@contextlib.contextmanager
def over_users(group: dist.ProcessGroup | None, what: str = "") -> Iterator[None]:
    """Context for a wait over a group of the user's: it ends with the reason if a rank is gone.

    This works if a model is synchronized over the same ranks. Without a name in `what`, the wait may take any time and no rank
    counts as late.
    """
    ring = None if group is None else GUARD.ring_of(tuple(dist.get_process_group_ranks(group)), dist.group.WORLD)
    member = None if ring is None else next(iter(ring.members.values()), None)
    if member is None:
        yield
        return
    member.borrowed, before = group, member.borrowed
    try:
        for fault in member.failures():  # after the assignment, so that later failures interrupt the group
            member.ring.latch(fault, member)
        require_no_fault(member)
        with Waiting(member, what):
            yield
    finally:
        member.borrowed = before


def require_no_fault(member: ModelMonitor | None) -> None:
    """Raises if a rank is gone or has failed; costs two attribute lookups otherwise."""
    if member is not None and (fault := member.fault or member.ring.fault):
        raise _last_error(member, fault)


def _last_error(member: ModelMonitor, fault: Fault) -> UndertowError:
    """Ends waits of Undertow's threads over these groups first, because the script may do anything after this error."""
    member.interrupt()
    return fault.error(f"synchronization {member.here.num_steps()}, rank {member.ring.rank}")


def join_ring(ranks: tuple[int, ...], rank: int, limits: SyncConfig) -> ModelMonitor | None:
    """Registers a new model's groups for `ranks` of the world; this is rank `rank` of them. A collective call.

    Returns None if no ring can be made. Raises RankLost if a rank has died earlier, and StallTimeout if one does not arrive
    within the timeout of process groups.
    """
    ring = GUARD.ring_of(ranks, dist.group.WORLD) or _new_ring(ranks, rank, limits)
    if ring is None:
        return None
    member = ring.join(limits)
    require_no_fault(member)
    return member


def _new_ring(ranks: tuple[int, ...], rank: int, limits: SyncConfig) -> Ring | None:
    where = f"the making of a process group, rank {rank}"
    of_groups = None if dist.group.WORLD is None else private.timeout_of(dist.group.WORLD)
    patience_s = min(limits.stall_timeout_s, patience.GLOO_WAITS_S if of_groups is None else of_groups.total_seconds())
    began_s = told_s = time.monotonic()

    def look(late: Sequence[int]) -> None:
        """Raises if one of the ranks that have not arrived is gone, or the time has passed."""
        nonlocal told_s
        now_s = time.monotonic()
        for other in late:
            if private.is_gone(ranks[other]):
                raise faults.lost(other).error(where)
        if now_s - began_s > patience_s and not store.check([over]):
            store.set(over, json.dumps(list(late)))  # tells ranks that arrive later that the others have given up
        if store.check([over]):
            raise faults.never_came(json.loads(store.get(over)), patience_s).error(where)
        if now_s - told_s > limits.stall_warning_s:
            told_s, named = now_s, ", ".join(map(str, late))
            faults.tell(f"rank {rank} has waited {now_s - began_s:.0f} s for rank {named} to synchronize a model.")

    try:
        store, name = private.default_store(), f"undertow/ring/{'_'.join(map(str, ranks))}"
        key = f"{name}/{store.add(f'{name}/tries/{rank}', 1)}"
        over = f"{key}/over"
        look(())
        neighbors = make_ring(store, key, rank=rank, num_ranks=len(ranks), look=look)
    except UndertowError:
        raise
    except RuntimeError as error:  # from the store
        raise RankLost(
            "the store that connects the ranks is gone, most likely because the rank that served it has ended.",
            where=where,
            remedy="Find out why that process ended, often rank 0's, and start again.",
        ) from error
    if not neighbors:
        _log.warning("rank %d reaches no ring of connections: lost ranks are found by the backend and its timeout alone.", rank)
        return None
    ring = Ring(neighbors, rank=rank, num_ranks=len(ranks), wake=GUARD.wake)
    GUARD.adopt(ranks, ring, dist.group.WORLD)
    return ring


class PeerMonitor:
    """All rings of this process, and the single thread that listens to them."""

    def __init__(self) -> None:
        # Each ring ends with torch.distributed's default group. If a stuck thread holds that until the interpreter ends, nothing
        # is left to do.
        self._rings: dict[tuple[int, ...], tuple[Ring, weakref.ref[Any]]] = {}
        self._heard: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._is_over = False
        self._thread: threading.Thread | None = None

    def ring_of(self, ranks: tuple[int, ...], world: object) -> Ring | None:
        """Returns the ring of these ranks, or None if torch.distributed was initialized again since it was made."""
        ring, of_world = self._rings.get(ranks, (None, None))
        return ring if of_world is not None and of_world() is world else None

    def adopt(self, ranks: tuple[int, ...], ring: Ring, world: object) -> None:
        if self._thread is None:
            self._begin()
        self._end(ranks)
        self._rings[ranks] = ring, weakref.ref(world, lambda _: self._end(ranks))
        for neighbor in ring.neighbors:
            neighbor.listen(lambda *heard: self._heard.put(partial(ring.hear, *heard)))
        self.wake()

    def wake(self) -> None:
        self._heard.put(int)

    def leave(self, error: BaseException | None) -> None:
        for ring, _ in list(self._rings.values()):
            ring.leave(error)

    def _end(self, ranks: tuple[int, ...]) -> None:
        """Leaves a ring because its process groups are gone or the process is about to end."""
        # Without the weak reference, which would call this at interpreter exit, after modules are gone.
        ring, _ = self._rings.pop(ranks, (None, None))
        if ring is None:
            return
        ring.leave(faults.raised())
        with ring.condition:
            neighbors, ring.neighbors = ring.neighbors, []
        for neighbor in neighbors:
            neighbor.flush(patience.FLUSH_S)
            neighbor.close()
        FREEING.finish()

    def _begin(self) -> None:
        thread = threading.Thread(target=self._listen, name="undertow-guard", daemon=True)
        thread.start()
        self._thread = thread
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forget)
        # multiprocessing may end a process without atexit; its finalizers still run.
        multiprocessing.util.Finalize(None, self._at_exit, exitpriority=100)
        atexit.register(self._at_exit)
        self._leave_before_end()

    def _leave_before_end(self) -> None:
        """Leaves with an exception that ends the process or a thread that was the last to train or create a model."""
        of_process, of_threads = sys.excepthook, threading.excepthook

        def process_ends(kind: type[BaseException], error: BaseException, trace: Any) -> object:
            self.leave(error)
            return of_process(kind, error, trace)

        def thread_ends(args: Any) -> object:
            trains = any(args.thread is not None and member.here.thread == args.thread.ident for member in self._members())
            if args.exc_value is not None and trains:
                self.leave(args.exc_value)
            return of_threads(args)

        sys.excepthook, threading.excepthook = process_ends, thread_ends

    def _at_exit(self) -> None:
        self.leave(faults.raised())
        for member in self._members():
            if member.known_fault is not None:  # the process may abort if broken groups still exist when it ends
                # An error in one group must not stop the rest of the exit.
                with contextlib.suppress(RuntimeError, ValueError):
                    member.destroy()
        for ranks in list(self._rings):
            self._end(ranks)
        self._is_over = True
        self.wake()
        if self._thread is not None:
            self._thread.join(patience.FLUSH_S)

    def _forget(self) -> None:
        """Closes all connections in a child process."""
        for ring, _ in self._rings.values():
            for neighbor in ring.neighbors:
                neighbor.forget()
            ring.neighbors = []
        self.__init__()  # type: ignore[misc]  # the thread does not exist in the child

    def _members(self) -> list[ModelMonitor]:
        return [member for ring, _ in list(self._rings.values()) for member in list(ring.members.values())]

    def _listen(self) -> None:
        while not self._is_over:
            try:
                pause_s = min((member.pause_s() for member in self._members()), default=None)  # for ever, if nothing is trained
                with contextlib.suppress(queue.Empty):
                    self._heard.get(timeout=pause_s)()
                for member in self._members():
                    member.look()
            except Exception:
                _log.exception("the thread that listens to other ranks continues after an error.")
                time.sleep(patience.ANSWERS_S)


GUARD = PeerMonitor()  # one for the process, like sys.excepthook
