"""The exception tree.

    UndertowError (RuntimeError)
    ├── ConfigError (ValueError)      a setting, an argument or a file cannot work
    │   └── WrongType (TypeError)     an argument has a type that cannot work
    ├── PlanMismatch                  ranks disagree about parameters, plan or settings
    ├── PhaseError                    a call does not fit the current phase of the step
    ├── ShardedGradientError          a gradient was used, and each rank has only its shard
    ├── NonFiniteGradient             a gradient, the norm of all, or a replica is not finite
    ├── ReplicaMismatch               parameters, or written gradients, differ between ranks
    ├── CheckpointError               a checkpoint, or a state, cannot be saved or loaded
    ├── Desync                        ranks are in different steps, plan generations or modes
    ├── PeerFailed                    another rank reported an error in this step, or ended with one
    ├── RankLost                      another rank's process is gone, or left while others wait
    └── StallTimeout (TimeoutError)   a rank has waited for others longer than the limit

Every message has three parts: what happened, where, and what to do. A traceback also names the page
to read. All errors are RuntimeErrors, like most of torch's own errors about distributed training:
code that catches those keeps working.
"""

import difflib
import tempfile
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path

from undertow.foreign import printable_lines

__all__ = [
    "CheckpointError",
    "ConfigError",
    "Desync",
    "NonFiniteGradient",
    "PeerFailed",
    "PhaseError",
    "PlanMismatch",
    "RankLost",
    "ReplicaMismatch",
    "ShardedGradientError",
    "StallTimeout",
    "UndertowError",
    "WrongType",
]


# the note below a message begins so
READ_MORE = "Read more: undertow docs "


class UndertowError(RuntimeError):
    """Base of all errors of this library; `str()` gives what happened, where, and what to do, one
    line each.

    Control characters are shown as escapes, because a traceback prints an error as it is. `page` is
    the page of the documentation that the traceback names below the message: the command
    `undertow docs PAGE` prints it.
    """

    page = "troubleshooting"

    def __init__(self, what: str, *, where: str = "", remedy: str = "") -> None:
        # One argument only, so that the error survives pickling between processes unchanged.
        super().__init__(
            printable_lines("\n  ".join(part for part in (what, where, remedy) if part))
        )
        self.add_note(f"{READ_MORE}{self.page}")


class ConfigError(UndertowError, ValueError):
    """A setting, an argument or a file cannot work."""


class WrongType(ConfigError, TypeError):
    """An argument has a type that cannot work."""


class PlanMismatch(UndertowError):
    """Ranks disagree about parameters, plan or settings; raised on every rank."""

    page = "reliability"


class PhaseError(UndertowError):
    """A call does not fit the current phase of the step."""


class ShardedGradientError(UndertowError):
    """A gradient was used, and each rank has only its shard of it."""

    page = "sharded-optimizer"


class NonFiniteGradient(UndertowError):
    """A gradient, the norm of all gradients, or a replica's value is not finite (NaN or Inf)."""

    page = "reliability"


class ReplicaMismatch(UndertowError):
    """Parameters, or gradients that a program has written for a sharded optimizer, differ between
    ranks; raised on every rank."""

    page = "reproducibility"


class CheckpointError(UndertowError):
    """A checkpoint, or the state of an optimizer, cannot be saved or loaded."""

    page = "checkpoints"


class Desync(UndertowError):
    """Ranks are in different steps, plan generations or modes; raised on every rank."""

    page = "reliability"


# `Watch.check` and `Watch.raise_reason` (ranks/watch.py) raise the next three, which `Fault.error`
# makes. So do a meeting (ranks/meeting.py) and, if a backward has failed, `require_sound`
# (engine/agreed_errors.py).
class PeerFailed(UndertowError):
    """Another rank reported an error in this step, or ended with one."""

    page = "reliability"


class RankLost(UndertowError):
    """Another rank's process is gone, or left while others wait for it.

    Raised on every remaining rank.
    """

    page = "reliability"


class StallTimeout(UndertowError, TimeoutError):
    """A rank has waited for others longer than the limit.

    Raised on every rank that has wrapped its model.
    """

    page = "reliability"


def require(
    holds: object,
    what: str,
    *,
    where: str = "",
    remedy: str = "",
    error: type[UndertowError] = ConfigError,
) -> None:
    """Raises `error` unless `holds` is true."""
    if not holds:
        raise error(what, where=where, remedy=remedy)


def suggestion(
    name: object, known: Collection[str], *, all_known: str = "Known", instead: str = ""
) -> str:
    """Returns the remedy for a name that is not known.

    The one it resembles, or `instead`, by default all.
    """
    return _did_you_mean(str(name), known) or instead or f"{all_known}: {', '.join(known)}."


def one_of(value: object, choices: Iterable[object]) -> str:
    """Returns the remedy for a value that is not one of a few: the one it resembles, and all."""
    choices = list(choices)
    every = f"Choose one of: {', '.join(map(repr, choices))}."
    if not isinstance(value, str):
        return every
    names = [choice for choice in choices if isinstance(choice, str)]
    return f"{_did_you_mean(value, names)} {every}".lstrip()


def _did_you_mean(name: str, known: Collection[str]) -> str:
    """Returns a question for the known name that this one resembles, or an empty text."""
    close = difflib.get_close_matches(name, known, n=1)
    return f"Did you mean {close[0]!r}?" if close else ""


def require_known(
    names: Iterable[str],
    known: Collection[str],
    kind: str,
    *,
    where: str,
    remedies: Mapping[str, str] | None = None,
) -> None:
    """Raises ConfigError for the first name that is not known, with its remedy or the known name
    that it resembles."""
    for name in (name for name in names if name not in known):
        remedy = (remedies or {}).get(name) or suggestion(
            name, sorted(known), all_known=f"Known {kind}s"
        )
        raise ConfigError(f"{kind} {name!r} does not exist.", where=where, remedy=remedy)


def make_directory(path: Path, *, where: str) -> None:
    """Creates the directory if it is missing; raises ConfigError if nothing can be written
    there."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise ConfigError(
            f"nothing can be written to {str(path)!r}: {error.strerror}.",
            where=where,
            remedy="Give another directory: --out DIR.",
        ) from error


def all_of(*calls: Callable[[], object]) -> None:
    """Calls all of `calls`, because other ranks wait in each, and then raises the first error."""
    first: UndertowError | None = None
    for call in calls:
        try:
            call()
        except UndertowError as error:
            first = first or error
    if first is not None:
        raise first


def listed(names: Sequence[str], *, most: int = 3) -> str:
    """Returns the first `most` names as text, and the number of the others."""
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"
