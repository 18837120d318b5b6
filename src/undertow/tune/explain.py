"""Explains in words and numbers why the plan was chosen."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from undertow.plan import Groups, Plan, finish_us
from undertow.profile import Profile
from undertow.shown import Shown, cell, with_experts
from undertow.tune.messages import Decided, Decision, Measurement, Outcome
from undertow.tune.tuner import Tuner, kinds_needed, knows_enough

if TYPE_CHECKING:
    from rich.console import RenderableType

_MS = 1e-3  # milliseconds in a microsecond
_MAX_TRIED = 64  # cuts and merges to try, spread over the buckets: a plan has hundreds at most


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation(Shown):
    """A plan and its reasons. Times in milliseconds from the start of a step until all gradients are reduced; None: not known.

    `print` and notebooks show it as lines.
    """

    num_ranks: int
    strategy: str
    bucket_mb: tuple[float, ...]  # 10^6 bytes
    why: str  # the reason for this plan
    bound_by: str = ""  # what limits its communication, with the figures
    measured_ms: float | None = None  # under this plan, or under the last measured one
    predicted_ms: float | None = None  # from measurements
    best_ms: float | None = None  # under the best plan
    limit_ms: float | None = None  # lower bound of every plan
    alternatives: tuple[str, ...] = ()  # the effect of fewer and more buckets
    network: tuple[str, ...] = ()  # one line per kind of collective
    decisions: tuple[str, ...] = ()  # oldest first
    # By pattern and ranks; all else is of the dense parameters.
    experts: Mapping[str, "Explanation"] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Returns the explanation as plain values, ready for JSON."""
        return asdict(self)

    def __rich__(self) -> "RenderableType":
        return with_experts(map(cell, _lines(self)), self.experts)


def _lines(it: Explanation) -> Iterator[str]:
    sizes = ", ".join(f"{megabytes:.2f}" for megabytes in it.bucket_mb)
    yield f"The plan: {_num_buckets_text(len(it.bucket_mb))} of {sizes} MB, {it.strategy}, {it.num_ranks} ranks"
    yield from (f"  {line}" for line in (it.why, it.bound_by) if line)
    times = {
        "measured": it.measured_ms,
        "predicted": it.predicted_ms,
        "the best plan": it.best_ms,
        "limit of every plan": it.limit_ms,
    }
    if known := [f"{name} {milliseconds:.2f}" for name, milliseconds in times.items() if milliseconds is not None]:
        yield f"Until gradients are synchronized, ms since the step began: {', '.join(known)}"
    sections = {"Other plans:": it.alternatives, "The network, as measured:": it.network, "Decisions:": it.decisions}
    for title, rows in sections.items():
        yield from (title, *(f"  {row}" for row in rows)) if rows else ()


def explanation(plan: Plan, tuner: Tuner | None, *, why: str, strategy: str, history: Sequence[Decided]) -> Explanation:
    """Explains `plan`; `tuner` has the measurements of its parameters, None without any."""
    profile = None if tuner is None else tuner.profile(plan, strategy=strategy)
    measurement = None if tuner is None else tuner.measurement
    known = Explanation(
        num_ranks=plan.num_ranks,
        strategy=strategy,
        bucket_mb=tuple(bucket.num_bytes / 1e6 for bucket in plan.buckets),
        why=why,
        bound_by="" if tuner is None or measurement is None else _bound_text(tuner.is_bound_by_processors, measurement),
        measured_ms=None if measurement is None else measurement.synchronized_us * _MS,
        decisions=tuple(f"step {made.round}: {_decision_text(made.decision)}" for made in history),
    )
    has_shards = strategy != "ddp"
    needed = kinds_needed(has_shards=has_shards)
    if tuner is None or profile is None or not profile.curves.keys() >= set(needed):
        return known
    known = replace(known, network=tuple(_curve_text(profile, kind) for kind in needed))
    if not knows_enough(profile.curves, has_shards=has_shards):
        return known
    best, present_us = tuner.best_and_present(profile, plan, has_shards=has_shards)
    predicted_us = partial(finish_us, plan.params, timing=profile.timing, costs=profile.costs(), has_shards=has_shards)
    return replace(
        known,
        predicted_ms=present_us * _MS,
        limit_ms=best.limit_us * _MS,
        best_ms=min(present_us, best.finish_us) * _MS,
        alternatives=tuple(_alternatives(plan, present_us, predicted_us)),
    )


def _bound_text(by_processors: bool, it: Measurement) -> str:
    return (
        f"bound by {'processors' if by_processors else 'the network'}: "
        f"packing and copying add {it.processors_us * _MS:.2f} ms to a step, the network {it.network_us * _MS:.2f} ms"
    )


def _alternatives(plan: Plan, present_us: float, predicted_us: Callable[[Groups], float]) -> Iterator[str]:
    groups = plan.groups
    alike = [at for at, (bucket, following) in enumerate(pairwise(plan.buckets)) if bucket.kind == following.kind]
    wide = [at for at, group in enumerate(groups) if len(group) > 1]
    merged = [((*groups[:at], groups[at] + groups[at + 1], *groups[at + 2 :]), at) for at in _some(alike)]
    cut = [
        ((*groups[:at], groups[at][:half], groups[at][half:], *groups[at + 1 :]), at)
        for at in _some(wide)
        for half in {1, len(groups[at]) // 2, len(groups[at]) - 1}
    ]
    for text, tried in (("fewer, at best buckets {} and {} in one", merged), ("more, at best bucket {} in two", cut)):
        if tried:
            later_us, at = min((predicted_us(other) - present_us, at) for other, at in tried)
            yield f"one bucket {text.format(at, at + 1)}: {later_us * _MS:+z.2f} ms"


def _num_buckets_text(num_buckets: int) -> str:
    return f"{num_buckets} bucket{'' if num_buckets == 1 else 's'}"


def _some(places: Sequence[int]) -> Sequence[int]:
    return places[:: max(1, -(-len(places) // _MAX_TRIED))]


def _curve_text(profile: Profile, kind: str) -> str:
    points = profile.curves[kind].points
    return f"{kind}: " + " to ".join(
        f"{num_bytes / 1e6:.3g} MB in {us * _MS:.2f} ms" for num_bytes, us in dict.fromkeys((points[0], points[-1]))
    )


def _decision_text(it: Decision) -> str:
    return _TEXTS[it.outcome].format(
        buckets=_num_buckets_text(len(it.groups or ())),
        numbers=f"predicted {it.present_us * _MS:.2f} ms, the best plan {it.predicted_us * _MS:.2f} ms",
    )


_TEXTS = {
    Outcome.KEEP: "kept ({numbers}: too little to gain)",
    Outcome.TRIED: "kept ({numbers}: a plan tried before was slower than predicted)",
    Outcome.MOVE: "moved to {buckets} ({numbers})",
    Outcome.FEWER: "moved to {buckets} ({numbers}: fewer, as good)",
    Outcome.BACK: "went back to {buckets}: measured to be faster",
    Outcome.UNKNOWN: "kept: too little was measured to tell what buckets of other sizes cost",
    Outcome.OVERTAKEN: "not followed: the plan had changed meanwhile",
    Outcome.LEARN: "moved to {buckets}, to learn what other sizes cost",
    Outcome.TOO_LARGE: "kept ({numbers}: for a move every rank would hold all of the optimizer's state)",
    Outcome.QUICK: "kept: one bucket is sent too quickly for a second one to pay",
    Outcome.FROZEN: "kept: torch.use_deterministic_algorithms is on, and another plan rounds differently",
}
