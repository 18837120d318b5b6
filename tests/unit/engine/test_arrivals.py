"""Arrivals are reported one by one, and release the ops of a round."""

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.strategies import lowerings, plans
from undertow.engine.arrivals import Arrivals, BackwardListener
from undertow.plan import Plan
from undertow.schedule import Op, OpKind, Releases, Schedule, lower_data_parallel
from undertow.schedule.op import EXTERNAL
from undertow.torch_private import private

BY_BUCKET = lower_data_parallel(3)
WHOLE = [(1, 0), (2,), (3,)]  # parameters of each bucket
ALL_LEAVE = "end: pack b0, all_reduce b0, pack b1, all_reduce b1, pack b2, all_reduce b2"
AFTER_REPEATS = ["0:", "1: pack b0, all_reduce b0", "0:", "repeats: True", "learn:", "reset:"]  # of WHOLE


class Listener(BackwardListener):
    """An engine that calls functions."""

    def __init__(self, on_full: Callable[[int], object], on_backward: Callable[[int], object]) -> None:
        self._on_full, self._on_backward = on_full, on_backward

    def first_gradient_arrives(self, task: int) -> None:
        self._on_backward(task)

    def bucket_is_full(self, index: int) -> None:
        self._on_full(index)

    def arrives_outside(self, _param: object) -> None:
        raise NotImplementedError

    def post_backward(self) -> None:
        raise NotImplementedError

    def backward_is_gone(self) -> None:
        raise NotImplementedError


def arrivals_of(
    buckets: Sequence[Sequence[int]],
    num_params: int,
    *,
    on_full: Callable[[int], object],
    on_backward: Callable[[int], object] = lambda _backward: None,
    device: Any = None,
) -> Arrivals:
    return Arrivals(buckets, range(num_params), engine=Listener(on_full, on_backward), device=device)


def arrives(arrivals: Arrivals, index: int) -> None:
    """Calls the hook of a parameter, as autograd does."""
    arrivals.bucket_of[index].hook(arrivals._params[index])


class Tracker:
    """One synchronization as one object: arrivals and the ops they release."""

    def __init__(self, schedule: Schedule, params_of_bucket: Sequence[Sequence[int]], *, num_params: int) -> None:
        self._releases = Releases(schedule)
        self._released: list[Op] = []
        self.arrivals = arrivals_of(params_of_bucket, num_params, on_full=self._fill)

    def reset(self) -> None:
        """Starts the next synchronization: nothing has arrived."""
        self.arrivals.reset()
        self._releases.reset()

    def arrive(self, param: int) -> Sequence[Op]:
        """Returns the ops that may be issued after the gradient of `param` has arrived."""
        self._released = []
        arrives(self.arrivals, param)
        return self._released

    def end_backward(self) -> Sequence[Op]:
        """Ends backward: gradients that have not arrived are unused on this rank, and all remaining buckets are launched."""
        return self._releases.happen(self._releases.end)

    def join(self) -> Sequence[Op]:
        """Returns the ops that wait for the network, after every engine of this process has launched."""
        return self._releases.happen(self._releases.join)

    def _fill(self, bucket: int) -> None:
        self._released += self._releases.happen(self._releases.fills[bucket])


def named(numbers: Iterable[int]) -> str:
    return " ".join(map(str, sorted(numbers)))


# What an event releases, or the state that is asked for.
EVENTS: dict[str, Callable[..., Any]] = {
    "end": lambda tracker: tracker.end_backward(),
    "join": lambda tracker: tracker.join(),
    "reset": lambda tracker: tracker.reset(),
    "learn": lambda tracker: tracker.arrivals.learn_repeats(),
    "note": lambda tracker, param: tracker.arrivals.note([int(param)]),
    "arrive": lambda tracker, param: tracker.arrive(int(param)),
    "arrived": lambda tracker: named(tracker.arrivals.arrived),
    "missing": lambda tracker: " | ".join(named(tracker.arrivals.missing(bucket)) or "-" for bucket in range(3)),
    "repeats": lambda tracker: str(tracker.arrivals.has_repeats),
}


