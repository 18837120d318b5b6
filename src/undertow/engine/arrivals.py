"""Follows a backward: its gradients as they arrive, the buckets that are full, its end, and whose
turn it is then to wait.

Reasons: docs/design/backward.md.
"""

from __future__ import annotations

import threading
import weakref
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count
from operator import attrgetter
from typing import Any, ClassVar

from torch import Tensor

from undertow.device import Accelerator
from undertow.torch_private import private

_NO_BACKWARD = -2


class BackwardListener(ABC):
    """An `Engine`, as the hooks on its parameters and the end of a backward see it.

    These modules cannot name that class, because it is made of them.
    """

    turn: WaitTurn

    @abstractmethod
    def first_gradient_arrives(self, task: int) -> None:
        """Called with the first gradient in backward `task`, and again after its round is
        closed."""

    @abstractmethod
    def bucket_is_full(self, index: int) -> None:
        """Called when all gradients of a bucket have arrived."""

    @abstractmethod
    def arrives_outside(self, param: Tensor) -> None:
        """Called with a gradient of a parameter that the plan does not have."""

    @abstractmethod
    def post_backward(self) -> None:
        """Called at the end of the outermost of nested backwards."""

    @abstractmethod
    def backward_is_gone(self) -> None:
        """Called when a backward, nested or not, has ended, or was ended by an exception."""


class BucketArrivals:
    """The arrivals of one bucket, and how far they are counted."""

    __slots__ = (
        "arrivals",
        "counts_from",
        "device",
        "index",
        "is_full",
        "known",
        "num_awaited",
        "num_known",
        "params",
        "seen",
        "streams",
    )

    def __init__(
        self,
        arrivals: Arrivals,
        index: int,
        params: Sequence[int],
        device: Accelerator | None,
    ) -> None:
        self.arrivals = arrivals
        self.index = index
        self.params = params
        self.seen: list[object] = []  # parameters, in the order of their arrivals
        self.counts_from = 0  # arrivals from this number on are counted one by one
        self.known = Counter[int]()  # how often each has arrived, by id, as of the last count
        self.num_known = 0  # arrivals that are counted
        self.num_awaited = 0  # arrivals that it waits for, with expected repeats
        self.is_full = False
        self.device: Any = device  # None on a host
        self.streams: set[Any] = set()  # of a device: those that gradients arrived on

    # If a backward is compiled with the code around it, so are the Python functions that it calls
    # first.
    @private.left_alone
    def arrive(self, param: object) -> None:
        """The hook of every parameter of the bucket."""
        # Called once per parameter and step, inside backward: everything else may be slower than
        # this one frame.
        seen = self.seen
        seen.append(param)
        if len(seen) >= self.counts_from:
            self.arrivals.count(param, self)

    @private.left_alone
    def arrive_on_stream(self, param: object) -> None:
        """The hook on a device: autograd makes each gradient on the stream of its parameter's
        forward, and no other one has waited for that."""
        self.streams.add(self.device.stream_of(param))
        self.arrive(param)

    @property
    def hook(self) -> Callable[[Any], None]:
        """The hook to register on each parameter of the bucket."""
        return self.arrive if self.device is None else self.arrive_on_stream

    def num_counted(self) -> int:
        """Returns the number of arrivals, without those that were repeated more often than
        expected."""
        repeats, known = self.arrivals.expected_repeats, self.known
        if not repeats and not known and len(set(map(id, self.seen))) == len(self.seen):
            return len(self.seen)  # the usual case, and the fastest
        known.update(map(id, self.seen[self.num_known :]))
        self.num_known = len(self.seen)
        if not repeats:
            return len(known)
        index_of = self.arrivals.index_of
        return sum(min(count, 1 + repeats[index_of.get(key, -1)]) for key, count in known.items())

    def has_repeats(self) -> bool:
        """Returns True if some parameter arrived more often than expected."""
        num_expected = self.num_awaited if self.is_full else self.num_counted()
        return len(self.seen) > num_expected

    def counts(self) -> Counter[int]:
        """Returns how often each parameter has arrived.

        A tensor that a user's hook has returned is not a parameter.
        """
        places = map(self.arrivals.index_of.get, map(id, self.seen))
        return Counter(index for index in places if index is not None)


