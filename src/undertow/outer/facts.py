"""The facts that replicas send with a fragment, and the errors that all of them raise for it."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from undertow.buckets.facts import FactCodec, differing
from undertow.errors import Desync, NonFiniteGradient, ReplicaMismatch, listed, require
from undertow.outer.step_settings import StepSettings
from undertow.plan.facts import FactKind
from undertow.ranks.transport import OwnGroup

MODULO = 1 << 20  # fp32 counts up to it exactly


class ReplicaFacts(NamedTuple):
    """The numbers of one rank in a trailer, each below `MODULO`."""

    step: int
    num_forwards: int
    numel: int  # of what it exchanges
    fingerprint: int  # of the global parameters and the outer momentum, in the first exchange
    settings: int  # digest of the settings of all optimizer steps so far; 0 is like any other
    not_finite: int  # 1 + the place of the first tensor that is not finite, 0: all are
    stopping: int  # 1: a signal has asked the rank to stop
    frozen: int  # of a sample of the parameters that replicas do not exchange


REPLICA_FACTS = dict.fromkeys(ReplicaFacts._fields, FactKind.NUMBERS)


def replica_facts(codec: FactCodec, told: Tensor) -> list[ReplicaFacts]:
    """Returns the facts of each rank of a column, on the host."""
    numbers = [codec.numbers(told, name) for name in ReplicaFacts._fields]
    return [ReplicaFacts(*map(int, of_rank)) for of_rank in zip(*numbers, strict=True)]


def require_alike(
    of_ranks: Mapping[int, ReplicaFacts], settings: StepSettings, group: OwnGroup, *, fragment: int
) -> None:
    """Raises the same error on every rank if ranks differ in an exchange.

    Desync: they are in other steps, or have run other numbers of forwards. ReplicaMismatch: their
    global parameters differ. PlanMismatch: their optimizers have stepped with other settings.
    """
    where = f"exchange of fragment {fragment}"
    named = _others({rank: facts[:2] for rank, facts in of_ranks.items()})
    if named:
        texts = [
            f"rank {rank}: {facts.num_forwards} forwards before step {facts.step}"
            for rank, facts in of_ranks.items()
        ]
        raise Desync(
            f"rank {named} has stepped a different number of times than the "
            "other replicas for the forwards that it ran.",
            where=f"{where}: {listed(texts, most=8)}",
            remedy="Look for a step, or a forward outside of accumulate(), that only some ranks "
            "run, and for a state of model.outer that only some have loaded.",
        )
    others = _others({rank: facts.numel for rank, facts in of_ranks.items()})
    require(
        not others,
        f"rank {others} exchanges another fragment than the other replicas.",
        where=f"{where}, after step {next(iter(of_ranks.values())).step}",
        remedy="Load a state of model.outer on every rank or on none.",
        error=Desync,
    )
    unlike = _others({rank: facts.fingerprint for rank, facts in of_ranks.items()})
    require(
        not unlike,
        f"rank {unlike} has other global parameters than the other replicas.",
        where=where,
        remedy="Load the same parameters on every rank, or call broadcast_parameters() after. A "
        "run that resumes also needs the saved state of model.outer on every rank.",
        error=ReplicaMismatch,
    )
    step = next(iter(of_ranks.values())).step
    if len({facts.settings for facts in of_ranks.values() if facts.settings}) > 1:
        raise settings.difference(group, where=where)
    settings.are_same_until(step)


def not_finite(
    of_ranks: Mapping[int, ReplicaFacts], names: Sequence[str], *, fragment: int
) -> NonFiniteGradient | None:
    """Returns the error of an exchange for which a replica had values that are not finite."""
    bad = {rank: facts for rank, facts in of_ranks.items() if facts.not_finite}
    if not bad:
        return None
    first = next(iter(bad.values()))
    ranks = ", ".join(map(str, bad))
    name = names[first.not_finite - 1]
    return _refused(
        f"the replica's {name!r} is not finite (NaN or Inf) on rank {ranks}.",
        step=first.step,
        fragment=fragment,
        look=f'Look for the overflow on rank {ranks}, or set nonfinite="skip", which leaves such '
        "a replica out of the mean.",
    )


def overflowed(of_ranks: Mapping[int, ReplicaFacts], *, fragment: int) -> NonFiniteGradient:
    """Returns the error of an exchange whose mean is not finite, although each replica's part
    is."""
    return _refused(
        "the mean of the replicas' differences is not finite (NaN or Inf).",
        step=next(iter(of_ranks.values())).step,
        fragment=fragment,
        look='Look for parameters that have grown without bound, or set nonfinite="skip".',
    )


def _refused(what: str, *, step: int, fragment: int, look: str) -> NonFiniteGradient:
    return NonFiniteGradient(
        what,
        where=f"exchange of fragment {fragment}, after step {step}",
        remedy=f"No other replica has taken it over. {look}",
    )


def _others(of_ranks: Mapping[int, Hashable]) -> str:
    """Returns the ranks that do not have what most ranks have."""
    return ", ".join(map(str, differing(of_ranks)))
