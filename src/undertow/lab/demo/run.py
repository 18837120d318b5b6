"""Runs the demo from start to end, in the process that starts the ranks."""

import os
import pickle
import signal
import tempfile
from collections.abc import Sequence
from multiprocessing import resource_tracker
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from undertow.errors import UndertowError, make_directory
from undertow.lab.demo.settings import (
    INT8,
    OURS,
    OUTER,
    RESULTS,
    TORCH_DDP,
    WAYS,
    DemoSettings,
    WayDone,
)
from undertow.lab.report.timeline import require_matplotlib, save_timeline
from undertow.shown import counted, print_line

# How the results of a variant compare if they are not equal by intention.
_COMPARISON = {INT8: "close", OUTER: "own"}


def run_demo(settings: DemoSettings, console: Console | None = None) -> int:
    """Runs and prints the comparison. Returns exit code 0, 1 if a rank failed or variants disagree,
    or 130 after Ctrl-C.

    Raises ConfigError if the output directory cannot be written.
    """
    console = Console() if console is None else console
    require_matplotlib()
    make_directory(settings.out, where="undertow demo")
    _print_introduction(console, settings)
    try:
        results = train(settings)
    except UndertowError as error:
        console.print(
            Text.assemble(("The demo has ended early:", "bold red"), " ", str(error)),
            soft_wrap=True,
        )
        return 1
    except KeyboardInterrupt:
        console.print("Interrupted; all ranks have ended.")
        return 130  # as shells expect of a process ended by Ctrl-C
    finally:
        console.show_cursor()  # rank 0 hides it while it shows its progress
    console.print("", comparison_table(results, num_steps=settings.num_steps), "")
    _save(settings, results, console)
    console.print("")
    wrong = [WAYS[done.way] for done in results if not done.is_right]
    if wrong:
        print_line(
            console, f"Results differ from the first variant: {', '.join(wrong)}.", "bold red"
        )
        return 1
    print_line(console, f"{headline(results)}; {_sameness(settings, results)}.", "bold")
    return 0


def headline(results: Sequence[WayDone]) -> str:
    """Returns the speeds of Undertow's variants over torch DDP's, as a sentence without its end."""
    compared_us = _compared_us(results)
    speeds = [
        f"{compared_us / done.step_us:.2f} times ({WAYS[done.way].removeprefix('Undertow, ')})"
        for done in results
        if done.way in OURS
    ]
    return f"Undertow trains {', '.join(speeds)} as fast as torch DDP"


def _compared_us(results: Sequence[WayDone]) -> float:
    return next(done.step_us for done in results if done.way == TORCH_DDP)


def _sameness(settings: DemoSettings, results: Sequence[WayDone]) -> str:
    """Returns how equal the results are, as a sentence without its end."""
    same = "gradients, parameters" if settings.is_exact else "gradients"
    loss = {done.way: done.loss for done in results}
    text = f"{same} and loss {'are equal' if settings.is_exact else 'agree'}"
    if INT8 in loss:
        apart = abs(loss[INT8] / results[0].loss - 1)
        text += f", and with int8 the loss is within {max(apart, 1e-4):.2%}"
    return text


def _print_introduction(console: Console, settings: DemoSettings) -> None:
    """Prints the settings, and warnings about inexact figures."""
    link = f"an emulated {settings.link} link"
    if settings.link == "none":
        link = "the bare loopback"
    ranks = counted(settings.num_ranks, "rank")
    print_line(
        console,
        f"Training one model in {len(settings.ways)} variants: {ranks} on this machine, "
        f"gradients over {link}.",
    )
    num_cores = os.cpu_count() or 1
    if settings.num_ranks == 1:
        console.print("[yellow]With one rank there is no communication to hide.[/]")
    if settings.num_ranks > num_cores:
        console.print(
            f"[yellow]{ranks} share {num_cores} cores: computation will take longer "
            "than on separate machines.[/]"
        )


def train(settings: DemoSettings) -> list[WayDone]:
    """Trains in new processes and always ends them; rank 0 shows the progress.

    Raises UndertowError if one fails or dies.
    """
    # Not at the top: the command can refuse its options without torch.
    from torch.multiprocessing.spawn import ProcessException, start_processes

    from undertow.lab.demo.rank import run_rank

    resource_tracker.ensure_running()  # its start would end the hold
    with tempfile.TemporaryDirectory(prefix="undertow-demo-") as folder:
        # Ranks inherit the hold and never see Ctrl-C: this process ends them.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        ranks = start_processes(  # type: ignore[no-untyped-call]
            run_rank, (settings, folder), settings.num_ranks, join=False, start_method="spawn"
        )
        try:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
            while not ranks.join():
                pass
        except ProcessException as error:
            raise UndertowError(
                f"rank {error.error_index} has failed.", where=str(error).strip()
            ) from None
        finally:
            for process in ranks.processes:
                process.kill()
                process.join()
        results: list[WayDone] = pickle.loads(Path(folder, RESULTS).read_bytes())
        return results


def comparison_table(results: Sequence[WayDone], *, num_steps: int) -> Table:
    """Returns a table with one row per variant; at most 80 columns wide."""
    names = (
        "ms per\nstep",
        "vs.\nDDP",
        "exposed\nms",
        "over-\nlap",
        "wire\nops",
        "final\nloss",
        "same\nresult",
    )
    table = Table(
        Column(no_wrap=True),
        *(Column(name, justify="right", no_wrap=True) for name in names),
        title=f"Rank 0, the median of {num_steps} steps"
        + (" (outer: the mean of a period)" if any(done.way == OUTER for done in results) else ""),
        title_justify="left",
        box=SIMPLE_HEAD,
        show_edge=False,
        padding=(0, 1, 0, 0),
    )
    compared_us = _compared_us(results)
    for done in sorted(results, key=lambda done: -done.step_us):
        overlap = done.overlap
        table.add_row(
            WAYS[done.way],
            f"{done.step_us / 1e3:.1f}",
            f"{compared_us / done.step_us:.2f}x",
            "-" if overlap.fraction is None else f"{overlap.exposed_us / 1e3:.1f}",
            "-" if overlap.fraction is None else f"{overlap.fraction:.0%}",
            done.num_ops,
            f"{done.loss:.4f}",
            _COMPARISON.get(done.way, "yes") if done.is_right else "[bold red]NO[/]",
            style="bold" if done.way in OURS else None,
        )
    return table


def _save(settings: DemoSettings, results: Sequence[WayDone], console: Console) -> None:
    """Saves a picture of a typical step, and the profiles of Undertow's variants for `plan` and
    `simulate`."""
    picture = settings.out / "demo.png"
    save_timeline(
        {WAYS[done.way]: done.typical for done in results},
        picture,
        title=headline(results),
        conditions=f"{counted(settings.num_ranks, 'rank')} on one machine, "
        f"{settings.link} emulated, typical of {settings.num_steps} steps",
    )
    print_line(console, f"A typical step as a picture: {picture}")
    for done in results:
        if done.profile is not None:
            path = settings.out / f"profile-{done.way}.json"
            done.profile.save(path)
            if done.way == "undertow":
                ask = f"undertow simulate {path} --ranks 64 --per-node 8 --link 100gbit"
                print_line(console, f"Predict the step on other networks: {ask}")
