"""Limits of a step over a link, and how near a system has to come to the parameters of right steps."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from benchmarks.matrix.limit import Compute, Wire, barrier_limit_s, limit_s, step_limit_s, wire_from_calibration
from benchmarks.matrix.truth import Reference, bounds_of

SECOND_PER_BYTE = Wire(seconds_per_byte=1.0, least_s=0.0)
SLOW_START = Wire(seconds_per_byte=1e-9, least_s=0.5)
GIGABIT = Wire(seconds_per_byte=1 / 119.5e6, least_s=0.0)
LAYERS = [2_000_000] * 24
READY = [0.130 + 0.010 * layer for layer in range(24)]
USED = [0.115 - 0.005 * layer for layer in range(24)]
TWO_LAYERS = Compute(ready_s=[12.0, 8.0], used_s=[0.0, 2.0], backward_s=12.0, update_s=1.0)
REPLAYED = Compute(
    ready_s=[0.360 - 0.010 * layer for layer in range(24)],
    used_s=[0.005 * layer for layer in range(24)],
    backward_s=0.360,
    update_s=0.006,
)

LIMITS = {
    "one gradient is ready, and sent": (limit_s([2.0], [3], SECOND_PER_BYTE), 5.0),
    # All from 0: 0 + 4. From the second on: 5 + 3. The last alone: 6 + 1.
    "the suffix that is latest": (limit_s([0.0, 5.0, 6.0], [1, 2, 1], SECOND_PER_BYTE), 8.0),
    "in another order of parameters": (limit_s([6.0, 0.0, 5.0], [1, 1, 2], SECOND_PER_BYTE), 8.0),
    "a small rest takes no less than the fastest collective": (limit_s([1.0], [4], SLOW_START), 1.5),
    "no gradients": (limit_s([], [], SECOND_PER_BYTE), 0.0),
    # 24 layers of 2 MB from 130 ms on, every 10 ms; 48 MB at 119.5 MB/s are 402 ms of wire: 532 ms, as published.
    "the replayed layers": (limit_s(READY, LAYERS, GIGABIT), 0.532),
    # Its last layer, first reduced, is first read at 115 ms of the next forward: 417 ms.
    "a step of the replayed layers": (step_limit_s(READY, USED, LAYERS, GIGABIT, compute_s=0.360), 0.417),
    "a step is not shorter than its compute": (step_limit_s([1.0], [0.5], [1], SECOND_PER_BYTE, compute_s=9.0), 9.0),
    "nor than all it sends": (step_limit_s([1.0, 1.0], [5.0, 0.0], [3, 4], SECOND_PER_BYTE, compute_s=0.0), 7.0),
    "the worked example of the barrier": (barrier_limit_s(TWO_LAYERS, [4, 4], SECOND_PER_BYTE), 17.0),
    "with a barrier a fast link costs the last reduction and the first gather": (
        barrier_limit_s(TWO_LAYERS, [4, 4], Wire(seconds_per_byte=0.5, least_s=0.0)),
        1.0 + 13.0 + 1.0,
    ),
    # 40 of each phase, less the 2 of forward before the second layer is read; 8 before the first gradient; the update.
    "with a barrier a slow link is busy from the first gradient to the last use": (
        barrier_limit_s(TWO_LAYERS, [4, 4], Wire(seconds_per_byte=10.0, least_s=0.0)),
        (40.0 - 2.0) + (8.0 + 40.0) + 1.0,
    ),
    **{
        f"the barrier of the replayed layers on {ranks} ranks": (
            barrier_limit_s(REPLAYED, LAYERS, Wire(seconds_per_byte=2 * (ranks - 1) / ranks / 119.5e6, least_s=0.0)),
            limit,
        )
        for ranks, limit in ((2, 0.460), (4, 0.623))
    },
}


@pytest.mark.parametrize(("found_s", "expected_s"), LIMITS.values(), ids=LIMITS)
def test_limits_by_hand(found_s: float, expected_s: float) -> None:
    is_published = round(expected_s, 1) != expected_s  # to a millisecond
    assert found_s == pytest.approx(expected_s, rel=0, abs=0.001 if is_published else 0)


def test_the_wire_is_as_fast_as_the_best_piece_size_was() -> None:
    trains = [{"bytes": 100, "seconds": 2.0}, {"bytes": 100, "seconds": 1.0}]
    wire = wire_from_calibration({"small_s": 0.25, "trains": trains})
    assert wire == Wire(seconds_per_byte=0.01, least_s=0.25)
    assert [wire.cheapest_s(num_bytes) for num_bytes in (200, 1, 0)] == [2.0, 0.25, 0.0]


def test_a_link_faster_than_time_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot take -1 s per byte"):
        Wire(seconds_per_byte=-1, least_s=0)


START, RIGHT = {"a": torch.zeros(4), "b": torch.zeros(4)}, {"a": torch.ones(4), "b": torch.ones(4)}  # steps are 2 long


def test_what_is_further_away_than_rounding_is_wrong() -> None:
    bounds = bounds_of(START, RIGHT, RIGHT)
    assert bounds["a"] == pytest.approx(2 * 5e-4, rel=1e-3)
    found = {"a": RIGHT["a"] + torch.tensor([9e-4, 0, 0, 0]), "b": RIGHT["b"] + torch.tensor([0, 0, 0, 2e-3])}
    systems = [SimpleNamespace(parameters=lambda params=params: params) for params in (found, {"a": RIGHT["a"]})]
    assert [Reference(right=RIGHT, bounds=bounds).wrong_parameters(system) for system in systems] == [["b"], ["b"]]


def test_a_model_that_amplifies_rounding_may_be_as_far_away_as_other_orders_of_a_sum_make_it() -> None:
    bounds = bounds_of(START, RIGHT, {"a": RIGHT["a"] + torch.tensor([0, 1e-3, 0, 0]), "b": RIGHT["b"]})
    assert bounds["a"] == pytest.approx(bounds["b"] + 4e-3, rel=1e-3)
