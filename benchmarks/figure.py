"""A measured figure beside its target."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

Row = dict[str, Any]  # one measurement as flat values; what is nested goes to bench.jsonl only
Tell = Callable[[str], None]  # says what is being measured now


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One line of the final table. Without a target it is for information."""

    name: str
    measured: float
    unit: str  # "" for a plain number
    num_decimals: int = 2
    at_most: float | None = None  # the target

    @property
    def is_met(self) -> bool | None:
        """True if the measured value, not its rounded form, meets the target; None without one."""
        return None if self.at_most is None else self.measured <= self.at_most

    @property
    def measured_text(self) -> str:
        return self._with_unit(self.measured)

    @property
    def target_text(self) -> str:
        return "-" if self.at_most is None else f"≤ {self._with_unit(self.at_most)}"

    @property
    def verdict(self) -> str:
        return "-" if self.is_met is None else "yes" if self.is_met else "NO"

    def to_dict(self) -> Row:
        return {
            "figure": self.name,
            "measured": self.measured,
            "unit": self.unit,
            "text": self.measured_text,
            "target": self.target_text,
            "is_met": self.is_met,
        }

    def _with_unit(self, value: float) -> str:
        text = f"{value:.{self.num_decimals}f}"
        return f"{text} {self.unit}" if self.unit else text


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One benchmark of the suite."""

    name: str
    title: str
    measure: Callable[[bool, Tell], Sequence[Row]]  # given whether it has to be quick
    judge: Callable[[Sequence[Row]], Sequence[Figure]]


def row_where(rows: Sequence[Row], **values: Any) -> Row:
    """The first row with those values."""
    return next(row for row in rows if all(row[key] == value for key, value in values.items()))
