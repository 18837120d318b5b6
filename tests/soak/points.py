"""The boundaries of a rank's step, at each of which something may happen to it."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

import undertow.sync
from soak.injections import NAN, Injection
from undertow import DistributedDataParallel
from undertow.runtime.exchange import Exchange
from undertow.runtime.waiting import Waiting


class BadBatch(ValueError):
    """What the user's code raises."""


class Points:
    """Which boundaries this process has passed, and what happens to it at one of them."""

    def __init__(self, injection: Injection, rank: int, say: Callable[..., None]) -> None:
        self.step = -1
        self._injection = injection
        self._is_mine = rank == injection.rank
        self._say = say
        self._jitter = random.Random(f"{injection.seed}/{injection.number}/{rank}")
        self._counting = threading.Lock()
        self._num_passages = 0
        self._taken = ""  # of what the training itself has to do

    def passes(self, point: str) -> None:
        """From any thread."""
        if self.step >= 0:
            time.sleep(1e-3 * self._injection.jitter_ms * self._jitter.random())
        if self._is_mine and point == self._injection.point and (self.step >= self._injection.step or point == "construction"):
            with self._counting:
                self._num_passages += 1
                is_here = self._num_passages == self._injection.passage + 1
            if is_here:
                self._say(fault=time.monotonic(), step=max(0, self.step))
                self._act()

    def takes(self, kind: str) -> bool:
        """Whether the training has to do this now, once."""
        if self._taken == kind:
            self._taken = ""
            return True
        return False

    def script_ends(self, model: DistributedDataParallel) -> None:
        """As the scripts of users do, one so, the other so."""
        match self._injection.ending:
            case "closed":
                model.close()
            case "destroyed":
                dist.destroy_process_group()

    def _act(self) -> None:
        match self._injection.kind:
            case "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            case "raises":
                raise BadBatch("row 7 has no label")
            case "leaves":
                raise SystemExit(0)
            case "stopped":
                self._say(stopped=True)
                os.kill(os.getpid(), signal.SIGSTOP)
            case "paused":
                awakes = subprocess.Popen(["sh", "-c", f"sleep {self._injection.seconds}; kill -CONT {os.getpid()}"])
                os.kill(os.getpid(), signal.SIGSTOP)
                awakes.wait()
            case "late":
                time.sleep(self._injection.seconds)
            case kind if kind.startswith(NAN):
                self._taken = NAN
            case "other graph" | "freezes" as kind:
                self._taken = kind
            case kind:
                raise NotImplementedError(kind)


def put_between(points: Points) -> None:
    """Has our waits, threads and broadcasts pass their points, for as long as this process lives; ops are their model's."""
    _around_waits(points)
    for name, point in (("begin", "post"), ("complete", "complete")):
        _before(points, Exchange, name, point)
    _before(points, undertow.sync, "broadcast_buffers", "buffers")
    _before(points, undertow.sync, "broadcast_in_place", "construction")


def _before(points: Points, owner: Any, name: str, point: str) -> None:
    then = getattr(owner, name)

    def passes_first(*args: Any, **kwargs: Any) -> Any:
        points.passes(point)
        return then(*args, **kwargs)

    setattr(owner, name, passes_first)


def _around_waits(points: Points) -> None:
    enter, leave = Waiting.__enter__, Waiting.__exit__

    def enters(waiting: Waiting) -> None:
        enter(waiting)
        if waiting._what:
            points.passes("before wait")

    def leaves(waiting: Waiting, kind: Any, error: Any, trace: Any) -> None:
        leave(waiting, kind, error, trace)
        if waiting._what:
            points.passes("behind wait")

    Waiting.__enter__, Waiting.__exit__ = enters, leaves
