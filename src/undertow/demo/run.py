"""Runs the demo from start to end, in the process that starts the ranks."""

import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.text import Text

from undertow.cost import collective_seconds
from undertow.demo.launch import RanksLost, local_ranks
from undertow.demo.results import ModelBuilt, StepDone, WayDone, comparison_table, complaints_of
from undertow.demo.settings import NUM_WARM_UP_STEPS, DemoSettings, Way, load_corpus
from undertow.report.timeline import make_directory, require_matplotlib, save_timeline
from undertow.shown import print_line

_INTERRUPTED = 130  # exit code that shells expect of a process ended by Ctrl-C
_SILENCE_S = 180.0  # seconds for computation and start; time on the network is added
_ASSUMED_BYTES = 100_000_000  # traffic of one step, a generous estimate
_BARELY_BUSY = 0.5  # cores that a desktop needs for itself

_Results = Mapping[Way, Sequence[WayDone]]  # of each rank


def run_demo(settings: DemoSettings, console: Console | None = None) -> int:
    """Runs and prints the comparison. Returns exit code 0, 1 if a rank failed or variants disagree, or 130 after Ctrl-C.

    Raises ConfigError if the text cannot be read or the output directory cannot be written.
    """
    console = Console() if console is None else console
    corpus = load_corpus(settings.text)
    require_matplotlib()
    make_directory(settings.out, where="undertow demo")
    _print_introduction(console, settings, num_cores=os.cpu_count() or 1, load=os.getloadavg()[0])
    try:
        results = _train(settings, corpus, console)
    except RanksLost as error:
        console.print(Text.assemble(("The demo has ended early:", "bold red"), " ", str(error)), soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        console.print("Interrupted; all ranks have ended.")
        return _INTERRUPTED
    console.print()
    console.print(comparison_table(results, num_steps=settings.num_steps))
    console.print()
    _save(settings, results, console)
    complaints = complaints_of(results, num_ranks=settings.num_ranks)
    for complaint in complaints:
        print_line(console, complaint, "bold red")
    if not complaints:
        alike = "gradients, parameters and loss" if settings.is_exact else "gradients and loss"
        console.print(f"All {len(settings.ways)} ways found the same {alike}.", highlight=False)
    return 1 if complaints else 0


def _print_introduction(console: Console, settings: DemoSettings, *, num_cores: int, load: float) -> None:
    """Prints the settings and anything that will blur the figures; `load` is the number of programs already computing."""
    link = "the bare loopback" if settings.emulated_link.is_free else f"an emulated {settings.link} link"
    ranks = f"{settings.num_ranks} rank{'s' if settings.num_ranks > 1 else ''}"
    print_line(console, f"Training one model {len(settings.ways)} ways: {ranks} on this machine, gradients over {link}.")
    if settings.num_ranks == 1:
        console.print("[yellow]One rank has nobody to talk to: there will be no communication to hide.[/]")
    if settings.num_ranks > num_cores:
        console.print(f"[yellow]{ranks} share {num_cores} cores: computation will take longer than on separate machines.[/]")
    elif settings.num_ranks + load > num_cores + _BARELY_BUSY:
        console.print("[yellow]Other programs are computing on this machine: times will vary.[/]")


def _train(settings: DemoSettings, corpus: bytes, console: Console) -> _Results:
    """Runs the ranks under a bar per variant, which moves on a terminal and is printed once at the end elsewhere."""
    name, figures = TextColumn("{task.description}"), TextColumn("{task.fields[figures]}")
    progress = Progress(name, BarColumn(bar_width=14), MofNCompleteColumn(), figures, console=console)
    width, total = max(len(way.label) for way in settings.ways), NUM_WARM_UP_STEPS + settings.num_steps
    tasks = {way: progress.add_task(way.label.ljust(width), total=total, figures="") for way in settings.ways}
    results: dict[Way, dict[int, WayDone]] = {way: {} for way in settings.ways}
    with tempfile.TemporaryDirectory(prefix="undertow-demo-") as directory:
        text = Path(directory) / "text"
        text.write_bytes(corpus)
        arguments, silence_s = (settings, text, Path(directory) / "meeting-point"), _SILENCE_S + _wire_s(settings, _ASSUMED_BYTES)
        with progress, local_ranks(_run_rank, arguments, num_ranks=settings.num_ranks, silence_s=silence_s) as messages:
            for message in messages:
                match message:
                    case ModelBuilt():
                        console.print(_model_text(settings, message))
                    case StepDone(way=way, step=step, step_ms=step_ms, loss=loss):
                        progress.update(tasks[way], completed=step + 1, figures=f"{step_ms:5.0f} ms/step  loss {loss:.4f}")
                    case WayDone(way=way, rank=rank):
                        results[way][rank] = message
    return {way: [of_ranks[rank] for rank in sorted(of_ranks)] for way, of_ranks in results.items()}


def _run_rank(*arguments: Any) -> None:
    # Imported in the ranks only: the parent process does not need torch.
    from undertow.demo.rank import run_rank

    run_rank(*arguments)


def _wire_s(settings: DemoSettings, num_bytes: int) -> float:
    """Returns the seconds that gradients of so many bytes take on the network."""
    return collective_seconds(settings.emulated_link, "all_reduce", num_bytes=num_bytes, num_ranks=settings.num_ranks)


def _model_text(settings: DemoSettings, built: ModelBuilt) -> str:
    wire_s = _wire_s(settings, built.gradient_bytes)
    on_the_wire = "" if wire_s == 0 else f", {wire_s * 1e3:.0f} ms of wire time per step"
    gradients = f"{built.gradient_bytes / 1e6:.1f} MB of gradients{on_the_wire}"
    return f"GPT with {built.num_parameters / 1e6:.1f} M parameters, {gradients}.\n"


def _save(settings: DemoSettings, results: _Results, console: Console) -> None:
    """Saves pictures of a typical step, and the profiles of Undertow's variants for `undertow plan` and `undertow simulate`."""
    traces = {way.label: of_ranks[0].typical for way, of_ranks in results.items()}
    for way in settings.ways:
        save_timeline({way.label: traces[way.label]}, settings.out / f"demo-{way}.png")
    picture = settings.out / "demo.png"
    save_timeline(traces, picture)
    print_line(console, f"A typical step as a picture: {picture}, each way alone: {settings.out / 'demo-*.png'}")
    for way, of_ranks in results.items():
        profile, path = of_ranks[0].profile, settings.out / f"profile-{way}.json"
        if profile is None:
            continue
        profile.save(path)
        if way is Way.UNDERTOW:
            ask = f"undertow simulate {path} --ranks 64 --per-node 8 --link 100gbit"
            print_line(console, f"What other networks would make of it: {ask}")
