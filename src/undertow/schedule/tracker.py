"""Tracks one synchronization: which gradients are ready, which buckets are full, and which ops of the schedule that releases.

The runtime and the simulator share it.
"""

import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any

from undertow.errors import ConfigError
from undertow.schedule.op import COMPUTE, EXTERNAL, Op, OpKind, Schedule

# States of a parameter. All except the first are true, so that arrive() tells the usual case from the others with one test.
_ABSENT, _ARRIVED, _ABSENT_AND_UNUSUAL = 0, 1, 2  # unusual: in pieces, or its arrival is noted
_MOST_REMEMBERED = 1024


class Arrivals:
    """Counts gradients as they arrive, and calls `on_full(bucket)` when the last one of a bucket arrives.

    A parameter that is cut into pieces is in several buckets: its arrival counts for each of them.

    `traversal` distinguishes a backward from another that runs inside it. If it has changed since the last arrival,
    `on_traversal(traversal, param)` is called first. Only the runtime uses both; elsewhere there is one traversal.
    """

    def __init__(
        self,
        params_of_bucket: Sequence[Sequence[int]],
        *,
        num_params: int,
        on_full: Callable[[int], object],
        traversal: Callable[[], int] = int,
        on_traversal: Callable[[int, int], object] = max,
    ) -> None:
        self._on_full = on_full
        self._traversal = traversal
        self._on_traversal = on_traversal
        self._seen_traversal = -1
        self._note: Callable[[int], object] | None = None
        # At the start of a synchronization: states, the number of gradients that each bucket waits for, and expected repeats.
        self._fresh: tuple[bytes, list[int], Counter[int]] = (b"", [], Counter())
        self.repeats: Counter[int] = Counter()  # by parameter, in this synchronization
        # Flags and counts instead of sets: arrive() runs thousands of times a step, and these stay in the fastest cache.
        self._states = bytearray(num_params)
        self.regroup(params_of_bucket)

    def regroup(self, params_of_bucket: Sequence[Sequence[int]]) -> None:
        """Switches to other buckets of the same parameters and resets. Raises ConfigError if a parameter has no bucket."""
        self._params_of_bucket = [tuple(params) for params in params_of_bucket]
        self._buckets_of_param: list[list[int]] = [[] for _ in self._states]
        for bucket, params in enumerate(self._params_of_bucket):
            for param in params:
                self._buckets_of_param[param].append(bucket)
        for param, buckets in enumerate(self._buckets_of_param):
            if not buckets:
                raise ConfigError(f"parameter {param} belongs to no bucket.", remedy="Put every parameter into one bucket.")
        self._bucket_of_param = [buckets[0] for buckets in self._buckets_of_param]
        self._prepare(self._fresh[2])
        self.reset()

    def call_at_each(self, note: Callable[[int], object] | None) -> None:
        """From the next synchronization on calls `note(param)` whenever a gradient counts; None stops that."""
        self._note = note
        self._prepare(self._fresh[2])

    def reset(self) -> None:
        """Starts the next synchronization: nothing has arrived."""
        states, num_pending, _ = self._fresh
        self._states, self.num_pending = bytearray(states), list(num_pending)
        self.repeats.clear()

    def forget_traversal(self) -> None:
        """Makes the next arrival call `on_traversal`, whatever its traversal."""
        self._seen_traversal = -1

    def silence(self) -> None:
        """Stops calls of `on_full`."""
        self._on_full = lambda _bucket: None

    def arrive(self, param: int, _gradient: object = None) -> None:
        """Records that the gradient of `param` arrived. A repeated arrival counts only if `learn_repeats` expects it."""
        # Called once per parameter and step, inside backward: everything else may be slower than this one frame.
        traversal = self._traversal()
        if traversal != self._seen_traversal:
            self._seen_traversal = traversal
            self._on_traversal(traversal, param)
        if self._states[param]:
            self._arrive_unusually(param)
            return
        self._states[param] = 1  # _ARRIVED, without looking up a global name
        bucket = self._bucket_of_param[param]
        num_pending = self.num_pending[bucket] - 1
        self.num_pending[bucket] = num_pending
        if not num_pending:
            self._on_full(bucket)

    def note(self, param: int) -> None:
        """Records that the gradient of `param` arrived, without calling anything."""
        if self._states[param] != _ARRIVED:
            self._states[param] = _ARRIVED
            self._count_down(param)

    @property
    def listener(self) -> object:
        """The object whose method `on_full` is."""
        return getattr(self._on_full, "__self__", None)

    @property
    def arrived(self) -> set[int]:
        """Parameters that have arrived in this synchronization."""
        return {param for param, state in enumerate(self._states) if state == _ARRIVED}

    @property
    def absent(self) -> set[int]:
        """Parameters that have not arrived in this synchronization."""
        if self._states.count(_ARRIVED) == len(self._states):
            return set()
        return {param for param, state in enumerate(self._states) if state != _ARRIVED}

    def missing(self, bucket: int) -> frozenset[int]:
        """Returns the parameters of `bucket` that have not arrived in this synchronization."""
        if self.num_pending[bucket] <= 0:
            return frozenset()
        return frozenset(param for param in self._params_of_bucket[bucket] if self._states[param] != _ARRIVED)

    @property
    def has_repeats(self) -> bool:
        """True if some parameter arrived more often in this synchronization than expected."""
        _, _, expected = self._fresh
        return any(count > expected[param] for param, count in self.repeats.items())

    def learn_repeats(self) -> None:
        """Expects each parameter to arrive as often as in this synchronization, from the next one on.

        Learning costs one synchronization in which a gradient arrived after its bucket was sent. If a parameter then arrives less
        often, its bucket is sent at the end of backward: later than possible, but never wrong.
        """
        self._prepare(self.repeats.copy())

    def _prepare(self, repeats: Counter[int]) -> None:
        """Sets how the next synchronization starts; `repeats` are expected."""
        is_noted = self._note is not None
        states = (_ABSENT_AND_UNUSUAL if is_noted or len(buckets) > 1 else _ABSENT for buckets in self._buckets_of_param)
        num_pending = [len(params) for params in self._params_of_bucket]
        for param, count in repeats.items():
            for bucket in self._buckets_of_param[param]:
                num_pending[bucket] += count
        self._fresh = (bytes(states), num_pending, repeats)

    def _arrive_unusually(self, param: int) -> None:
        if self._states[param] == _ARRIVED:
            self.repeats[param] += 1
            if self.repeats[param] > self._fresh[2][param]:
                return
        if self._note is not None:
            self._note(param)
        self._states[param] = _ARRIVED
        for bucket in self._count_down(param):
            self._on_full(bucket)

    def _count_down(self, param: int) -> list[int]:
        """Returns the buckets that the gradient of `param` has filled. All are counted before any callback runs."""
        for bucket in self._buckets_of_param[param]:
            self.num_pending[bucket] -= 1
        return [bucket for bucket in self._buckets_of_param[param] if not self.num_pending[bucket]]


