"""Layers, fragments and their turns."""

from collections import deque
from itertools import product

import pytest

from undertow.config import Outer
from undertow.plan.fragments import Turns, chosen_turns, exposed_us, fixed_turns, layers_of, starts_after


def test_a_layer_is_the_path_to_the_first_number_or_the_first_child() -> None:
    names = ["wte.weight", "h.0.attn.weight", "h.0.mlp.0.weight", "h.1.attn.weight", "net.ln.weight", "net.head.weight", "scale"]
    assert layers_of(names) == ["wte", "h.0", "h.1", "net", "scale"]


def test_fragments_take_turns_within_a_period() -> None:
    starts = {k: [step for step in range(1, 25) if starts_after(step, k, num_fragments=3, every=8)] for k in range(3)}
    assert starts == {0: [8, 16, 24], 1: [10, 18], 2: [13, 21]}


@pytest.mark.parametrize(
    ("fixed_us", "layer_us", "turns"),
    [
        (10.0, 30.0, Turns(fragments=1, delay=1)),  # all 20 layers travel beneath a step
        (10.0, 90.0, Turns(fragments=3, delay=1)),
        (10.0, 600.0, Turns(fragments=10, delay=2)),  # two layers at most
        (10.0, 1e6, Turns(fragments=16, delay=3)),  # nothing hides that
    ],
)
def test_the_fewest_steps_of_delay_that_hide_an_exchange_are_chosen(fixed_us: float, layer_us: float, turns: Turns) -> None:
    assert chosen_turns(Outer(every=30), step_us=1000.0, fixed_us=fixed_us, layers_us=[layer_us] * 20) == turns


def test_a_large_layer_needs_a_longer_delay() -> None:
    layers_us = [4500.0, *[100.0] * 9]
    assert chosen_turns(Outer(every=100), step_us=1000.0, fixed_us=10.0, layers_us=layers_us).delay == 7


@pytest.mark.parametrize(
    ("every", "turns"),
    [
        (1, Turns(fragments=1, delay=0)),
        (9, Turns(fragments=1, delay=0)),  # a step of delay would lose more than a tenth of the training
        (10, Turns(fragments=10, delay=1)),
        (59, Turns(fragments=16, delay=5)),
        (60, Turns(fragments=16, delay=6)),
    ],
)
def test_a_slow_link_makes_steps_wait_rather_than_a_delay_above_a_tenth_of_the_interval(every: int, turns: Turns) -> None:
    """The outer step overwrites what was trained in the delay, so a longer one gains nothing."""
    assert chosen_turns(Outer(every=every), step_us=1000.0, fixed_us=10.0, layers_us=[1e6] * 20) == turns
    given = chosen_turns(Outer(every=every, delay=every - 1), step_us=1000.0, fixed_us=10.0, layers_us=[1e6] * 20)
    assert given.delay == every - 1


@pytest.mark.parametrize(
    ("settings", "num_layers", "wanted"),
    [
        ({"every": 30}, 9, (2, 1)),
        ({"every": 30}, 1, (1, 1)),
        ({"every": 1}, 9, (1, 0)),
        ({"every": 30, "fragments": 4}, 9, (4, 1)),
        ({"every": 30, "delay": 5}, 9, (2, 5)),
    ],
)
def test_fixed_turns_follow_no_measurement(settings: dict[str, int], num_layers: int, wanted: tuple[int, int]) -> None:
    turns = fixed_turns(Outer(**settings), num_layers=num_layers)
    assert (turns.fragments, turns.delay) == wanted


def test_given_fragments_or_delay_are_kept() -> None:
    how = {"step_us": 1000.0, "fixed_us": 10.0, "layers_us": [150.0] * 20}
    assert chosen_turns(Outer(every=30, fragments=2), **how) == Turns(fragments=2, delay=3)
    assert chosen_turns(Outer(every=30, delay=5), **how) == Turns(fragments=1, delay=5)
    assert chosen_turns(Outer(every=1), **how) == Turns(fragments=1, delay=0)


def waits_step_by_step(times_us: tuple[int, ...], *, delay: int, every: int, step_us: int) -> list[int]:
    """The waits of every step of ten periods: a link that carries one exchange after the other, and a clock."""
    now_us = free_us = 0
    flights: deque[tuple[int, int]] = deque()  # the step after which it is due, and its end
    waits_us = []
    for step in range(1, 10 * every + 1):
        now_us += step_us
        for fragment, time_us in enumerate(times_us):
            if starts_after(step, fragment, num_fragments=len(times_us), every=every):
                free_us = max(free_us, now_us) + time_us
                flights.append((step + delay, free_us))
        began_us = now_us
        while flights and flights[0][0] <= step:
            now_us = max(now_us, flights.popleft()[1])
        waits_us.append(now_us - began_us)
    return waits_us


@pytest.mark.parametrize("times_us", [(5,), (40,), (200,), (3, 30), (30, 3), (9, 9, 9), (1, 70, 1), (64, 64, 64)])
def test_the_exposed_time_is_the_one_of_a_link_and_a_clock_step_by_step(times_us: tuple[int, ...]) -> None:
    for delay, every in product((0, 1, 2, 5), (6, 7, 10)):
        waits_us = waits_step_by_step(times_us, delay=delay, every=every, step_us=8)
        found = exposed_us(times_us, delay=delay, every=every, step_us=8)
        # Times are whole numbers, so that sums are exact.
        assert found == sum(waits_us[-every:]) / every, (delay, every)
        assert (found == 0) is (not any(waits_us)), (delay, every)
