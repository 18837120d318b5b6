"""Who hears of arrivals, one by one."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from undertow.schedule import Arrivals, SerialArrivals, Tracker, lower_data_parallel


class Heard:
    """Arrivals in the traversal 7, and all that is called as they come."""

    def __init__(self, buckets: Sequence[Sequence[int]]) -> None:
        self.calls: list[str] = []
        self.traversal = 7
        self.arrivals = Arrivals(
            buckets,
            num_params=1 + max(param for bucket in buckets for param in bucket),
            on_full=lambda bucket: self.calls.append(f"b{bucket}"),
            traversal=lambda: self.traversal,
            on_traversal=lambda traversal, param: self.calls.append(f"p{param} in {traversal}"),
        )

    def after(self, event: str) -> str:
        """What is called at an event: an arrival, if it is a number."""
        self.calls.clear()
        arrivals, (name, *given) = self.arrivals, event.split()
        match name:
            case "each":
                arrivals.call_at_each(lambda param: self.calls.append(f"p{param}"))
            case "none":
                arrivals.call_at_each(None)
            case "note":
                arrivals.note(int(given[0]))
            case "enter":
                self.traversal = int(given[0])
            case "regroup":
                arrivals.regroup([tuple(map(int, bucket)) for bucket in given])
            case "state":
                return f"arrived {sorted(arrivals.arrived)}, repeats {arrivals.has_repeats}"
            case "learn_repeats" | "reset" | "forget_traversal":
                getattr(arrivals, name)()
            case param:
                arrivals.arrive(int(param))
        return ", ".join(self.calls)


SCRIPTS = {
    "noted before its bucket is full": (
        [(1, 0), (2,)],
        ["each:", "reset:", "2: p2 in 7, p2, b1", "1: p1", "0: p0, b0", "state: arrived [0, 1, 2], repeats False"],
    ),
    "noted from the next round on": ([(0,), (1,)], ["each:", "0: p0 in 7, b0", "reset:", "1: p1, b1"]),
    "nobody wants to know any more": (
        [(0,), (1,)],
        ["each:", "reset:", "0: p0 in 7, p0, b0", "none:", "1: b1", "reset:", "0: b0"],
    ),
    "noted once in two pieces": ([(0,), (0, 1)], ["each:", "reset:", "1: p1 in 7, p1", "0: p0, b0, b1"]),
    "not noted, for it does not count": (
        [(0, 1)],
        ["each:", "reset:", "0: p0 in 7, p0", "0:", "note 1:", "state: arrived [0, 1], repeats True"],
    ),
    "each expected repeat is noted": (
        [(0,)],
        ["each:", "reset:", "0: p0 in 7, p0, b0", "0:", "learn_repeats:", "reset:", "0: p0", "0: p0, b0"],
    ),
    "noted in other buckets": ([(0, 1)], ["each:", "reset:", "regroup 0 1:", "1: p1 in 7, p1, b1"]),
    "other buckets, in pieces or whole": (
        [(0, 1)],
        ["regroup 0 01:", "0: p0 in 7, b0", "1: b1", "regroup 1 0:", "0: b1", "1: b0"],
    ),
    "a piece counts for each of its buckets": ([(1, 0), (0, 2), (0,)], ["2: p2 in 7", "0: b1, b2", "1: b0"]),
    "the first of every traversal is told, repeated or not": (
        [(1, 0), (2,)],
        ["2: p2 in 7, b1", "enter 8:", "1: p1 in 8", "0: b0", "2:", "0:", "enter 7:", "0: p0 in 7", "1:"],
    ),
    "a forgotten traversal is told again": ([(0, 1)], ["0: p0 in 7", "1: b0", "forget_traversal:", "0: p0 in 7", "1:"]),
}


@pytest.mark.parametrize(("buckets", "script"), SCRIPTS.values(), ids=SCRIPTS)
def test_arrivals(buckets: list[tuple[int, ...]], script: list[str]) -> None:
    heard = Heard(buckets)
    assert [f"{event}: {heard.after(event)}".strip() for event, _, _ in (line.partition(":") for line in script)] == script


def test_a_round_may_be_reset_when_its_first_gradient_is_told() -> None:
    # What was reset counts the gradient that is just being told.
    arrivals = Arrivals([(0, 1)], num_params=2, on_full=int, on_traversal=lambda *_: arrivals.reset())
    arrivals.note(1)
    arrivals.arrive(0)
    assert (arrivals.arrived, arrivals.missing(0)) == ({0}, {1})


def test_all_buckets_are_counted_before_one_of_them_is_told_of() -> None:
    missing: list[frozenset[int]] = []
    arrivals = Arrivals([(0,), (0, 1)], num_params=2, on_full=lambda _: missing.append(arrivals.missing(1)))
    arrivals.arrive(1)
    arrivals.arrive(0)
    assert missing == [frozenset(), frozenset()]


def test_arrivals_know_who_listens() -> None:
    tracker = Tracker(lower_data_parallel(1), [(0,)], num_params=1)
    assert tracker.arrivals.listener is tracker
    assert Arrivals([], num_params=0, on_full=lambda _: None).listener is None


def test_arrivals_of_other_threads_wait_while_a_round_begins() -> None:
    # As those of another device do: counted before the round has begun, they would count for none.
    full: list[int] = []
    begins, has_counted = threading.Event(), threading.Event()

    def begin(_traversal: int, _param: int) -> None:
        begins.set()
        assert not has_counted.wait(0.2)
        arrivals.reset()

    def arrive_elsewhere() -> None:
        begins.wait()
        arrivals.arrive(1)
        has_counted.set()

    arrivals = SerialArrivals([(0, 1)], num_params=2, on_full=full.append, traversal=lambda: 7, on_traversal=begin)
    with ThreadPoolExecutor(1) as threads:
        threads.submit(arrive_elsewhere)
        arrivals.arrive(0)
    assert full == [0]
