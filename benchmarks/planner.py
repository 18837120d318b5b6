"""How long it takes to choose a plan: up to 10,000 parameters, a measured-like curve, and the same with shards."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median

import numpy as np
from numpy.typing import ArrayLike, NDArray

from benchmarks.figure import Figure, Relation, Row, Target, Tell, row_where
from undertow.plan import ParamSpec, StepTiming, choose

_BACKWARD_US, _FORWARD_US = 40_000.0, 20_000.0
_WHOLE, _SHARDS = "data-parallel", "shards"
_CASES = tuple((form, num) for form in (_WHOLE, _SHARDS) for num in (300, 3000, 10_000))
_NUMELS = (64, 256, 4096, 65_536, 300_000)

# An all-reduce on 8 A100s: stas00/ml-engineering, network chapter. (bytes, microseconds); the ends continue the last pieces.
_KIB = 1024
_POINTS = (
    (0, 58),
    (256 * _KIB, 61),
    (1024 * _KIB, 102),
    (4096 * _KIB, 102),
    (8192 * _KIB, 134),
    (16384 * _KIB, 277),
    (32768 * _KIB, 424),
    (65536 * _KIB, 685),
    (131072 * _KIB, 1328),
    (262144 * _KIB, 2421),
    (8388608 * _KIB, 77_472),
)


class MeasuredCosts:
    """The measured all-reduce; a reduce-scatter and an all-gather take half of it."""

    def collective_us(self, kind: str, num_bytes: ArrayLike) -> NDArray[np.float64]:
        """See `Costs`."""
        sizes, times = zip(*_POINTS, strict=True)
        whole = np.interp(np.asarray(num_bytes, dtype=np.float64), sizes, times)
        return whole if kind == "all_reduce" else 0.5 * whole


def model_of(num_params: int) -> tuple[list[ParamSpec], StepTiming]:
    """Parameters of mixed sizes that come one after another, and are used in the reverse of that order."""
    rng = random.Random(0)
    numels = rng.choices(_NUMELS, k=num_params)
    params = [ParamSpec(name=f"p{i}", shape=(numel,), dtype="float32", itemsize=4) for i, numel in enumerate(numels)]
    ready = sorted(rng.uniform(0, _BACKWARD_US) for _ in range(num_params))
    used = sorted((rng.uniform(0, _FORWARD_US) for _ in range(num_params)), reverse=True)
    return params, StepTiming(ready_us=ready, backward_end_us=_BACKWARD_US, used_us=used)


def measure(is_quick: bool, tell: Tell) -> list[Row]:
    """A row per form and number of parameters: CPU time, the median of some runs."""
    num_repetitions = 3 if is_quick else 15
    rows = []
    for form, num_params in _CASES:
        tell(f"{form}, {num_params} parameters")
        params, timing = model_of(num_params)
        plan = partial(
            choose,
            params,
            range(num_params),
            timing,
            MeasuredCosts(),
            has_shards=form != _WHOLE,
        )
        choice, times_ms = plan(), [_milliseconds(plan) for _ in range(num_repetitions)]
        rows.append(
            {
                "form": form,
                "num_params": num_params,
                "planning_ms": median(times_ms),
                "longest_ms": max(times_ms),
                "num_buckets": len(choice.best.groups),
            }
        )
    return rows


def judge(rows: Sequence[Row]) -> list[Figure]:
    bounds_ms = {(_WHOLE, 300): 200.0, (_SHARDS, 300): 200.0}
    return [
        Figure(
            name=f"planning, {form}, {num_params:,} parameters",
            measured=row_where(rows, form=form, num_params=num_params)["planning_ms"],
            unit="ms",
            num_decimals=0,
            target=Target(relation=Relation.BELOW, bound=bounds_ms[case]) if case in bounds_ms else None,
        )
        for case in _CASES
        for form, num_params in [case]
    ]


def _milliseconds(call: Callable[[], object]) -> float:
    start = time.process_time()  # one thread, which does nothing but compute: on an idle machine that is the time it takes
    call()
    return (time.process_time() - start) * 1e3
