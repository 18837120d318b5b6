"""Faults and states of ranks, as values and as text; no torch, no sockets."""

from __future__ import annotations

import logging
import os
import sys
import traceback
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any, TypedDict

from undertow.errors import CheckpointError, NonFiniteGradient, PeerFailed, RankLost, StallTimeout, UndertowError
from undertow.foreign import printable_lines

_log = logging.getLogger("undertow")
_NUM_FRAMES = 12
_MAX_TEXT = 2000  # limit on the characters of an error or a stack that are sent
_UNKNOWN, _NO_MODEL = -1, -2  # special values of the number of synchronizations


@dataclass(frozen=True, slots=True)
class Fault:
    """The reason why a step cannot continue, the same on every rank that learns of it."""

    kind: type[UndertowError]
    what: str
    remedy: str
    told: str = ""  # details from the rank that detected it, several lines

    def error(self, where: str) -> UndertowError:
        """Returns a new error each time: raising one twice would accumulate both tracebacks."""
        return self.kind(self.what, where="\n  ".join(part for part in (where, self.told) if part), remedy=self.remedy)


class State(TypedDict):
    """A rank's own report of its activity."""

    rank: int
    step: int  # completed synchronizations; negative if unknown
    doing: str
    waits_for: str  # the wait of the group in question; empty if the rank does not wait
    waited_s: float
    stack: list[str]


def failed(rank: int, text: str) -> Fault:
    """A rank has ended with an exception, or is about to."""
    remedy = f"The step is incomplete on every rank. The traceback is in the log of rank {rank}."
    return Fault(PeerFailed, f"rank {rank} has failed: {text}", remedy)


def lost(rank: int) -> Fault:
    """A rank's process died without a message."""
    return Fault(
        RankLost,
        f"rank {rank} is gone: its process has ended without a word, or was killed.",
        "The step is incomplete on every rank. Look for what has ended it (memory, the scheduler), and start from a checkpoint.",
    )


def finished(rank: int, num_steps: int) -> Fault:
    """A rank has closed its model or exited normally."""
    return Fault(
        RankLost,
        f"rank {rank} has left: it has finished after {num_steps} synchronizations, and others wait for it.",
        "Give every rank as many batches, train inside join() of the wrapper, or have a rank without data call finish().",
    )


def stalled(text: str) -> Fault:
    """A rank has waited too long."""
    first, _, rest = text.partition("\n")
    return Fault(
        StallTimeout,
        first,
        "Look at what the late ranks are doing, or set stall_timeout_s higher if that is how it must be.",
        told=rest.strip(),
    )


def timed_out(rank: int, report: str) -> Fault:
    """A collective ended before the stall timeout, because it exceeded the process group's timeout."""
    return Fault(
        StallTimeout,
        f"rank {rank} has waited for as long as the process group's timeout lets it.",
        "Look at what the late ranks are doing, or give the process group a longer timeout: "
        "stall_timeout_s above it does nothing.",
        told=report,
    )


def never_came(ranks: Sequence[int], waited_s: float) -> Fault:
    """Some ranks have not created the wrapper that others wait for."""
    named = ", ".join(map(str, ranks))
    return Fault(
        StallTimeout,
        f"rank {named} has made no such wrapper within {waited_s:.0f} s, and other ranks wait for it.",
        "Wrap the model on every rank of the group. "
        "If that takes longer, set stall_timeout_s and the process group's timeout higher.",
    )


def gathers_alone(rank: int, *, missed_by: int) -> Fault:
    """A rank gathers the state of an optimizer while another one continues to train."""
    return Fault(
        CheckpointError,
        f"rank {rank} called state_dict() of a ShardedOptimizer, which gathers it from every rank, and rank {missed_by} did not.",
        "Call it on every rank. Before a framework calls it on one rank only, call consolidate_state_dict() on every rank.",
    )


def stopped(rank: int) -> State:
    """The state that a neighbor reports for a rank that cannot answer."""
    return State(rank=rank, step=_UNKNOWN, doing="stopped by a signal", waits_for="", waited_s=0.0, stack=[])


def without_model(rank: int, thread: int) -> State:
    """The state of a rank that was asked about a model it has not created; its script runs in `thread`."""
    frames = frames_of(thread)
    doing = f"has made no such wrapper, {activity(frames, {})}"
    return State(rank=rank, step=_NO_MODEL, doing=doing, waits_for="", waited_s=0.0, stack=stack_lines(frames))


def printable(said: Any) -> Any:
    """Escapes control characters in the texts of a message: they must not control a terminal."""
    match said:
        case str():
            return printable_lines(said)
        case dict():
            return {key: printable(part) for key, part in said.items()}
        case list():
            return [printable(part) for part in said]
    return said


def text_of(error: BaseException) -> str:
    """Returns an exception as one line, or a few."""
    return "".join(traceback.format_exception_only(error)).strip()[:_MAX_TEXT]


