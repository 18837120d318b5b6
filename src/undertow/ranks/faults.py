"""Faults and activities of ranks, as values and as text."""

import contextlib
import logging
import os
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

from undertow.errors import (
    READ_MORE,
    Desync,
    NonFiniteGradient,
    PeerFailed,
    PlanMismatch,
    RankLost,
    ReplicaMismatch,
    StallTimeout,
    UndertowError,
)
from undertow.foreign import printable_lines
from undertow.ranks.answers import (
    ALL_WAIT,
    ALL_WAIT_FOR_IT,
    MAX_TEXT,
    Answer,
    Call,
    Ranks,
    Run,
    named,
)

_log = logging.getLogger("undertow")
_NUM_FRAMES = 12
# folders of torch and Undertow
_LIBRARIES = (os.path.dirname(torch.__file__) + os.sep, str(Path(__file__).parents[1]) + os.sep)
_LEFT = "has left"
_STATE = "every rank must call"  # in the name of a wait
# By a part of the name of a wait: the remedy if it is for a call that one rank alone often makes.
_CALLS_OF_ALL = {
    _STATE: "Make the call on every rank, not under `if rank == 0`. To save on one "
    "rank, every rank calls consolidate_state_dict() first.",
    "to save a checkpoint": "Call save_checkpoint() on every rank, not under `if rank == 0`.",
    "to load a checkpoint": "Call load_checkpoint() on every rank, not under `if rank == 0`.",
}
_KINDS = {
    kind.__name__: kind
    for kind in (
        Desync,
        NonFiniteGradient,
        PeerFailed,
        PlanMismatch,
        RankLost,
        ReplicaMismatch,
        StallTimeout,
    )
}
# Parts of a file's path, and the activity of a thread that runs its code.
_ACTIVITIES = {
    "/torch/utils/data/": "loading data",
    "/torch/optim/": "in the optimizer",
    "/torch/distributed/distributed_c10d.py": "in {function} of torch.distributed",
    "/torch/autograd/": "in backward",
    "/torch/_tensor.py": "in backward",
}


@dataclass(frozen=True, slots=True)
class Fault:
    """The reason why a step cannot continue, the same on every rank that learns of it."""

    kind: type[UndertowError]
    what: str
    remedy: str
    told: str = ""  # details from the rank that detected it, several lines
    lost_rank: int | None = None  # that is gone without a last message
    # when this rank learned of it
    known_s: float = field(default_factory=time.monotonic, compare=False)

    def error(self, where: str, *, waits_for: str = "") -> UndertowError:
        """Returns the error to raise (`Watch.give_up`): RankLost, PeerFailed, StallTimeout, or one
        that ranks have agreed on.

        It is a new one each time: raising one twice would accumulate both tracebacks. If a rank has
        left while this one `waits_for` a call of every rank, the data is not the reason.
        """
        has_left = self.kind is RankLost and _LEFT in self.what
        return self.kind(
            self.what,
            where="\n  ".join(filter(None, (where, self.told))),
            remedy=(has_left and _remedy_of_call(waits_for)) or self.remedy,
        )

    def content(self) -> dict[str, Any]:
        """Returns the content of a message, for `fault_from`."""
        return {
            "error": self.kind.__name__,
            "what": self.what,
            "remedy": self.remedy,
            "told": self.told,
            "lost_rank": self.lost_rank,
        }