class Arrivals:
    """Follows gradients as they arrive, and tells the `engine` when the last one of a bucket
    arrives.

    `bucket_of` has the bucket of each of `params`. The `hook` of that bucket is called with the
    parameter when its gradient arrives. Buckets of different devices fill in different threads,
    which wait for one another.

    If the first gradient of a bucket, after a reset or `forget_backward`, belongs to another
    backward than the gradients before it, the engine is told of that first. On a `device`, each
    gradient arrives on a stream; without one, parameters are on the host.
    """

    def __init__(
        self,
        params_of_bucket: Sequence[Sequence[int]],
        params: Sequence[object],
        *,
        engine: BackwardListener,
        device: Accelerator | None = None,
    ) -> None:
        self.engine = engine
        self.is_closed = False
        # called with each parameter, by index, that arrives; `Tuning` and `Measuring` set it
        self.at_each: Callable[[int], object] | None = None
        self._lock = threading.RLock()  # a hook may run a backward
        self.expected_repeats: Counter[int] = Counter()  # by parameter
        self._last_backward = _NO_BACKWARD
        self._device = device
        self._params = tuple(params)
        self.index_of = {id(param): index for index, param in enumerate(self._params)}
        self.regroup(params_of_bucket)

    def regroup(self, params_of_bucket: Sequence[Sequence[int]]) -> None:
        """Switches to other buckets of the same parameters, with other hooks, and resets."""
        self.buckets: list[BucketArrivals] = []
        bucket_of: dict[int, BucketArrivals] = {}
        for index, params in enumerate(params_of_bucket):
            bucket = BucketArrivals(self, index, params, self._device)
            self.buckets.append(bucket)
            bucket_of.update(dict.fromkeys(params, bucket))
        self.bucket_of = [bucket_of[param] for param in range(len(self._params))]
        self.reset()

    def reset(self) -> None:
        """Starts the next synchronization: nothing has arrived."""
        repeats = self.expected_repeats
        for bucket in self.buckets:
            bucket.seen.clear()
            bucket.known.clear()
            bucket.num_known = 0
            bucket.counts_from = 0
            bucket.is_full = not bucket.params
            bucket.num_awaited = len(bucket.params)
            if repeats:
                bucket.num_awaited += sum(map(repeats.__getitem__, bucket.params))

    def forget_backward(self) -> None:
        """Makes the next arrival count as the first of a backward."""
        self._last_backward = _NO_BACKWARD
        for bucket in self.buckets:
            bucket.counts_from = 0

    def close(self) -> None:
        """Reports no more full buckets; an arrival may be in the middle of `count`."""
        self.is_closed = True

    def count(self, param: object, bucket: BucketArrivals) -> None:
        """Called after an arrival that may be the first of a backward or the last of `bucket`,
        which lists it."""
        with self._lock:
            index, bucket_of = self.index_of.get(id(param)), self.bucket_of
            if index is None:
                return  # a hook of the user's has returned it, which torch is about to refuse
            backward = private.graph_task_id()
            if backward != self._last_backward:
                self._last_backward = backward
                self.engine.first_gradient_arrives(backward)
                self._last_backward = backward  # it may have been forgotten
                if bucket_of is not self.bucket_of:  # now in other buckets
                    self.bucket_of[index].hook(param)
                    return
            if not bucket.seen or bucket.seen[-1] is not param:  # reset since
                bucket.seen.append(param)
            if self.at_each is not None:
                self.at_each(index)
            bucket.counts_from = bucket.num_awaited if self.at_each is None else 0
            if (
                not bucket.is_full
                and len(bucket.seen) >= bucket.num_awaited == bucket.num_counted()
            ):
                bucket.is_full = True
                if not self.is_closed:
                    self.engine.bucket_is_full(bucket.index)

    def note(self, indices: Iterable[int]) -> None:
        """Records that the gradients of these parameters arrived, without calling anything."""
        absent = self.absent.intersection(indices)
        for bucket in self.buckets:
            bucket.seen.extend(self._params[index] for index in bucket.params if index in absent)

    @property
    def arrived(self) -> set[int]:
        """Parameters that have arrived in this synchronization."""
        return {index for bucket in self.buckets for index in bucket.counts()}

    @property
    def absent(self) -> set[int]:
        """Parameters that have not arrived in this synchronization."""
        if all(map(attrgetter("is_full"), self.buckets)):
            return set()
        return set(range(len(self._params))) - self.arrived

    def missing(self, bucket: int) -> frozenset[int]:
        """Returns the parameters of `bucket` that have not arrived in this synchronization."""
        found = self.buckets[bucket]
        return frozenset() if found.is_full else frozenset(found.params).difference(found.counts())

    @property
    def has_repeats(self) -> bool:
        """True if some parameter arrived more often in this synchronization than expected."""
        return any(map(BucketArrivals.has_repeats, self.buckets))

    def learn_repeats(self) -> None:
        """Expects each parameter to arrive as often as in this synchronization, from the next one
        on.

        Learning costs one synchronization: a gradient in it arrived after its bucket was sent. If a
        parameter then arrives less often, its bucket is sent at the end of backward: later than
        possible, but never wrong.
        """
        counts = [count for bucket in self.buckets for count in bucket.counts().items()]
        self.expected_repeats = Counter({index: count - 1 for index, count in counts if count > 1})


