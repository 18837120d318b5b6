"""The tuner's decision on one rank, and its encoding for the other ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from undertow.errors import ConfigError
from undertow.plan import GathersBehind, GroupEntry, ParamSpec, Piece
from undertow.plan.layout import member_of, piece_of

_NUM_SINGLE = 7
# Planners cut a parameter into pieces of at least this size, or cut all together into fewer than _MOST_SMALL_PIECES.
_LEAST_PIECE_BYTES = 256 * 1024
_MOST_SMALL_PIECES = 1024


class Outcome(IntEnum):
    KEEP = 0  # another plan would gain too little
    MOVE = 1
    BACK = 2  # the previous plan was faster
    UNKNOWN = 3  # too few measurements
    FROZEN = 4  # the plan may no longer change
    OVERTAKEN = 5  # the plan changed while this was decided
    LEARN = 6  # buckets of other sizes, to learn their cost
    TOO_LARGE = 7  # every rank would have to hold all state for a moment
    FEWER = 8  # predicted to be as fast, with less work for the host


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The plan from now on; times are predictions in microseconds, from the start of a step until all gradients are reduced."""

    outcome: Outcome
    next_look: int  # steps until the next check
    present_us: float = 0.0  # under the current plan
    predicted_us: float = 0.0  # under the best plan
    limit_us: float = 0.0  # lower bound of every plan
    groups: tuple[tuple[GroupEntry, ...], ...] | None = None  # None: keep the plan
    gathers_behind: GathersBehind | None = None  # for that plan, if buckets are stepped in backward; None: not known

    def to_array(self, params: tuple[ParamSpec, ...]) -> NDArray[np.float64]:
        """Encodes the decision as numbers, a fixed count for these parameters. Exact: indices stay below 2^53."""
        rows = [
            (piece.param, piece.first, piece.stop, bucket)
            for bucket, group in enumerate(self.groups or ())
            for piece in (piece_of(member, params) for member in group)
        ]
        most = _most_rows(params)
        if len(rows) > most:
            raise ConfigError(
                f"a plan of {len(rows)} slots is too long to tell the other ranks of.",
                where=f"{len(params)} parameters, at most {most} slots",
                remedy="Cut parameters into fewer pieces.",
            )
        gathers = [(at, bucket) for at, behind in enumerate(self.gathers_behind or ()) for bucket in behind]
        numbers = np.zeros(_NUM_SINGLE + 4 * most + 2 * (most + 1))
        times = (self.present_us, self.predicted_us, self.limit_us)
        numbers[:_NUM_SINGLE] = (self.outcome, self.next_look, *times, len(rows), len(gathers))
        numbers[_NUM_SINGLE : _NUM_SINGLE + 4 * len(rows)] = np.asarray(rows, dtype=np.float64).reshape(-1)
        first = _NUM_SINGLE + 4 * most
        numbers[first : first + 2 * len(gathers)] = np.asarray(gathers, dtype=np.float64).reshape(-1)
        return numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class Decided:
    """A decision, and the synchronization after which it was made."""

    round: int  # number of the synchronization, from 0, among those with these parameters
    decision: Decision


def _most_rows(params: Sequence[ParamSpec]) -> int:
    return len(params) + _MOST_SMALL_PIECES + sum(spec.num_bytes for spec in params) // _LEAST_PIECE_BYTES


def decision_from_array(numbers: NDArray[np.float64], params: tuple[ParamSpec, ...]) -> Decision:
    """Decodes the numbers of `Decision.to_array`."""
    outcome, next_look, present_us, predicted_us, limit_us, num_rows, num_gathers = numbers[:_NUM_SINGLE].tolist()
    rows = numbers[_NUM_SINGLE : _NUM_SINGLE + 4 * int(num_rows)].astype(np.int64).reshape(-1, 4).tolist()
    groups: dict[int, list[GroupEntry]] = {}
    for param, first, stop, bucket in rows:
        groups.setdefault(bucket, []).append(member_of(Piece(param=param, first=first, stop=stop), params))
    return Decision(
        outcome=Outcome(int(outcome)),
        next_look=int(next_look),
        present_us=present_us,
        predicted_us=predicted_us,
        limit_us=limit_us,
        groups=tuple(map(tuple, groups.values())) if rows else None,
        gathers_behind=_gathers_behind(numbers[_NUM_SINGLE + 4 * _most_rows(params) :], int(num_gathers)),
    )


def _gathers_behind(numbers: NDArray[np.float64], num_gathers: int) -> GathersBehind | None:
    behind: list[list[int]] = [[] for _ in range(num_gathers)]  # every bucket is gathered once
    for at, bucket in numbers[: 2 * num_gathers].astype(np.int64).reshape(-1, 2).tolist():
        behind[at].append(bucket)
    return tuple(map(tuple, behind)) or None
