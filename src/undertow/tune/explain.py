"""Explains in words and numbers why the plan is as it is."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from undertow.plan import Plan, Wires
from undertow.plan.owners import totals_by_rank, update_work
from undertow.shown import Shown, cell, with_experts
from undertow.tune.trials import formats_text

if TYPE_CHECKING:
    from rich.console import RenderableType

_MOST_LINES = 8
_MOST_SIZES = 12  # in one line


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation(Shown):
    """A plan and its reasons.

    `print` and notebooks show it as at most eight lines.
    """

    num_ranks: int
    strategy: str
    bucket_mb: tuple[float, ...]  # 10^6 bytes, in full width
    wires: Wires = ()  # the format of each bucket
    why: str  # the reason for this plan
    # the plans that were tried, each with the median steps of its windows and of the plan before
    trials: tuple[str, ...] = ()
    owners: str = ""  # whole parameters: the balance of ranks
    # By pattern and ranks; all else is of the dense parameters.
    experts: Mapping[str, "Explanation"] = field(default_factory=dict)
    outer: str = ""  # the fragments of outer synchronization, and their reason

    @property
    def in_brief(self) -> str:
        """The plan and its reason, and the fragments of outer synchronization: a line each."""
        return "\n".join(filter(None, (self._plan_line, f"  {self.why}", self.outer)))

    def to_dict(self) -> dict[str, Any]:
        """Returns the explanation as plain values, ready for JSON."""
        return asdict(self)

    @property
    def _plan_line(self) -> str:
        sizes = [f"{megabytes:.2f}" for megabytes in self.bucket_mb]
        formats = ""
        if len(set(self.wires)) == 1:
            formats = formats_text(self.wires)
        else:
            for index, wire in enumerate(self.wires):
                sizes[index] += "" if wire is None else f" ({wire})"
        number = f"{len(sizes)} bucket{'' if len(sizes) == 1 else 's'}"
        if len(sizes) > _MOST_SIZES:
            half = _MOST_SIZES // 2
            sizes[half:-half] = ["..."]
        buckets = f"{number} of {', '.join(sizes)} MB{formats}"
        ranks = f"{self.num_ranks} rank{'' if self.num_ranks == 1 else 's'}"
        return f"The plan: {buckets}, {self.strategy}, {ranks}"

    def _lines(self) -> Iterator[str]:
        rest = [f"  {self.owners}"] if self.owners else []
        if self.outer:
            rest.append(self.outer)
        room = _MOST_LINES - 2 - len(rest)
        shown = [f"    {trial}" for trial in self.trials]
        if len(shown) > room:
            left = len(shown) - room + 1
            shown[room - 1 :] = [f"    and {left} more in explain().trials"]
        yield from (self._plan_line, f"  {self.why}", *shown, *rest)

    def __rich__(self) -> "RenderableType":
        return with_experts(map(cell, self._lines()), self.experts)


def explanation(plan: Plan, *, why: str, strategy: str, trials: Sequence[str] = ()) -> Explanation:
    """Explains `plan`, which is in force after these trials."""
    return Explanation(
        num_ranks=plan.num_ranks,
        strategy=strategy,
        bucket_mb=tuple(bucket.num_bytes / 1e6 for bucket in plan.buckets),
        wires=plan.wires,
        why=why,
        trials=tuple(trials),
        owners=_owners_of(plan),
    )


def _owners_of(plan: Plan) -> str:
    """Returns the balance of ranks that own whole parameters, or ""."""
    if not any(plan.owners):
        return ""

    def largest(sizes: Sequence[int]) -> str:
        parts = totals_by_rank(sizes, plan.groups, plan.owners, num_ranks=plan.num_shards)
        return f"{max(parts) * len(parts) / (sum(parts) or 1):.2f} x the mean"

    in_bytes = largest([spec.num_bytes for spec in plan.params])
    in_work = largest([update_work(spec) for spec in plan.params])
    return (
        "One owner for each parameter. The largest share of a rank: "
        f"{in_bytes} in bytes, {in_work} in work of updates"
    )
