"""The facts that replicas send with a fragment, and the errors that all of them raise for it."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from undertow.buckets.facts import FactCodec, differing
from undertow.engine.agreed_errors import CHANGE_ALIKE
from undertow.errors import (
    Desync,
    NonFiniteGradient,
    PlanMismatch,
    ReplicaMismatch,
    listed,
    require,
)
from undertow.outer.step_settings import StepSettings
from undertow.plan.facts import FactKind
from undertow.ranks.answers import MOST_TEXTS
from undertow.ranks.transport import OwnGroup

MODULO = 1 << 20  # fp32 counts up to it exactly


class ReplicaFacts(NamedTuple):
    """The numbers of one rank in a trailer, each below `MODULO`."""

    step: int
    num_forwards: int
    numel: int  # of what it exchanges
    fingerprint: int  # of the global parameters and the outer momentum, in the first exchange
    settings: int  # digest of the settings of steps since the last exchange; 0 is like any other
    not_finite: int  # 1 + the place of the first tensor that is not finite, 0: all are
    stopping: int  # 1: a signal has asked the rank to stop
    frozen: int  # of a sample of the parameters that replicas do not exchange
    skips: int  # the same if scalers have skipped the same number of steps of each optimizer
    trained: int  # digest of the names in the fragment that are not frozen


REPLICA_FACTS = dict.fromkeys(ReplicaFacts._fields, FactKind.NUMBERS)


def replica_facts(codec: FactCodec, told: Tensor) -> list[ReplicaFacts]:
    """Returns the facts of each rank of a column, on the host."""
    numbers = [codec.numbers(told, name) for name in ReplicaFacts._fields]
    return [ReplicaFacts(*map(int, of_rank)) for of_rank in zip(*numbers, strict=True)]


def require_alike(
    of_ranks: Mapping[int, ReplicaFacts],
    settings: StepSettings,
    group: OwnGroup,
    *,
    fragment: int,
    trained: Mapping[str, bool],
) -> None:
    """Raises the same error on every rank if ranks differ in an exchange.

    Desync: they are in other steps, or have run other numbers of forwards. ReplicaMismatch: their
    global parameters differ. PlanMismatch: some have frozen other parameters, or their optimizers
    have stepped with other settings. `trained` are this rank's parameters, False for frozen ones.
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
            where=f"{where}: {listed(texts, most=MOST_TEXTS)}",
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
    freezers = _others({rank: facts.trained for rank, facts in of_ranks.items()})
    if freezers:
        name = first_that_differs(group, trained)
        raise PlanMismatch(
            f"parameter {name!r} was frozen or unfrozen on some replicas only: rank {freezers} "
            "trains other parameters than the other replicas.",
            where=f"{where}, after step {step}",
            remedy=CHANGE_ALIKE,
        )
    compared = {(facts.skips, facts.settings) for facts in of_ranks.values() if facts.settings}
    if len(compared) > len({skips for skips, _ in compared}):
        raise settings.difference(group, where=where)
    settings.are_same_until(step)


class NotFinite(NamedTuple):
    """Values that are not finite in an exchange; the same on every rank."""

    what: str
    where: str
    look: str  # where to look for the cause
    skipped: str  # what happens under nonfinite="skip"

    def error(self) -> NonFiniteGradient:
        """Returns a new error each time."""
        remedy = f"No other replica has taken it over. {self.look}"
        return NonFiniteGradient(self.what, where=self.where, remedy=remedy)

    def warning(self, num_so_far: int) -> str:
        """Returns a text for users who skip such exchanges."""
        times = "" if num_so_far == 1 else f" Exchanges like this so far: {num_so_far}."
        return f"{self.what} {self.skipped}{times}\n  {self.where}"


def not_finite(
    of_ranks: Mapping[int, ReplicaFacts], names: Sequence[str], *, fragment: int
) -> NotFinite | None:
    """Returns the first value of a replica that is not finite, or None."""
    bad = {rank: facts for rank, facts in of_ranks.items() if facts.not_finite}
    if not bad:
        return None
    first = next(iter(bad.values()))
    ranks = ", ".join(map(str, bad))
    name = names[first.not_finite - 1]
    return NotFinite(
        f"the replica's {name!r} is not finite (NaN or Inf) on rank {ranks}.",
        where=_after(first, fragment),
        look=f'Look for the overflow on rank {ranks}, or set nonfinite="skip", which leaves such '
        "a replica out of the mean.",
        skipped="It is left out of the mean, and its optimizer keeps its state: if that has NaN "
        "too, every exchange leaves it out.",
    )


def overflowed(of_ranks: Mapping[int, ReplicaFacts], *, fragment: int) -> NotFinite:
    """Returns a mean that is not finite, although each replica's part is."""
    return NotFinite(
        "the mean of the replicas' differences is not finite (NaN or Inf).",
        where=_after(next(iter(of_ranks.values())), fragment),
        look='Look for parameters that have grown without bound, or set nonfinite="skip".',
        skipped="The fragment stays as it is.",
    )


def _after(facts: ReplicaFacts, fragment: int) -> str:
    return f"exchange of fragment {fragment}, after step {facts.step}"


def _others(of_ranks: Mapping[int, Hashable]) -> str:
    """Returns the ranks that do not have what most ranks have."""
    return ", ".join(map(str, differing(of_ranks)))


def first_that_differs(group: OwnGroup, mine: Mapping[str, Tensor | bool]) -> str:
    """Returns the first name with another value, such as a fingerprint, on some rank, or that only
    some ranks have; "?" if the ranks do not tell of one. Every rank calls this."""
    lines = sorted(f"{int(value)} {name}" for name, value in mine.items())
    # A rank without a text would not be compared.
    found = group.watch.ask("\n".join(["values", *lines]), of=group.names)
    of_ranks = [set(one.text.splitlines()) for one in found if one.text is not None]
    unlike = of_ranks[0] ^ of_ranks[1] if len(of_ranks) > 1 else set()
    return min((line.partition(" ")[2] for line in unlike), default="?")
