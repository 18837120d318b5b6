"""What `undertow plan` does; imports torch only for the demo's model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from undertow.cli.network import NetworkOptions
from undertow.cli.what_if import Question
from undertow.errors import ConfigError
from undertow.plan import ParamSpec, Plan
from undertow.plan.table import plan_from_source, source_from_file
from undertow.profile import Profile, profile_from_file
from undertow.profile.profile import FORMAT_FIELD
from undertow.report.comparison import print_outcomes
from undertow.report.plan import print_plan
from undertow.report.shown import print_line
from undertow.schedule import Schedule, Strategy, lower_data_parallel, strategy_named, verify
from undertow.simulate import Conditions

__all__ = ["PlanRequest", "show_plan"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """The options of the command. Raises ConfigError for what cannot go together."""

    file: Path | None
    strategy: str | None  # that of a profile, else ddp
    num_ranks: int | None
    has_overlap: bool
    network: NetworkOptions

    def __post_init__(self) -> None:
        if self.num_ranks is not None and self.num_ranks < 1:
            raise ConfigError(
                f"a plan is for one rank or more, got --ranks {self.num_ranks}.",
                where="undertow plan",
                remedy="Give one or more, or leave it out.",
            )


def show_plan(request: PlanRequest) -> None:
    """Prints the buckets and the schedule that are asked for, and of a profile what a step takes."""
    if request.file is not None and _is_profile(request.file):
        profile = profile_from_file(request.file)
        named = profile.strategy if request.strategy is None else request.strategy
        _show_plan_of_profile(request, profile, strategy_named(named))
        return
    strategy = strategy_named(request.strategy)
    if request.network.link is not None:
        raise ConfigError(
            "--link says what a step takes, which needs a profile.",
            where=f"{request.file or 'the model of undertow demo'} has no times",
            remedy="Give a profile that save_profile() has written, or leave --link, --per-node and --node-link out.",
        )
    source = _demo_parameters() if request.file is None else source_from_file(request.file)
    plan = plan_from_source(
        source,
        num_ranks=request.num_ranks,
        splits=strategy.gather is not None,
    )
    print_plan(plan, strategy, _schedule(plan, strategy, request))


def _is_profile(path: Path) -> bool:
    """Also of a broken file: who reads profiles then says what is wrong."""
    try:
        return f'"{FORMAT_FIELD}"' in path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return False


def _show_plan_of_profile(request: PlanRequest, profile: Profile, strategy: Strategy) -> None:
    num_ranks = profile.num_ranks if request.num_ranks is None else request.num_ranks
    question = Question(
        profile=profile,
        strategy=strategy,
        options=request.network,
        conditions=Conditions(overlap=request.has_overlap),
    )
    what_if = question.at(num_ranks)
    plan = what_if.optimal_plan
    per_node = request.network.per_node
    num_nodes = None if per_node is None else num_ranks // min(per_node, num_ranks)
    print_plan(plan, strategy, _schedule(plan, strategy, request), num_nodes=num_nodes)
    console = Console()
    console.print()
    print_outcomes([what_if.outcome("as above", plan)], console)
    print_line(console, f"Network: {what_if.network.source}")


def _schedule(plan: Plan, strategy: Strategy, request: PlanRequest) -> Schedule:
    num_buckets = len(plan.buckets)
    schedule = lower_data_parallel(num_buckets, strategy, overlap=request.has_overlap)
    return verify(schedule, strategy, num_buckets=num_buckets)


def _demo_parameters() -> Sequence[ParamSpec]:
    from undertow.demo.model import demo_parameters

    return demo_parameters()
