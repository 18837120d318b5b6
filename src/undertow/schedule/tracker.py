"""Releases the ops of a schedule as gradients arrive; shared by the runtime and the simulator."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from undertow.schedule.arrivals import Arrivals
from undertow.schedule.op import COMPUTE, EXTERNAL, Op, OpKind, Schedule


class Releases:
    """Which ops of a schedule may be issued, now that others have happened.

    An op is released when every op it comes after has been released (or, for one that is not ours, has happened)
    and, on a communication lane, every earlier op of that lane: ranks whose gradients arrive in different orders
    still issue the same collectives in the same order. Released is not complete: who issues an op makes sure that
    its inputs are, as a stream does.
    """

    def __init__(self, schedule: Schedule) -> None:
        self._ops = schedule.ops
        self._graph = _Graph.of(schedule)
        self._blockers: list[int] = []
        self._queues: list[deque[int]] = []
        self._happened: set[int] = set()
        self.reset()

    def reset(self) -> None:
        """Starts the next round: nothing has happened."""
        self._happened.clear()
        self._blockers = list(self._graph.num_blockers)
        self._queues = [deque(ids) for ids in self._graph.queues]

    def fill(self, bucket: int) -> Sequence[Op]:
        """The ops to issue now that all gradients of `bucket` are there."""
        return self._happen(self._graph.fills[bucket])

    def end_backward(self) -> Sequence[Op]:
        """Backward is over: what has not arrived is unused here, and everything that remains leaves."""
        return [op for happened in (*self._graph.fills, self._graph.end) for op in self._happen(happened)]

    def join(self) -> Sequence[Op]:
        """Every engine of this process has launched: the ops that wait for the network may be issued."""
        return self._happen(self._graph.join)

    def _happen(self, op_id: int) -> list[Op]:
        """Marks an op as happened and returns what that releases, transitively, in the order to issue it."""
        if op_id in self._happened:
            return []
        released: list[Op] = []
        # By id, so that a bucket leaves before the next one is packed.
        worklist = [op_id]
        while worklist:
            done = heappop(worklist)
            self._happened.add(done)
            if done != op_id:
                released.append(self._ops[done])
            for unblocked in (*self._release_compute(done), *self._release_queues()):
                heappush(worklist, unblocked)
        return released

    def _release_compute(self, done: int) -> list[int]:
        released = []
        for successor in self._graph.successors[done]:
            self._blockers[successor] -= 1
            op = self._ops[successor]
            if self._blockers[successor] == 0 and op.lane == COMPUTE and op.kind not in EXTERNAL:
                released.append(op.id)
        return released

    def _release_queues(self) -> list[int]:
        # The head of a queue holds back everything behind it: launch order must not depend on arrival.
        released = []
        for queue in self._queues:
            while queue and self._blockers[queue[0]] == 0:
                released.append(queue.popleft())
        return released


class Tracker:
    """Arrivals and the ops they release, together: a round as one object."""

    def __init__(self, schedule: Schedule, params_of_bucket: Sequence[Sequence[int]], *, num_params: int) -> None:
        self._releases = Releases(schedule)
        self._released: list[Op] = []
        self.arrivals = Arrivals(params_of_bucket, num_params=num_params, on_full=self._fill)

    def reset(self) -> None:
        """Starts the next round: nothing has arrived."""
        self.arrivals.reset()
        self._releases.reset()

    def arrive(self, param: int) -> Sequence[Op]:
        """The ops that may be issued now that the gradient of `param` is there."""
        self._released = []
        self.arrivals.arrive(param)
        return self._released

    def end_backward(self) -> Sequence[Op]:
        """Backward is over: what has not arrived is unused here, and everything that remains leaves."""
        return self._releases.end_backward()

    def join(self) -> Sequence[Op]:
        """Every engine of this process has launched: the ops that wait for the network may be issued."""
        return self._releases.join()

    def _fill(self, bucket: int) -> None:
        self._released += self._releases.fill(bucket)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Graph:
    """What a round starts from: the schedule's edges, and the ops that happen without us."""

    num_blockers: tuple[int, ...]
    successors: tuple[tuple[int, ...], ...]
    queues: tuple[tuple[int, ...], ...]  # by lane that is not the compute lane
    fills: tuple[int, ...]  # by bucket
    end: int
    join: int

    @classmethod
    def of(cls, schedule: Schedule) -> _Graph:
        successors: list[list[int]] = [[] for _ in schedule.ops]
        lanes: dict[str, list[int]] = {}
        of_kind: dict[OpKind, list[int]] = {}
        for op in schedule.ops:
            for earlier in op.after:
                successors[earlier].append(op.id)
            if op.lane != COMPUTE:
                lanes.setdefault(op.lane, []).append(op.id)
            of_kind.setdefault(op.kind, []).append(op.id)
        return cls(
            num_blockers=tuple(len(op.after) for op in schedule.ops),
            successors=tuple(map(tuple, successors)),
            queues=tuple(map(tuple, lanes.values())),
            fills=tuple(sorted(of_kind[OpKind.FILL], key=lambda op_id: schedule.ops[op_id].bucket or 0)),
            end=of_kind[OpKind.END][0],
            join=of_kind[OpKind.JOIN][0],
        )
