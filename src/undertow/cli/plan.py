"""What `undertow plan` does; imports torch only for the demo's model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from undertow.errors import ConfigError
from undertow.plan import ParamSpec, Plan
from undertow.plan.table import plan_from_source, source_from_file
from undertow.report.plan import print_plan
from undertow.schedule import Schedule, Strategy, lower_accumulation, lower_data_parallel, strategy_named, verify

__all__ = ["PlanRequest", "show_plan"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """The options of the command. Raises ConfigError for what cannot go together."""

    file: Path | None
    strategy: str
    num_ranks: int | None
    bucket_cap_mb: float | None
    has_overlap: bool
    is_accumulation: bool

    def __post_init__(self) -> None:
        if self.num_ranks is not None and self.num_ranks < 1:
            raise ConfigError(
                f"a plan is for one rank or more, got --ranks {self.num_ranks}.",
                where="undertow plan",
                remedy="Give one or more, or leave it out.",
            )
        if self.is_accumulation and not self.has_overlap:
            raise ConfigError(
                "--accumulation and --no-overlap cannot go together.",
                where="undertow plan",
                remedy="Leave one of them out: a backward that only accumulates has one schedule.",
            )


def show_plan(request: PlanRequest) -> None:
    """Prints the buckets and the schedule that are asked for."""
    strategy = strategy_named(request.strategy)
    source = _demo_parameters() if request.file is None else source_from_file(request.file)
    plan = plan_from_source(
        source,
        num_ranks=request.num_ranks,
        bucket_cap_mb=request.bucket_cap_mb,
        splits=strategy.gather is not None,
    )
    print_plan(plan, strategy, _schedule(plan, strategy, request))


def _schedule(plan: Plan, strategy: Strategy, request: PlanRequest) -> Schedule:
    num_buckets = len(plan.buckets)
    if request.is_accumulation:
        schedule = lower_accumulation(num_buckets, strategy)
    else:
        schedule = lower_data_parallel(num_buckets, strategy, overlap=request.has_overlap)
    return verify(schedule, strategy, num_buckets=num_buckets)


def _demo_parameters() -> Sequence[ParamSpec]:
    from undertow.demo.model import demo_parameters

    return demo_parameters()
