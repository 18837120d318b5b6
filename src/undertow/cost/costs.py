"""What collectives take, as a function of their payload: one interface for measured curves and for formulas."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from undertow.cost.link import Link, collective_seconds


class Costs(Protocol):
    """Time on the communication lane. A bucket without bytes is not free: it still is a collective."""

    def collective_us(self, kind: str, num_bytes: ArrayLike) -> NDArray[np.float64]:
        """Microseconds of one collective of that kind ("all_reduce", "reduce_scatter", "all_gather"), of any shape of sizes.

        `num_bytes` is the whole payload, as the full tensor has it. Not decreasing in it.
        """
        ...


class RingCosts:
    """Ring algorithms over `num_ranks` ranks, each with its own `link`."""

    def __init__(self, link: Link, *, num_ranks: int) -> None:
        self._link = link
        self._num_ranks = num_ranks

    def collective_us(self, kind: str, num_bytes: ArrayLike) -> NDArray[np.float64]:
        """See `Costs`."""
        fixed = collective_seconds(self._link, kind, num_bytes=0, num_ranks=self._num_ranks)
        per_byte = collective_seconds(self._link, kind, num_bytes=1, num_ranks=self._num_ranks) - fixed
        return 1e6 * (fixed + per_byte * np.asarray(num_bytes, dtype=np.float64))
