"""The demo in the terminal: progress while it runs, then the comparison."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.table import Table

from undertow.cost import collective_seconds
from undertow.demo.results import ModelBuilt, StepDone, Verdict, WayDone
from undertow.demo.settings import NUM_WARM_UP_STEPS, OURS, REFERENCE, DemoSettings, Way
from undertow.report.shown import print_line

__all__ = ["LiveProgress", "comparison_table", "print_introduction"]

_BARELY_BUSY = 0.5  # cores that a desktop needs for itself


def print_introduction(console: Console, settings: DemoSettings, *, num_cores: int, load: float) -> None:
    """Prints the settings and anything that will blur the figures; `load` is the number of programs already computing."""
    link = "the bare loopback" if settings.emulated_link.is_free else f"an emulated {settings.link} link"
    ranks = f"{settings.num_ranks} rank{'s' if settings.num_ranks > 1 else ''}"
    print_line(console, f"Training one model {len(settings.ways)} ways: {ranks} on this machine, gradients over {link}.")
    if settings.num_ranks == 1:
        console.print("[yellow]One rank has nobody to talk to: there will be no communication to hide.[/]")
    if settings.num_ranks > num_cores:
        console.print(f"[yellow]{ranks} share {num_cores} cores: computation will take longer than on machines of their own.[/]")
    elif settings.num_ranks + load > num_cores + _BARELY_BUSY:
        console.print("[yellow]Other programs are computing on this machine: times will vary.[/]")


class LiveProgress:
    """A bar per variant; it moves on a terminal, and is printed once at the end elsewhere."""

    def __init__(self, console: Console, settings: DemoSettings) -> None:
        self._console = console
        self._settings = settings
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=14),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            console=console,
        )
        width = max(len(way.label) for way in settings.ways)
        total = NUM_WARM_UP_STEPS + settings.num_steps
        self._tasks: dict[Way, TaskID] = {
            way: self._progress.add_task(way.label.ljust(width), total=total, figures="") for way in settings.ways
        }

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._progress.stop()

    def model_built(self, message: ModelBuilt) -> None:
        link, num_ranks = self._settings.emulated_link, self._settings.num_ranks
        wire_s = collective_seconds(link, "all_reduce", num_bytes=message.gradient_bytes, num_ranks=num_ranks)
        on_the_wire = "" if wire_s == 0 else f", {wire_s * 1e3:.0f} ms of wire time per step"
        self._console.print(
            f"GPT with {message.num_parameters / 1e6:.1f} M parameters, {message.gradient_bytes / 1e6:.1f} MB of "
            f"gradients{on_the_wire}.\n"
        )

    def step_done(self, message: StepDone) -> None:
        figures = f"{message.step_ms:5.0f} ms/step  loss {message.loss:.4f}"
        self._progress.update(self._tasks[message.way], completed=message.step + 1, figures=figures)


def comparison_table(results: Mapping[Way, Sequence[WayDone]], verdict: Verdict, *, num_steps: int) -> Table:
    """Returns a table with one row per variant, as measured by rank 0; at most 80 columns wide."""
    table = Table(
        title=f"Rank 0, medians of {num_steps} steps",
        title_justify="left",
        box=SIMPLE_HEAD,
        show_edge=False,
        padding=(0, 1, 0, 0),
    )
    table.add_column("", no_wrap=True)
    for name in ("ms per\nstep", "vs.\nfirst", "exposed\nms", "over-\nlap", "wire\nops", "final\nloss", "same\ngrads"):
        table.add_column(name, justify="right", no_wrap=True)
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
            "yes" if verdict.agrees(way) else "[bold red]NO[/]",
            style="bold" if way in OURS else None,
        )
    return table
