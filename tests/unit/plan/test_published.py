"""Plans for ResNet-50, whose backward others have measured tensor by tensor.

The data is not ours to copy: the repository netx-repo/training-bottleneck has it (simulation/bk_time_logs/resnet50.bk.log, a
V100, batch 32). Tests read it from the folder that UNDERTOW_PUBLISHED_DATA names, or from shared/data beside the repository.
"""

from __future__ import annotations

import os
from functools import cache
from itertools import accumulate
from pathlib import Path

import pytest

from support.project import ROOT
from undertow.cost import Link
from undertow.cost.costs import RingCosts
from undertow.plan import Optimum, ParamSpec, SizeCaps, StepTiming, finish_us, group_by_size, optimal_groups

FOLDER = Path(os.environ.get("UNDERTOW_PUBLISHED_DATA") or ROOT.parent / "shared" / "data")
PROFILE = FOLDER / "resnet50.bk.log"
pytestmark = pytest.mark.skipif(not PROFILE.exists(), reason=f"there is no {PROFILE.name} in UNDERTOW_PUBLISHED_DATA")

NUM_RANKS = 32
STEP_US = 128_100.0  # of one GPU, as published with the profile
# Line rates as payload; of 10 GbE 9.43 Gb/s are, by the frames' and TCP's headers. Hops as such networks have them.
LINKS = {
    "10 GbE": Link(name="10 GbE", hop_s=20e-6, bytes_per_s=9.43e9 / 8),
    "56 Gb/s": Link(name="56 Gb/s", hop_s=5e-6, bytes_per_s=56e9 / 8),
    "100 Gb/s": Link(name="100 Gb/s", hop_s=5e-6, bytes_per_s=100e9 / 8),
}
each_link = pytest.mark.parametrize("link", LINKS.values(), ids=LINKS)


@cache
def resnet() -> tuple[list[ParamSpec], StepTiming]:
    """Tensors in the order of their ready times, and these."""
    lines = PROFILE.read_text().splitlines()[3:]
    rows = [(float(wait_us), int(num_bytes)) for wait_us, num_bytes in (line.split(",") for line in lines if line)]
    params = [
        ParamSpec(name=f"tensor {i}", shape=(num_bytes // 4,), dtype="float32", itemsize=4)
        for i, (_, num_bytes) in enumerate(rows)
    ]
    ready = list(accumulate(wait_us for wait_us, _ in rows))
    return params, StepTiming(ready_us=ready, backward_end_us=ready[-1])


def optimum_on(link: Link) -> Optimum:
    params, timing = resnet()
    return optimal_groups(params, range(len(params)), timing, RingCosts(link, num_ranks=NUM_RANKS), num_ranks=NUM_RANKS)


def test_the_profile_is_the_published_one() -> None:
    params, timing = resnet()
    assert (len(params), sum(param.num_bytes for param in params)) == (161, 102_228_128)
    assert timing.backward_end_us == pytest.approx(64_806.6, abs=0.1)  # published to 0.1 ms


@each_link
def test_four_buckets_come_within_a_hundredth_of_the_best_step(link: Link) -> None:
    optimum = optimum_on(link)
    assert len(optimum.groups) <= 4
    assert optimum.finish_us - optimum.best_us <= 0.01 * STEP_US


@each_link
def test_no_other_grouping_would_be_through_two_hundredths_earlier(link: Link) -> None:
    optimum = optimum_on(link)
    # What is left above the limit is launches, which it does not count, and cells of sizes.
    assert optimum.limit_us <= optimum.best_us <= 1.02 * optimum.limit_us


@pytest.mark.parametrize(("name", "num_buckets", "ratio"), [("10 GbE", 3, 1.05), ("56 Gb/s", 3, 8.4), ("100 Gb/s", 2, 3.8)])
def test_buckets_of_one_size_expose_more_than_fewer_planned_ones(name: str, num_buckets: int, ratio: float) -> None:
    params, timing = resnet()
    mib = 1024 * 1024
    groups = group_by_size(params, range(len(params)), SizeCaps(cap_bytes=25.0 * mib, first_bytes=(1.0 * mib,)))
    fixed_us = finish_us(params, groups, timing, RingCosts(LINKS[name], num_ranks=NUM_RANKS)) - timing.backward_end_us
    optimum = optimum_on(LINKS[name])
    assert len(optimum.groups) == num_buckets < len(groups)
    assert fixed_us / (optimum.finish_us - timing.backward_end_us) == pytest.approx(ratio, rel=0.02)  # two digits, as docs say
