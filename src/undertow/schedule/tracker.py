"""Releases the ops of a schedule as gradients arrive; shared by the runtime and the simulator."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from undertow.errors import ConfigError
from undertow.schedule.op import COMPUTE, EXTERNAL, Op, OpKind, Schedule


class Tracker:
    """Who has arrived in this round, and which ops may be issued because of it.

    An op is released when every op it comes after has been released (or, for one that is not ours, has happened)
    and, on a communication lane, every earlier op of that lane: ranks whose gradients arrive in different orders
    still issue the same collectives in the same order. Released is not complete: who issues an op makes sure that
    its inputs are, as a stream does.
    """

    def __init__(self, schedule: Schedule, params_of_bucket: Sequence[Sequence[int]], *, num_params: int) -> None:
        self._ops = schedule.ops
        self._params_of_bucket = [frozenset(params) for params in params_of_bucket]
        self._bucket_of_param = _bucket_of_param(params_of_bucket, num_params)
        self._graph = _Graph.of(schedule)
        # Flags and counts in place of sets: arrive() runs thousands of times a step and these stay in the fastest cache.
        self._has_arrived = bytearray(num_params)
        self._num_pending: list[int] = []
        self._repeats: Counter[int] = Counter()
        self._expected_repeats: dict[int, int] = {}
        self._blockers: list[int] = []
        self._queues: list[deque[int]] = []
        self._happened: set[int] = set()
        self.reset()

    def reset(self) -> None:
        """Starts the next round: nothing has arrived."""
        self._has_arrived = bytearray(len(self._has_arrived))
        self._num_pending = [len(params) for params in self._params_of_bucket]
        for param, count in self._expected_repeats.items():
            self._num_pending[self._bucket_of_param[param]] += count
        self._repeats.clear()
        self._happened.clear()
        self._blockers = list(self._graph.num_blockers)
        self._queues = [deque(ids) for ids in self._graph.comm_lanes]

    @property
    def arrived(self) -> set[int]:
        """Parameters that have arrived in this round."""
        return {param for param, has_arrived in enumerate(self._has_arrived) if has_arrived}

    @property
    def has_repeats(self) -> bool:
        """Whether some parameter arrived more often in this round than it was expected to."""
        return any(count > self._expected_repeats.get(param, 0) for param, count in self._repeats.items())

    def learn_repeats(self) -> None:
        """From the next round on a parameter counts as arrived when it has come as often as in this one.

        It costs one round in which something came after its bucket had left; a parameter that then comes less often
        is sent at the end of backward, later than it could be and never wrong.
        """
        self._expected_repeats = dict(self._repeats)

    def missing(self, bucket: int) -> frozenset[int]:
        """Parameters of `bucket` that have not arrived in this round."""
        if self._num_pending[bucket] <= 0:
            return frozenset()
        return frozenset(param for param in self._params_of_bucket[bucket] if not self._has_arrived[param])

    def arrive(self, param: int) -> Sequence[Op]:
        """The ops that may be issued now that the gradient of `param` is there.

        A repeated arrival releases nothing, unless it has been learned to expect it.
        """
        # Called once per parameter and step, inside backward: everything else here may be slower than this.
        if self._has_arrived[param]:
            return self._arrive_again(param)
        self._has_arrived[param] = 1
        bucket = self._bucket_of_param[param]
        num_pending = self._num_pending[bucket] - 1
        self._num_pending[bucket] = num_pending
        if num_pending:
            return ()
        return self._happen(self._graph.fills[bucket])

    def _arrive_again(self, param: int) -> Sequence[Op]:
        self._repeats[param] += 1
        if self._repeats[param] > self._expected_repeats.get(param, 0):
            return ()
        bucket = self._bucket_of_param[param]
        self._num_pending[bucket] -= 1
        return () if self._num_pending[bucket] else self._happen(self._graph.fills[bucket])

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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Graph:
    """What a round starts from: the schedule's edges, and the ops that happen without us."""

    num_blockers: tuple[int, ...]
    successors: tuple[tuple[int, ...], ...]
    comm_lanes: tuple[tuple[int, ...], ...]
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
            comm_lanes=tuple(map(tuple, lanes.values())),
            fills=tuple(sorted(of_kind[OpKind.FILL], key=lambda op_id: schedule.ops[op_id].bucket or 0)),
            end=of_kind[OpKind.END][0],
            join=of_kind[OpKind.JOIN][0],
        )


def _bucket_of_param(params_of_bucket: Sequence[Sequence[int]], num_params: int) -> list[int]:
    bucket_of = {param: bucket for bucket, params in enumerate(params_of_bucket) for param in params}
    for param in range(num_params):
        if param not in bucket_of:
            raise ConfigError(f"parameter {param} belongs to no bucket.", remedy="Put every parameter into one bucket.")
    return [bucket_of[param] for param in range(num_params)]
