"""Runs the demo from start to end, in the process that starts the ranks."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from undertow.cost import collective_seconds
from undertow.demo.corpus import load_corpus
from undertow.demo.launch import LocalRanks, RanksLost
from undertow.demo.results import ModelBuilt, StepDone, Verdict, WayDone
from undertow.demo.settings import DemoSettings, Way
from undertow.demo.show import LiveProgress, comparison_table, print_introduction
from undertow.report.directory import make_directory
from undertow.report.shown import print_line
from undertow.report.timeline import require_matplotlib, save_timeline

__all__ = ["run_demo"]

_INTERRUPTED = 130  # exit code that shells expect of a process ended by Ctrl-C
_SILENCE_S = 180.0  # seconds for computation and start; time on the network is added
_ASSUMED_BYTES = 100e6  # traffic of one step, a generous estimate


def run_demo(settings: DemoSettings, console: Console | None = None) -> int:
    """Runs and prints the comparison. Returns exit code 0, 1 if a rank failed or variants disagree, or 130 after Ctrl-C.

    Raises ConfigError if the text cannot be read or the output directory cannot be written.
    """
    console = Console() if console is None else console
    corpus = load_corpus(settings.text)
    require_matplotlib()
    make_directory(settings.out, where="undertow demo")
    print_introduction(console, settings, num_cores=os.cpu_count() or 1, load=os.getloadavg()[0])
    try:
        results = _train(settings, corpus, console)
    except RanksLost as error:
        console.print(Text.assemble(("The demo has ended early:", "bold red"), " ", str(error)), soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        console.print("Interrupted; all ranks have ended.")
        return _INTERRUPTED
    return _conclude(settings, results, console)


def _train(settings: DemoSettings, corpus: bytes, console: Console) -> Mapping[Way, Sequence[WayDone]]:
    results: dict[Way, dict[int, WayDone]] = {way: {} for way in settings.ways}
    wire_s = collective_seconds(settings.emulated_link, "all_reduce", num_bytes=int(_ASSUMED_BYTES), num_ranks=settings.num_ranks)
    with tempfile.TemporaryDirectory(prefix="undertow-demo-") as directory:
        text = Path(directory) / "text"
        text.write_bytes(corpus)
        arguments = (settings, text, Path(directory) / "meeting-point")
        ranks = LocalRanks(_run_rank, arguments, num_ranks=settings.num_ranks, silence_s=_SILENCE_S + wire_s)
        with LiveProgress(console, settings) as progress, ranks:
            for message in ranks.messages():
                match message:
                    case ModelBuilt():
                        progress.model_built(message)
                    case StepDone():
                        progress.step_done(message)
                    case WayDone():
                        results[message.way][message.rank] = message
    return {way: [of_ranks[rank] for rank in sorted(of_ranks)] for way, of_ranks in results.items()}


def _run_rank(*arguments: object) -> None:
    # Imported in the ranks only: the parent process does not need torch.
    from undertow.demo.rank import run_rank

    entry: Callable[..., None] = run_rank
    entry(*arguments)


def _conclude(settings: DemoSettings, results: Mapping[Way, Sequence[WayDone]], console: Console) -> int:
    verdict = Verdict.of(results, num_ranks=settings.num_ranks)
    console.print()
    console.print(comparison_table(results, verdict, num_steps=settings.num_steps))
    traces = {way.label: of_ranks[0].typical for way, of_ranks in results.items()}
    for way in settings.ways:
        save_timeline({way.label: traces[way.label]}, settings.out / f"demo-{way}.png")
    picture = settings.out / "demo.png"
    save_timeline(traces, picture)
    each = settings.out / "demo-*.png"
    console.print()
    print_line(console, f"A typical step as a picture: {picture}, each way alone: {each}")
    _save_profiles(settings, results, console)
    for complaint in verdict.complaints:
        print_line(console, complaint, "bold red")
    if not verdict.complaints:
        alike = "gradients, parameters and loss" if settings.is_exact else "gradients and loss"
        console.print(f"All {len(settings.ways)} ways found the same {alike}.", highlight=False)
    return 1 if verdict.complaints else 0


def _save_profiles(settings: DemoSettings, results: Mapping[Way, Sequence[WayDone]], console: Console) -> None:
    """Saves the profiles of Undertow's variants, for `undertow plan` and `undertow simulate`."""
    for way, of_ranks in results.items():
        profile = of_ranks[0].profile
        if profile is None:
            continue
        path = settings.out / f"profile-{way}.json"
        profile.save(path)
        if way is Way.UNDERTOW:
            ask = f"undertow simulate {path} --ranks 64 --per-node 8 --link 100gbit"
            print_line(console, f"What other networks would make of it: {ask}")