def after(tracker: Tracker, event: str) -> str:
    """An event that is a number is an arrival."""
    name, *given = event.split() if event.split()[0] in EVENTS else ("arrive", event)
    found = EVENTS[name](tracker, *given) or ()
    return found if isinstance(found, str) else ", ".join(op.label for op in found)


@pytest.mark.parametrize(
    ("schedule", "buckets", "script"),
    [
        pytest.param(BY_BUCKET, WHOLE, ["1:", "0: pack b0, all_reduce b0"], id="a full bucket is packed and leaves"),
        pytest.param(
            BY_BUCKET,
            WHOLE,
            ["2: pack b1", "0:", "1: pack b0, all_reduce b0, all_reduce b1", "repeats: False"],
            id="a late bucket holds back those behind it",
        ),
        pytest.param(
            BY_BUCKET,
            WHOLE,
            ["repeats: False", "3:", ALL_LEAVE, "join: bind b0, bind b1, bind b2"],
            id="the end of backward releases what never filled and the last bucket, the join binds",
        ),
        pytest.param(
            BY_BUCKET,
            WHOLE,
            [*AFTER_REPEATS, "0:", "missing: 1 | 2 | 3", "arrived: 0", "1:", "0: pack b0, all_reduce b0", "repeats: False"],
            id="after learning a bucket waits for the repeats of its parameters",
        ),
        pytest.param(
            BY_BUCKET,
            WHOLE,
            ["note 0:", "note 1:", "note 1:", "arrived: 0 1", "missing: - | 2 | 3", "repeats: False", ALL_LEAVE],
            id="what is only noted has arrived and releases nothing",
        ),
        pytest.param(
            BY_BUCKET,
            WHOLE,
            [*AFTER_REPEATS, "0:", "1:", "learn:", "reset:", "0:", "1: pack b0, all_reduce b0"],
            id="learning from a round without repeats forgets them",
        ),
    ],
)
def test_a_bucket_leaves_when_it_is_full_and_after_those_before_it(
    schedule: Schedule, buckets: list[tuple[int, ...]], script: list[str]
) -> None:
    tracker = Tracker(schedule, buckets, num_params=1 + max(map(max, buckets)))
    assert [f"{event}: {after(tracker, event)}".strip() for event, _, _ in (line.partition(":") for line in script)] == script


class Case(NamedTuple):
    """A plan, its schedule, and which parameters arrive in which order, some of them again."""

    plan: Plan
    schedule: Schedule
    arrivals: list[int]

    @property
    def tracker(self) -> Tracker:
        return Tracker(self.schedule, [bucket.params for bucket in self.plan.buckets], num_params=len(self.plan.params))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    plan = draw(plans())
    indices = range(len(plan.params))
    return Case(
        plan,
        draw(lowerings)(len(plan.buckets)),
        draw(st.permutations(indices) | st.lists(st.sampled_from(indices)) if indices else st.just([])),
    )


def play(tracker: Tracker, arrivals: Sequence[int]) -> tuple[list[tuple[int, Op]], list[Op], list[Op]]:
    """What is released at arrivals, with the number of arrivals so far, at the end of backward, and at the join."""
    return (
        [(count, op) for count, param in enumerate(arrivals, start=1) for op in tracker.arrive(param)],
        list(tracker.end_backward()),
        list(tracker.join()),
    )


@given(cases(), st.booleans())
def test_each_op_of_ours_is_released_once_in_order_and_in_its_time(case: Case, has_learned_repeats: bool) -> None:
    tracker = case.tracker
    if has_learned_repeats:
        play(tracker, [*case.arrivals, *case.arrivals])
        tracker.arrivals.learn_repeats()
        tracker.reset()
    during, at_end, at_join = play(tracker, case.arrivals)
    before_join = [*(op for _, op in during), *at_end]
    ops = [*before_join, *at_join]
    ours = [op for op in case.schedule.ops if op.kind not in EXTERNAL]
    assert (sorted(ops, key=lambda op: op.id), [op for op in ops if op.kind is OpKind.ALL_REDUCE]) == (
        ours,
        [op for op in ours if op.kind is OpKind.ALL_REDUCE],
    )
    for at, op in enumerate(ops):
        assert {case.schedule.ops[earlier] for earlier in op.after} & {*ours} <= {*ops[:at]}
    for count, op in during:
        assert {*case.plan.buckets[op.bucket].params} <= {*case.arrivals[:count]}  # only full buckets are packed
        assert (op.kind, op.bucket) != (OpKind.ALL_REDUCE, len(case.plan.buckets) - 1)  # the last one waits for backward
    crossed = {op.bucket for op in ours if op.kind is OpKind.ALL_REDUCE}
    assert not any(op.kind is OpKind.BIND and op.bucket in crossed for op in before_join)


