"""The benchmarks, in the order in which they run."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks import host_overhead, memory, muon, recording, simulator, watching
from benchmarks.figure import Figure, Part, Relation, Row, Target, Tell, row_where


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
            target=Target(relation=Relation.AT_MOST, bound=0.5),
        ),
        Figure(
            name="host overhead over torch DDP's batched_grad_copy",
            measured=ours["above_bare_ms"] / batched["above_bare_ms"],
            unit="x",
            target=Target(relation=Relation.AT_MOST, bound=1.0),
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
        name="memory",
        title="Memory for gradients: 101 MB of them, 2 ranks",
        measure=memory.measure,
        judge=memory.judge,
    ),
    Part(
        name="muon",
        title="Whole matrices in shards: replayed layers of a GPT of 4.9 M parameters, 4 ranks, shaped 1 Gb/s link",
        measure=muon.measure,
        judge=muon.judge,
    ),
    Part(
        name="recording",
        title="Cost of recording: 150 parameters, CPU time of the training thread",
        measure=recording.measure,
        judge=recording.judge,
    ),
    Part(
        name="simulator",
        title="Simulator: CPU time of a step, 100 layers on 16,384 ranks of different speed, ZeRO-1, with contention",
        measure=simulator.measure,
        judge=simulator.judge,
    ),
    Part(
        name="watching",
        title="Cost of watching over the other ranks: 150 parameters, a healthy run",
        measure=watching.measure,
        judge=watching.judge,
    ),
)
