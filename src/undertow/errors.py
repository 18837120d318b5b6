"""The exception tree.

    UndertowError (RuntimeError)
    ├── ConfigError (ValueError)      a setting, an argument or a file that cannot work
    │   └── WrongType (TypeError)     an argument of a type that cannot work
    ├── PlanMismatch                  ranks disagree about parameters, plan or settings
    ├── PhaseError                    a call that does not fit where the step is
    ├── ShardedGradientError          a use of a gradient of which each rank has only its shard
    ├── NonFiniteGradient             a gradient, or the norm of all, that is infinite or no number
    ├── ReplicaMismatch               parameters that are no longer the same on all ranks
    ├── CheckpointError               a checkpoint, or a state, that cannot be saved or loaded
    ├── Desync                        ranks are in different steps, plan generations or modes
    ├── PeerFailed                    another rank reported an error in this step, or has ended with one
    ├── RankLost                      another rank's process is gone, or has left while others wait for it
    └── StallTimeout (TimeoutError)   a rank has waited for others longer than it was to

Every message has three parts: what happened, where, and what to do. All are RuntimeErrors, as most of torch's own errors
about distributed training are: code that catches those keeps working.
"""

from __future__ import annotations

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
    """Base of all errors of this library; `str()` is what happened, where, and what to do, a line each.

    Control characters are shown as escapes, for a traceback prints an error as it is.
    """

    def __init__(self, what: str, *, where: str = "", remedy: str = "") -> None:
        # One argument only, so that the error survives pickling between processes unchanged.
        super().__init__(printable_lines("\n  ".join(part for part in (what, where, remedy) if part)))


class ConfigError(UndertowError, ValueError):
    """A setting, an argument or a file that cannot work."""


class WrongType(ConfigError, TypeError):
    """An argument of a type that cannot work."""


class PlanMismatch(UndertowError):
    """Ranks disagree about parameters, plan or settings; raised on every rank."""


class PhaseError(UndertowError):
    """A call that does not fit where the step is."""


class ShardedGradientError(UndertowError):
    """A use of a gradient of which each rank has only its shard."""


class NonFiniteGradient(UndertowError):
    """A gradient, or the norm of all of them, that is infinite or no number."""


class ReplicaMismatch(UndertowError):
    """Parameters are no longer the same on all ranks; raised on every rank."""


class CheckpointError(UndertowError):
    """A checkpoint, or a state of an optimizer, that cannot be saved or loaded."""


class Desync(UndertowError):
    """Ranks are in different steps, plan generations or modes; raised on every rank."""


class PeerFailed(UndertowError):
    """Another rank reported an error in this step, or has ended with one."""


class RankLost(UndertowError):
    """Another rank's process is gone, or has left while others wait for it; raised on every rank that is left."""


class StallTimeout(UndertowError, TimeoutError):
    """A rank has waited for others longer than it was to; raised on every rank that has wrapped its model."""
