"""The report and the files of `undertow run`, when a model's training ends."""

import contextlib
import json
import os
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path

from undertow.errors import PhaseError, UndertowError
from undertow.foreign import printable_lines
from undertow.sync.gradient_sync import GradientSync
from undertow.trace.step_report import StepReport
from undertow.whole_file import write_whole

_GLOBAL = """Each rank has trained a replica. Files of model.state_dict() have the global
parameters, as they were after the last exchange.
"""
_REPLICAS = """Each rank has trained a replica, and model.state_dict() has only its own parameters:
a file that rank 0 has written holds one replica. To save the global parameters, write

    with model.outer.synchronized():
        torch.save(model.state_dict(), path)
"""


def end(sync: GradientSync, out: str | None, number: int) -> None:
    """Writes this rank's files into `out`; `number` counts the models of this process from 0.

    Rank 0, or rank 1 if rank 0 is lost, prints to standard error: where the time went, the plan
    with its reason, how to save if replicas have trained alone, why the ranks could not go on, and
    the place of the files. After an error that ended the program it prints only the last two, so
    that the error stays visible.
    """
    fault = sync._all_ranks.watch.fault
    speaks = sync.rank == (1 if fault is not None and fault.lost_rank == 0 else 0)
    if out is None and not speaks:
        return
    report, is_written = sync.report(), False
    if out is not None:  # first: standard error may be closed
        is_written = _write(_texts(sync, report, speaks=speaks), Path(out), number)
    has_steps = report.num_steps > 0 or sync.outer is not None
    if speaks and has_steps and not hasattr(sys, "last_value"):
        from rich.console import Console

        Console(stderr=True).print(report, sync.explain().in_brief, soft_wrap=True)
        if sync.outer is not None:
            print(_GLOBAL if sync.outer.saves_global else _REPLICAS, file=sys.stderr)
    if speaks and fault is not None:
        print(f"undertow run: {printable_lines(fault.what)}", file=sys.stderr)
    if out is not None and is_written and speaks:
        command = f"undertow report {shlex.quote(out)}"
        print(f"The files are in {out}. A page about them: {command}", file=sys.stderr)


def _texts(sync: GradientSync, report: StepReport, *, speaks: bool) -> dict[str, str]:
    """Returns the texts of this rank's files by name: its report, and if it speaks for its group
    the plan and the profile."""
    rank = sync._all_ranks.user.ranks[sync.rank]
    # Variables that are the same on all nodes of a run: reports of different ones are told apart.
    run = [os.environ.get(name, "") for name in ("TORCHELASTIC_RUN_ID", "MASTER_PORT")]
    texts = {f"report-rank{rank}": json.dumps({"run": run, **report.to_dict()})}
    if speaks:
        first = sync._all_ranks.user.ranks[0]  # which names these files, whoever writes them
        of_group = f"-rank{first}" if first else ""
        texts[f"plan{of_group}"] = sync.plan.to_json()
        with contextlib.suppress(PhaseError):  # too few steps
            texts[f"profile{of_group}"] = sync.profile().to_json()
    return texts


def _write(texts: Mapping[str, str], out: Path, number: int) -> bool:
    """Returns False if the files cannot be written, after it has said so."""
    of_model = f"-{number + 1}" if number else ""
    try:
        for name, text in texts.items():
            path = out / f"{name}{of_model}.json"
            write_whole(path, f"{text}\n".encode(), where="undertow run --out DIR")
    except UndertowError as error:
        print(f"undertow run: {error}", file=sys.stderr)
        return False
    return True