@dataclass(slots=True)
class Activity:
    """The training of one model in this process. The training thread writes its part.

    A query from another rank reads it.
    """

    # completed synchronizations; True if a step has begun since
    steps: Callable[[], tuple[int, bool]] = lambda: (0, True)
    module: Callable[[], nn.Module | None] = lambda: None  # a weak reference
    # the known training thread: this one until another trains
    thread: int = field(default_factory=threading.get_ident)
    # its name, and when it began; without a name if this rank does not wait
    wait: tuple[str, float] = "", 0.0
    # how often it has made each collective call, and the last one, by their ranks
    num_calls: Counter[tuple[str, tuple[int, ...]]] = field(default_factory=Counter)
    last_calls: dict[tuple[int, ...], str] = field(default_factory=dict)

    def makes_call(self, name: str, ranks: tuple[int, ...]) -> None:
        """Counts a collective call of `ranks`, or of all ranks if that is empty."""
        self.num_calls[name, ranks] += 1
        self.last_calls[ranks] = name

    def num_steps(self) -> int:
        return self.steps()[0]

    def waited_s(self) -> float:
        waits_for, since_s = self.wait
        return time.monotonic() - since_s if waits_for else 0.0

    def answer(self, rank: int, about: Sequence[Call] = ()) -> Answer:
        """Returns what this rank does, and which of the calls in `about` it has not made."""
        step, has_begun = self.steps()
        waits_for, since_s = self.wait
        if waits_for:
            return Answer(
                step,
                waits_for,
                waited_s=time.monotonic() - since_s,
                since_s=since_s,
                calls=self._calls(),
                lacks=self._lacks(rank, about),
            )
        frames = frames_of(self.thread)
        doing = activity(frames, self._names())
        if not has_begun:
            since = f"since synchronization {step}" if step else "yet"
            doing += f", no training forward {since} (if its data has ended: finish())"
        return Answer(step, "", "\n".join((doing, *stack_lines(frames))))

    def _calls(self) -> list[Call]:
        return [
            Call(name, _runs(ranks), self.num_calls[name, ranks])
            for ranks, name in list(self.last_calls.items())
        ]

    def _lacks(self, rank: int, about: Sequence[Call]) -> list[Call]:
        counted = list(self.num_calls.items())  # the training thread may add to them
        made = {(name, _runs(ranks)): number for (name, ranks), number in counted}
        return [
            call
            for call in about
            if call.is_of(rank) and made.get((call.name, call.ranks), 0) < call.number
        ]

    def _names(self) -> dict[int, str]:
        """Returns the names of the model's modules, by id."""
        model = self.module()
        with contextlib.suppress(RuntimeError):  # the model may be changing at this moment
            if model is not None:
                return {id(module): name for name, module in model.named_modules()}
        return {}


@cache
def _runs(ranks: tuple[int, ...]) -> tuple[Run, ...]:
    return tuple(Ranks.of(ranks).runs)


def failed(rank: int, error: BaseException) -> Fault:
    """A rank has ended with an exception, or is about to."""
    # Without the page, which this rank's error names.
    text = (
        "".join(traceback.format_exception_only(error))
        .strip()
        .partition(f"\n{READ_MORE}")[0][:MAX_TEXT]
    )
    return Fault(
        PeerFailed,
        f"rank {rank} has failed: {text}",
        f"The step is incomplete on every rank. The traceback is in the log of rank {rank}.",
    )


def agreed(error: UndertowError) -> Fault:
    """An error that some ranks raise together, for others that wait for these."""
    what, *told = str(error).split("\n  ")
    remedy = told.pop() if told else ""
    return Fault(type(error), what, remedy, told="\n  ".join(told))


def _at(rank: int, host: str) -> str:
    return f"rank {rank} (host {host})" if host else f"rank {rank}"


def lost(rank: int, host: str = "") -> Fault:
    """The connection to a rank has ended; `host` is its machine, if ranks are on several."""
    return Fault(
        RankLost,
        f"{_at(rank, host)} is gone: its process exited or was killed without reporting an error.",
        "The step is incomplete on every rank. Find out why it ended (memory, the scheduler), "
        "and restart from a checkpoint.",
        lost_rank=rank,
    )


def silent(rank: int, silence_s: float, host: str = "") -> Fault:
    """The machine of a rank does not answer the kernel of this one, which a paused process does."""
    return Fault(
        RankLost,
        f"{_at(rank, host)} is gone: its machine has not answered for {silence_s:.0f} s.",
        "The step is incomplete on every rank. Find out if the machine or its network is down, and "
        "restart from a checkpoint.",
        lost_rank=rank,
    )


def left(rank: int, error: BaseException | None, num_steps: int) -> Fault:
    """A rank has closed its model or exited, normally or with an error that is not fatal to others
    by itself."""
    if error is not None:
        return failed(rank, error)
    return Fault(
        RankLost,
        f"rank {rank} {_LEFT}: it has finished after {num_steps} synchronizations, and others "
        "wait for it.",
        "Give every rank the same number of batches, have a rank without data call finish(), or "
        "train inside join() of the wrapper (not with a ShardedOptimizer).",
    )


