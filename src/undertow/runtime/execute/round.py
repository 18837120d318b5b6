"""One synchronization, or one backward that only accumulates: how it begins, and what its ranks report."""

from collections.abc import Callable, Collection, Generator, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from undertow.runtime.gradients.trailer import Reading
from undertow.runtime.gradients.weights import RoundWeights
from undertow.schedule import Arrivals, Releases


class RoundKind(Enum):
    """The treatment of gradients in a round."""

    ACCUMULATE = auto()  # packs them, or leaves them in place, and sends nothing
    REDUCE = auto()
    SHADOW = auto()  # contributes none: this rank has run out of data
    RETIRE = auto()  # the last one under a plan before its parameters, or its communication hook, change


@dataclass(frozen=True, kw_only=True)
class Round:
    """A round as its beginning decides it."""

    kind: RoundKind
    number: int  # of the synchronization
    generation: int  # of the plan
    not_arrived: Callable[[int], Sequence[int]]  # bucket -> positions without a new gradient on this rank
    arrivals: Arrivals | None = None  # of this rank's gradients
    rebinds: Callable[[int], Collection[int]] | None = None  # bucket -> positions that take over others' values; None: all
    is_last: bool = True  # of the step, which adds up no more gradients
    mode: int | None = 0  # must be the same on every rank; None on a rank that accepts the mode of the others
    rescale: float = 1.0  # factor for the mean over all ranks, if some of them have run out of data
    weights: RoundWeights | None = None  # the divisor of sums, if losses are weighted
    op: str | None = None  # of a reduction by hand, if it differs from the settings'
    has_other_buffers: bool = False  # buffers differ from the compared ones
    is_read_at_once: bool = False  # on devices too: the contents of its trailers count when it ends
    is_synchronized: bool = True  # False if it only accumulates


@dataclass(slots=True)
class RoundResult:
    """This rank's reports to a round, and the findings of all ranks there."""

    round: Round
    has_failed: bool = False
    misuse: int = 0  # the reason why a reduction by hand is wrong here, or 0
    unused: dict[int, list[int]] = field(default_factory=dict)  # bucket -> positions unused on this rank
    readings: list[Reading] = field(default_factory=list)
    nonfinite: dict[int, frozenset[int]] = field(default_factory=dict)  # bucket -> positions, on any rank
    keeps_earlier: bool = False  # its results are added to earlier ones of the step
    busy_ms: tuple[float, ...] = ()

    @property
    def late_buckets(self) -> list[int]:
        """Buckets with a gradient, on some rank, that arrived after they had been launched."""
        return self.reported("late_buckets", overdue=False)

    def reported(self, field: str, *, overdue: bool = True) -> list[int]:
        """Returns the ranks, or buckets, that the trailers list in that field; with or without trailers of earlier rounds."""
        if not self.readings:
            return []
        readings = (reading for reading in self.readings if overdue or not reading.is_overdue)
        return sorted({number for reading in readings for number in getattr(reading, field)})


@dataclass(slots=True)
class OpenRound:
    """The round under way, and how far it is."""

    round: Round
    result: RoundResult
    releases: Releases
    holds_back: bool  # nothing is launched before the end of backward, as under a plan that not all ranks have agreed on
    ending: Generator[None, None, None] | None = (
        None  # the rest after backward, in parts: see RoundRunner._end_round; None while backward runs
    )