class OutermostEnd:
    """Tells the `engine` of the end of the outermost of nested backwards; a reentrant checkpoint
    runs one inside another.

    Also tells it when a watched backward is gone, which it may be before its end: an exception has
    ended it.
    """

    def __init__(self, engine: BackwardListener) -> None:
        self.engine = engine
        self._watches: dict[int, weakref.ref[_BackwardEnd]] = {}  # by backward

    @property
    def is_coming(self) -> bool:
        """True if a watched backward still runs.

        A backward that an exception has ended does not, and never reaches its end.
        """
        return any(watch() is not None for watch in self._watches.values())

    def watch(self, task: int) -> None:
        """Called from a hook that runs in backward `task`; once per task is enough."""
        if task not in self._watches:
            end = _BackwardEnd(self)
            self._watches[task] = weakref.ref(end, lambda _: self.engine.backward_is_gone())
            private.call_after_backward(end.comes)

    def forget(self) -> None:
        """Forgets the backwards of this round, including those that an exception ended."""
        self._watches.clear()


class _BackwardEnd:
    """The end of one backward, which calls it.

    Only that backward holds it, so it is gone as soon as the backward is.
    """

    __slots__ = ("__weakref__", "_outermost")

    def __init__(self, outermost: OutermostEnd) -> None:
        self._outermost = outermost

    @private.left_alone  # if a whole step is compiled, so are the hooks of its backward
    def comes(self) -> None:
        """The callback after the backward."""
        node = private.enclosing_node()
        if node is None:
            self._outermost.engine.post_backward()
            return

        # If that node raises, the end never comes, although this object may stay alive.
        self._outermost.engine.backward_is_gone()

        # The task ran inside a node of an outer one: when that node is done, wait for the end of
        # the outer task.
        def climb(*_gradients: object) -> None:  # holds this object until then
            handle.remove()
            self._outermost.watch(private.graph_task_id())

        handle = node.register_hook(climb)


class WaitTurn:
    """The turn of an engine to wait after a backward: engines wait in the order of their
    construction.

    One backward may reach them in another order on another rank, and some waits need calls of all
    ranks: a rebuild, and the comparison of a change that only some ranks have found.
    """

    _numbers: ClassVar[Iterator[int]] = count()
    # By the number of an engine that waits, the backward after which it does.
    _waiting: ClassVar[dict[int, int]] = {}

    def __init__(self) -> None:
        self.number = next(self._numbers)  # in the order of construction

    def begins(self) -> None:
        """Called when a backward ends, before any engine waits."""
        self._waiting[self.number] = private.graph_task_id()

    def ends(self) -> None:
        """Called when the round of that backward has ended.

        Need not be called after an error: torch never gives another backward the same id.
        """
        self._waiting.pop(self.number, None)

    @property
    def has_come(self) -> bool:
        """True unless an engine that was made earlier still waits after this backward."""
        this = private.graph_task_id()
        # Another thread may run a backward, and change these: a copy runs no Python code.
        for number, backward in self._waiting.copy().items():
            if number < self.number and backward == this:
                return False
        return True