def late_ranks(asking: State, states: Mapping[int, State], *, ranks: Collection[int]) -> set[int]:
    """Returns the ranks that do not wait like the asking one."""
    return {rank for rank in ranks if rank != asking["rank"] and (rank not in states or not states[rank]["waits_for"])}


def stall_text(asking: State, states: Mapping[int, State], gone: Mapping[int, str], *, ranks: Collection[int]) -> str:
    """Describes each rank's wait or activity; ranks with the same states produce the same text."""
    late = late_ranks(asking, states, ranks=ranks)
    late = late - gone.keys() or late
    how = "has made no such wrapper" if all(_has_no_model(states.get(rank)) for rank in late) else "has not come"
    named = f"rank {', '.join(map(str, sorted(late)))} {how}" if late else "all ranks wait, for different things"
    lines = [f"rank {asking['rank']} has waited {asking['waited_s']:.0f} s for {asking['waits_for']}: {named}."]
    for rank in ranks:
        state = states.get(rank)
        if rank in gone:
            lines.append(gone[rank])
        elif state is None:
            lines.append(f"rank {rank}: no answer; it is stopped, out of reach, or in a call that keeps Python from running")
        elif state["waits_for"]:
            lines.append(f"rank {rank}: synchronization {state['step']}, waits for {state['waits_for']}")
        else:
            step = f"synchronization {state['step']}, " if state["step"] >= 0 else ""
            lines.append(f"rank {rank}: {step}{state['doing']}")
            lines += [f"  {line}" for line in state["stack"]]
    return "\n  ".join(lines)


def _has_no_model(state: State | None) -> bool:
    return state is not None and state["step"] == _NO_MODEL


def activity(frames: Sequence[FrameType], modules: Mapping[int, str]) -> str:
    """Describes a thread's activity from its frames, innermost last; `modules` maps ids of the model's modules to names."""
    for frame in reversed(frames):
        path = frame.f_code.co_filename
        if _lies_in(path, "torch", "utils", "data"):
            return "loading data"
        if _lies_in(path, "torch", "optim"):
            return "in the optimizer"
        if path.endswith(os.path.join("torch", "distributed", "distributed_c10d.py")):
            return f"in {frame.f_code.co_name} of torch.distributed"
        if _lies_in(path, "torch", "autograd") or path.endswith(os.path.join("torch", "_tensor.py")):
            return "in backward"
        if frame.f_code.co_name == "_call_impl" and id(frame.f_locals.get("self")) in modules:
            name = modules[id(frame.f_locals["self"])]
            return f"in the forward of {name!r}" if name else "in the forward of the model"
    return "in code outside of the model"


def idle_since(num_steps: int) -> str:
    """Describes a rank that has left its training loop or is between two steps."""
    return f", no training forward since synchronization {num_steps}" if num_steps else ", no training forward yet"


def frames_of(thread: int) -> list[FrameType]:
    """Returns the stack of a thread, innermost frame last."""
    frame = sys._current_frames().get(thread)
    frames: list[FrameType] = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames[::-1]


def stack_lines(frames: Sequence[FrameType]) -> list[str]:
    """Returns file, line and function of the innermost frames, without values (maybe secret) or source (maybe stale)."""
    return [f"{_short(frame.f_code)}, line {frame.f_lineno}, in {frame.f_code.co_name}"[:200] for frame in frames[-_NUM_FRAMES:]]


def fault_from(message: Mapping[str, Any]) -> Fault:
    """Parses a fault that another rank detected; raises KeyError if it is malformed."""
    kinds = {kind.__name__: kind for kind in (CheckpointError, NonFiniteGradient, PeerFailed, RankLost, StallTimeout)}
    return Fault(kinds[message["error"]], str(message["what"]), str(message["remedy"]), str(message["told"]))


def state_from(message: Mapping[str, Any]) -> State:
    """Parses another rank's state; raises ValueError, TypeError or KeyError if it is malformed."""
    return State(
        rank=int(message["rank"]),
        step=int(message["step"]),
        doing=str(message["doing"])[:_MAX_TEXT],
        waits_for=str(message["waits_for"])[:_MAX_TEXT],
        waited_s=float(message["waited_s"]),
        stack=[str(line)[:200] for line in message["stack"][:_NUM_FRAMES]],
    )


def tell(text: str) -> None:
    """Logs a report, or prints it to standard error if no logging handler is set up: users must see it."""
    text = printable_lines(text)
    is_heard = any(not isinstance(handler, logging.NullHandler) for handler in (*_log.handlers, *logging.getLogger().handlers))
    if is_heard:
        _log.warning("%s", text)
    else:
        print(f"undertow: {text}", file=sys.stderr, flush=True)


def _lies_in(path: str, *folders: str) -> bool:
    return os.path.join("", *folders, "") in path


def _short(code: CodeType) -> str:
    return os.sep.join(code.co_filename.split(os.sep)[-3:])
