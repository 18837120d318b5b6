"""A round under way."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from undertow.runtime.execute.executor import Round
from undertow.schedule import Releases


@dataclass(slots=True)
class OpenRound:
    """The round under way, and how far it has come."""

    round: Round
    releases: Releases
    holds_back: bool  # nothing leaves before the end of backward, as under a plan that not all ranks have agreed on
    ending: Iterator[None] | None = None  # what follows backward, in parts: see Engine._end_round

    @property
    def is_launched(self) -> bool:
        """Whether its last bucket has left, or may leave."""
        return self.ending is not None
