"""Defines the commands and their options."""

from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from undertow import __version__
from undertow.config import Outer
from undertow.errors import require
from undertow.lab.cli.plan import show_plan
from undertow.lab.cli.question import Question, asks, option
from undertow.lab.cli.simulate import show_outer, show_simulation, show_sweep
from undertow.lab.cost import LINKS
from undertow.lab.report.outer import EVERY
from undertow.lab.simulate import Conditions
from undertow.lab.traces import merge


class Swept(StrEnum):
    """Conditions that `undertow simulate --sweep` varies."""

    BANDWIDTH = "bandwidth"
    EVERY = "every"


_Sweep = Annotated[
    Swept | None,
    option(
        "bandwidth shows the step over links of 0.1 to 100 Gb/s, each in full width, "
        "bfloat16 and int8, with the latency of --link. every shows --outer 1 to 300."
    ),
]
_Optimizer = Annotated[
    str | None,
    option(
        '"adamw", "sgd" or "muon": predict the update of this optimizer in shards, from a profile '
        "that was measured with it. The rank with the most work counts. With muon each matrix has "
        "one owner, except embeddings and heads (by name). By default an update takes as long as "
        "in the profile."
    ),
]
_Outer = Annotated[
    int | None,
    option(
        "Steps that replicas of one rank train alone between two exchanges of a fragment; "
        "--wire is the format of differences, by default int8."
    ),
]
_Delay = Annotated[
    int | None,
    option("Steps that hide an exchange, with --outer; by default chosen."),
]
_Fragments = Annotated[
    int | None,
    option("Fragments of the model, with --outer; by default chosen."),
]

app = typer.Typer(
    name="undertow",
    help="Data-parallel training for PyTorch that overlaps gradient communication with "
    "computation.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _outer(
    every: int | None, *, wire: str | None, delay: int | None, fragments: int | None
) -> list[Outer]:
    """Returns the settings of outer synchronization, several for a sweep."""
    settings = []
    for steps in EVERY if every is None else (every,):
        one = Outer(
            every=steps,
            wire=None if wire == "none" else wire or "int8",
            delay="auto" if delay is None else delay,
            fragments="auto" if fragments is None else fragments,
        )
        settings.append(one)
    return settings


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        print(f"undertow {__version__}")
        raise typer.Exit


@app.callback()
def undertow(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    """Data-parallel training for PyTorch that overlaps gradient communication with
    computation."""


@app.command(
    help="Train a small GPT in five variants over an emulated network and compare them: a "
    "reduction for each parameter, buckets after backward, torch DDP, Undertow, and Undertow with "
    'wire="int8".\n\n'
    "Starts the ranks itself, takes about 30 seconds, and checks that every variant has the same "
    "gradients and, with two ranks or one, ends with the same parameters, or close ones "
    "with int8. Prints a table and draws where each step's time went, in OUT/demo.png.\n\n"
    "Exit code 0: all variants agree. 1: they do not, or a rank failed. 2: an option cannot work."
)
def demo(  # one argument per option
    nproc: Annotated[
        int,
        typer.Option(
            min=1, max=16, help="Ranks to start on this machine; each computes on one core."
        ),
    ] = 2,
    link: Annotated[
        str,
        typer.Option(
            help='Network to emulate: a rate such as "1gbit", "2.5gbit", "200mbit", or "none".'
        ),
    ] = "250mbit",
    steps: Annotated[
        int, typer.Option(min=1, help="Measured steps per variant, after ten to warm up.")
    ] = 5,
    out: Annotated[Path, typer.Option(help="Directory for the picture.")] = Path("out"),
    strategy: Annotated[
        str,
        typer.Option(
            help='"zero1" or "zero2" adds a variant with a sharded optimizer; "ddp" does not.'
        ),
    ] = "ddp",
    outer: Annotated[
        int | None,
        option(
            "Adds a variant whose ranks train alone and exchange fragments of the model every so "
            "many steps."
        ),
    ] = None,
) -> None:
    """Converts options to settings; the decorator has the help text."""
    # Not at the top: the other commands do not need it.
    from undertow.lab.demo import DemoSettings, run_demo

    settings = DemoSettings(
        num_ranks=nproc, link=link, num_steps=steps, out=out, strategy=strategy, outer=outer
    )
    raise typer.Exit(run_demo(settings))


@app.command(
    help="Run a training program as it is, with Undertow's class instead of torch's; "
    "`undertow run --help` says more."
)
def run() -> None:
    """Is for the list of commands: `main` runs this one."""


@app.command(help="Print a page of the documentation, or list all pages.")
def docs() -> None:
    """Is for the list of commands: `main` runs this one."""


@app.command(
    help="Write a page about a run that any browser shows without a network: advice, the step as "
    "a timeline, each bucket, and the same model on other links.\n\n"
    "DIR has the files of `undertow run --out DIR` or report.save(DIR/report-rank0.json). "
    "The page is OUT/report.html; a second model of the run has report-2.html.\n\n"
    "Exit code 0: written. 2: files are missing, damaged or of different runs or groups, or the "
    "page cannot be written."
)
def report(
    folder: Annotated[
        Path,
        typer.Argument(metavar="DIR", help="Folder that a run has written.", show_default=False),
    ],
    out: Annotated[
        Path | None,
        option("Directory for the page; by default DIR."),
    ] = None,
) -> None:
    # Not at the top: the other commands do not need it.
    from undertow.lab.report.page import save_pages

    for page in save_pages(folder, folder if out is None else out):
        print(f"Page: {page}")


@app.command(
    help="Show the buckets that a cost model plans for a model, the plans that they are chosen "
    "from, and with --schedule the ops of one step, without running anything. Training does not "
    "trust the model: it tries plans on real steps, and keeps one only if its steps are faster.\n\n"
    "PROFILE is a JSON file, written by save_profile() or by hand (`undertow docs profiles`), or "
    "the example gpt2.\n\n"
    'Example: undertow plan gpt2 --ranks 64 --link "100gbit,5us"\n\n'
    "Exit code 0: shown. 2: an option or PROFILE cannot work."
)
@asks
def plan(
    question: Question,
    bucket_cap_mb: Annotated[
        float | None,
        option("Largest bucket in MiB; without it, planned ones."),
    ] = None,
    schedule: Annotated[
        bool, typer.Option("--schedule", help="Show the ops of one step in their order too.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON only.")] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            "-o", "--out", help="Write the plan as JSON into this file too.", show_default=False
        ),
    ] = None,
) -> None:
    show_plan(
        question.what_if(),
        bucket_cap_mb=bucket_cap_mb,
        has_schedule=schedule,
        is_json=json,
        out=out,
    )


