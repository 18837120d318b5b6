"""Faults: something happens to one rank of a training, at a point of its step that is chosen, and every rank ends somehow.

A training (support.training) passes points: those of the user's code, the library's ops, and calls inside of the library. A
fault names one of them. With `meets` the faulty rank waits there until all others have come to the same point of the same
step, so that the step that they name is known.
"""

import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from support.inside import INNER_CALLS, around_waits, before_calls, observe
from support.processes import Ended, Rank, free_port, run_ranks
from undertow import DistributedDataParallel

FAULTY_STEP, NUM_STEPS = 3, 6
SMALL: dict[str, Any] = {"bucket_cap_mb": 1e-4}  # a bucket for every weight
NAN, NAN_SKIPPED = "not a number", "not a number, skipped"
FACTORS = {NAN: torch.nan, f"{NAN}, raised": torch.nan, NAN_SKIPPED: torch.nan, "infinite": torch.inf}  # of a gradient


class BadBatch(ValueError):
    """What the user's code raises."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    kind: str  # one of KINDS
    point: str  # that a training passes
    rank: int = 1
    num_ranks: int = 2
    way: str = "ddp"  # to train: one of support.training.WAYS
    settings: dict[str, Any] = field(default_factory=dict)
    step: int = FAULTY_STEP  # from which on passages of the point are counted
    passage: int = 0
    meets: bool = True
    seconds: float = 0.0  # that a rank is late or paused
    num_reports: int = 1  # that a rank is late for
    jitter_ms: float = 0.0  # every rank dawdles up to so long at every point
    num_micro_batches: int = 1  # of which all but the last are accumulated
    ending: str = "left open"  # what the script does at last about its model and its groups
    is_env: bool = False  # meets by env://, where rank 0 serves the store

    @property
    def others(self) -> list[int]:
        return [rank for rank in range(self.num_ranks) if rank != self.rank]


def outcomes(fault: Fault, *, is_script: bool = False) -> list[Ended]:
    """How every rank ends, in order; `seconds` among its words are those from the fault to its error."""
    ended = run_ranks(
        partial(run_rank, fault, free_port() if fault.is_env else None),
        fault.num_ranks,
        stays=(fault.rank,) if fault.kind == "stopped" else (),
        is_script=is_script,
    )
    began_s = ended[fault.rank].words.get("fault", 0.0)
    for rank in ended:
        rank.words["seconds"] = rank.words.get("at", began_s) - began_s
    return ended


def run_rank(fault: Fault, port: int | None, rank: Rank) -> list[str]:
    """Trains as one rank; returns the names of parameters that are not those of an undisturbed training."""
    from support.training import WAYS, different, expected  # it passes points, which are of this module

    if port is None:
        rank.meet()
    else:
        rank.enter_environment(port)
        dist.init_process_group("gloo")
    try:
        return different(WAYS[fault.way](Points(fault, rank)).run(), expected(fault))
    except BaseException:
        # Connections stay until all others have learnt of the fault: when they break, it must not be for this rank.
        if fault.meets and rank.number != fault.rank:
            rank.tell("knows")
            rank.waits_for("knows", fault.others)
        raise


class Points:
    def __init__(self, fault: Fault, rank: Rank) -> None:
        self.fault, self.rank = fault, rank
        self.step = -1
        self.model: DistributedDataParallel | None = None
        self._jitter = random.Random(f"{fault}/{rank.number}")
        self._counting, self._num_passages = threading.Lock(), 0
        self._taken = ""  # by what the training itself has to do
        before_calls(INNER_CALLS, self.passes)
        around_waits(self.passes)

    def watch(self, model: DistributedDataParallel) -> None:
        self.model = model
        observe(
            model,
            before=lambda op: self.passes(f"before {op.kind}"),
            after=lambda op: self.passes(f"after {op.kind}"),
        )

    def passes(self, point: str) -> None:
        """From any thread."""
        fault = self.fault
        if self.step >= 0 and fault.jitter_ms:
            time.sleep(1e-3 * fault.jitter_ms * self._jitter.random())
        if point == fault.point and (self.step >= fault.step or point in ("start", "construction", "connection", "second model")):
            with self._counting:
                self._num_passages += 1
                is_here = self._num_passages == fault.passage + 1
            if is_here:
                self._comes()

    def spoiled(self, gradient: torch.Tensor) -> torch.Tensor | None:
        factor = FACTORS.get(self._taken)
        return gradient * factor if factor is not None and self.takes(self._taken) else None

    def takes(self, kind: str) -> bool:
        is_taken = self._taken == kind
        self._taken = "" if is_taken else self._taken
        return is_taken

    @property
    def is_faulty(self) -> bool:
        return self.rank.number == self.fault.rank

    def _comes(self) -> None:
        if self.fault.meets:
            self.rank.tell("here")
        if self.is_faulty:
            if self.fault.meets:
                self.rank.waits_for("here", range(self.fault.num_ranks))
            self.rank.say(fault=time.monotonic(), step=max(0, self.step))
            KINDS.get(self.fault.kind, _has_training_do_it)(self)


# Kinds of faults. Each function is called on the faulty rank, where it has come to the point.


def raises(_points: Points) -> None:
    raise BadBatch("row 7 has no label")


def leaves(_points: Points) -> None:
    raise SystemExit(0)


def closes(points: Points) -> None:
    """Its process stays."""
    points.model.close()
    points.rank.waits_for("knows", points.fault.others)


def is_paused(points: Points) -> None:
    wakes = subprocess.Popen(["sh", "-c", f"sleep {points.fault.seconds}; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)
    wakes.wait()


def is_late_until_reported(points: Points) -> None:
    points.rank.waits_for(
        f"logged {points.fault.num_reports}",
        points.fault.others if points.fault.point == "start" else range(points.fault.num_ranks),
    )


def writes(points: Points) -> None:
    with torch.no_grad():
        points.model.module.last.weight.mul_(2.0)


def _has_training_do_it(points: Points) -> None:
    points._taken = points.fault.kind


KINDS: dict[str, Callable[[Points], object]] = {
    "killed": lambda _: os.kill(os.getpid(), signal.SIGKILL),
    "raises": raises,
    "leaves": leaves,
    "closes": closes,
    "stopped": lambda _: os.kill(os.getpid(), signal.SIGSTOP),
    "paused": is_paused,
    "late": lambda points: time.sleep(points.fault.seconds),
    "late until reported": is_late_until_reported,
    "late for good": lambda points: points.rank.waits_for("knows", points.fault.others),
    "writes": writes,
}
