"""Messages from the ranks to the process that started them, and their comparison."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from rich.box import SIMPLE_HEAD
from rich.table import Column, Table

from undertow.demo.settings import OURS, REFERENCE, Way
from undertow.profile import Profile
from undertow.trace import Trace, overlap_of


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelBuilt:
    """Rank 0 has built the model and all ranks have met."""

    num_parameters: int  # elements
    gradient_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDone:
    """One step of rank 0."""

    way: Way
    step: int  # from 0, the warm-up included
    step_ms: float
    loss: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WayDone:
    """One variant on one rank; figures are medians over the measured steps."""

    way: Way
    rank: int
    step_ms: float
    exposed_ms: float
    overlap: float | None  # hidden share of the communication; None: there was none
    typical: Trace  # of the step that is closest to the medians
    loss: float  # of the last step
    gradients_agree: bool  # with the reference's
    parameters_agree: bool  # after the last step; True if another order of addition leads to different parameters
    profile: Profile | None = None  # the library's profile; None for other variants, and after too few steps


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFailed:
    """A rank has raised an exception or died."""

    rank: int
    failed_s: float  # time.perf_counter, which all processes of a machine share: the first failure is the cause
    traceback: str  # or how it ended
    remedy: str = ""


Message = ModelBuilt | StepDone | WayDone | RankFailed


def way_done(
    way: Way,
    traces: Sequence[Trace],
    *,
    loss: float,
    gradients_agree: bool,
    parameters_agree: bool = True,
    profile: Profile | None = None,
) -> WayDone:
    """Summarizes the measured steps of one variant."""
    steps = [(trace, trace.duration_us, overlap_of(trace)) for trace in traces]
    length, exposed = median(it for _, it, _ in steps), median(overlap.exposed_us for *_, overlap in steps)
    hidden = [overlap.fraction for *_, overlap in steps if overlap.fraction is not None]
    typical, *_ = min(steps, key=lambda step: abs(step[1] - length) + abs(step[2].exposed_us - exposed))
    return WayDone(
        way=way,
        rank=typical.rank,
        step_ms=length / 1e3,
        exposed_ms=exposed / 1e3,
        overlap=median(hidden) if hidden else None,
        typical=typical,
        loss=loss,
        gradients_agree=gradients_agree,
        parameters_agree=parameters_agree,
        profile=profile,
    )


# Tolerance of the loss with three or more ranks, when variants add in different orders: in AdamW's first steps a differing last
# bit of a gradient that is nearly zero changes the update by a whole learning rate.
_LOSS_TOLERANCE = 1e-2


def complaints_of(results: Mapping[Way, Sequence[WayDone]], *, num_ranks: int) -> list[str]:
    """Compares every variant with the reference, rank by rank; returns a line for each difference."""
    tolerance = 0.0 if num_ranks <= 2 else _LOSS_TOLERANCE
    right = [rank.loss for rank in results[REFERENCE]]
    wrong = {
        "gradients are": [way for way, mine in results.items() if not all(rank.gradients_agree for rank in mine)],
        "final loss is": [way for way, mine in results.items() if not _are_close(mine, right, tolerance)],
        "parameters are": [way for way, mine in results.items() if not all(rank.parameters_agree for rank in mine)],
    }
    return [f"{way.label}: its {what} not the reference's." for what, ways in wrong.items() for way in ways]


def _are_close(mine: Sequence[WayDone], right: Sequence[float], tolerance: float) -> bool:
    # A NaN loss is close to nothing.
    return all(abs(rank.loss - loss) <= tolerance * abs(loss) for rank, loss in zip(mine, right, strict=True))


def comparison_table(results: Mapping[Way, Sequence[WayDone]], *, num_steps: int) -> Table:
    """Returns a table with one row per variant, as measured by rank 0; at most 80 columns wide."""
    names = ("ms per\nstep", "vs.\nfirst", "exposed\nms", "over-\nlap", "wire\nops", "final\nloss", "same\ngrads")
    table = Table(
        Column(no_wrap=True),
        *(Column(name, justify="right", no_wrap=True) for name in names),
        title=f"Rank 0, medians of {num_steps} steps",
        title_justify="left",
        box=SIMPLE_HEAD,
        show_edge=False,
        padding=(0, 1, 0, 0),
    )
    first_ms = results[REFERENCE][0].step_ms
    for way, of_ranks in results.items():
        result = of_ranks[0]
        table.add_row(
            way.label,
            f"{result.step_ms:.1f}",
            f"{first_ms / result.step_ms:.2f}x",
            "-" if result.overlap is None else f"{result.exposed_ms:.1f}",
            "-" if result.overlap is None else f"{result.overlap:.0%}",
            str(len(result.typical.communication)),
            f"{result.loss:.4f}",
            "yes" if all(rank.gradients_agree for rank in of_ranks) else "[bold red]NO[/]",
            style="bold" if way in OURS else None,
        )
    return table
