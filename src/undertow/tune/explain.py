"""Explains in words and numbers why the plan is as it is."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any

from undertow.plan import Plan, Wires
from undertow.plan.owners import totals_by_rank, update_work
from undertow.shown import Shown, cell, counted
from undertow.tune.trials import Trial, Trials, Verdict

if TYPE_CHECKING:
    from rich.console import RenderableType

_MOST_LINES = 8
_MOST_EXPERTS = 3  # groups, each in a line
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
    trials_are_over: bool = True  # False: buckets may still change
    owners: str = ""  # whole parameters: the balance of ranks
    # By pattern and ranks; all else is of the dense parameters.
    experts: Mapping[str, "Explanation"] = field(default_factory=dict)
    outer: str = ""  # the fragments of outer synchronization, and their reason

    @property
    def in_brief(self) -> str:
        """The plan and its reason, and the fragments of outer synchronization: a line each."""
        return "\n".join(filter(None, (f"The plan: {self._plan}", f"  {self.why}", self.outer)))

    def to_dict(self) -> dict[str, Any]:
        """Returns the explanation as plain values, ready for JSON."""
        return asdict(self)

    @property
    def _plan(self) -> str:
        sizes = [f"{megabytes:.2f}" for megabytes in self.bucket_mb]
        formats = ""
        if len(set(self.wires)) == 1:
            formats = formats_text(self.wires)
        else:
            for index, wire in enumerate(self.wires):
                sizes[index] += "" if wire is None else f" ({wire})"
        number = counted(len(sizes), "bucket")
        if len(sizes) > _MOST_SIZES:
            half = _MOST_SIZES // 2
            sizes[half:-half] = ["..."]
        buckets = f"{number} of {', '.join(sizes)} MB{formats}"
        ranks = counted(self.num_ranks, "rank")
        return f"{buckets}, {self.strategy}, {ranks}"

    def _lines(self) -> Iterator[str]:
        rest = [f"  {self.owners}"] if self.owners else []
        if self.outer:
            rest.append(self.outer)
        experts = [f"Experts {name}: {it._plan}; {it.why}" for name, it in self.experts.items()]
        rest += _cut(experts, _MOST_EXPERTS, rest="explain().experts")
        trials = [f"    {trial}" for trial in self.trials]
        shown = _cut(trials, _MOST_LINES - 2 - len(rest), rest="explain().trials")
        yield from (f"The plan: {self._plan}", f"  {self.why}", *shown, *rest)

    def __rich__(self) -> "RenderableType":
        from rich.console import Group

        return Group(*map(cell, self._lines()))


def _cut(lines: list[str], room: int, *, rest: str) -> list[str]:
    """Returns at most `room` lines; the last one tells where the others are."""
    if len(lines) <= room:
        return lines
    return [*lines[: room - 1], f"    and {len(lines) - room + 1} more in {rest}"]


def explanation(
    plan: Plan,
    *,
    why: str,
    strategy: str,
    trials: Sequence[Trial] = (),
    trials_are_over: bool = True,
) -> Explanation:
    """Explains `plan`, which is in force after these trials."""
    return Explanation(
        num_ranks=plan.num_ranks,
        strategy=strategy,
        bucket_mb=tuple(bucket.num_bytes / 1e6 for bucket in plan.buckets),
        wires=plan.wires,
        why=why,
        trials=tuple(map(trial_text, trials)),
        trials_are_over=trials_are_over,
        owners=_owners_of(plan),
    )


def trial_text(trial: Trial) -> str:
    """Returns the candidate, its median step so far, and the median under the present plan."""
    candidate = _plan_text(trial.plan)
    if trial.failure:
        return f"{candidate}: {trial.failure}"
    present_ms, candidate_ms = trial.times_ms[::2], trial.times_ms[1::2]
    if not candidate_ms:
        return f"{candidate}: not measured yet"
    before = f"{median(present_ms):.1f} ms before"
    return f"{candidate}: {median(candidate_ms):.1f} ms, {before}, {trial.verdict.value}"


def progress_text(trials: Trials, *, num_steps: int) -> str:
    """Returns the progress of trials that have taken so many steps."""
    plans = counted(len(trials.tried), "other plan")
    if trials.stopped:
        return f"trials have ended after {num_steps} steps: {trials.stopped}"
    if not trials.are_over:
        return f"trials are under way: {num_steps} steps, {plans} so far"
    if any(trial.verdict is Verdict.TAKEN for trial in trials.tried):
        return f"its steps were the fastest: {plans} tried in {num_steps} steps"
    if not trials.tried:
        return "no other plan is worth a trial"
    return f"{plans} tried in {num_steps} steps, none 2 % faster"


def formats_text(wires: Wires) -> str:
    """Returns ", all in int8" or ", 3 of them in int8"; empty in full width."""
    numbers = Counter(filter(None, wires))
    return "".join(
        f", {'all' if number == len(wires) else f'{number} of them'} in {wire}"
        for wire, number in numbers.items()
    )


def _plan_text(plan: Plan) -> str:
    """Returns, for example, "4 buckets, the last one of 0.73 MB, all in int8"."""
    text = counted(len(plan.buckets), "bucket")
    if len(plan.buckets) > 1:
        text += f", the last one of {plan.buckets[-1].num_bytes / 1e6:.2f} MB"
    return text + formats_text(plan.wires)


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
