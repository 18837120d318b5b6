"""The table of strategies: the placements of tensors, and the op that converts one placement to another."""

from dataclasses import dataclass
from enum import StrEnum

from undertow.errors import require
from undertow.schedule.op import OpKind


class Placement(StrEnum):
    PARTIAL = "partial"  # every rank has a summand
    SHARD = "shard"  # every rank has a part
    REPLICATE = "replicate"  # every rank has the whole tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """States which tensors are replicated and which are sharded over the ranks; on a mesh of two axes, over the inner axis.

    Parameters are replicated.
    """

    name: str
    gradient: Placement  # at rest, between micro-batches
    optimizer: Placement
    across: Placement | None = None  # placement of the optimizer over the outer axis, if there is one

    @property
    def reduction(self) -> OpKind:
        """The op that moves gradients to the optimizer's placement."""
        return _OPS[Placement.PARTIAL, self.optimizer]

    @property
    def crossing(self) -> OpKind | None:
        """The op that moves the inner result to the optimizer's placement on the outer axis; None without an outer axis."""
        return None if self.across is None else _OPS[Placement.PARTIAL, self.across]

    @property
    def gather(self) -> OpKind | None:
        """The op that moves updated parameters to the forward's placement; None if they are there already."""
        return _OPS.get((self.optimizer, Placement.REPLICATE))

    @property
    def reduces_micro_batches(self) -> bool:
        """True if a backward that only accumulates communicates, because gradients between micro-batches are shards."""
        return self.gradient is Placement.SHARD


_OPS = {
    (Placement.PARTIAL, Placement.REPLICATE): OpKind.ALL_REDUCE,
    (Placement.PARTIAL, Placement.SHARD): OpKind.REDUCE_SCATTER,
    (Placement.SHARD, Placement.REPLICATE): OpKind.ALL_GATHER,
}
DDP = Strategy(name="ddp", gradient=Placement.PARTIAL, optimizer=Placement.REPLICATE)
ZERO1 = Strategy(name="zero1", gradient=Placement.PARTIAL, optimizer=Placement.SHARD)
ZERO2 = Strategy(name="zero2", gradient=Placement.SHARD, optimizer=Placement.SHARD)
HYBRID = Strategy(name="hybrid", gradient=Placement.PARTIAL, optimizer=Placement.SHARD, across=Placement.REPLICATE)
STRATEGIES = {strategy.name: strategy for strategy in (DDP, ZERO1, ZERO2, HYBRID)}


def strategy_named(name: str | None) -> Strategy:
    """Returns the strategy of that name, DDP for None; raises ConfigError for an unknown name."""
    require(
        name is None or name in STRATEGIES,
        f"strategy {name!r} does not exist.",
        where="strategy",
        remedy="Use torch.distributed.fsdp.fully_shard to shard parameters."
        if name in ("zero3", "fsdp")
        else f"Choose one of: {', '.join(map(repr, STRATEGIES))}.",
    )
    return DDP if name is None else STRATEGIES[name]
