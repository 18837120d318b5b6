"""Who has arrived in this round: which gradients are there, and which buckets are full."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from undertow.errors import ConfigError

# States of a parameter. All but the first are true, so that arrive() tells the usual case from the others by one look.
_ABSENT, _ARRIVED, _ABSENT_AND_UNUSUAL = 0, 1, 2  # unusual: in pieces, or somebody wants to know when it comes


class Arrivals:
    """Counts gradients as they arrive, and calls `on_full(bucket)` when the last one of a bucket is there.

    A parameter that travels in pieces is in several buckets: its gradient counts for each of them when it arrives.

    `traversal` tells one backward from another that runs inside it; when it has changed since the last arrival,
    `on_traversal(traversal, param)` is called first. Both are for the runtime; elsewhere there is one traversal.
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
        self._expected_repeats: dict[int, int] = {}
        self._repeats: Counter[int] = Counter()
        # Flags and counts in place of sets: arrive() runs thousands of times a step and these stay in the fastest cache.
        self._states = bytearray(num_params)
        self._num_pending: list[int] = []
        self.regroup(params_of_bucket)

    def regroup(self, params_of_bucket: Sequence[Sequence[int]]) -> None:
        """Counts for other buckets of the same parameters; nothing has arrived. ConfigError if one has no bucket."""
        self._params_of_bucket = [tuple(params) for params in params_of_bucket]
        self._buckets_of_param = _buckets_of_param(params_of_bucket, len(self._states))
        self._bucket_of_param = [buckets[0] for buckets in self._buckets_of_param]
        self._absent = self._absent_states()
        self.reset()

    def call_at_each(self, note: Callable[[int], object] | None) -> None:
        """From the next round on calls `note(param)` whenever a gradient counts; nothing, if None."""
        self._note = note
        self._absent = self._absent_states()

    def reset(self) -> None:
        """Starts the next round: nothing has arrived."""
        self._states = bytearray(self._absent)
        self._num_pending = [len(params) for params in self._params_of_bucket]
        for param, count in self._expected_repeats.items():
            for bucket in self._buckets_of_param[param]:
                self._num_pending[bucket] += count
        self._repeats.clear()

    def forget_traversal(self) -> None:
        """The next arrival calls `on_traversal`, whatever traversal it comes from."""
        self._seen_traversal = -1

    def silence(self) -> None:
        """Calls `on_full` no more."""
        self._on_full = _nobody

    def arrive(self, param: int, _gradient: object = None) -> None:
        """The gradient of `param` is there. A repeated arrival counts only if it has been learned to expect it."""
        # Called once per parameter and step, inside backward: everything else may be slower than this one frame.
        if self._traversal() != self._seen_traversal:
            self._enter(param)
        if self._states[param]:
            self._arrive_unusually(param)
            return
        self._states[param] = 1  # _ARRIVED, without the look-up of a global name
        bucket = self._bucket_of_param[param]
        num_pending = self._num_pending[bucket] - 1
        self._num_pending[bucket] = num_pending
        if not num_pending:
            self._on_full(bucket)

    def note(self, param: int) -> None:
        """The gradient of `param` is there; nothing is called for it."""
        if self._states[param] != _ARRIVED:
            self._states[param] = _ARRIVED
            self._count_down(param)

    @property
    def listener(self) -> object:
        """Whose method `on_full` is."""
        return getattr(self._on_full, "__self__", None)

    @property
    def arrived(self) -> set[int]:
        """Parameters that have arrived in this round."""
        return {param for param, state in enumerate(self._states) if state == _ARRIVED}

    @property
    def absent(self) -> set[int]:
        """Parameters that have not arrived in this round."""
        if self._states.count(_ARRIVED) == len(self._states):
            return set()
        return {param for param, state in enumerate(self._states) if state != _ARRIVED}

    def missing(self, bucket: int) -> frozenset[int]:
        """Parameters of `bucket` that have not arrived in this round."""
        if self._num_pending[bucket] <= 0:
            return frozenset()
        return frozenset(param for param in self._params_of_bucket[bucket] if self._states[param] != _ARRIVED)

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

    def _absent_states(self) -> bytes:
        is_noted = self._note is not None
        return bytes(_ABSENT_AND_UNUSUAL if is_noted or len(buckets) > 1 else _ABSENT for buckets in self._buckets_of_param)

    def _enter(self, param: int) -> None:
        self._seen_traversal = self._traversal()
        self._on_traversal(self._seen_traversal, param)

    def _arrive_unusually(self, param: int) -> None:
        if self._states[param] == _ARRIVED:
            self._repeats[param] += 1
            if self._repeats[param] > self._expected_repeats.get(param, 0):
                return
        if self._note is not None:
            self._note(param)
        self._states[param] = _ARRIVED
        for bucket in self._count_down(param):
            self._on_full(bucket)

    def _count_down(self, param: int) -> list[int]:
        """The buckets that the gradient of `param` has filled. All are counted before anybody hears of one."""
        for bucket in self._buckets_of_param[param]:
            self._num_pending[bucket] -= 1
        return [bucket for bucket in self._buckets_of_param[param] if not self._num_pending[bucket]]


class SerialArrivals(Arrivals):
    """Arrivals that come from several threads: autograd has one for each device, and buckets must leave in one order."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._lock = threading.RLock()  # a hook may run a backward
        super().__init__(*args, **kwargs)

    def arrive(self, param: int, _gradient: object = None) -> None:
        with self._lock:
            super().arrive(param)


def _nobody(_bucket: int) -> None:
    """Nobody listens."""


def _buckets_of_param(params_of_bucket: Sequence[Sequence[int]], num_params: int) -> list[tuple[int, ...]]:
    buckets_of: dict[int, list[int]] = defaultdict(list)
    for bucket, params in enumerate(params_of_bucket):
        for param in params:
            buckets_of[param].append(bucket)
    for param in range(num_params):
        if param not in buckets_of:
            raise ConfigError(f"parameter {param} belongs to no bucket.", remedy="Put every parameter into one bucket.")
    return [tuple(buckets_of[param]) for param in range(num_params)]
