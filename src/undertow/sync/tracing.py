"""Writes the records of a model as traces for viewers."""

import itertools
import multiprocessing.util
import os
import uuid
import weakref
from collections.abc import Callable
from pathlib import Path

from undertow.engine.engine import Engine
from undertow.errors import PhaseError, require
from undertow.ranks import faults
from undertow.sync.views import path_of_rank, trace_text
from undertow.torch_private import process_groups
from undertow.whole_file import write_whole

FOLDER = "UNDERTOW_TRACE"  # the variable that names a folder for traces
_numbers = itertools.count()  # of the models that are traced, in the order all ranks create them


def run_name() -> str:
    """Returns a name of this run that all ranks agree on through the store by which they have met.

    "" without that store.
    """
    try:
        store = process_groups.default_store()
        return str(store.compare_set("undertow/run", "", uuid.uuid4().hex).decode())
    except (RuntimeError, ValueError):  # it is gone, or of a kind that cannot do this
        return ""


def save_trace(
    engine: Engine,
    path: str | Path,
    *,
    steps: int | None = None,
    number: int = 0,
    run: str | None = None,
) -> Path:
    """Writes the trace of the last steps, or of all that are recorded; returns its path.

    Never communicates.
    """
    group, where = engine.current_plan.group, "save_trace(path, steps=...)"
    rank = group.user.ranks[group.rank]
    path = path_of_rank(path, rank, number)
    require(
        steps is None or steps > 0,
        f"steps must be 1 or more, got {steps}.",
        where=where,
        remedy="Give a number, or None.",
    )
    records = engine.recorder.records(at_most=steps)
    require(
        records,
        "no step is recorded.",
        where=f"save_trace, rank {rank}",
        remedy="Run a training step before, and leave record on.",
        error=PhaseError,
    )
    about = {
        "run": run_name() if run is None else run,
        "rank": rank,
        "ranks": group.user.ranks,
        "model": number,
        "began_ns": engine.recorder.wall_ns(records[0].step),
    }
    text = trace_text(records, about)
    write_whole(path, text.encode(), where=where)
    return path


def trace_at_end(engine: Engine) -> Callable[[], object] | None:
    """Returns a function that writes the trace into the folder of the variable, once; the end of
    the process calls it too.

    None if the variable is not set.
    """
    folder = os.environ.get(FOLDER)
    if not folder:
        return None
    path = Path(folder).absolute() / "trace.json.gz"
    arguments = (weakref.ref(engine), path, next(_numbers), run_name())
    # Unlike atexit's, it is also called in processes that multiprocessing has started.
    return multiprocessing.util.Finalize(None, _save_at_end, args=arguments, exitpriority=0)


def _save_at_end(
    weak_engine: Callable[[], Engine | None], path: Path, number: int, run: str
) -> None:
    """Writes the trace if the engine exists and has something to show, and only reports an error.

    A program must not fail because of files for viewers.
    """
    engine = weak_engine()
    if engine is None or not engine.current_plan.is_active:  # one rank has nothing to show
        return
    group = engine.current_plan.group
    # On a device, reading a time waits for earlier launches, which may never end after a fault.
    if not group.hardware.is_host and group.is_broken:
        return
    try:
        save_trace(engine, path, number=number, run=run)
    except Exception as error:
        faults.tell(f"nothing is written for viewers: {error}")
