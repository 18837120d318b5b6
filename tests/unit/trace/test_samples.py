"""What collectives cost, from times at which they were on a link that nobody else used."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from undertow.cost import curve_from_samples
from undertow.trace import Transfer, cost_samples

LATENCY_US, US_PER_BYTE = 50.0, 0.002
SIZES = (10_000, 400_000, 90_000, 1_000_000, 20_000)


def cost_us(num_bytes: int) -> float:
    return LATENCY_US + US_PER_BYTE * num_bytes


def transfer(num_bytes: int, start_us: float, stop_us: float) -> Transfer:
    return Transfer(num_bytes=num_bytes, start_us=start_us, stop_us=stop_us)


def exact(sizes: Sequence[int]) -> tuple[tuple[float, Any], ...]:
    """The samples of collectives of those sizes, to rounding."""
    return tuple((size, pytest.approx(cost_us(size))) for size in sizes)


def alone(sizes: Sequence[int]) -> list[Transfer]:
    """One after another, with pauses."""
    return [transfer(size, 1e5 * at, 1e5 * at + cost_us(size)) for at, size in enumerate(sizes)]


def queued(sizes: Sequence[int]) -> list[Transfer]:
    """All launched at once, and carried one after another."""
    ends = np.cumsum([cost_us(size) for size in sizes])
    return [transfer(size, 0.0, float(end)) for size, end in zip(sizes, ends, strict=True)]


def shared(launches: Sequence[tuple[int, float]], *, most: int) -> list[Transfer]:
    """As many as `most` at a time share the link evenly; each needs its cost of it."""
    waiting, active, done, now = list(enumerate(launches)), dict[int, float](), dict[int, float](), 0.0
    while waiting or active:
        while waiting and len(active) < most and waiting[0][1][1] <= now:
            at, (size, _) = waiting.pop(0)
            active[at] = cost_us(size)
        first_end = now + min(active.values()) * len(active) if active else np.inf
        is_room = bool(waiting) and len(active) < most
        then = min(first_end, waiting[0][1][1]) if is_room else first_end
        active = {at: left - (then - now) / len(active) for at, left in active.items()}
        now = then
        ended = [at for at, left in active.items() if left <= 1e-6]
        done |= dict.fromkeys(ended, now)
        active = {at: left for at, left in active.items() if at not in ended}
    return [transfer(size, start, done[at]) for at, (size, start) in enumerate(launches)]


TOGETHER = shared([(SIZES[1], 0.0), (SIZES[3], 0.0)], most=2)
LENGTHS, STALLS = (1, 2, 3, 5), [queued(SIZES[: 1 + at % 5]) for at in range(19)]
# The steps, and the sizes of the first samples, which are exact.
STEPS: dict[str, tuple[list[list[Transfer]], Sequence[int]]] = {
    "with pauses between them": ([alone(SIZES)], SIZES),
    "queues of several lengths": (
        [queued(SIZES[:length]) for length in LENGTHS],
        [size for length in LENGTHS for size in SIZES[:length]],
    ),
    # How long the link was busy says nothing of latency there: when each was through does.
    "the same queue in every step": ([queued(SIZES)] * 5, SIZES * 5),
    "two that share the link, which makes each longer": ([TOGETHER, *([row] for row in alone(SIZES))], (SIZES[1], SIZES[3])),
    "one stalled step in ten moves nothing else": (
        [*STALLS, [transfer(it.num_bytes, 0.0, it.stop_us + 1e6) for it in queued(SIZES[:2])]],
        [size for at in range(19) for size in SIZES[: 1 + at % 5]],
    ),
    "without bytes the latency": ([queued([0, 0]), queued([0, 1000, 0]), queued([0])], (0, 0, 0, 1000, 0, 0)),
    "nothing sent": ([[], []], ()),
    "no steps": ([], ()),
}


@pytest.mark.parametrize(("steps", "sizes"), STEPS.values(), ids=STEPS)
def test_what_each_costs_is_found(steps: list[list[Transfer]], sizes: Sequence[int]) -> None:
    samples = cost_samples(steps)
    assert samples[: len(sizes)] == exact(sizes)
    assert len(samples) == sum(map(len, steps))


@pytest.mark.parametrize(
    ("steps", "samples"),
    [
        ([transfer(1000, 5.0, 45.0)], ((1000.0, 40.0),)),
        ([transfer(10, 0.0, 30.0), transfer(1000, 30.0, 31.0)], ((10.0, 30.0), (1000.0, 1.0))),
    ],
    ids=["one is a sample by itself", "one that begins where another ends is not with it"],
)
def test_samples_of_one_step(steps: list[Transfer], samples: tuple[tuple[float, float], ...]) -> None:
    assert cost_samples([steps]) == tuple((size, pytest.approx(time)) for size, time in samples)


def test_two_that_share_the_link_are_longer() -> None:
    assert TOGETHER[0].stop_us == pytest.approx(2 * cost_us(SIZES[1]))  # half of the link


def test_queues_that_are_almost_the_same_in_every_step_give_what_each_costs() -> None:
    # One step of five had a pause, and all were 2 % longer or shorter: the latency must not drown in that.
    times = np.random.default_rng(7).uniform(0.98, 1.02, size=5)
    steps = [[transfer(it.num_bytes, 0.0, it.stop_us * time) for it in queued(SIZES)] for time in times]
    steps[2] = [transfer(SIZES[0], -1e4, -1e4 + cost_us(SIZES[0])), *queued(SIZES[1:])]
    line = curve_from_samples(cost_samples(steps)).us([0, 1_000_000])
    # Sizes range over a factor of 100: the smallest costs 1.4 latencies, and its time is within 2 %, as are all others.
    assert line == pytest.approx([LATENCY_US, cost_us(1_000_000)], rel=0.05)


@pytest.mark.parametrize("most", [2, 3])
def test_latency_and_bandwidth_are_found_where_several_share_the_link(most: int) -> None:
    # However they share it, it is busy for the sum of what they cost: the fit is exact, to rounding.
    launches = [[(size, 40.0 * at) for at, size in enumerate(SIZES[:length])] for length in (1, 2, 3, 4, 5)]
    samples = cost_samples([shared(step, most=most) for step in launches])
    assert curve_from_samples(samples).us([0, 500_000]) == pytest.approx([LATENCY_US, cost_us(500_000)], rel=1e-6)


@pytest.mark.parametrize("most", [2, 3])
def test_the_bandwidth_is_nearly_found_where_several_share_the_link_and_every_step_is_the_same(most: int) -> None:
    # At an end as many as `most` - 1 others are under way: on average half of each, of ten that were sent.
    samples = cost_samples([shared([(size, 40.0 * at) for at, size in enumerate(SIZES * 2)], most=most)] * 5)
    assert float(curve_from_samples(samples).us(sum(SIZES))) == pytest.approx(cost_us(sum(SIZES)), rel=0.2 * (most - 1))


def test_costs_without_a_latency_leave_something_to_one_without_bytes() -> None:
    # A curve takes no time of zero, and training must not end over one.
    samples = cost_samples([[transfer(1000, 0.0, 10.0), transfer(0, 0.0, 10.0)], [transfer(3000, 0.0, 30.0)]])
    assert all(time > 0 for _, time in samples)
    assert curve_from_samples(samples).us(1000) == pytest.approx(10.0, rel=1e-3)


def test_a_link_too_fast_for_the_clock_still_gives_a_curve() -> None:
    samples = cost_samples([[transfer(1000, 5.0, 5.0), transfer(0, 6.0, 6.0), transfer(2000, 9.0, 8.9)]])
    assert curve_from_samples(samples).us(2000) < 1.0


times = st.floats(0, 1e6, allow_nan=False)
transfers = st.builds(
    lambda num_bytes, start_us, duration_us: transfer(num_bytes, start_us, start_us + duration_us),
    st.integers(0, 10**9),
    times,
    times,
)


@given(together=st.lists(transfers, max_size=6), others=st.lists(st.lists(transfers, max_size=6), max_size=6))
def test_each_collective_has_a_sample_that_a_curve_takes_and_without_pauses_they_add_up(
    together: list[Transfer], others: list[list[Transfer]]
) -> None:
    steps = [[transfer(0, 0.0, 3e6), *together], *others]  # the first one lasts as long as anything drawn
    samples = cost_samples(steps)
    assert sorted(size for size, _ in samples) == sorted(float(it.num_bytes) for step in steps for it in step)
    assert all(0 < time < np.inf for _, time in samples)
    assert all(0 < time < np.inf for _, time in cost_samples(others))
    # Each is a nanosecond at least, so that the sum may be more by one for each.
    assert sum(time for _, time in samples[: 1 + len(together)]) == pytest.approx(3e6, rel=1e-9, abs=0.01)
