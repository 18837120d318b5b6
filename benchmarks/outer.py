"""What outer synchronization gains over a link of 100 Mb/s, and what it changes in training.

`outer-link` times whole periods of steps, of two ranks in network namespaces. `outer-quality` trains the demo's GPT, as the
study `quality` does, with as many tokens for each variant. `outer-docstrings` is a shorter task, whose learning rate is as
high as plain data parallelism bears: there it shows what an outer momentum and a delay do.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import partial
from operator import itemgetter
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks import quality
from benchmarks.figure import Figure, Part, Relation, Row, Target, Tell
from benchmarks.matrix.links import shaped_network
from benchmarks.matrix.systems import sgd
from benchmarks.matrix.worker import die_with
from benchmarks.matrix.workloads import make_workload
from undertow import DistributedDataParallel, SyncConfig

LINK, QUALITY, DOCSTRINGS = "outer-link", "outer-quality", "outer-docstrings"
WORKLOADS = ("replay", "gpt")
_RATE, _RANKS, _EVERY = "100mbit", 2, 30
_MOST = 1.03  # times the bare model's step
BARE, TORCH, INT8, OUTER = "bare", "torch DDP", "Undertow, int8", f"Undertow, outer every {_EVERY}"
_SETTINGS: dict[str, dict[str, Any]] = {INT8: {"wire": "int8"}, OUTER: {"outer": {"every": _EVERY}}}
_SIZES_MB = {f"{TORCH}, {size_mb} MB": size_mb for size_mb in (1, 2, 4, 8, 16, 25)}  # the best is the row of torch's class
PERIODS = (10, 30, 100)
_NUM_STEPS, _NUM_DOCSTRING_STEPS = 2000, 600
_TURNS = {"fragments": 2, "delay": 1}  # given, so that results do not depend on the clock
_MOST_LOSS = 2.0  # percent above a mean in every step, at most, with two replicas
PLAIN = "every step"


def parts(out: Path, *, resumes: bool) -> tuple[Part, ...]:
    """The benchmarks. The studies keep their finished runs in `out`."""
    link = Part(
        name=LINK,
        title=f"Outer synchronization over {_RATE}, {_RANKS} ranks: ms of a step, mean over whole periods",
        measure=measure_link,
        judge=judge_link,
    )
    study = Part(
        name=QUALITY,
        title=f"Outer synchronization: loss after {_NUM_STEPS} steps of a GPT over bytes on Python's modules",
        measure=partial(measure_quality, out, resumes),
        judge=judge_quality,
    )
    short = Part(
        name=DOCSTRINGS,
        title=f"Outer synchronization: loss after {_NUM_DOCSTRING_STEPS} steps of a GPT over bytes on docstrings",
        measure=partial(measure_docstrings, out, resumes),
        judge=judge_docstrings,
    )
    return link, study, short


def measure_link(is_quick: bool, tell: Tell) -> list[Row]:
    """A row for each workload and system: the median of rounds, which alternate between systems; of torch's sizes one round."""
    num_rounds, num_periods, sizes = (1, 1, list(_SIZES_MB)[-1:]) if is_quick else (3, 3, list(_SIZES_MB))
    rows = []
    with shaped_network(_RATE, _RANKS) as network:
        for workload in WORKLOADS:
            found: dict[str, list[Row]] = {name: [] for name in (BARE, TORCH, INT8, OUTER)}
            for name in sizes:
                tell(f"{workload}: {name}")
                found[TORCH].append(_timed(network, workload, name, 6))
            found[TORCH] = [min(found[TORCH], key=itemgetter("step_ms"))]
            for number in range(num_rounds):
                for name in (BARE, INT8, OUTER):
                    tell(f"{workload}, round {number + 1} of {num_rounds}: {name}")
                    num_timed = 6 if name == INT8 else num_periods * _EVERY
                    found[name].append(_timed(network, workload, name, num_timed))
            for name, rounds in found.items():
                row = {key: median(each[key] for each in rounds) for key in rounds[0]}
                rows.append({"workload": workload, "system": name, "rounds": len(rounds), **row})
    return rows


def judge_link(rows: Sequence[Row]) -> list[Figure]:
    """Each system's step over the bare model's, and what outer synchronization exposes."""
    steps = {(row["workload"], row["system"]): row for row in rows}
    figures = []
    for (workload, name), row in steps.items():
        if name == BARE:
            continue
        ratio = row["step_ms"] / steps[workload, BARE]["step_ms"]
        target = Target(relation=Relation.AT_MOST, bound=_MOST) if name == OUTER else None
        figures.append(Figure(name=f"{workload}: {name} / bare", measured=ratio, unit="x", target=target))
        if name == OUTER:
            figures.append(Figure(name=f"{workload}: exposed of an exchange", measured=row["exposed_ms"], unit="ms"))
    return figures


