"""Explains in words and numbers why the plan was chosen."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from undertow.plan import Candidate, Plan, Wires
from undertow.plan.owners import totals_by_rank, update_work
from undertow.profile import Profile
from undertow.shown import Shown, cell, with_experts
from undertow.tune.messages import Decision, Outcome
from undertow.tune.tuner import Tuner, kinds_needed, wire_to_plan

if TYPE_CHECKING:
    from rich.console import RenderableType

_MS = 1e-3  # milliseconds in a microsecond


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation(Shown):
    """A plan and its reasons. Times in milliseconds from the start of a step until all gradients
    are reduced; None: not known.

    `print` and notebooks show it as lines.
    """

    num_ranks: int
    strategy: str
    bucket_mb: tuple[float, ...]  # 10^6 bytes, in full width
    wires: Wires = ()  # the format of each bucket
    # whole parameters: the bytes that ranks own in each bucket, and the balance
    owners: tuple[str, ...] = ()
    why: str  # the reason for this plan
    bound_by: str = ""  # what limits its communication, with the figures
    # in the steps that were measured, under the plan before the decision
    measured_ms: float | None = None
    predicted_ms: float | None = None  # from measurements
    # the plans that this one was chosen from, by number of buckets, each with its predicted time
    plans: tuple[str, ...] = ()
    network: tuple[str, ...] = ()  # one line per kind of collective
    decision: str = ""  # after the measurement
    # By pattern and ranks; all else is of the dense parameters.
    experts: Mapping[str, "Explanation"] = field(default_factory=dict)
    outer: str = ""  # the fragments of outer synchronization, and their reason

    def to_dict(self) -> dict[str, Any]:
        """Returns the explanation as plain values, ready for JSON."""
        return asdict(self)

    def __rich__(self) -> "RenderableType":
        return with_experts(map(cell, _lines(self)), self.experts)


def _lines(explained: Explanation) -> Iterator[str]:
    sizes = [f"{megabytes:.2f}" for megabytes in explained.bucket_mb]
    formats = ""
    if len(set(explained.wires)) == 1:
        formats = _formats_text(explained.wires)
    else:
        for index, wire in enumerate(explained.wires):
            sizes[index] += "" if wire is None else f" ({wire})"
    buckets = f"{_num_buckets_text(len(sizes))} of {', '.join(sizes)} MB{formats}"
    yield f"The plan: {buckets}, {explained.strategy}, {explained.num_ranks} ranks"
    for line in (explained.why, explained.decision, explained.bound_by):
        if line:
            yield f"  {line}"
    times = {
        "measured before the decision": explained.measured_ms,
        "predicted for this plan": explained.predicted_ms,
    }
    known = [f"{name} {time_ms:.2f}" for name, time_ms in times.items() if time_ms is not None]
    if known:
        yield f"Until gradients are synchronized, ms since the step began: {', '.join(known)}"
    if explained.plans:
        yield "The fastest plans of each number of buckets, predicted:"
        yield from (f"  {row}" for row in explained.plans)
    if explained.owners:
        yield "One owner for each parameter, MB of a rank:"
        yield from (f"  {row}" for row in explained.owners)
    if explained.network:
        yield "The network, as measured:"
        yield from (f"  {row}" for row in explained.network)
    if explained.outer:
        yield explained.outer


def explanation(
    plan: Plan, tuner: Tuner | None, *, why: str, strategy: str, decision: Decision | None
) -> Explanation:
    """Explains `plan`; `tuner` has the measurements of its parameters, None without any."""
    profile = None if tuner is None else tuner.profile(plan, strategy=strategy)
    known = Explanation(
        num_ranks=plan.num_ranks,
        strategy=strategy,
        bucket_mb=tuple(bucket.num_bytes / 1e6 for bucket in plan.buckets),
        wires=plan.wires,
        owners=_owners_of(plan),
        why=why,
        decision="" if decision is None else _decision_text(decision),
    )
    if tuner is None or profile is None:
        return known
    has_shards = strategy != "ddp"
    kinds = [kind for kind in kinds_needed(has_shards=has_shards) if kind in profile.curves]
    known = replace(
        known,
        bound_by=_bound_text(profile),
        measured_ms=((profile.step_us or 0.0) - profile.update_us) * _MS,
        network=tuple(_curve_text(profile, kind) for kind in kinds),
    )
    found = tuner.choice(plan, has_shards=has_shards)
    if found is None:
        return known
    choice, present_us = found
    return replace(
        known,
        predicted_ms=present_us * _MS,
        plans=table_of_choice(choice.candidates, plan),
    )


def _owners_of(plan: Plan) -> tuple[str, ...]:
    """Returns a line for each bucket with owners, and one for all of them."""
    if not any(plan.owners):
        return ()

    def by_rank(sizes: Sequence[int], buckets: slice) -> list[int]:
        groups, owners = plan.groups[buckets], plan.owners[buckets]
        return totals_by_rank(sizes, groups, owners, num_ranks=plan.num_shards)

    num_bytes = [spec.num_bytes for spec in plan.params]
    rows = []
    for bucket in plan.buckets:
        if bucket.owners is None:
            continue
        parts = by_rank(num_bytes, slice(bucket.index, bucket.index + 1))
        sizes = f"{min(parts) / 1e6:.2f} to {max(parts) / 1e6:.2f}"
        rows.append(f"bucket {bucket.index}: {sizes} (largest {_over_mean(parts)})")
    work = by_rank([update_work(spec) for spec in plan.params], slice(None))
    in_all = _over_mean(by_rank(num_bytes, slice(None)))
    rows.append(f"all: largest {in_all} in bytes, {_over_mean(work)} in work of updates")
    return tuple(rows)


def _over_mean(parts: Sequence[int]) -> str:
    return f"{max(parts) * len(parts) / (sum(parts) or 1):.2f} x the mean"


def table_of_choice(candidates: Iterable[Candidate], present: Plan) -> tuple[str, ...]:
    """Returns a line for each candidate, fewest buckets first; the present plan is marked."""
    rows = []
    for candidate in sorted(candidates, key=lambda candidate: len(candidate.groups)):
        row = f"{candidate.finish_us * _MS:.2f} ms: {_num_buckets_text(len(candidate.groups))}"
        if candidate.last_share != 1:
            row += f", the last one {candidate.last_share:g} of the others"
        row += _formats_text(candidate.wires)
        if present.is_alike(candidate.groups, candidate.wires):
            row += " (this plan)"
        rows.append(row)
    return tuple(rows)


def _bound_text(profile: Profile) -> str:
    by = "processors" if profile.is_bound_by_processors else "the network"
    processors_ms = (profile.processors_us or 0.0) * _MS
    network_ms = (profile.network_us or 0.0) * _MS
    keeps = ""
    if wire_to_plan(profile, profile.wire) != profile.wire:
        keeps = "; wire='auto' keeps full width"
    return (
        f"bound by {by}: packing and copying add {processors_ms:.2f} ms to a step, "
        f"the network {network_ms:.2f} ms{keeps}"
    )


def _num_buckets_text(num_buckets: int) -> str:
    return f"{num_buckets} bucket{'' if num_buckets == 1 else 's'}"


def _formats_text(wires: Wires) -> str:
    """Returns ", all in int8" or ", 3 of them in int8"; empty in full width."""
    numbers = Counter(filter(None, wires))
    return "".join(
        f", {'all' if number == len(wires) else f'{number} of them'} in {wire}"
        for wire, number in numbers.items()
    )


def _curve_text(profile: Profile, kind: str) -> str:
    points = profile.curves[kind].points
    return f"{kind}: " + " to ".join(
        f"{num_bytes / 1e6:.3g} MB in {us * _MS:.2f} ms"
        for num_bytes, us in dict.fromkeys((points[0], points[-1]))
    )


def _decision_text(decision: Decision) -> str:
    return _TEXTS[decision.outcome].format(
        buckets=_num_buckets_text(len(decision.groups or ())) + _formats_text(decision.wires),
        numbers=f"predicted: the plan so far {decision.present_us * _MS:.2f} ms, the best "
        f"{decision.predicted_us * _MS:.2f} ms",
    )


_TEXTS = {
    Outcome.MOVE: "moved to {buckets} ({numbers})",
    Outcome.KEEP: "kept ({numbers}: too little to gain)",
    Outcome.UNKNOWN: "kept: buckets of one size do not show what other sizes cost",
    Outcome.FROZEN: "kept: torch.use_deterministic_algorithms is on, and another plan rounds "
    "differently",
    Outcome.OWNED: "kept: the state of an optimizer that Undertow does not know stays where it is",
    Outcome.INCOMPLETE: "the steps are measured again: some were not complete, or the plan has "
    "changed",
    Outcome.TOO_LARGE: "kept ({numbers}: for a move every rank would hold all of the optimizer's "
    "state)",
}
