"""The reasons why a step cannot continue, as values and as texts.

Fault                              a reason, the same on every rank that learns of it
lost, silent, left, failed, ...    the faults: who finds one calls its function
is_of_transport, is_timeout        errors of transports, which have a fault as their reason
tell                               prints a report

Reasons: docs/design/lost-ranks.md.
"""

import logging
import re
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

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
from undertow.ranks.answers import ALL_WAIT, ALL_WAIT_FOR_IT, MAX_TEXT, named

_log = logging.getLogger("undertow")
_LEFT = "has left"
_STATE = "every rank must call"  # in the name of a wait
# By a part of the name of a wait: the remedy if it is for a call that one rank alone often makes.
_CALLS_OF_ALL = {
    _STATE: "Make the call on every rank, not under `if rank == 0`. To save on one "
    "rank, every rank calls consolidate_state_dict() first.",
    "to save a checkpoint": "Call save_checkpoint() on every rank, not under `if rank == 0`.",
    "to load a checkpoint": "Call load_checkpoint() on every rank, not under `if rank == 0`.",
}
# by their names in messages
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
# Timeouts of a collective (also of one whose connections another collective's timeout has closed:
# of several in flight, either may report first), of the stores that groups are made through, and of
# connecting. The kernel's messages about a connection are worded differently.
_TIME_IS_OVER = re.compile(
    r"time(d )?out waiting|operation timed out!|application timeout caused|(wait|socket|connect) "
    r"timeout",
    re.IGNORECASE,
)
# Words of transports (gloo, NCCL, the store) when a connection breaks.
_OF_TRANSPORTS = re.compile(
    r"connection|closed|reset|broken pipe|time.?out|timed "
    r"out|socket|gloo|nccl|peer|abort",
    re.IGNORECASE,
)


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
    """The machine of a rank does not answer the kernel of this one; a paused process answers."""
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


def is_timeout(error: BaseException) -> bool:
    """Returns True if a wait has lasted too long, for another rank or for the store."""
    return _TIME_IS_OVER.search(str(error)) is not None


def is_of_transport(error: BaseException) -> bool:
    """Returns True if a connection may have broken; other errors have no reason to wait for."""
    return _OF_TRANSPORTS.search(str(error)) is not None


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
