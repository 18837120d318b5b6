"""The ranks of an outer synchronization, and what its fragments share."""

from __future__ import annotations

import dataclasses

import torch
import torch.distributed as dist
from torch import Tensor

from undertow.buckets.facts import FactCodec
from undertow.config import Outer, SyncConfig
from undertow.outer.facts import NotFinite, ReplicaFacts, replica_facts
from undertow.outer.frozen import Frozen
from undertow.outer.step_settings import StepSettings
from undertow.ranks import faults
from undertow.ranks.exchanges import Exchanges, exchanges_over
from undertow.ranks.transport import OwnGroup


class Replicas:
    """The groups of an outer synchronization: `column` has one rank of each replica, and `row` is
    this rank's replica if it has several ranks.

    `places` has the ranks of each replica, as places in the group of all ranks. `exchanges` leave
    the division of a mean to the parcels. `leaves_out`: a replica that is not finite is left out,
    else it is an error. `parts`: beside tensor parallelism, the ranks that hold this replica
    together.
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
        frozen: Frozen,
        leaves_out: bool,
        parts: OwnGroup | None = None,
    ) -> None:
        self.all_ranks, self.exchanges, self.row, self.outer = all_ranks, exchanges, row, outer
        self.column = exchanges.group
        self.places, self.settings, self.frozen = places, settings, frozen
        self.leaves_out = leaves_out
        self._parts = parts if leaves_out else None
        self.num_left_out = 0  # exchanges that have left a replica out

    def of_ranks(self, codec: FactCodec, told: Tensor) -> dict[int, ReplicaFacts]:
        """Returns the facts of all ranks, as errors number them.

        told: [ranks of a row * elements of `codec`], on the host
        """
        found = [replica_facts(codec, column) for column in torch.split(told, codec.numel)]
        return {
            self.all_ranks.names[rank]: found[column][replica]
            for replica, row in enumerate(self.places)
            for column, rank in enumerate(row)
        }

    @property
    def leaves_out_together(self) -> bool:
        """True if the ranks that hold a replica together must agree to leave it out: a parameter
        that all of them have whole would get different means."""
        return self._parts is not None

    def agree_on(self, bad: Tensor) -> None:
        """Writes the largest value of the ranks that hold this replica together into `bad`; a
        collective call if they leave it out together."""
        if self._parts is not None:
            what = "whether all parts of the replica are finite"
            self._parts.all_reduce(bad, what, dist.ReduceOp.MAX).wait()

    def tell_left_out(self, found: NotFinite) -> None:
        """Warns on the first rank, the first, second, fourth time and so on: a replica whose
        optimizer's state is not finite is left out of every exchange."""
        if self.all_ranks.rank == 0 and self.num_left_out.bit_count() == 1:
            faults.tell(found.warning(self.num_left_out))

    def close(self) -> None:
        self.exchanges.close()
        self.column.close()
        if self.row is not None:
            self.row.close()


def open_replicas(
    all_ranks: OwnGroup,
    config: SyncConfig,
    *,
    places: list[list[int]],
    settings: StepSettings,
    frozen: Frozen,
    parts: OwnGroup | None,
) -> Replicas:
    """Opens the groups of the replicas; a collective call."""
    assert config.outer is not None  # else there are no replicas
    *rows, column = all_ranks.user.axes()
    own = [
        OwnGroup(axis, device=all_ranks.device, limits=config, within=all_ranks)
        for axis in (column, *(row for row in rows if len(row.ranks) > 1))
    ]
    for axis in own:
        axis.open()
    ordered = dataclasses.replace(config, reduction="ordered")
    return Replicas(
        all_ranks,
        exchanges_over(own[0], ordered, divisor=1),  # parcels divide
        own[1] if len(own) > 1 else None,
        config.outer,
        places=places,
        settings=settings,
        frozen=frozen,
        leaves_out=config.nonfinite == "skip",
        parts=parts,
    )
