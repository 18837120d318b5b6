"""Where a tensor lies: the table of strategies, and the op that takes it from one placement to another."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from undertow.errors import ConfigError
from undertow.schedule.op import OpKind


class Placement(StrEnum):
    PARTIAL = "partial"  # every rank has a summand
    SHARD = "shard"  # every rank has its part
    REPLICATE = "replicate"  # every rank has all of it


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """What is replicated and what is sharded over the ranks; of a mesh of two axes over those of the inner one."""

    name: str
    gradient: Placement  # at rest, between micro-batches
    optimizer: Placement
    parameter: Placement = Placement.REPLICATE
    across: Placement | None = None  # of the optimizer over the outer axis, where there is one

    @property
    def reduction(self) -> OpKind:
        """Takes gradients to where the optimizer needs them."""
        return _OPS[Placement.PARTIAL, self.optimizer]

    @property
    def crossing(self) -> OpKind | None:
        """Takes what was reduced over the inner axis to where the optimizer needs it over the outer one, where there is one."""
        return None if self.across is None else _OPS[Placement.PARTIAL, self.across]

    @property
    def gather(self) -> OpKind | None:
        """Takes what the optimizer has updated to where the forward needs it; None where it is there."""
        return None if self.optimizer is self.parameter else _OPS[self.optimizer, self.parameter]

    @property
    def reduces_micro_batches(self) -> bool:
        """Whether a backward that only accumulates communicates: gradients at rest are shards."""
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
    """The strategy of that name, DDP for None; ConfigError for another one."""
    strategy = DDP if name is None else STRATEGIES.get(name)
    if strategy is None:
        raise ConfigError(
            f"there is no strategy {name!r}.",
            where="strategy",
            remedy="Use torch.distributed.fsdp.fully_shard to shard parameters."
            if name in ("zero3", "fsdp")
            else f"Choose one of: {', '.join(map(repr, STRATEGIES))}.",
        )
    return strategy
