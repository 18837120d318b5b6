"""The table of strategies.

The ops that each bucket needs, which follow from the tensors that rest as shards.
"""

from dataclasses import dataclass

from undertow.errors import require
from undertow.schedule.op import OpKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """The ops of a bucket. Parameters are replicated.

    Shards lie over the ranks, or over the inner axis of a mesh.
    """

    name: str
    reduction: OpKind  # moves gradients to the ranks that update their parameters
    crossing: OpKind | None = None  # moves its result over the outer axis of a mesh
    # moves updated parameters to all ranks, if each rank updates a shard
    gather: OpKind | None = None
    # A backward that only accumulates communicates: gradients between micro-batches are shards.
    reduces_micro_batches: bool = False


DDP = Strategy(name="ddp", reduction=OpKind.ALL_REDUCE)
ZERO1 = Strategy(name="zero1", reduction=OpKind.REDUCE_SCATTER, gather=OpKind.ALL_GATHER)
ZERO2 = Strategy(
    name="zero2",
    reduction=OpKind.REDUCE_SCATTER,
    gather=OpKind.ALL_GATHER,
    reduces_micro_batches=True,
)
HYBRID = Strategy(
    name="hybrid",
    reduction=OpKind.REDUCE_SCATTER,
    crossing=OpKind.ALL_REDUCE,
    gather=OpKind.ALL_GATHER,
)
STRATEGIES = {strategy.name: strategy for strategy in (DDP, ZERO1, ZERO2, HYBRID)}


def strategy_named(name: str | None) -> Strategy:
    """Returns the strategy of that name, DDP for None; raises ConfigError for an unknown name."""
    if name is None:
        return DDP
    require(
        isinstance(name, str) and name in STRATEGIES,
        f"strategy {name!r} does not exist.",
        where="strategy",
        remedy=f"Choose one of: {', '.join(map(repr, STRATEGIES))}.",
    )
    return STRATEGIES[name]
