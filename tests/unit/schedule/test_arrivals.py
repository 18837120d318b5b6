"""Who hears of arrivals, one by one."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from undertow.schedule import Arrivals, SerialArrivals


def noted_arrivals(*buckets: Sequence[int], num_params: int) -> tuple[Arrivals, list[str]]:
    """Arrivals of a round in which each is noted, and what has been called."""
    called: list[str] = []
    arrivals = Arrivals(buckets, num_params=num_params, on_full=lambda bucket: called.append(f"b{bucket} full"))
    arrivals.call_at_each(lambda param: called.append(f"p{param}"))
    arrivals.reset()
    return arrivals, called


def test_each_arrival_is_noted_before_its_bucket_is_full() -> None:
    arrivals, called = noted_arrivals((1, 0), (2,), num_params=3)
    for param in (2, 1, 0):
        arrivals.arrive(param)
    assert called == ["p2", "b1 full", "p1", "p0", "b0 full"]
    assert arrivals.arrived == {0, 1, 2}


def test_arrivals_are_noted_from_the_next_round_on() -> None:
    noted: list[int] = []
    arrivals = Arrivals([(0,), (1,)], num_params=2, on_full=lambda _: None)
    arrivals.call_at_each(noted.append)
    arrivals.arrive(0)
    assert noted == []
    arrivals.reset()
    arrivals.arrive(1)
    assert noted == [1]


def test_nothing_is_noted_when_nobody_wants_to_know_any_more() -> None:
    arrivals, called = noted_arrivals((0,), (1,), num_params=2)
    arrivals.arrive(0)
    arrivals.call_at_each(None)
    arrivals.arrive(1)
    arrivals.reset()
    arrivals.arrive(0)
    assert called == ["p0", "b0 full", "b1 full", "b0 full"]


def test_a_parameter_in_pieces_is_noted_once() -> None:
    arrivals, called = noted_arrivals((0,), (0, 1), num_params=2)
    arrivals.arrive(1)
    arrivals.arrive(0)
    assert called == ["p1", "p0", "b0 full", "b1 full"]


def test_an_arrival_that_does_not_count_is_not_noted() -> None:
    arrivals, called = noted_arrivals((0, 1), num_params=2)
    arrivals.arrive(0)
    arrivals.arrive(0)
    arrivals.note(1)
    assert called == ["p0"]
    assert arrivals.has_repeats


def test_each_expected_repeat_is_noted() -> None:
    arrivals, called = noted_arrivals((0,), num_params=1)
    arrivals.arrive(0)
    arrivals.arrive(0)
    arrivals.learn_repeats()
    arrivals.reset()
    called.clear()
    arrivals.arrive(0)
    arrivals.arrive(0)
    assert called == ["p0", "p0", "b0 full"]


def test_arrivals_are_noted_in_other_buckets_too() -> None:
    arrivals, called = noted_arrivals((0, 1), num_params=2)
    arrivals.regroup([(0,), (1,)])
    arrivals.arrive(1)
    assert called == ["p1", "b1 full"]


def test_arrivals_of_other_threads_wait_while_a_round_begins() -> None:
    """As those of another device do: counted before the round has begun, they would count for none."""
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
    other = threading.Thread(target=arrive_elsewhere)
    other.start()
    arrivals.arrive(0)
    other.join()
    assert full == [0]