@given(cases(), st.data())
def test_repeats_release_nothing_what_is_missing_is_known_and_a_reset_forgets_all(case: Case, data: st.DataObject) -> None:
    tracker, some = case.tracker, case.arrivals[: data.draw(st.integers(0, len(case.arrivals)))]
    for param in some:
        tracker.arrive(param)
        assert list(tracker.arrive(param)) == []
    assert [tracker.arrivals.missing(bucket.index) for bucket in case.plan.buckets] == [
        {*bucket.params} - {*some} for bucket in case.plan.buckets
    ]
    tracker.reset()
    assert tracker.arrivals.arrived == set()
    assert play(tracker, case.arrivals) == play(case.tracker, case.arrivals)
    assert (tracker.arrivals.arrived, [*tracker.end_backward(), *tracker.join()]) == ({*case.arrivals}, [])


@given(cases(), st.data())
def test_remembered_rounds_release_what_the_interpreter_does(case: Case, data: st.DataObject) -> None:
    remembered = case.tracker
    orders = [case.arrivals, data.draw(st.permutations(case.arrivals)), case.arrivals[: len(case.arrivals) // 2]]
    for arrivals in data.draw(st.lists(st.sampled_from(orders), min_size=2, max_size=6)):
        remembered.reset()
        assert play(remembered, arrivals) == play(case.tracker, arrivals)  # a new tracker has nothing to remember


class Heard:
    """Arrivals in the backward 7, and all that is called as they come."""

    def __init__(self, buckets: Sequence[Sequence[int]]) -> None:
        self.calls: list[str] = []
        self.backward = 7
        self.arrivals = arrivals_of(
            buckets,
            1 + max(param for bucket in buckets for param in bucket),
            on_full=lambda bucket: self.calls.append(f"b{bucket}"),
            on_backward=lambda backward: self.calls.append(f"first in {backward}"),
        )

    def after(self, event: str) -> str:
        """What is called at an event: an arrival, if it is a number."""
        self.calls.clear()
        name, *given = event.split() if event.split()[0] in CALLS else ("arrive", event)
        with mock.patch.object(private, "graph_task_id", return_value=self.backward):
            return CALLS[name](self, *given) or ", ".join(self.calls)


CALLS: dict[str, Callable[..., Any]] = {
    "arrive": lambda it, param: arrives(it.arrivals, int(param)),
    "each": lambda it: vars(it.arrivals).update(at_each=lambda param: it.calls.append(f"p{param}")),
    "none": lambda it: vars(it.arrivals).update(at_each=None),
    "note": lambda it, param: it.arrivals.note([int(param)]),
    "enter": lambda it, backward: vars(it).update(backward=int(backward)),
    "regroup": lambda it, *buckets: it.arrivals.regroup([tuple(map(int, bucket)) for bucket in buckets]),
    "state": lambda it: f"arrived {sorted(it.arrivals.arrived)}, repeats {it.arrivals.has_repeats}",
    "learn_repeats": lambda it: it.arrivals.learn_repeats(),
    "reset": lambda it: it.arrivals.reset(),
    "forget_backward": lambda it: it.arrivals.forget_backward(),
}


@pytest.mark.parametrize(
    ("buckets", "script"),
    [
        pytest.param(
            [(1, 0), (2,)],
            ["each:", "reset:", "2: first in 7, p2, b1", "1: p1", "0: p0, b0", "state: arrived [0, 1, 2], repeats False"],
            id="noted before its bucket is full",
        ),
        pytest.param(
            [(0, 1)],
            ["each:", "reset:", "0: first in 7, p0", "0: p0", "note 1:", "state: arrived [0, 1], repeats True"],
            id="told of a repeat, and not of what is noted",
        ),
        pytest.param(
            [(0,)],
            ["each:", "reset:", "0: first in 7, p0, b0", "0: p0", "learn_repeats:", "reset:", "0: p0", "0: p0, b0"],
            id="told of each expected repeat",
        ),
        pytest.param(
            [(0, 1)],
            ["regroup 0 1:", "0: first in 7, b0", "1: b1", "regroup 1 0:", "0: b1", "1: b0"],
            id="other buckets",
        ),
        pytest.param(
            [(1, 0), (2,)],
            [
                *("2: first in 7, b1", "enter 8:", "1: first in 8", "0: b0", "2:", "0:"),
                *("enter 7:", "0: first in 7", "1:", "forget_backward:", "1: first in 7", "0:"),
            ],
            id="a backward is told of at the first arrival of a bucket, and when it is full",
        ),
        pytest.param(
            [(0,), (1,)],
            ["each:", "reset:", "0: first in 7, p0, b0", "none:", "1: b1", "reset:", "0: b0"],
            id="nobody wants to know any more",
        ),
        pytest.param(
            [(0, 1)],
            ["0: first in 7", "1: b0", "forget_backward:", "0: first in 7", "1:"],
            id="a forgotten backward is told again",
        ),
    ],
)
def test_each_arrival_is_told_once_and_the_last_one_of_a_bucket_fills_it(
    buckets: list[tuple[int, ...]], script: list[str]
) -> None:
    heard = Heard(buckets)
    assert [f"{event}: {heard.after(event)}".strip() for event, _, _ in (line.partition(":") for line in script)] == script


def test_a_round_may_be_reset_when_its_first_gradient_is_told() -> None:
    # What was reset counts the gradient that is just being told.
    arrivals = arrivals_of([(0, 1)], 2, on_full=int, on_backward=lambda *_: arrivals.reset())
    arrivals.note([1])
    arrives(arrivals, 0)
    assert (arrivals.arrived, arrivals.missing(0)) == ({0}, {1})


def test_an_arrival_that_is_counted_when_its_hooks_are_closed_fills_no_bucket() -> None:
    # Its backward may begin a round, and the round may change the plan, which closes them.
    full: list[int] = []
    arrivals = arrivals_of([(0,)], 1, on_full=full.append, on_backward=lambda _: arrivals.close())
    arrives(arrivals, 0)
    assert full == []


def test_what_a_hook_of_the_users_returns_is_no_parameter() -> None:
    arrivals = arrivals_of([(0, 1, 2)], 3, on_full=int)
    arrivals.bucket_of[0].hook(object())  # torch passes it on, and then refuses it
    arrives(arrivals, 1)
    assert (arrivals.arrived, arrivals.absent, arrivals.missing(0)) == ({1}, {0, 2}, {0, 2})


def test_arrivals_of_other_threads_wait_while_a_round_begins() -> None:
    # As those of another device do: counted before the round has begun, they would count for none.
    full: list[int] = []
    begins, has_counted = threading.Event(), threading.Event()

    def begin(_backward: int) -> None:
        begins.set()
        assert not has_counted.wait(0.2)
        arrivals.reset()

    def arrive_elsewhere() -> None:
        begins.wait()
        arrives(arrivals, 1)
        has_counted.set()

    arrivals = arrivals_of([(0,), (1,)], 2, on_full=full.append, on_backward=begin)
    with ThreadPoolExecutor(1) as threads:
        threads.submit(arrive_elsewhere)
        arrives(arrivals, 0)
    assert full == [0, 1]


def test_a_bucket_knows_the_streams_that_its_gradients_arrived_on() -> None:
    arrivals = arrivals_of([(1, 0), (2,)], 3, on_full=lambda _: None, device=SimpleNamespace(stream_of="xyz".__getitem__))
    for param in range(3):
        arrives(arrivals, param)
    assert [bucket.streams for bucket in arrivals.buckets] == [{"x", "y"}, {"z"}]
