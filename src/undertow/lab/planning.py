"""Chooses the plan of a family under which a step is predicted to take the least time.

A plan of the family has k buckets of about equal bytes, in the order that gradients arrive, as the
plans have that training tries. The last bucket is as large as the others or a quarter of them: it
is sent after backward, so nothing hides it.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from undertow.plan import ParamSpec, Plan, equal_groups, plan_from_groups
from undertow.plan.grouping import is_too_large

NUMS_OF_BUCKETS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 48, 64)
LAST_SHARES = (1.0, 0.25)
SLACK = 1.002  # under a plan of fewer buckets a step may take longer by this factor


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A plan of the family, and the predicted time of a step under it, in microseconds."""

    plan: Plan
    last_share: float  # size of the last bucket, relative to the others
    step_us: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The chosen plan, and the plans that it was chosen from."""

    best: Candidate
    # the fastest one of each number of buckets, fewest buckets first
    candidates: tuple[Candidate, ...]


def family(
    params: Sequence[ParamSpec],
    order: Sequence[int],
    *,
    num_ranks: int,
    num_shards: int | None,
    wire: str | None = None,
) -> Iterator[tuple[float, Plan]]:
    """Yields the plans of the family, each with its `last_share`, in the format `wire`.

    `order` has the indices of the parameters in the order that their gradients become ready.
    """
    for num_buckets in NUMS_OF_BUCKETS:
        for last_share in LAST_SHARES[: 1 if num_buckets == 1 else None]:
            groups = equal_groups(params, order, num_buckets=num_buckets, last_share=last_share)
            plan = plan_from_groups(
                params, groups, num_ranks=num_ranks, num_shards=num_shards, wires=wire
            )
            if not is_too_large(plan):
                yield last_share, plan


def choose(plans: Iterable[tuple[float, Plan]], step_us: Callable[[Plan], float]) -> Choice:
    """Returns the fastest of these plans, and of plans that are as fast the one with the fewest
    buckets.

    Args:
        plans: Each with its `last_share`.
        step_us: The predicted time of a step under a plan, in microseconds.
    """
    fastest: dict[int, Candidate] = {}  # by the number of buckets
    for last_share, plan in plans:
        time_us = step_us(plan)
        known = fastest.get(len(plan.buckets))
        if known is None or time_us < known.step_us:
            fastest[len(plan.buckets)] = Candidate(
                plan=plan, last_share=last_share, step_us=time_us
            )
    candidates = tuple(fastest[number] for number in sorted(fastest))
    least_us = min(candidate.step_us for candidate in candidates)
    return Choice(
        best=next(candidate for candidate in candidates if candidate.step_us <= least_us * SLACK),
        candidates=candidates,
    )
