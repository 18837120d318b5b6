"""The ranks of an outer synchronization, and what its fragments share."""

from __future__ import annotations

import torch
from torch import Tensor

from undertow.buckets.facts import FactCodec
from undertow.config import Outer
from undertow.outer.facts import ReplicaFacts, replica_facts
from undertow.outer.step_settings import StepSettings
from undertow.ranks.exchanges import Exchanges
from undertow.ranks.transport import OwnGroup


class Replicas:
    """The groups of an outer synchronization: `column` has one rank of each replica, and `row` is
    this rank's replica if it has several ranks.

    `places` has the ranks of each replica, as places in the group of all ranks. `exchanges` leave
    the division of a mean to the parcels. `leaves_out`: a replica that is not finite is left out,
    else it is an error.
    """

    def __init__(  # noqa: PLR0913  # what a fragment needs to know of its surroundings
        self,
        all_ranks: OwnGroup,
        exchanges: Exchanges,
        row: OwnGroup | None,
        outer: Outer,
        *,
        places: list[list[int]],
        settings: StepSettings,
        leaves_out: bool,
    ) -> None:
        self.all_ranks, self.exchanges, self.row, self.outer = all_ranks, exchanges, row, outer
        self.column = exchanges.group
        self.places, self.settings, self.leaves_out = places, settings, leaves_out
        self.num_left_out = 0  # exchanges that have left a replica out

    def of_ranks(self, codec: FactCodec, told: Tensor) -> dict[int, ReplicaFacts]:
        """Returns the facts of all ranks, by their places in the group of all.

        told: [ranks of a row * elements of `codec`], on the host
        """
        found = [replica_facts(codec, column) for column in torch.split(told, codec.numel)]
        return {
            rank: found[column][replica]
            for replica, row in enumerate(self.places)
            for column, rank in enumerate(row)
        }

    def close(self) -> None:
        self.exchanges.close()
        self.column.close()
        if self.row is not None:
            self.row.close()
