"""A meeting of ranks: each waits until all have arrived, in the store of torch.distributed.

meeting_of  context: a meeting of these ranks
Meeting     the store, which is asked for nothing that waits
Lateness    how long a rank waits for late ones

Reasons: docs/design/lost-ranks.md.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch.distributed.distributed_c10d import Store

from undertow.config import SyncConfig
from undertow.errors import RankLost, UndertowError
from undertow.ranks import faults, patience
from undertow.ranks.watch import NullWatch
from undertow.torch_private import private


@contextlib.contextmanager
def meeting_of(
    ranks: tuple[int, ...], rank: int, limits: SyncConfig, watch: NullWatch, within_s: float
) -> Iterator[Meeting]:
    """Context for a meeting of these ranks; each rank counts its meetings.

    Raises the error that `watch` has for a rank that is gone, or StallTimeout.
    """
    try:
        store = private.default_store()
        # a list of thousands of ranks is longer than a store's key may be
        name = f"undertow/ring/{private.name_of(ranks)}"
        key = f"{name}/{store.add(f'{name}/tries/{rank}', 1)}"
        lateness = Lateness(store, f"{key}/over", rank, limits, watch, within_s=within_s)
        lateness.check(())
        yield Meeting(store, key, rank, len(ranks), lateness)
    except UndertowError:
        raise
    except RuntimeError as error:  # from the store
        raise RankLost(
            "the store that connects the ranks is gone, most likely because the rank that served "
            "it has ended.",
            where=_where(rank),
            remedy="Find out why that process ended, often rank 0's, and start again.",
        ) from error


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

    def check(self, late: Sequence[int]) -> None:
        """Raises if the ranks that have not arrived do not arrive in time."""
        waited_s = time.monotonic() - self._began_s
        gives_up = waited_s > self._limit_s or self._watch.fault is not None
        if gives_up and not self._store.check([self._over]):
            # tells ranks that arrive later, whose watch may be younger than the fault
            self._store.set(self._over, json.dumps(list(late) or [self._rank]))
        self._watch.check()
        if self._store.check([self._over]):
            named = json.loads(self._store.get(self._over))
            raise faults.never_came(named, self._limit_s).error(_where(self._rank))
        if waited_s > self._told_s + self._warning_s:
            self._told_s = waited_s
            named = ", ".join(map(str, late))
            faults.tell(
                f"rank {self._rank} has waited {waited_s:.0f} s for rank {named} to synchronize a "
                "model."
            )


def _where(rank: int) -> str:
    return f"the making of a process group, rank {rank}"


@dataclass(frozen=True, slots=True)
class Meeting:
    """The meeting of one rank with the others, at several places one after another."""

    store: Store
    key: str
    rank: int
    num_ranks: int
    lateness: Lateness

    def arrive(self, place: str, told: str = "") -> None:
        """Leaves the text `told` at a place, and waits until all ranks have arrived there."""
        key = f"{self.key}/{place}"
        self.store.set(f"{key}/{self.rank}", told)
        num_here = self.store.add(key, 1)
        pause_s = 0.001
        look_s = time.monotonic() + patience.PROBE_S
        while num_here < self.num_ranks:
            time.sleep(pause_s)
            pause_s = min(0.25, 1.5 * pause_s)
            num_here = self.store.add(key, 0)
            if num_here < self.num_ranks and time.monotonic() > look_s:
                look_s = time.monotonic() + patience.PROBE_S
                ranks = range(self.num_ranks)
                self.lateness.check(
                    [rank for rank in ranks if not self.store.check([f"{key}/{rank}"])]
                )

    def told_by(self, rank: int, place: str) -> str:
        """Returns the text that a rank has left at a place where all have arrived."""
        return str(self.store.get(f"{self.key}/{place}/{rank}").decode())

    @property
    def has_failed(self) -> bool:
        return bool(self.store.check([f"{self.key}/why"]))

    def fail(self, why: str) -> None:
        """Tells all ranks the reason, unless they have one: later ranks fail because of it."""
        if not self.has_failed:
            self.store.set(f"{self.key}/why", why)