def _timed(network: Any, workload: str, name: str, num_timed: int) -> Row:
    """Runs a system on fresh ranks, each in its namespace."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = [str(os.getpid()), folder, workload, name, str(num_timed)]
        ranks = []
        for rank in range(_RANKS):
            command = [sys.executable, "-m", "benchmarks.outer", *arguments, str(rank)]
            environment = {**os.environ, "GLOO_SOCKET_IFNAME": network.interface, "OMP_NUM_THREADS": "1"}
            ranks.append(subprocess.Popen(network.command(rank, command), env=environment))
        codes = [process.wait() for process in ranks]
        if any(codes):
            raise RuntimeError(f"{workload}, {name}: the ranks ended with exit codes {codes}")
        found: Row = json.loads((Path(folder) / "result.json").read_text(encoding="utf-8"))
        return found


def _run_rank(runner: str, folder: str, workload_name: str, name: str, num_timed: str, rank: str) -> None:
    die_with(int(runner))
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/meeting-point", _RANKS)
    dist.init_process_group("gloo", store=store, rank=int(rank), world_size=_RANKS)
    workload = make_workload(workload_name, 1.0, torch.device("cpu"))
    model, batch = workload.make_model(), workload.make_batch(int(rank))
    wrapped: nn.Module = model
    if name in _SIZES_MB:
        wrapped = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=_SIZES_MB[name])
    elif name in _SETTINGS:
        wrapped = DistributedDataParallel(model, config=SyncConfig(**_SETTINGS[name]))
    optimizer = sgd(model)

    def train(num_steps: int) -> float:
        began_s = time.perf_counter()
        for _ in range(num_steps):
            optimizer.zero_grad()
            wrapped(*batch).backward()
            optimizer.step()
        return (time.perf_counter() - began_s) / num_steps * 1e3

    outer = isinstance(wrapped, DistributedDataParallel) and wrapped.outer is not None
    train(2 * _EVERY if outer else 3)  # until fragments are chosen, and every one has been exchanged
    dist.barrier()
    row = {"step_ms": train(int(num_timed)), "exposed_ms": 0.0, "exchange_ms": 0.0, "fragments": 0, "delay": 0, "sent_mb": 0.0}
    if isinstance(wrapped, DistributedDataParallel):
        report = wrapped.report().outer
        if report is not None:
            row |= {"exposed_ms": report.exposed_ms, "exchange_ms": report.exchange_ms, "sent_mb": report.sent_bytes / 1e6}
            row |= {"fragments": report.fragments, "delay": report.delay}
        wrapped.close()
    dist.barrier()
    if rank == "0":
        (Path(folder) / "result.json").write_text(json.dumps(row), encoding="utf-8")
    dist.destroy_process_group()


def variants() -> dict[str, quality.Variant]:
    """The ways to train: a mean of gradients in every step, and outer synchronization of several periods."""
    return {PLAIN: quality.Variant(), **{f"every {every}": _outer(every) for every in PERIODS}}


def docstring_variants() -> dict[str, quality.Variant]:
    """As `variants`; and with the momentum of papers, as plain means, and with a delay of half a period."""
    found = {PLAIN: quality.Variant()}
    for every in PERIODS[:2]:
        found[f"every {every}"] = _outer(every)
        found[f"every {every}, momentum=0.9"] = _outer(every, fragments=1, momentum=0.9)
        found[f"every {every}, plain mean"] = _outer(every, fragments=1, lr=1.0, momentum=0.0, delay=0)
        found[f"every {every}, delay={every // 2}"] = _outer(every, fragments=1, delay=every // 2)
    return found


def _outer(every: int, **settings: Any) -> quality.Variant:
    return quality.Variant(config={"outer": {"every": every, **_TURNS, **settings}})


def measure_quality(out: Path, resumes: bool, is_quick: bool, tell: Tell) -> list[Row]:
    """A row for each variant, number of ranks and seed; finished runs are kept in a file."""
    num_steps, seeds = (40, quality.SEEDS[:1]) if is_quick else (_NUM_STEPS, quality.SEEDS)
    of_ranks = dict.fromkeys(quality.RANKS, variants())
    return quality.measure_runs(out / f"{QUALITY}.jsonl", resumes, of_ranks, seeds, quality.modules(num_steps), tell)


def measure_docstrings(out: Path, resumes: bool, is_quick: bool, tell: Tell) -> list[Row]:
    """As `measure_quality`, with two replicas on the shorter task."""
    num_steps, seeds = (40, quality.SEEDS[:1]) if is_quick else (_NUM_DOCSTRING_STEPS, quality.SEEDS)
    of_ranks = {2: docstring_variants()}
    kept = out / f"{DOCSTRINGS}.jsonl"
    return quality.measure_runs(kept, resumes, of_ranks, seeds, quality.docstrings(num_steps), tell)


def judge_quality(rows: Sequence[Row]) -> list[Figure]:
    """How far each variant's loss on held-out text is above a mean in every step, as a mean over seeds."""
    return _judged(rows, dict.fromkeys(quality.RANKS, variants()), bounded=("every 30",))


def judge_docstrings(rows: Sequence[Row]) -> list[Figure]:
    """As `judge_quality`."""
    return _judged(rows, {2: docstring_variants()}, bounded=("every 10",))


def _judged(rows: Sequence[Row], of_ranks: Mapping[int, Mapping[str, Any]], *, bounded: Sequence[str]) -> list[Figure]:
    above = quality.percent_above(rows, PLAIN)
    figures = []
    for ranks, names in of_ranks.items():
        for name in names:
            if name == PLAIN:
                continue
            is_judged = ranks == 2 and name in bounded
            target = Target(relation=Relation.AT_MOST, bound=_MOST_LOSS) if is_judged else None
            title = f"{ranks} replicas, {name}: loss above {PLAIN}"
            figures.append(Figure(name=title, measured=mean(above[name, ranks]), unit="%", target=target))
    return figures


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        _run_rank(*sys.argv[1:])
