"""The report of a step.

Its figures, one sentence of advice, and how it is shown, logged and written.
"""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from undertow.shown import Shown, cell, narrow_table, with_experts
from undertow.trace.bucket_report import BucketReport, bucket_table
from undertow.trace.outer_report import OuterReport
from undertow.trace.record import Event
from undertow.whole_file import write_whole

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport(Shown):
    """Where the time of a typical step went, on this rank, in milliseconds.

    `print` and notebooks show it as tables.

    The typical step is the recorded one whose times are nearest to the medians of all. All figures
    are of this one step, so that they add up; only `step_p50_ms` and `step_p95_ms` are of all
    recorded steps. A step is `forward_ms`, `backward_ms`, `exposed_ms` and `rest_ms`.

    Communication is the reduction of gradients and, with a sharded optimizer, the gathers of the
    parameters that it updated in the previous step. `communication_ms`, `exposed_ms` and `overlap`
    cover both; `gather_ms` and `gather_exposed_ms` cover the gathers alone.

    - `forward_ms` and `backward_ms` do not include waits, `rest_ms` is the optimizer and all else
    until the next forward.
    - `communication_ms` is the time that the link was in use, waits for a rank that sends later
      included; `exposed_ms` is the time that the compute lane waited for it, and `overlap` the
      share of the rest (None: no communication).
    - `late_rank_ms` is the part of the exposed time spent waiting for a rank that was slower than
      this one; the rest is spent waiting for the network.
    - `processors_ms` is the time that communication takes from processors: packing in backward, and
      copies and additions while the compute lane waits.
    - `coding_ms` is the time that threads of the host encoded gradients or decoded them, with a
      `wire`; it is part of `communication_ms`. On CUDA it is 0: a stream does that.
    - `limit_ms` is a lower bound: the earliest time at which the gradients of these buckets, with
      their ready times, could have been reduced. It does not include gathers.
    """

    num_steps: int
    # the first recorded step under this plan; None: all recorded steps ran under it
    plan_since: int | None = None
    num_skipped: int  # by nonfinite="skip", since the model was wrapped
    # that calls waited for a save in the background, since the model was wrapped
    save_waited_ms: float = 0.0
    why_fixed: str = ""  # why no other plan is tried; empty if some are
    not_tried: tuple[str, ...] = ()  # plans that could not be tried, and why
    # the settings of this name
    wire: str | tuple[str | None, ...] | None = None
    param_wire: str | None = None
    # share of this rank's nonzero gradient values that arrived as zero when they were last counted;
    # None: no format
    zeroed: float | None = None
    # the model is compiled as a whole, and its gradients become ready all at once
    is_one_graph: bool
    rank: int
    num_ranks: int
    step: int  # number of the typical step
    step_p50_ms: float
    step_p95_ms: float
    step_ms: float
    forward_ms: float
    backward_ms: float
    rest_ms: float
    communication_ms: float
    exposed_ms: float
    late_rank_ms: float
    processors_ms: float
    coding_ms: float
    overlap: float | None
    gather_ms: float
    gather_exposed_ms: float
    # from the start of the step until the last bucket of gradients was reduced
    synchronized_ms: float
    limit_ms: float
    bytes_ms: float
    slowest_rank: int | None
    busy_ms: tuple[float, ...]  # by rank
    buckets: tuple[BucketReport, ...]
    gathers: tuple[BucketReport, ...]  # in launch order; empty if the optimizer is not sharded
    events: tuple[Event, ...] = field(repr=False)  # of the typical step
    # by pattern and ranks; all else is of the dense parameters
    experts: Mapping[str, "StepReport"] = field(default_factory=dict)
    outer: OuterReport | None = None  # of SyncConfig(outer=...)

    @property
    def worst_bucket(self) -> BucketReport | None:
        """The bucket whose gradients the step waited for longest; None if it waited for none."""
        worst = max(self.buckets, key=lambda bucket: bucket.waited_ms, default=None)
        return worst if worst is not None and worst.waited_ms > 0 else None

    @property
    def sent_bytes(self) -> int:
        """Bytes passed to collectives of gradients in a step, in their format; 0 if a communication
        hook sent them.

        Each of n ranks sends 2 (n - 1) / n times as much in an all-reduce, and (n - 1) / n times as
        much in a reduce-scatter.
        """
        return sum(bucket.sent_bytes for bucket in self.buckets)

    @property
    def verdict(self) -> str:
        """Excellent, good or poor, by the exposed share of the step.

        Empty if the steps are too few or too small to judge.
        """
        verdict = next(
            word for word, most in _VERDICTS.items() if self.exposed_ms <= most * self.step_ms
        )
        is_large = verdict == "excellent" or self.exposed_ms >= _LEAST_MS
        return (
            verdict
            if is_large and self.num_steps >= _FEWEST_STEPS and self.overlap is not None
            else ""
        )

    @property
    def advice(self) -> str:
        """One sentence of advice.

        It names the first cause that explains most of the exposed time, and what to do about it.
        Only a step with the verdict poor has one: a cause is worth at least 5 % of it then. If
        another rank waits longer than this one, in its own poor step, for the slowest rank, that
        comes first.
        """
        if self.num_steps == 0 and self.outer is not None:
            return "Within a step this replica, a single rank, sends nothing."
        if self.num_steps == 0 and self.num_ranks == 1:
            return (
                "A single rank has nothing to communicate: no step is recorded. Start two or "
                "more: torchrun --nproc-per-node=2 script.py."
            )
        if self.num_steps == 0:
            return "No step is recorded yet: run a training step, and leave record on."
        if self.overlap is None:
            return "Nothing is sent, so nothing is waited for: all gradients stay where they are."
        if self.num_steps < _FEWEST_STEPS:
            return (
                f"Too few steps to judge: {self.num_steps} under this plan. "
                "Train at least ten more."
            )
        if held_up := _held_up(self):
            return held_up
        if self.verdict in ("excellent", "good"):
            share = self.exposed_ms / self.step_ms
            return (
                f"Well hidden: the step waits for communication in {share:z.1%} of its time. "
                "There is nothing to do."
            )
        if not self.verdict:
            return (
                f"Too small to judge: the step waits {self.exposed_ms:.2f} ms for communication, "
                f"and waits below {_LEAST_MS:.0f} ms depend on what else the processors do."
            )
        return next(filter(None, (cause(self) for cause in _CAUSES)))

    def scalars(self) -> dict[str, float]:
        """Returns the figures by name, for a logger such as TensorBoard; `undertow docs
        scalars` has recipes.

        Figures that do not exist are left out, such as the overlap without communication, or times
        of encoding without a format. Before the first step, and with one rank, none exists.
        """
        if self.num_steps == 0:
            return {}
        known = {name: getattr(self, name) for name in _SCALARS}
        known["coding_ms"] = self.coding_ms or None
        known |= {"sent_mb": self.sent_bytes / 1e6, "buckets": len(self.buckets)}
        return {
            f"undertow/{name}": float(value) for name, value in known.items() if value is not None
        }

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as plain values, ready for JSON."""
        return {"advice": self.advice, **asdict(self)}

    def save(self, path: str | Path) -> None:
        """Writes the report as JSON, for `undertow report DIR` as report-rank0.json and so on.

        Args:
            path: The file to write.
        """
        write_whole(path, f"{json.dumps(self.to_dict())}\n".encode(), where="report.save(path)")

    def __rich__(self) -> "RenderableType":
        return with_experts(_tables(self), self.experts)


# Of the report's fields, those that `scalars` has under their own names.
_SCALARS = (
    *("step_ms", "step_p50_ms", "step_p95_ms", "forward_ms", "backward_ms", "rest_ms"),
    "communication_ms",
    *("exposed_ms", "late_rank_ms", "processors_ms", "overlap", "gather_ms", "gather_exposed_ms"),
    *("synchronized_ms", "limit_ms", "slowest_rank", "num_steps", "num_skipped", "zeroed"),
)


# Advice.

_FEWEST_STEPS = 5  # to judge
# By the exposed share of the step, at most.
_VERDICTS = {"excellent": 0.02, "good": 0.10, "poor": math.inf}
# Exposed, to judge. A scheduler gives a processor to another thread for a millisecond or more. A
# shorter wait may come from that: no cause below would explain it, and no plan would shorten it.
_LEAST_MS = 1.0
# Of the exposed time: a cause that explains this share is the one to look at. More than a tenth of
# a poor step is exposed, so the cause is worth more than a twentieth of the step.
_MOST = 0.5
# Of the step: what another plan has to save, or all bytes have to take, before it is advised.
_LEAST_WORTH = 0.05
_COMPUTE_MORE = (
    "let a step compute more, with larger batches or gradient accumulation "
    "(undertow docs slow-networks)"
)
_LEAST_ZEROED = 0.01  # share of values, to be shown


def _held_up(report: StepReport) -> str:
    """The advice if another rank waits for the slowest one, in a poor step, longer than this one
    waits.

    Times of computing include waits for parameters, and no rank is to blame for those: the slowest
    one's are taken to be as long as this rank's.
    """
    busy_ms = report.busy_ms  # with replicas of several ranks, of this replica, a row of a mesh
    if not busy_ms or busy_ms[report.rank % len(busy_ms)] == min(busy_ms):
        return ""
    waited_ms = max(busy_ms) - min(busy_ms) - report.gather_exposed_ms
    if waited_ms <= max(report.exposed_ms, _VERDICTS["good"] * report.step_ms, _LEAST_MS):
        return ""
    return (
        f"Another rank waits {waited_ms:.1f} ms for rank {report.slowest_rank}, the slowest in "
        "this step: look at its input pipeline, at the length of its batches, and at what else "
        "runs on its machine."
    )


def _late_rank(report: StepReport) -> str:
    share = report.late_rank_ms / report.exposed_ms
    if share < _MOST:
        return ""
    return (
        f"{share:.0%} of the exposed time is waiting for a late rank, in this step rank "
        f"{report.slowest_rank}: look at its input pipeline, at the length of its batches, and at "
        "what else runs on its machine."
    )


def _fixed_plan(report: StepReport) -> str:
    worst = report.worst_bucket
    if not report.why_fixed or worst is None or len(worst.params) == 1:
        return ""
    share = worst.waited_ms / report.exposed_ms
    held = worst.num_bytes / sum(bucket.num_bytes for bucket in report.buckets)
    if min(share, held) < _MOST:
        return ""
    return (
        f"{share:.0%} of the exposed time is for bucket {worst.index}, which holds {held:.0%} of "
        "the gradients and is full late "
        f"in backward. No other plan is tried ({report.why_fixed}): remove that setting, or choose "
        "smaller buckets."
    )


def _processors(report: StepReport) -> str:
    if report.processors_ms <= report.exposed_ms * _MOST:
        return ""
    return (
        "Processors are the limit: packing, copying and adding gradients take "
        f"{report.processors_ms:.1f} ms of a step of "
        f"{report.step_ms:.1f} ms. Leave a core to each rank's communication, or use fewer "
        "compute threads or ranks on this machine."
    )


def _network(report: StepReport) -> str:
    if report.limit_ms == 0:
        return ""
    late_ms = report.synchronized_ms - report.limit_ms
    if late_ms > max(0.1 * report.limit_ms, _LEAST_WORTH * report.step_ms):
        return ""
    reduced_ms = report.communication_ms - report.gather_ms
    if reduced_ms - report.late_rank_ms > report.backward_ms:
        if not _has_costly_bytes(report):
            return (
                "Messages are the limit, not bytes: communication of gradients takes "
                f"{reduced_ms:.1f} ms, longer than the {report.backward_ms:.1f} ms of backward, "
                f"and the bytes of this step take at most {report.bytes_ms:.1f} ms of it "
                f"at 100 Mb/s or more: {_COMPUTE_MORE}."
            )
        return (
            f"The network is the limit: communication of gradients takes {reduced_ms:.1f} ms, "
            f"longer than the {report.backward_ms:.1f} ms of backward: simulate another "
            f"link with undertow simulate, or {_fewer_bytes(report)}."
        )
    last = report.buckets[-1]
    means = _fewer_bytes(report) if _has_costly_bytes(report) else _COMPUTE_MORE
    return (
        "Gradients leave as soon as these buckets are full, and the last of "
        f"{len(report.buckets)}, with {last.largest}, is full when backward ends: "
        f"explain() gives the reasons for these buckets. To hide more, {means}."
    )


def _has_costly_bytes(report: StepReport) -> bool:
    """Returns True if fewer bytes could make the step so much shorter that it is worth advice."""
    return report.bytes_ms >= max(_LEAST_MS, _LEAST_WORTH * report.step_ms)


def _fewer_bytes(report: StepReport) -> str:
    """Returns the advice to send fewer bytes, with the settings for it that are not in use."""
    settings = []
    if report.wire is None and report.sent_bytes > 0:  # it does not go with a communication hook
        settings.append('wire="int8" (or "auto")')
    if report.param_wire is None and report.gathers:
        settings.append('param_wire="int8"')
    means = "send fewer bytes in another way"
    if settings:
        means = f"set {' and '.join(settings)} to send fewer bytes"
    return f"{means} (undertow docs slow-networks)"


def _plan(report: StepReport) -> str:
    if report.limit_ms == 0:
        return (
            "The step waits for parameters: let more of the forward run before it reads the "
            "first of them."
        )
    return (
        f"Gradients are synchronized {report.synchronized_ms / report.limit_ms:.2f} times as late "
        "as these buckets allow: explain() gives the reasons for this plan."
    )


_CAUSES = (_late_rank, _fixed_plan, _processors, _network, _plan)


# The report as tables.


def _tables(report: StepReport) -> "Iterator[RenderableType]":
    if report.outer is not None:
        yield cell(report.outer.text)
    if report.num_steps == 0:
        yield cell(report.advice)
        return
    # Above the tables, not as their titles, which rich would wrap at the width of the table.
    yield f"Where a step goes: rank {report.rank}, step {report.step}, a typical one"
    yield _step_table(report)
    if report.plan_since is not None:
        yield (
            f"Only steps under this plan count, since step {report.plan_since}: the others ran "
            "under other plans."
        )
    yield cell(report.advice)
    worst = report.worst_bucket
    if report.buckets:
        yield (
            f"\nBuckets{' of gradients' if report.gathers else ''} in this step, ms since it began"
        )
        yield bucket_table(report.buckets, worst=worst, has_format=report.wire is not None)
    if report.gathers:
        yield "\nGathers of parameters in this step, ms since it began"
        yield bucket_table(report.gathers, worst=worst, has_format=report.param_wire is not None)
    if report.is_one_graph:
        yield (
            "The model is compiled as one graph because no bucket reaches 1 MiB: its gradients "
            "arrive all at once.\n"
            "Set bucket_cap_mb to 1 or more, or compile its layers one by one."
        )
    if report.zeroed is not None and report.zeroed >= _LEAST_ZEROED:
        yield (
            f"{report.zeroed:.0%} of the gradient values that are not zero arrive as zero, because "
            "they are small in their block (the last count)."
        )
    if report.not_tried:
        yield (
            "Plans that could not be tried, so the present plan stayed: "
            f"{'; '.join(report.not_tried)}"
        )
    yield from _counts(report)


def _counts(report: StepReport) -> "Iterator[RenderableType]":
    """Yields the counts since the model was wrapped that are not 0."""
    if report.save_waited_ms > 0:
        yield f"Waited for saves in the background: {report.save_waited_ms:.0f} ms"
    if report.num_skipped > 0:
        yield f"Optimizer steps skipped because of non-finite gradients: {report.num_skipped}"


def _step_table(report: StepReport) -> "Table":
    table = narrow_table("part")
    table.add_column("ms", justify="right", no_wrap=True)
    table.add_column("notes", overflow="fold")

    def add(name: str, time_ms: float, note: str = "") -> None:
        table.add_row(name, f"{time_ms:z.1f}", note)

    steps = (
        f"p50 {report.step_p50_ms:.1f}, p95 {report.step_p95_ms:.1f}; steps counted: "
        f"{report.num_steps}"
    )
    add("step", report.step_ms, steps)
    add("  forward", report.forward_ms)
    add("  backward", report.backward_ms)
    worst = report.worst_bucket
    waits = "" if worst is None else f"waits, the longest for bucket {worst.index}"
    add("  exposed", report.exposed_ms, waits)
    if report.overlap is not None:
        is_late = report.late_rank_ms >= 0.05  # as shown
        late = f"in this step rank {report.slowest_rank}" if is_late else ""
        add("    a late rank", report.late_rank_ms, late)
    add("  rest", report.rest_ms, "optimizer, and all else until the next forward")
    if report.overlap is None:
        return table
    verdict = ""
    if report.verdict:
        verdict = (
            f"; {report.verdict}: {report.exposed_ms / report.step_ms:z.1%} of the step is exposed"
        )
    add("communication", report.communication_ms, f"{report.overlap:.0%} hidden{verdict}")
    if report.gathers:
        megabytes = sum(gather.sent_bytes for gather in report.gathers) / 1e6
        add(
            "  of it gathers",
            report.gather_ms,
            f"{megabytes:.1f} MB; {report.gather_exposed_ms:.1f} ms exposed",
        )
    if report.coding_ms:
        whole = sum(bucket.num_bytes for bucket in report.buckets)
        sizes = f"{report.sent_bytes / 1e6:.2f} of {whole / 1e6:.2f} MB of gradients sent"
        add("  of it encoding", report.coding_ms, f"and decoding; {sizes}")
    limit = f"limit {report.limit_ms:.1f}, the earliest with these buckets"
    add("synchronized after", report.synchronized_ms, limit)
    return table
