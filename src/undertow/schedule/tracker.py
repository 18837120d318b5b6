"""Releases the ops of a schedule as gradients arrive; shared by the runtime and the simulator."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from undertow.schedule.arrivals import Arrivals
from undertow.schedule.op import COMPUTE, EXTERNAL, Op, OpKind, Schedule


class Releases:
    """Decides which ops of a schedule may be issued after others have happened.

    An op is released when every op it follows has been released (or, for an external op, has happened). On a communication lane
    every earlier op of that lane must also be released: ranks whose gradients arrive in different orders still issue the same
    collectives in the same order. Released does not mean complete: the issuer of an op must ensure that its inputs are complete,
    as a stream does.
    """

    def __init__(self, schedule: Schedule) -> None:
        self._ops = schedule.ops
        self._graph = _Graph.of(schedule)
        self._blockers: list[int] = []
        self._queues: list[deque[int]] = []
        self._happened: set[int] = set()
        self.reset()

    def reset(self) -> None:
        """Starts the next synchronization: nothing has happened."""
        self._happened.clear()
        self._blockers = list(self._graph.num_blockers)
        self._queues = [deque(ids) for ids in self._graph.queues]

    def fill(self, bucket: int) -> Sequence[Op]:
        """Returns the ops to issue after all gradients of `bucket` have arrived."""
        return self._happen(self._graph.fills[bucket])

    def end_backward(self) -> Sequence[Op]:
        """Ends backward: gradients that have not arrived are unused on this rank, and all remaining buckets are launched."""
        return [op for happened in (*self._graph.fills, self._graph.end) for op in self._happen(happened)]

    def join(self) -> Sequence[Op]:
        """Returns the ops that wait for the network, after every engine of this process has launched."""
        return self._happen(self._graph.join)

    def _happen(self, op_id: int) -> list[Op]:
        """Marks an op as happened and returns the ops that this releases, transitively, in the order to issue them."""
        if op_id in self._happened:
            return []
        released: list[Op] = []
        # By id, so that a bucket is launched before the next one is packed.
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
        # The head of a queue holds back all later ops: launch order must not depend on arrival.
        released = []
        for queue in self._queues:
            while queue and self._blockers[queue[0]] == 0:
                released.append(queue.popleft())
        return released


class Tracker:
    """One synchronization as one object: arrivals and the ops they release."""

    def __init__(self, schedule: Schedule, params_of_bucket: Sequence[Sequence[int]], *, num_params: int) -> None:
        self._releases = Releases(schedule)
        self._released: list[Op] = []
        self.arrivals = Arrivals(params_of_bucket, num_params=num_params, on_full=self._fill)

    def reset(self) -> None:
        """Starts the next synchronization: nothing has arrived."""
        self.arrivals.reset()
        self._releases.reset()

    def arrive(self, param: int) -> Sequence[Op]:
        """Returns the ops that may be issued after the gradient of `param` has arrived."""
        self._released = []
        self.arrivals.arrive(param)
        return self._released

    def end_backward(self) -> Sequence[Op]:
        """Ends backward: gradients that have not arrived are unused on this rank, and all remaining buckets are launched."""
        return self._releases.end_backward()

    def join(self) -> Sequence[Op]:
        """Returns the ops that wait for the network, after every engine of this process has launched."""
        return self._releases.join()

    def _fill(self, bucket: int) -> None:
        self._released += self._releases.fill(bucket)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Graph:
    """The initial state of a synchronization: the schedule's edges, and the external ops."""

    num_blockers: tuple[int, ...]
    successors: tuple[tuple[int, ...], ...]
    queues: tuple[tuple[int, ...], ...]  # one for each lane except the compute lane
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
