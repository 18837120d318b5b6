"""Waits for other ranks: they have a name while they last, and end with the reason if a rank does not arrive."""

from __future__ import annotations

import contextlib
import json
import logging
import re
import time
from types import TracebackType
from typing import TYPE_CHECKING

import torch.distributed as dist

from undertow.config import SyncConfig
from undertow.errors import RankLost, UndertowError
from undertow.plan import Bucket, Plan
from undertow.runtime.peers import faults
from undertow.runtime.peers.faults import Fault
from undertow.runtime.peers.model_monitor import ModelMonitor
from undertow.runtime.peers.monitor import GUARD, Ring
from undertow.runtime.peers.ring import make_ring
from undertow.runtime.peers.worker import in_worker
from undertow.runtime.torch_private import private

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

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
        member = self._member
        if self._what and in_worker():
            self._what = ""
        if member is not None and self._what:
            self._before = member.waits_for, member.since_s
            member.since_s = time.monotonic()
            member.waits_for = self._what

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
                member.waits_for, member.since_s = self._before


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
            member.ring.say("failed", text=faults.text_of(error))


def label_of(bucket: Bucket, plan: Plan) -> str:
    """Names a bucket in messages."""
    names = [repr(plan.params[index].name) for index in dict.fromkeys(bucket.params)]
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return f"bucket {bucket.index} ({shown or 'flags only'})"


def where_of(member: ModelMonitor) -> str:
    return f"synchronization {member.num_steps()}, rank {member.ring.rank}"


@contextlib.contextmanager
def over_users(group: dist.ProcessGroup | None, what: str = "") -> Iterator[None]:
    """Context for a wait over a group of the user's: it ends with the reason if a rank is gone.

    This works if a model is synchronized over the same ranks. Without a name in `what`, the wait may take any time and no rank
    counts as late.
    """
    ranks = () if group is None else tuple(dist.get_process_group_ranks(group))
    ring = GUARD.ring_of(ranks, dist.group.WORLD)
    member = None if ring is None else next(iter(ring.members.values()), None)
    if ring is None or member is None:
        yield
        return
    member.borrowed, before = group, member.borrowed
    try:
        ring.counts_failures(member)  # after the assignment, so that later failures interrupt the group
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
    return fault.error(where_of(member))


def join_ring(ranks: tuple[int, ...], rank: int, limits: SyncConfig) -> ModelMonitor | None:
    """Registers a new model's groups for `ranks` of the world, of which this is number `rank`; a collective call.

    Returns None if no ring can be made. Raises RankLost if a rank has died earlier, and StallTimeout if one does not arrive
    within the timeout of process groups.
    """
    world = dist.group.WORLD
    ring = GUARD.ring_of(ranks, world)
    if ring is None:
        ring = _new_ring(ranks, rank, limits, world)
        if ring is None:
            return None
        GUARD.adopt(ranks, ring)
    member = ring.join(limits)
    require_no_fault(member)
    return member


def _new_ring(ranks: tuple[int, ...], rank: int, limits: SyncConfig, world: object) -> Ring | None:
    store, members = private.default_store(), "_".join(map(str, ranks))
    began_s, told_s = time.monotonic(), time.monotonic()
    patience = private.timeout_of(world) if isinstance(world, dist.ProcessGroup) else None
    patience_s = min(limits.stall_timeout_s, 1800.0 if patience is None else patience.total_seconds())
    where = f"the making of a process group, rank {rank}"

    def give_up(late: Sequence[int]) -> None:
        raise faults.never_came(late, patience_s).error(where)

    def each(late: Sequence[int]) -> None:
        nonlocal told_s
        waited_s, named = time.monotonic() - began_s, ", ".join(map(str, late))
        if store.check([over]):
            give_up(json.loads(store.get(over)))
        if waited_s > patience_s:
            store.set(over, json.dumps(list(late)))
            give_up(late)
        if time.monotonic() - told_s > limits.stall_warning_s:
            told_s = time.monotonic()
            faults.tell(f"rank {rank} has waited {waited_s:.0f} s for rank {named} to synchronize a model.")

    try:
        number = int(store.add(f"undertow/ring/{members}/tries/{rank}", 1))
        key = f"undertow/ring/{members}/{number}"
        over = f"{key}/over"  # tells ranks that arrive late that the others have given up
        each(())
        neighbors = make_ring(
            store,
            key,
            rank=rank,
            num_ranks=len(ranks),
            is_gone=lambda other: private.is_gone(ranks[other]),
            each=each,
        )
    except UndertowError:
        raise
    except RuntimeError as error:  # from the store
        raise RankLost(
            "the store by which ranks meet is gone, and with it most likely the rank that served it.",
            where=where,
            remedy="Look for what has ended that process, often rank 0's, and start again.",
        ) from error
    if isinstance(neighbors, int):
        raise faults.lost(neighbors).error(where)
    if neighbors is None:
        _log.warning("rank %d reaches no ring of connections: lost ranks are found by the backend and its timeout alone.", rank)
        return None
    return Ring(neighbors, rank=rank, num_ranks=len(ranks), world=world)
