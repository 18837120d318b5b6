"""Waits for other ranks: they have a name while they last, and end with the reason if a rank does not arrive."""

import contextlib
import json
import logging
import re
import time
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from undertow.config import SyncConfig
from undertow.errors import RankLost, UndertowError
from undertow.plan import Bucket, Plan
from undertow.runtime.peers import faults
from undertow.runtime.peers.faults import Fault
from undertow.runtime.peers.monitor import GUARD
from undertow.runtime.peers.neighbor import make_ring
from undertow.runtime.peers.ring import ModelMonitor, Ring
from undertow.runtime.peers.threads import in_worker
from undertow.runtime.torch_private import private

_log = logging.getLogger("undertow")
# Words of transports (gloo, NCCL, the store) when a connection breaks. Other errors are raised without waiting for a reason.
_OF_TRANSPORTS = re.compile(r"connection|closed|reset|broken pipe|time.?out|timed out|socket|gloo|nccl|peer|abort", re.IGNORECASE)


class Waiting:
    """Context for a wait for other ranks; an error inside it is replaced by its reason if that is known.

    `what` names the wait in reports. It is ignored in Undertow's worker threads, because a rank reports one wait at a time, the
    training thread's.
    """

    __slots__ = ("_before", "_member", "_what")

    def __init__(self, member: ModelMonitor | None, what: str) -> None:
        self._member = member
        self._what = what

    def __enter__(self) -> None:
        if self._what and in_worker():
            self._what = ""
        if self._member is not None and self._what:
            here = self._member.here
            self._before = here.waits_for, here.since_s
            here.since_s = time.monotonic()
            here.waits_for = self._what

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        member = self._member
        if member is None:
            return
        try:
            if isinstance(error, RuntimeError) and not isinstance(error, UndertowError):
                is_broken = member.known_fault is not None or _OF_TRANSPORTS.search(str(error))
                fault = member.reason(error) if is_broken else None
                if fault is not None:
                    raise _last_error(member, fault) from error
        finally:  # only now: while it looks for the reason, this rank still counts as waiting and not as late
            if self._what:
                member.here.waits_for, member.here.since_s = self._before


class Launching(Waiting):
    """Context for sending a set of messages that must be complete; if a rank fails inside, it tells the others."""

    __slots__ = ()

    def __init__(self, member: ModelMonitor | None) -> None:
        super().__init__(member, "")

    def __enter__(self) -> None:
        require_no_fault(self._member)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        super().__exit__(kind, error, trace)
        member = self._member
        if error is not None and not isinstance(error, UndertowError) and member is not None and member.known_fault is None:
            # The other ranks would take the next message for the missing one, and gloo ends a process for that.
            member.ring.says_failed(error)


def label_of(bucket: Bucket, plan: Plan) -> str:
    """Names a bucket in messages."""
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
    if ring is None or member is None:
        yield
        return
    member.borrowed, before = group, member.borrowed
    try:
        for fault in member.failures():  # after the assignment, so that later failures interrupt the group
            ring.latch(fault, member)
        require_no_fault(member)
        with Waiting(member, what):
            yield
    finally:
        member.borrowed = before


def require_no_fault(member: ModelMonitor | None) -> None:
    """Raises if a rank is gone or has failed; costs two attribute lookups otherwise."""
    if member is not None and (member.fault or member.ring.fault):
        fault = member.known_fault
        assert fault is not None  # a fault is never reset
        raise _last_error(member, fault)


def _last_error(member: ModelMonitor, fault: Fault) -> UndertowError:
    """Ends waits of Undertow's threads over these groups first, because the script may do anything after this error."""
    member.interrupt()
    return fault.error(f"synchronization {member.here.num_steps()}, rank {member.ring.rank}")


def join_ring(ranks: tuple[int, ...], rank: int, limits: SyncConfig) -> ModelMonitor | None:
    """Registers a new model's groups for `ranks` of the world, of which this is number `rank`; a collective call.

    Returns None if no ring can be made. Raises RankLost if a rank has died earlier, and StallTimeout if one does not arrive
    within the timeout of process groups.
    """
    world = dist.group.WORLD
    ring = GUARD.ring_of(ranks, world)
    if ring is None:
        ring = _new_ring(ranks, rank, limits)
        if ring is None:
            return None
        GUARD.adopt(ranks, ring, world)
    member = ring.join(limits)
    require_no_fault(member)
    return member


def _new_ring(ranks: tuple[int, ...], rank: int, limits: SyncConfig) -> Ring | None:
    where = f"the making of a process group, rank {rank}"
    try:
        store, name = private.default_store(), f"undertow/ring/{'_'.join(map(str, ranks))}"
        key = f"{name}/{store.add(f'{name}/tries/{rank}', 1)}"
        look = _look_at_late(store, f"{key}/over", ranks, rank, limits, where)
        look(())
        neighbors = make_ring(store, key, rank=rank, num_ranks=len(ranks), look=look)
    except UndertowError:
        raise
    except RuntimeError as error:  # from the store
        raise RankLost(
            "the store by which ranks meet is gone, and with it most likely the rank that served it.",
            where=where,
            remedy="Look for what has ended that process, often rank 0's, and start again.",
        ) from error
    if neighbors is None:
        _log.warning("rank %d reaches no ring of connections: lost ranks are found by the backend and its timeout alone.", rank)
        return None
    return Ring(neighbors, rank=rank, num_ranks=len(ranks), wake=GUARD.wake)


def _look_at_late(
    store: Store, over: str, ranks: Sequence[int], rank: int, limits: SyncConfig, where: str
) -> Callable[[Sequence[int]], None]:
    """Returns a function of the ranks that have not arrived: it raises if one of them is gone, or the time has passed.

    The store tells ranks that arrive later at `over` that the others have given up.
    """
    of_groups = None if dist.group.WORLD is None else private.timeout_of(dist.group.WORLD)
    patience_s = min(limits.stall_timeout_s, 1800.0 if of_groups is None else of_groups.total_seconds())
    began_s = told_s = time.monotonic()

    def look(late: Sequence[int]) -> None:
        nonlocal told_s
        now_s = time.monotonic()
        for other in late:
            if private.is_gone(ranks[other]):
                raise faults.lost(other).error(where)
        if now_s - began_s > patience_s and not store.check([over]):
            store.set(over, json.dumps(list(late)))
        if store.check([over]):
            raise faults.never_came(json.loads(store.get(over)), patience_s).error(where)
        if now_s - told_s > limits.stall_warning_s:
            told_s, named = now_s, ", ".join(map(str, late))
            faults.tell(f"rank {rank} has waited {now_s - began_s:.0f} s for rank {named} to synchronize a model.")

    return look
