"""One synchronization, or one backward that only accumulates: how it begins, and what its ranks report."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from undertow.errors import ReplicaMismatch
from undertow.plan.layout import ALIKE
from undertow.runtime.gradients.trailer import Reading
from undertow.schedule import Arrivals

# For each group of an optimizer that has stepped: what it is called, and its settings by name.
Settings = tuple[tuple[str, tuple[tuple[str, Any], ...]], ...]


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
    is_last: bool = True  # of the step, which adds up no more gradients
    mode: int | None = 0  # must be the same on every rank; None on a rank that accepts the mode of the others
    rescale: float = 1.0  # factor for the mean over all ranks, if some of them have run out of data
    op: str | None = None  # of a reduction by hand, if it is not the mean
    settings: Settings = ()  # with which optimizers have stepped since the last synchronization
    loaded: int = 0  # digest of parameters that `load_state_dict` has changed here; 0 without any
    alike: Sequence[int | None] = (None,) * len(ALIKE)  # a digest for each; None accepts the others'
    is_read_at_once: bool = False  # on devices too: the contents of its trailers count when it ends
    is_synchronized: bool = True  # False if it only accumulates
    keeps_own: bool = False  # buckets keep this rank's gradients, because shards are to be reduced from them


@dataclass(slots=True)
class RoundResult:
    """This rank's reports to a round, and the findings of all ranks there."""

    round: Round
    has_failed: bool = False
    taken: set[int] = field(default_factory=set)  # parameters whose gradient arrived here and was gone when its bucket left
    unused: dict[int, list[int]] = field(default_factory=dict)  # bucket -> positions unused on this rank
    readings: list[Reading] = field(default_factory=list)
    nonfinite: dict[int, frozenset[int]] = field(default_factory=dict)  # bucket -> positions, on any rank
    keeps_earlier: bool = False  # its results are added to earlier ones of the step
    busy_ms: tuple[float, ...] = ()
    apart: ReplicaMismatch | None = None  # the error, if load_state_dict has made replicas differ

    @property
    def late_buckets(self) -> list[int]:
        """Buckets with a gradient, on some rank, that arrived after they had been launched."""
        return self.reported("late_buckets", overdue=False)

    @property
    def unlike(self) -> set[str]:
        """Those of ALIKE in which ranks differ."""
        return {fact for reading in self.readings for fact in reading.unlike}

    def reported(self, field: str, *, overdue: bool = True) -> list[int]:
        """Returns the ranks, or buckets, that the trailers list in that field; with or without trailers of earlier rounds."""
        if not self.readings:
            return []
        readings = (reading for reading in self.readings if overdue or not reading.is_overdue)
        return sorted({number for reading in readings for number in getattr(reading, field)})
