"""The benchmarks, in the order in which they run."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks import host_overhead, muon
from benchmarks.figure import Figure, Part, Row, Tell, row_where


def _measure_host_overhead(is_quick: bool, tell: Tell) -> list[Row]:
    num_repetitions = 1 if is_quick else 5
    tell(f"{len(host_overhead.SYSTEMS)} systems, {num_repetitions} repetitions")
    return host_overhead.run(num_repetitions=num_repetitions)


def _judge_host_overhead(rows: Sequence[Row]) -> list[Figure]:
    ours, batched = (row_where(rows, system=name) for name in ("Undertow", "torch DDP, batched_grad_copy"))
    return [
        Figure(
            name="host overhead over torch DDP's default",
            measured=ours["ratio_to_torch"],
            unit="x",
            at_most=0.5,
        ),
        Figure(
            name="host overhead over torch DDP's batched_grad_copy",
            measured=ours["above_bare_ms"] / batched["above_bare_ms"],
            unit="x",
            at_most=1.0,
        ),
    ]


PARTS = (
    Part(
        name="host-overhead",
        title="Host overhead: 3,000 parameters of 64 elements, CPU time per step above the bare model",
        measure=_measure_host_overhead,
        judge=_judge_host_overhead,
    ),
    Part(
        name="muon",
        title="Whole matrices in shards: replayed layers of a GPT of 4.9 M parameters, 4 ranks, shaped 1 Gb/s link",
        measure=muon.measure,
        judge=muon.judge,
    ),
)