class SerialArrivals(Arrivals):
    """Arrivals from several threads: autograd has one thread per device, and buckets must be launched in one order."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._lock = threading.RLock()  # a hook may run a backward
        super().__init__(*args, **kwargs)

    def arrive(self, param: int, _gradient: object = None) -> None:
        with self._lock:
            super().arrive(param)


@dataclass(frozen=True, slots=True)
class _Progress:
    """How far a synchronization is: ops by id."""

    happened: set[int]
    num_blockers: list[int]  # of each op
    queues: list[deque[int]]  # of each lane, the ops that have not been released


class Releases:
    """Decides which ops of a schedule may be issued after others have happened.

    An op is released when every op it follows has been released (or, for an external op, has happened). On a communication lane
    every earlier op of that lane must also be released: ranks whose gradients arrive in different orders still issue the same
    collectives in the same order. Released does not mean complete: the issuer of an op must ensure that its inputs are complete,
    as a stream does.
    """

    def __init__(self, schedule: Schedule) -> None:
        self._ops = schedule.ops
        self._successors: list[list[int]] = [[] for _ in schedule.ops]
        lanes: dict[str, list[int]] = {}  # by comm lane and update lane: its ops, in the order in which they are released
        of_kind: dict[OpKind, list[Op]] = {}
        for op in schedule.ops:
            for earlier in op.after:
                self._successors[earlier].append(op.id)
            if op.lane != COMPUTE:
                lanes.setdefault(op.lane, []).append(op.id)
            of_kind.setdefault(op.kind, []).append(op)
        self._lanes = tuple(lanes.values())
        self._is_computed = [op.lane == COMPUTE and op.kind not in EXTERNAL for op in schedule.ops]
        fills = tuple(op.id for op in sorted(of_kind[OpKind.FILL], key=lambda op: op.bucket or 0))
        # What may happen: all gradients of a bucket have arrived; backward ends, so that gradients that have not arrived are
        # unused on this rank and all remaining buckets are launched; and every engine of this process has launched.
        self.fills = [(op_id,) for op_id in fills]
        self.end, self.join = (*fills, of_kind[OpKind.END][0].id), (of_kind[OpKind.JOIN][0].id,)
        # Most steps repeat the one before. Ops that have happened, as bits by id, and those that happen now -> the bits after
        # them, and the ops that they release.
        self._steps: dict[tuple[int, tuple[int, ...]], tuple[int, tuple[Op, ...]]] = {}
        self.reset()

    def reset(self) -> None:
        """Starts the next synchronization: nothing has happened."""
        self._happened = 0
        self._progress: _Progress | None = None  # from the first step on that is not remembered
        if len(self._steps) > _MOST_REMEMBERED + 4 * len(self.fills):  # gradients arrive in another order in every step
            self._steps.clear()

    def happen(self, op_ids: tuple[int, ...]) -> tuple[Op, ...]:
        """Marks one of `fills`, `end` or `join` as happened; returns the ops that this releases, in the order to issue them."""
        key = self._happened, op_ids
        if self._progress is None and key in self._steps:
            self._happened, released = self._steps[key]
            return released
        if self._progress is None:
            self._progress = self._as_of(self._happened)
        released = self._released(self._progress, op_ids)
        self._steps[key] = self._happened, released
        return released

    def _as_of(self, bits: int) -> _Progress:
        happened = {op.id for op in self._ops if bits >> op.id & 1} if bits else set[int]()
        return _Progress(
            happened=happened,
            num_blockers=[len(set(op.after) - happened) for op in self._ops],
            queues=[deque(op_id for op_id in lane if op_id not in happened) for lane in self._lanes],
        )

    def _released(self, progress: _Progress, op_ids: Sequence[int]) -> tuple[Op, ...]:
        released: list[Op] = []
        for op_id in op_ids:
            # By id, so that a bucket is launched before the next one is packed.
            worklist = [] if op_id in progress.happened else [op_id]
            while worklist:
                done = heappop(worklist)
                progress.happened.add(done)
                self._happened |= 1 << done
                if done != op_id:
                    released.append(self._ops[done])
                for successor in self._successors[done]:
                    progress.num_blockers[successor] -= 1
                    if progress.num_blockers[successor] == 0 and self._is_computed[successor]:
                        heappush(worklist, successor)
                # The head of a queue holds back all later ops: launch order must not depend on arrival.
                for queue in progress.queues:
                    while queue and progress.num_blockers[queue[0]] == 0:
                        heappush(worklist, queue.popleft())
        return tuple(released)
