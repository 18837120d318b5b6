"""One rank of a system, in its namespace: python -m benchmarks.shaped.rank JOB. It lives as long as its session.

Reads commands from its standard input, a JSON line each, and answers each with a JSON line. Other output goes to its log.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.matrix import truth
from benchmarks.matrix.systems import Setting, System
from benchmarks.matrix.worker import die_with
from benchmarks.matrix.workloads import make_workload

_UNTIMED = 2  # steps of every turn: the first ones find the caches as another system has left them


def main(job: dict[str, Any], answer: Callable[[dict[str, Any]], None]) -> None:
    """Builds the system, then answers commands until there are no more."""
    die_with(job["runner_pid"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    assert dist.group.WORLD is not None
    workload = make_workload(job["workload"], job["scale"], torch.device("cpu"))
    batch = workload.make_batch(dist.get_rank())
    reference = None
    if job["is_averaged"]:
        reference = truth.reference_of(workload.make_model, batch, dist.group.WORLD, beat=_nothing)
    module = importlib.import_module(job["module"])
    system = module.build(Setting(model=workload.make_model(), group=dist.group.WORLD, options=job["options"]))
    _train(system, batch, truth.NUM_STEPS)
    if reference is not None:
        wrong = reference.wrong_parameters(system, rounding=job["rounding"])
        if wrong:
            raise RuntimeError(f"trains wrongly: {', '.join(wrong[:3])} and {len(wrong)} in all are not the reference's")
    del reference
    gc.collect()
    answer({"steps_ms": _train(system, batch, job["num_settling"])})
    for line in sys.stdin:
        command = json.loads(line)
        if command["do"] == "train":
            dist.barrier()
            _train(system, batch, _UNTIMED)
            cpu_began_s = time.process_time()
            steps_ms = _train(system, batch, command["num_steps"])
            cpu_ms = (time.process_time() - cpu_began_s) / command["num_steps"] * 1e3
            answer({"steps_ms": steps_ms, "cpu_ms": cpu_ms})
        else:
            answer({"told": _told(system)})
    # The runner has closed the pipe: it wants no more, and ends what is left.


def _train(system: System, batch: Any, num_steps: int) -> list[float]:
    """Returns the milliseconds of each step, from its start to the start of the next."""
    starts_s = []
    for _ in range(num_steps):
        starts_s.append(time.perf_counter())
        system.backward(batch)
        system.update()
    starts_s.append(time.perf_counter())
    system.finish()
    return [(stop_s - start_s) * 1e3 for start_s, stop_s in pairwise(starts_s)]


def _told(system: System) -> dict[str, str]:
    """Returns what the system says about itself: its plan and its report."""
    told = {}
    wrapped = getattr(system, "wrapped", None)
    for name in ("explain", "report"):
        with suppress(Exception):  # another system, or another version of the library
            told[name] = str(getattr(wrapped, name)())
    return told


def _nothing() -> None:
    pass


def _answering(job: dict[str, Any]) -> int:
    """Returns the exit code. An error is in the log before the pipe of answers ends, when the runner reads the log."""
    with os.fdopen(os.dup(1), "w", buffering=1) as answers:
        os.dup2(2, 1)  # whatever else is printed goes to the log
        try:
            main(job, lambda found: print(json.dumps(found), file=answers))
        except Exception:
            traceback.print_exc()
            return 1
    return 0


if __name__ == "__main__":
    os._exit(_answering(json.loads(sys.argv[1])))  # the other rank may be gone already: a tidy end would wait for it
