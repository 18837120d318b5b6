"""How near the overlapped synchronization comes to the limit on an emulated 1 Gb/s link.

Every step runs the same timed layers four times in turn, in the same processes and over the same link: the bare model,
a blocking loop over the parameters, torch DDP, and Undertow. A step is zero_grad, forward, backward, and whatever is needed
until every gradient is the mean over ranks; there is no optimizer, which would be the same for all.

    limit = max over buckets of (ready + wire time of this bucket and all that follow)

`ready` is when the bucket's last gradient was there, on the rank that had it last, as the run itself recorded it; the
wire time is the link's formula. `bare_limit_ms` is the same with the times at which the bare model had those gradients,
so that what our own hooks and copies cost counts as well.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.figure import Figure, Relation, Row, Target, Tell, row_where
from benchmarks.matrix.profile import even_layers
from benchmarks.matrix.workloads.replay import Replay
from benchmarks.ranks import run_ranks
from undertow import DistributedDataParallel, SyncConfig
from undertow.cost import Link, collective_seconds, link_from_text
from undertow.emulation.link import BACKEND, EmulatedLink, emulated_backend
from undertow.plan import Plan
from undertow.trace import StepRecord, limit_us

LINK = "1gbit"
NUM_RANKS = (2, 4)
NUM_WARMUP = 3  # buckets are ordered anew after the first step
_BARE, _NAIVE, _TORCH, _OURS = "bare model", "a reduction per parameter", "torch DDP, default", "Undertow"


@dataclass(slots=True)
class _Times:
    """One system's steps on one rank; seconds of the machine's monotonic clock, which all ranks share."""

    started: list[float] = field(default_factory=list)
    stopped: list[float] = field(default_factory=list)
    num_collectives: list[int] = field(default_factory=list)

    def step_ms(self) -> float:
        """Median of the steps after the warm-up."""
        return median((stop - start) * 1e3 for start, stop in self._measured())

    def _measured(self) -> list[tuple[float, float]]:
        return list(zip(self.started, self.stopped, strict=True))[NUM_WARMUP:]


class _Arrivals:
    """When each gradient of the bare model was there, in seconds, step by step."""

    def __init__(self, model: nn.Module) -> None:
        self.steps: list[dict[int, float]] = []
        for index, param in enumerate(model.parameters()):
            param.register_post_accumulate_grad_hook(partial(self._arrive, index))

    def begin(self) -> None:
        self.steps.append({})

    def _arrive(self, index: int, _param: Tensor) -> None:
        self.steps[-1][index] = time.perf_counter()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Measured:
    """What one rank brings back."""

    times: dict[str, _Times]
    arrivals: list[dict[int, float]]
    records: dict[int, StepRecord]
    plan: Plan
    first_overlap: float | None


def measure_rank(rank: int, num_ranks: int, num_steps: int) -> list[Row]:
    """The rows of one run; every rank makes them, from what all ranks have measured."""
    link = link_from_text(LINK)
    with emulated_backend(link) as emulated:
        group = dist.new_group(backend=BACKEND)
        measured = _measure(rank, group, emulated, num_steps)
        gathered: list[Any] = [None] * num_ranks
        dist.all_gather_object(gathered, measured)
        dist.destroy_process_group(group)
    return _rows(gathered, link)


def _measure(rank: int, group: dist.ProcessGroup, emulated: EmulatedLink, num_steps: int) -> _Measured:
    bare, naive, by_torch, ours = (_new_model() for _ in range(4))
    arrivals = _Arrivals(bare)
    # One plan for all steps, of which the limit is computed.
    wrapped = DistributedDataParallel(ours, process_group=group, config=SyncConfig(auto_tune=False))
    torchs = nn.parallel.DistributedDataParallel(by_torch, process_group=group)
    steps: dict[str, Callable[[Tensor], None]] = {
        _BARE: lambda x: _backward(bare, x),
        _NAIVE: lambda x: _backward_and_reduce_each(naive, x, group),
        _TORCH: lambda x: _backward(torchs, x),
        _OURS: lambda x: _backward(wrapped, x),
    }
    times = {name: _Times() for name in steps}
    first_overlap = None
    for step in range(num_steps):
        arrivals.begin()
        for name, run_step in steps.items():
            _time_step(run_step, times[name], emulated, torch.full((1,), rank + 1.0))
        if step == 0:
            first_overlap = wrapped.report().overlap
            _require_equal(naive, ours, is_exact=group.size() == 2)
    wrapped.sync._forward_begins()  # completes the last step's record
    engine, plan = wrapped.sync._engine, wrapped.plan
    generation = engine.current_plan.compiled.generation
    records = {record.step: record for record in engine.recorder.records(generation=generation)}
    wrapped.close()
    return _Measured(times=times, arrivals=arrivals.steps, records=records, plan=plan, first_overlap=first_overlap)


def _new_model() -> Replay:
    torch.manual_seed(0)
    return Replay(even_layers())


def _backward(model: nn.Module, x: Tensor) -> None:
    model.zero_grad()
    model(x).backward()


def _backward_and_reduce_each(model: nn.Module, x: Tensor, group: dist.ProcessGroup) -> None:
    _backward(model, x)
    for param in model.parameters():
        assert param.grad is not None  # every layer has run
        dist.all_reduce(param.grad, group=group)
        param.grad /= group.size()


def _time_step(run_step: Callable[[Tensor], None], times: _Times, emulated: EmulatedLink, x: Tensor) -> None:
    dist.barrier()
    emulated.take_log()
    times.started.append(time.perf_counter())
    run_step(x)
    times.stopped.append(time.perf_counter())
    times.num_collectives.append(len(emulated.take_log()))


def _require_equal(one: nn.Module, other: nn.Module, *, is_exact: bool) -> None:
    """A fast wrong answer is no figure. With three or more ranks the order of the sum changes the last bits."""
    for mine, theirs in zip(one.parameters(), other.parameters(), strict=True):
        assert mine.grad is not None
        assert theirs.grad is not None
        if not (torch.equal(mine.grad, theirs.grad) if is_exact else torch.allclose(mine.grad, theirs.grad)):
            raise RuntimeError("Undertow's gradients are not those of the loop over the parameters.")


def _rows(ranks: Sequence[_Measured], link: Link) -> list[Row]:
    mine = ranks[0]
    wires_s = [_wire_s(link, bucket.wire_bytes, len(ranks)) for bucket in mine.plan.buckets]
    rows = [
        {
            "ranks": len(ranks),
            "system": name,
            "step_ms": round(times.step_ms(), 1),
            "collectives": max(times.num_collectives[NUM_WARMUP:]),
            "limit_ms": None,
            "ratio_to_limit": None,
            "bare_limit_ms": None,
            "ratio_to_bare_limit": None,
            "first_step_overlap": None,
        }
        for name, times in mine.times.items()
    ]
    ours = row_where(rows, system=_OURS)
    steps = [step for step in range(NUM_WARMUP, len(mine.arrivals)) if all(step in rank.records for rank in ranks)]
    limit_ms = median(_limit_ms(ranks, wires_s, step) for step in steps)
    bare_limit_ms = median(_bare_limit_ms(ranks, wires_s, step) for step in steps)
    ours |= {
        "limit_ms": round(limit_ms, 1),
        "ratio_to_limit": round(mine.times[_OURS].step_ms() / limit_ms, 4),
        "bare_limit_ms": round(bare_limit_ms, 1),
        "ratio_to_bare_limit": round(mine.times[_OURS].step_ms() / bare_limit_ms, 4),
        "first_step_overlap": mine.first_overlap,
        "num_buckets": len(mine.plan.buckets),
        "num_params": len(mine.plan.params),
        "wire_ms": round(sum(wires_s) * 1e3, 1),
        "steps_ms": [
            round((stop - start) * 1e3, 1)
            for start, stop in zip(mine.times[_OURS].started, mine.times[_OURS].stopped, strict=True)
        ],
        "buckets": [_bucket_row(mine, wires_s, steps, index) for index in range(len(wires_s))],
    }
    return rows


def _limit_ms(ranks: Sequence[_Measured], wires_s: Sequence[float], step: int) -> float:
    """The limit of one of our steps, since rank 0 began it."""
    began_s = ranks[0].times[_OURS].started[step]
    ready_s = [
        max(rank.times[_OURS].started[step] + rank.records[step].buckets[index].ready_us / 1e6 for rank in ranks) - began_s
        for index in range(len(wires_s))
    ]
    return limit_us(ready_s, wires_s) * 1e3


def _bare_limit_ms(ranks: Sequence[_Measured], wires_s: Sequence[float], step: int) -> float:
    """The limit of our buckets over the gradients as the bare model had them, since rank 0 began that step."""
    began_s = ranks[0].times[_BARE].started[step]
    ready_s = [
        max(rank.arrivals[step][param] for rank in ranks for param in bucket.params) - began_s for bucket in ranks[0].plan.buckets
    ]
    return limit_us(ready_s, wires_s) * 1e3


def _bucket_row(mine: _Measured, wires_s: Sequence[float], steps: Sequence[int], index: int) -> Row:
    rows = [mine.records[step].buckets[index] for step in steps]
    return {
        "bucket": index,
        "wire_bytes": mine.plan.buckets[index].wire_bytes,
        "ready_ms": round(median(row.ready_us for row in rows) / 1e3, 2),
        "launched_ms": round(median(row.launched_us for row in rows) / 1e3, 2),
        "done_ms": round(median(row.done_us for row in rows) / 1e3, 2),
        "waited_ms": round(median(row.waited[1] - row.waited[0] for row in rows) / 1e3, 2),
        "formula_ms": round(wires_s[index] * 1e3, 2),
    }


def _wire_s(link: Link, num_bytes: int, num_ranks: int) -> float:
    return collective_seconds(link, "all_reduce", num_bytes=num_bytes, num_ranks=num_ranks)


def measure(is_quick: bool, tell: Tell) -> list[Row]:
    """A row per number of ranks and system."""
    num_steps = NUM_WARMUP + (5 if is_quick else 20)
    rows: list[Row] = []
    for num_ranks in NUM_RANKS:
        tell(f"{num_ranks} ranks, {num_steps} steps of {len((_BARE, _NAIVE, _TORCH, _OURS))} systems")
        rows += run_ranks(measure_rank, num_ranks, num_ranks, num_steps)
    return rows


def judge(rows: Sequence[Row]) -> list[Figure]:
    return [figure for num_ranks in NUM_RANKS for figure in _judge_run([row for row in rows if row["ranks"] == num_ranks])]


def _judge_run(rows: Sequence[Row]) -> list[Figure]:
    ours, torchs, naive = (row_where(rows, system=name) for name in (_OURS, _TORCH, _NAIVE))
    run = f"{ours['ranks']} ranks"
    return [
        Figure(
            name=f"{run}: step over its limit of {ours['limit_ms']:.0f} ms",
            measured=ours["ratio_to_limit"],
            unit="x",
            num_decimals=3,
            target=Target(relation=Relation.AT_MOST, bound=1.05),
        ),
        Figure(
            name=f"{run}: step over the bare model's limit of {ours['bare_limit_ms']:.0f} ms",
            measured=ours["ratio_to_bare_limit"],
            unit="x",
            num_decimals=3,
        ),
        Figure(
            name=f"{run}: step over torch DDP's of {torchs['step_ms']:.0f} ms",
            measured=ours["step_ms"] / torchs["step_ms"],
            unit="x",
        ),
        Figure(
            name=f"{run}: step over the loop's of {naive['step_ms']:.0f} ms",
            measured=ours["step_ms"] / naive["step_ms"],
            unit="x",
        ),
        Figure(
            name=f"{run}: collectives per step (the loop: {naive['collectives']})",
            measured=ours["collectives"],
            unit="",
            num_decimals=0,
            target=Target(relation=Relation.EQUAL, bound=ours["num_buckets"]),
        ),
        Figure(
            name=f"{run}: communication hidden in the very first step",
            measured=100 * (ours["first_step_overlap"] or 0.0),
            unit="%",
            num_decimals=0,
            target=Target(relation=Relation.ABOVE, bound=0),
        ),
    ]
