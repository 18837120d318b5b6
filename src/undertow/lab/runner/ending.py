"""The report and the files of `undertow run`, when a model's training ends."""

import contextlib
import json
import os
import shlex
import sys
from pathlib import Path

from undertow.errors import PhaseError, UndertowError
from undertow.lab.profile import Profile
from undertow.sync.gradient_sync import GradientSync
from undertow.trace.step_report import StepReport
from undertow.whole_file import write_whole

_REPLICAS = """Each rank has trained a replica, and model.state_dict() has only its own parameters:
a file that rank 0 has written holds one replica. To save the global parameters, write

    with model.outer.synchronized():
        torch.save(model.state_dict(), path)
"""


def end(sync: GradientSync, out: str | None, number: int) -> None:
    """Writes this rank's files into `out`; `number` counts the models of this process from 0.

    Rank 0 prints to standard error: where the time went, the plan with its reason, how to save if
    replicas have trained alone, and the place of the files. After an error that ended the program
    it prints only the place, so that the error stays visible.
    """
    if out is None and sync.rank != 0:
        return
    report, profile = sync.report(), None
    with contextlib.suppress(PhaseError):  # too few steps
        profile = sync.profile()
    has_steps = report.num_steps > 0 or sync.outer is not None
    if sync.rank == 0 and has_steps and not hasattr(sys, "last_value"):
        from rich.console import Console

        Console(stderr=True).print(report, sync.explain().in_brief, soft_wrap=True)
        if sync.outer is not None:
            print(_REPLICAS, file=sys.stderr)
    if out is not None:
        _write(sync, report, profile, Path(out), number)


def _write(
    sync: GradientSync, report: StepReport, profile: Profile | None, out: Path, number: int
) -> None:
    """Writes this rank's report and, by the first rank of the model's group, profile and plan."""
    rank = sync._all_ranks.user.ranks[sync.rank]
    of_group = f"-rank{rank}" if rank else ""
    # Variables that are the same on all nodes of a run: reports of different ones are told apart.
    run = [os.environ.get(name, "") for name in ("TORCHELASTIC_RUN_ID", "MASTER_PORT")]
    texts = {f"report-rank{rank}": json.dumps({"run": run, **report.to_dict()})}
    if sync.rank == 0:
        texts[f"plan{of_group}"] = sync.plan.to_json()
        if profile is not None:
            texts[f"profile{of_group}"] = profile.to_json()
    of_model = f"-{number + 1}" if number else ""
    try:
        for name, text in texts.items():
            path = out / f"{name}{of_model}.json"
            write_whole(path, f"{text}\n".encode(), where="undertow run --out DIR")
    except UndertowError as error:
        print(f"undertow run: {error}", file=sys.stderr)
        return
    if sync.rank == 0:
        command = f"undertow report {shlex.quote(str(out))}"
        print(f"The files are in {out}. A page about them: {command}", file=sys.stderr)