@app.command(
    help="Predict the step of a model on a network, without running anything.\n\n"
    "PROFILE is a JSON file, written by save_profile() or by hand (`undertow docs profiles`), or "
    "the example gpt2. "
    "Simulates a step that sends one message per parameter, one with buckets of 25 MiB after "
    "a first one of 1 MiB, as torch's DistributedDataParallel has them, and one with the "
    "buckets that a cost model plans for this network (training tries plans on real steps "
    "instead). Prints the time of each step, and its parts on a typical rank: computing, waiting "
    "for the network and waiting for a late rank. The scaling efficiency is "
    "the share of the step that computing alone takes. Draws timelines in "
    "OUT/simulate.png. --sweep bandwidth draws the step over the rate of the link instead, in "
    "OUT/sweep.png.\n\n"
    'Example: undertow simulate gpt2 --ranks 64 --per-node 8 --link "100gbit,5us"\n\n'
    "Exit code 0: shown. 2: an option or PROFILE cannot work."
)
@asks
def simulate(  # noqa: PLR0913  # one argument per option
    question: Question,
    optimizer: _Optimizer = None,
    sweep: _Sweep = None,
    outer: _Outer = None,
    delay: _Delay = None,
    fragments: _Fragments = None,
    overlap: Annotated[
        bool, typer.Option(help="Reduce during backward, or everything at its end.")
    ] = True,
    skew: Annotated[
        float | None,
        option(
            "Standard deviation of computing times between ranks, 0.05 is 5 %; a typical "
            "rank is shown. The defaults of this and the next three options are as measured, or as "
            "in `undertow docs fidelity`."
        ),
    ] = None,
    contention: Annotated[
        float | None,
        option("Share of its speed that computing loses while the network works."),
    ] = None,
    launch_us: Annotated[
        float | None,
        option("Microseconds that a rank computes per collective."),
    ] = None,
    copy_us_per_mb: Annotated[
        float | None,
        option("Microseconds that a rank computes per megabyte of a bucket."),
    ] = None,
    out: Annotated[Path, typer.Option(help="Directory for the picture.")] = Path("out"),
    json: Annotated[bool, typer.Option("--json", help="Print JSON, and draw nothing.")] = False,
) -> None:
    conditions = Conditions(
        overlap=overlap,
        skew=skew,
        contention=contention,
        launch_us=launch_us,
        copy_us_per_mb=copy_us_per_mb,
    )
    what_if = replace(question.what_if(optimizer=optimizer), conditions=conditions)
    if outer is not None or sweep is Swept.EVERY:
        settings = _outer(outer, wire=question.wire, delay=delay, fragments=fragments)
        show_outer(what_if, settings, is_json=json)
        return
    require(
        delay is None and fragments is None,
        "--delay and --fragments have no effect without --outer.",
        where="undertow simulate",
        remedy="Give --outer too, the steps between two exchanges.",
    )
    if sweep is None:
        show_simulation(what_if, out=out, is_json=json)
        return
    require(
        question.wire is None and question.param_wire is None,
        "--wire and --param-wire have no effect with --sweep.",
        where="undertow simulate",
        remedy="Leave them out: a sweep shows full width, bfloat16 and int8.",
    )
    show_sweep(what_if, out=out, is_json=json)


@app.command(
    help="List the links that have a name, with their rate and latency, and where these are from."
)
def links() -> None:
    for name, (text, source) in LINKS.items():
        print(f"{name:14} {text:14} {source}")


@app.command(
    help="Merge the traces of all ranks into one file for Perfetto, with their clocks aligned.\n\n"
    "DIR has the trace files of a run with UNDERTOW_TRACE=DIR, or of model.save_trace(path). "
    "Open the result at https://ui.perfetto.dev. If a rank's trace is missing, the others are "
    "merged.\n\n"
    "Exit code 0: merged. 2: no trace was found, one cannot be read, they are of different "
    "runs, or OUT cannot be written."
)
def trace(
    folder: Annotated[
        Path,
        typer.Argument(metavar="DIR", help="Folder with the ranks' traces.", show_default=False),
    ],
    out: Annotated[
        Path | None,
        option("File to write, .json or .json.gz; by default DIR.json.gz."),
    ] = None,
) -> None:
    out = folder.absolute().with_name(f"{folder.absolute().name}.json.gz") if out is None else out
    typer.echo(f"{merge(folder, out)}: {out}")
