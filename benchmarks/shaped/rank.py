"""One rank of a system: python -m benchmarks.shaped.rank JOB. It lives as long as its session.

Runs in any virtual environment that has torch; imports Undertow only if that is the system. Reads commands from its standard
input, a JSON line each, and answers each with a JSON line. Other output goes to its log.
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
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.processes import die_with
from benchmarks.shaped import truth
from benchmarks.shaped.systems import Setting, System
from benchmarks.shaped.workloads import workload_from_text

_TO_SETTLE = 20  # steps between two questions whether a system has settled
_UNTIMED = 2  # steps of every turn: the first ones find the caches as another system has left them


def main(job: dict[str, Any], answer: Callable[[dict[str, Any]], None]) -> None:
    """Builds the system, compares it with the reference, then answers commands until there are no more."""
    die_with(job["runner_pid"])
    torch.set_num_threads(1)
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=f"file://{job['store']}", rank=rank, world_size=num_ranks)
    group = dist.group.WORLD
    assert group is not None
    workload = workload_from_text(job["workload"])
    batch = workload.batch_of(rank)
    reference = truth.reference_of(workload.make_model, batch, group) if job["is_averaged"] else None
    module = importlib.import_module(job["module"])
    system = module.build(Setting(model=workload.make_model(), group=group, options=job["options"]))
    _train(system, batch, truth.NUM_STEPS)
    if reference is not None:
        wrong = reference.wrong_parameters(system, rounding=job["rounding"])
        if wrong:
            raise RuntimeError(f"trains wrongly: {', '.join(wrong[:3])} and {len(wrong)} in all are not the reference's")
    del reference
    gc.collect()
    answer({"steps_ms": _settle(system, batch, job["num_settling"], job["most_settling"])})
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
            answer({"told": dict(system.told())})
    # The runner has closed the pipe: it wants no more, and ends what is left.


def _settle(system: System, batch: Any, num_steps: int, most_steps: int) -> list[float]:
    """Trains for `num_steps`, and then until all ranks have settled, but not beyond `most_steps`; returns milliseconds."""
    steps_ms = _train(system, batch, num_steps)
    while len(steps_ms) < most_steps:
        is_settled = torch.tensor([system.is_settled()], dtype=torch.int32)
        dist.all_reduce(is_settled, op=dist.ReduceOp.MIN)
        if is_settled.item():
            break
        steps_ms += _train(system, batch, _TO_SETTLE)
    return steps_ms


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
