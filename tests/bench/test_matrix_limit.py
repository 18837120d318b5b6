from __future__ import annotations

import pytest
from benchmarks.matrix.limit import Compute, Wire, barrier_limit_s, limit_s, step_limit_s, wire_from_calibration

SECOND_PER_BYTE = Wire(seconds_per_byte=1.0, least_s=0.0)


def test_one_gradient_is_through_when_it_was_ready_and_sent() -> None:
    assert limit_s([2.0], [3], SECOND_PER_BYTE) == 5.0


def test_the_suffix_that_is_latest_counts() -> None:
    # All from 0: 0 + 4. From the second on: 5 + 3. The last alone: 6 + 1.
    assert limit_s([0.0, 5.0, 6.0], [1, 2, 1], SECOND_PER_BYTE) == 8.0


def test_the_order_in_which_parameters_are_given_does_not_matter() -> None:
    assert limit_s([6.0, 0.0, 5.0], [1, 1, 2], SECOND_PER_BYTE) == 8.0


def test_a_small_rest_takes_no_less_than_the_fastest_collective() -> None:
    wire = Wire(seconds_per_byte=1e-9, least_s=0.5)
    assert limit_s([1.0], [4], wire) == 1.5


def test_the_published_figures_of_the_replayed_layers() -> None:
    # 24 layers of 2 MB from 130 ms on, every 10 ms; 48 MB at 119.5 MB/s are 402 ms of wire: 532 ms.
    ready = [0.130 + 0.010 * layer for layer in range(24)]
    wire = Wire(seconds_per_byte=1 / 119.5e6, least_s=0.0)
    assert limit_s(ready, [2_000_000] * 24, wire) == pytest.approx(0.532, abs=0.001)
    # Whole step: its last layer, first reduced, is first read at 115 ms of the next forward: 417 ms.
    used = [0.115 - 0.005 * layer for layer in range(24)]
    assert step_limit_s(ready, used, [2_000_000] * 24, wire, compute_s=0.360) == pytest.approx(0.417, abs=0.001)


def test_the_worked_example_of_the_barrier() -> None:
    compute = Compute(ready_s=[12.0, 8.0], used_s=[0.0, 2.0], backward_s=12.0, update_s=1.0)
    assert barrier_limit_s(compute, [4, 4], SECOND_PER_BYTE) == 17.0


def test_with_a_barrier_a_fast_link_costs_the_last_reduction_and_the_first_gather() -> None:
    compute = Compute(ready_s=[12.0, 8.0], used_s=[0.0, 2.0], backward_s=12.0, update_s=1.0)
    wire = Wire(seconds_per_byte=0.5, least_s=0.0)
    assert barrier_limit_s(compute, [4, 4], wire) == 1.0 + 13.0 + 1.0


def test_with_a_barrier_a_slow_link_is_busy_from_the_first_gradient_to_the_last_use() -> None:
    compute = Compute(ready_s=[12.0, 8.0], used_s=[0.0, 2.0], backward_s=12.0, update_s=1.0)
    wire = Wire(seconds_per_byte=10.0, least_s=0.0)
    # 40 of each phase, less the 2 of forward before the second layer is read; 8 before the first gradient; the update.
    assert barrier_limit_s(compute, [4, 4], wire) == (40.0 - 2.0) + (8.0 + 40.0) + 1.0


def test_the_barrier_of_the_replayed_layers() -> None:
    ready = [0.360 - 0.010 * layer for layer in range(24)]
    compute = Compute(ready_s=ready, used_s=[0.005 * layer for layer in range(24)], backward_s=0.360, update_s=0.006)
    of_ranks = {ranks: Wire(seconds_per_byte=2 * (ranks - 1) / ranks / 119.5e6, least_s=0.0) for ranks in (2, 4)}
    limits = [barrier_limit_s(compute, [2_000_000] * 24, wire) for wire in of_ranks.values()]
    assert limits == pytest.approx([0.460, 0.623], abs=0.001)


def test_a_step_is_not_shorter_than_its_compute() -> None:
    assert step_limit_s([1.0], [0.5], [1], SECOND_PER_BYTE, compute_s=9.0) == 9.0


def test_a_step_is_not_shorter_than_all_it_sends() -> None:
    assert step_limit_s([1.0, 1.0], [5.0, 0.0], [3, 4], SECOND_PER_BYTE, compute_s=0.0) == 7.0


def test_without_gradients_there_is_no_limit() -> None:
    assert limit_s([], [], SECOND_PER_BYTE) == 0.0


def test_the_wire_is_as_fast_as_the_best_piece_size_was() -> None:
    trains = [{"bytes": 100, "seconds": 2.0}, {"bytes": 100, "seconds": 1.0}]
    wire = wire_from_calibration({"small_s": 0.25, "trains": trains})
    assert wire == Wire(seconds_per_byte=0.01, least_s=0.25)
    assert wire.cheapest_s(200) == 2.0
    assert wire.cheapest_s(1) == 0.25
    assert wire.cheapest_s(0) == 0.0


def test_a_link_faster_than_time_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot take -1 s per byte"):
        Wire(seconds_per_byte=-1, least_s=0)
