"""The exception tree.

    UndertowError (RuntimeError)
    ├── ConfigError (ValueError)      a setting, an argument or a file cannot work
    │   └── WrongType (TypeError)     an argument has a type that cannot work
    ├── PlanMismatch                  ranks disagree about parameters, plan or settings
    ├── PhaseError                    a call does not fit the current phase of the step
    ├── ShardedGradientError          a gradient was used of which each rank has only its shard
    ├── NonFiniteGradient             a gradient, or the norm of all, is not finite (NaN or Inf)
    ├── ReplicaMismatch               parameters differ between ranks
    ├── CheckpointError               a checkpoint, or a state, cannot be saved or loaded
    ├── Desync                        ranks are in different steps, plan generations or modes
    ├── PeerFailed                    another rank reported an error in this step, or ended with one
    ├── RankLost                      another rank's process is gone, or left while others wait for it
    └── StallTimeout (TimeoutError)   a rank has waited for others longer than the limit

Every message has three parts: what happened, where, and what to do. All are RuntimeErrors, like most of torch's own errors about
distributed training: code that catches those keeps working.
"""

import difflib
from collections.abc import Collection

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


class UndertowError(RuntimeError):
    """Base of all errors of this library; `str()` gives what happened, where, and what to do, one line each.

    Control characters are shown as escapes, because a traceback prints an error as it is.
    """

    def __init__(self, what: str, *, where: str = "", remedy: str = "") -> None:
        # One argument only, so that the error survives pickling between processes unchanged.
        super().__init__(printable_lines("\n  ".join(part for part in (what, where, remedy) if part)))


class ConfigError(UndertowError, ValueError):
    """A setting, an argument or a file cannot work."""


class WrongType(ConfigError, TypeError):
    """An argument has a type that cannot work."""


class PlanMismatch(UndertowError):
    """Ranks disagree about parameters, plan or settings; raised on every rank."""


class PhaseError(UndertowError):
    """A call does not fit the current phase of the step."""


class ShardedGradientError(UndertowError):
    """A gradient was used of which each rank has only its shard."""


class NonFiniteGradient(UndertowError):
    """A gradient, or the norm of all gradients, is not finite (NaN or Inf)."""


class ReplicaMismatch(UndertowError):
    """Parameters differ between ranks; raised on every rank."""


class CheckpointError(UndertowError):
    """A checkpoint, or the state of an optimizer, cannot be saved or loaded."""


class Desync(UndertowError):
    """Ranks are in different steps, plan generations or modes; raised on every rank."""


class PeerFailed(UndertowError):
    """Another rank reported an error in this step, or ended with one."""


class RankLost(UndertowError):
    """Another rank's process is gone, or left while others wait for it; raised on every remaining rank."""


class StallTimeout(UndertowError, TimeoutError):
    """A rank has waited for others longer than the limit; raised on every rank that has wrapped its model."""


def require(holds: object, what: str, *, where: str = "", remedy: str = "", error: type[UndertowError] = ConfigError) -> None:
    """Raises `error` unless `holds` is true."""
    if not holds:
        raise error(what, where=where, remedy=remedy)


def suggestion(name: object, known: Collection[str], *, all_known: str = "Known") -> str:
    """Returns the remedy for a name that is not known: the one it resembles, or all."""
    close = difflib.get_close_matches(str(name), known, n=1)
    return f"Did you mean {close[0]!r}?" if close else f"{all_known}: {', '.join(known)}."
