"""What the tuner decides on one rank, and how the other ranks learn of it."""

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
# Planners cut a parameter into pieces that are no smaller than this, or all together into fewer than so many.
_LEAST_PIECE_BYTES = 256 * 1024
_MOST_SMALL_PIECES = 1024


class Outcome(IntEnum):
    KEEP = 0  # another plan would gain too little
    MOVE = 1
    BACK = 2  # the plan before was faster
    UNKNOWN = 3  # too little was measured
    FROZEN = 4  # the plan may not change any more
    OVERTAKEN = 5  # the plan has changed while this was decided
    LEARN = 6  # buckets of other sizes, to find out what those cost
    TOO_LARGE = 7  # all state would have to be on every rank for a moment
    FEWER = 8  # as good by prediction, and less work for the host


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The plan from now on; times are predicted ones, in microseconds, from the begin of a step until all is reduced."""

    outcome: Outcome
    next_look: int  # after so many steps
    present_us: float = 0.0  # under the plan so far
    predicted_us: float = 0.0  # under the best plan
    limit_us: float = 0.0  # under no plan is it less
    groups: tuple[tuple[GroupEntry, ...], ...] | None = None  # None: the plan stays
    gathers_behind: GathersBehind | None = None  # where buckets are stepped in backward, of that plan; None: not known

    def to_array(self, params: tuple[ParamSpec, ...]) -> NDArray[np.float64]:
        """Numbers, as many for every decision on these parameters. Exact: indices stay below 2^53."""
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
    """A decision, and when it fell."""

    round: int  # from 0, of the rounds with these parameters
    decision: Decision


def _most_rows(params: Sequence[ParamSpec]) -> int:
    return len(params) + _MOST_SMALL_PIECES + sum(spec.num_bytes for spec in params) // _LEAST_PIECE_BYTES


def decision_from_array(numbers: NDArray[np.float64], params: tuple[ParamSpec, ...]) -> Decision:
    """Inverse of `Decision.to_array`."""
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