def stalled(text: str) -> Fault:
    first, _, rest = text.partition("\n")
    of_call = _remedy_of_call(text)
    remedy = (
        "Find out why the late ranks are late, or set stall_timeout_s higher if such waits are "
        "expected."
    )
    if of_call:
        remedy = f"{of_call} If every rank does, find out why the late ranks are late."
    if ALL_WAIT_FOR_IT in first:
        remedy = (
            "Find out why the network is slow or interrupted, or set stall_timeout_s higher if "
            "such waits are expected."
        )
    if ALL_WAIT in first:
        remedy = (
            "Make the same calls on every rank, in the same order: look for one under "
            "`if rank == 0` or in a branch that only some ranks take."
        )
    if _STATE in text:
        remedy = of_call
    return Fault(StallTimeout, first, remedy, told=rest.strip())


def _remedy_of_call(text: str) -> str:
    """Returns the remedy if `text` names a wait for a call of every rank, or ""."""
    return next((remedy for name, remedy in _CALLS_OF_ALL.items() if name in text), "")


def timed_out(rank: int, report: str) -> Fault:
    """A collective ended before the stall timeout, because it exceeded the process group's
    timeout."""
    return Fault(
        StallTimeout,
        f"rank {rank} has waited for the whole timeout of the process group.",
        "Find out why the late ranks are late, or give the process group a longer timeout: "
        "stall_timeout_s has no effect above it.",
        told=report,
    )


def never_came(ranks: Sequence[int], waited_s: float) -> Fault:
    """Some ranks have not created the wrapper or the optimizer that others wait for."""
    return Fault(
        StallTimeout,
        f"{named(ranks)} {'have' if len(ranks) > 1 else 'has'} made no such wrapper or "
        f"ShardedOptimizer within {waited_s:.0f} s, and other ranks wait for it.",
        "Make it on every rank of the group, by the same class: `undertow run` starts all ranks. "
        "If that takes longer, set stall_timeout_s and the process group's timeout higher.",
    )


def raised() -> BaseException | None:
    """Returns the exception that this thread is leaving with, or None if the script ends
    normally."""
    error = sys.exc_info()[1]
    if isinstance(error, SystemExit):
        return error.__context__ if error.code else None
    return error


def activity(frames: Sequence[FrameType], modules: Mapping[int, str]) -> str:
    """Describes a thread's activity from its frames, innermost last.

    `modules` maps ids of the model's modules to names.
    """
    for frame in reversed(frames):
        path = frame.f_code.co_filename.replace(os.sep, "/")
        function = frame.f_code.co_name
        for part, text in _ACTIVITIES.items():
            if part in path:
                return text.format(function=function)
        name = modules.get(id(frame.f_locals.get("self"))) if function == "_call_impl" else None
        if name is not None:
            return f"in the forward of {name!r}" if name else "in the forward of the model"
    return "in code outside of the model"


def frames_of(thread: int) -> list[FrameType]:
    """Returns the stack of a thread, innermost frame last."""
    innermost = sys._current_frames().get(thread)
    frames = () if innermost is None else traceback.walk_stack(innermost)
    return [frame for frame, _ in frames][::-1]


def stack_lines(frames: Sequence[FrameType]) -> list[str]:
    """Returns file, line and function of the innermost frames, without values (maybe secret) or
    source (maybe stale).

    Of the frames of torch and Undertow only the innermost of all: the script's lines tell more.
    """
    told = [frame for frame in frames[:-1] if not _is_of_library(frame)] + [*frames[-1:]]
    return [
        f"{os.sep.join(frame.f_code.co_filename.split(os.sep)[-3:])}, line {frame.f_lineno}, in "
        f"{frame.f_code.co_name}"[:200]
        for frame in told[-_NUM_FRAMES:]
    ]


def _is_of_library(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(_LIBRARIES)


def fault_from(message: Mapping[str, Any]) -> Fault:
    """Parses a fault that another rank detected; raises KeyError if it is malformed."""
    lost_rank = message.get("lost_rank")
    return Fault(
        _KINDS[message["error"]],
        str(message["what"]),
        str(message["remedy"]),
        str(message["told"]),
        None if lost_rank is None else int(lost_rank),
    )


def tell(text: str) -> None:
    """Logs a report, or prints it to standard error if no logging handler is set up.

    Users must see it.
    """
    text = printable_lines(text)
    if any(
        not isinstance(handler, logging.NullHandler)
        for handler in (*_log.handlers, *logging.getLogger().handlers)
    ):
        _log.warning("%s", text)
    else:
        print(f"undertow: {text}", file=sys.stderr, flush=True)
