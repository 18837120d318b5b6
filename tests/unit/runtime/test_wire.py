"""When an emulated link is free, and what passes at once on one that is shaped by a token bucket."""

from __future__ import annotations

import math

import pytest

from undertow.cost import Link
from undertow.runtime.wire import Wire

LINK = Link(name="slow", hop_s=1.0, bytes_per_s=10.0)


def due(wire: Wire, ready_s: float, bytes_s: float, latency_s: float = 0.0) -> float:
    return wire.reserve(ready_s=ready_s, bytes_s=bytes_s, latency_s=latency_s)[1]


def test_a_link_carries_one_thing_after_another() -> None:
    wire = Wire(LINK)
    assert wire.reserve(ready_s=100.0, bytes_s=5.0) == (100.0, 105.0)
    assert wire.reserve(ready_s=101.0, bytes_s=4.0, latency_s=1.0) == (105.0, 110.0)
    assert wire.reserve(ready_s=120.0, bytes_s=4.0, latency_s=1.0) == (120.0, 125.0)


@pytest.mark.parametrize(("rest_s", "passes_s"), [(0.0, 0.0), (1.0, 1.0), (3.0, 3.0), (4.0, 3.0), (50.0, 3.0)])
def test_as_much_passes_at_once_as_fits_into_the_rest_and_into_the_bucket(rest_s: float, passes_s: float) -> None:
    wire = Wire(LINK, burst_bytes=30)
    assert due(wire, 100.0, 5.0) == 102.0  # it has rested since ever
    assert due(wire, 102.0 + rest_s, 5.0) == 107.0 + rest_s - passes_s


def test_a_bucket_that_is_not_used_up_fills_again_and_never_beyond() -> None:
    wire = Wire(LINK, burst_bytes=30)
    assert [due(wire, ready_s, 1.0) for ready_s in (100.0, 100.0, 100.0, 100.0)] == [100.0, 100.0, 100.0, 101.0]
    assert [due(wire, ready_s, 2.0) for ready_s in (103.0, 103.0, 200.0)] == [103.0, 105.0, 200.0]
    assert due(wire, 200.0, 2.0) == 201.0  # a third of the bucket was left


def test_collectives_that_pass_at_once_have_their_latencies_one_after_another_in_which_the_bucket_fills() -> None:
    wire = Wire(LINK, burst_bytes=30)
    stretches = [wire.reserve(ready_s=100.0, bytes_s=2.0, latency_s=1.0) for _ in range(4)]
    # Tokens for 3 s: 2 of them taken, 1 come, 2 taken, 1 come; then 1 is lacking, and again.
    assert stretches == [(100.0, 101.0), (101.0, 102.0), (102.0, 104.0), (104.0, 106.0)]


def test_a_link_that_costs_nothing_has_no_bucket() -> None:
    wire = Wire(Link(name="none", hop_s=0.0, bytes_per_s=math.inf), burst_bytes=30)
    assert wire.reserve(ready_s=100.0, bytes_s=0.0) == (100.0, 100.0)
