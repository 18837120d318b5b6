"""The simulator: one step of a model of 100 layers on 16,384 ranks, each of another speed."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from statistics import median

from benchmarks.figure import Figure, Relation, Row, Target, Tell
from undertow.lab.cost import costs_for
from undertow.lab.profile import Profile
from undertow.lab.simulate import Conditions, simulate
from undertow.plan import ParamSpec, SizeCaps, group_by_size, plan_from_groups
from undertow.schedule import ZERO1

NUM_RANKS, NUM_LAYERS = 16_384, 100
_PARAMS_PER_LAYER = 12
_LAYER_NUMEL = 12_000_000
_MIB = 1024 * 1024
CAPS: Mapping[str, SizeCaps] = {
    "25 MiB buckets": SizeCaps(cap_bytes=25 * _MIB, first_bytes=(_MIB,)),
    "per parameter": SizeCaps(cap_bytes=1),
}
# What takes longest: gathers, ranks of different speed, and computation that the lane slows.
_CONDITIONS = Conditions(skew=0.02, contention=0.1, launch_us=0.0, copy_us_per_mb=0.0)


def _profile() -> Profile:
    num_params = NUM_LAYERS * _PARAMS_PER_LAYER
    numel = _LAYER_NUMEL // _PARAMS_PER_LAYER
    params = tuple(ParamSpec(name=f"p{i}", shape=(numel,), dtype="float32", itemsize=4) for i in range(num_params))
    ready_us = tuple(200_000 * (1 - i / num_params) for i in range(num_params))
    return Profile(params=params, ready_us=ready_us, forward_us=100_000, backward_us=200_000, update_us=5_000)


def measure(is_quick: bool, tell: Tell) -> list[Row]:
    """A row per plan: seconds of CPU time for one simulated step under zero1, with the check of its schedule; median."""
    profile = _profile()
    costs = costs_for("400gbit,5us", num_ranks=NUM_RANKS, per_node=8)
    rows = []
    for name, caps in CAPS.items():
        groups = group_by_size(profile.params, profile.order, caps)
        tell(f"{name}: {len(groups)}")
        plan = plan_from_groups(profile.params, groups, num_ranks=NUM_RANKS)
        seconds = []
        for _ in range(1 if is_quick else 5):
            start = time.process_time()
            simulate(profile, plan, ZERO1, costs, _CONDITIONS)
            seconds.append(time.process_time() - start)
        rows.append({"plan": name, "buckets": len(groups), "seconds": median(seconds)})
    return rows


def judge(rows: Sequence[Row]) -> list[Figure]:
    return [
        Figure(
            name=f"one step, {row['buckets']} buckets",
            measured=row["seconds"],
            unit="s",
            num_decimals=3,
            target=Target(relation=Relation.BELOW, bound=1.0),
        )
        for row in rows
    ]
