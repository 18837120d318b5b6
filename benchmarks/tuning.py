"""What it costs to find the plan: the first hundred steps of training with tuning beside those without.

Two copies of the timed layers take a step in turn, in the same processes and over the same emulated link, one of them with
`auto_tune=False`. Tuning's own time is that of everything that it does between rounds (comparing what ranks have measured,
planning on rank 0, new buckets), and what the first step under a new plan takes longer than the ones after it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from benchmarks.figure import Figure, Relation, Row, Target, Tell
from benchmarks.matrix.profile import even_layers
from benchmarks.matrix.workloads.replay import Replay
from benchmarks.ranks import run_ranks
from undertow import DistributedDataParallel, SyncConfig
from undertow.cost import link_from_text
from undertow.emulation.link import BACKEND, emulated_backend
from undertow.engine.current_plan import CurrentPlan
from undertow.engine.tuning import NUM_STEPS_BEFORE, NUM_STEPS_MEASURED

LINK = "1gbit"
NUM_RANKS = (2, 4)
NUM_STEPS = 100
_NUM_AFTER_A_MOVE = 5


def measure_rank(rank: int, num_ranks: int) -> Row:
    """The row of one run."""
    with emulated_backend(link_from_text(LINK)):
        group = dist.new_group(backend=BACKEND)
        tuned, untuned = (_wrapped(group, auto_tune=auto_tune) for auto_tune in (True, False))
        adopting_s: list[float] = []
        tuned_s: list[float] = []
        untuned_s: list[float] = []
        num_buckets: list[int] = []
        x = torch.full((1,), rank + 1.0)
        _warm_up(group, x)
        for step in range(NUM_STEPS):
            for wrapped, times in ((tuned, tuned_s), (untuned, untuned_s))[:: -1 if step % 2 else 1]:
                dist.barrier()
                with _timed(adopting_s if wrapped is tuned else []):
                    times.append(_step_s(wrapped, x))
            num_buckets.append(len(tuned.plan.buckets))
        decision = tuned.explain().decision
        for wrapped in (tuned, untuned):
            wrapped.close()
        dist.destroy_process_group(group)
    moved = [step for step in range(1, NUM_STEPS) if num_buckets[step] != num_buckets[step - 1]]
    measured, later = slice(NUM_STEPS_BEFORE, NUM_STEPS_BEFORE + NUM_STEPS_MEASURED + 3), slice(20, None)
    beside = [tuned / untuned for tuned, untuned in zip(tuned_s[measured], untuned_s[measured], strict=True)]
    settling_s = sum(tuned_s[step] - median(tuned_s[step + 1 : step + 1 + _NUM_AFTER_A_MOVE]) for step in moved)
    return {
        "ranks": num_ranks,
        "first_100_tuned_s": round(sum(tuned_s), 3),
        "first_100_untuned_s": round(sum(untuned_s), 3),
        "ratio": round(sum(tuned_s) / sum(untuned_s), 4),
        "own_share": round((sum(adopting_s) + max(0.0, settling_s)) / sum(tuned_s), 5),
        "adopting_ms": round(sum(adopting_s) * 1e3, 1),
        "settling_ms": round(settling_s * 1e3, 1),
        "last_50_tuned_ms": round(median(tuned_s[50:]) * 1e3, 1),
        "last_50_untuned_ms": round(median(untuned_s[50:]) * 1e3, 1),
        "first_10_tuned_ms": [round(step_s * 1e3) for step_s in tuned_s[:10]],
        "first_10_untuned_ms": [round(step_s * 1e3) for step_s in untuned_s[:10]],
        "measured_over_later": round(median(tuned_s[measured]) / median(tuned_s[later]), 4),
        "measured_over_untuned": round(median(beside), 4),
        "decision": decision,
    }


def _wrapped(group: dist.ProcessGroup, *, auto_tune: bool) -> DistributedDataParallel:
    torch.manual_seed(0)
    return DistributedDataParallel(Replay(even_layers()), process_group=group, config=SyncConfig(auto_tune=auto_tune))


def _warm_up(group: dist.ProcessGroup, x: torch.Tensor) -> None:
    """The first model of a process pays for connections and imports, which the second one finds."""
    first = _wrapped(group, auto_tune=False)
    _step_s(first, x)
    first.close()


def _step_s(wrapped: DistributedDataParallel, x: torch.Tensor) -> float:
    began_s = time.perf_counter()
    wrapped.zero_grad()
    wrapped(x).backward()
    return time.perf_counter() - began_s


@contextmanager
def _timed(times: list[float]) -> Iterator[None]:
    """Times the work of plans at the beginning and the end of rounds."""

    def timed(act: Callable[..., None]) -> Callable[..., None]:
        def act_and_note(current_plan: CurrentPlan, *given: object) -> None:
            began_s = time.perf_counter()
            act(current_plan, *given)
            times.append(time.perf_counter() - began_s)

        return act_and_note

    with (
        mock.patch.object(CurrentPlan, "adopt_plan", timed(CurrentPlan.adopt_plan)),
        mock.patch.object(CurrentPlan, "round_ended", timed(CurrentPlan.round_ended)),
    ):
        yield


def measure(is_quick: bool, tell: Tell) -> list[Row]:
    """A row per number of ranks."""
    rows: list[Any] = []
    for num_ranks in NUM_RANKS[:1] if is_quick else NUM_RANKS:
        tell(f"{num_ranks} ranks, {NUM_STEPS} steps with tuning and as many without")
        rows.append(run_ranks(measure_rank, num_ranks, num_ranks))
    return rows


def judge(rows: Sequence[Row]) -> list[Figure]:
    return [
        Figure(
            name=f"{row['ranks']} ranks: {name}",
            measured=row[key] * scale,
            unit=unit,
            num_decimals=3,
            target=Target(relation=Relation.AT_MOST, bound=bound),
        )
        for row in rows
        for name, key, scale, unit, bound in (
            ("tuning's share of the first 100 steps", "own_share", 100, "%", 1.0),
            ("first 100 steps, tuned over untuned", "ratio", 1, "x", 1.01),
            ("steps 3 to 10, in which it measures, over later ones", "measured_over_later", 1, "x", 1.03),
            ("the same steps over untuned ones in turn, with equal buckets", "measured_over_untuned", 1, "x", 1.03),
        )
    ]
