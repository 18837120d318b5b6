"""The reasons for a plan, as the user reads them."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from support.records import printed
from support.strategies import spec
from undertow.cost import CostCurve
from undertow.plan import ParamSpec, Plan, plan_from_groups
from undertow.profile import Profile
from undertow.report.explain import print_explanation
from undertow.tune import Decided, Decision, Explanation, Outcome, Tuner, explanation

# Gradients of 1 MB come at 1, 2, 3 and 4 ms of backward, the last registered first; forward takes 2 ms.
PARAMS = tuple(spec(f"p{i}", 250_000) for i in range(4))
# 0.1 ms and 1 ms per MB; measured at 1 MB and 4 MB.
CURVE = CostCurve(points=((1e6, 1100.0), (4e6, 4100.0)))
WHY = "planned from what was measured"
HALF = CostCurve(points=((1e6, 600.0), (4e6, 2100.0)))
KINDS = [spec("a", 1000), spec("b", 1000, dtype="float16"), spec("c", 1000, dtype="float16")]
MANY = [spec(f"p{i}", 1000) for i in range(600)]
MOVE = Decision(outcome=Outcome.MOVE, next_look=1, present_us=9200.0, predicted_us=7400.0, groups=((3, 2), (1, 0)))


def profile(params: Sequence[ParamSpec] = PARAMS, **curves: CostCurve) -> Profile:
    times = {
        "ready_us": tuple(max(0.0, 4000.0 - 1000.0 * i) for i in range(len(params))),
        "forward_us": 2000.0,
        "backward_us": 4000.0,
    }
    return Profile(params=tuple(params), **times, num_ranks=2, curves=curves or {"all_reduce": CURVE})


def plan_of(*groups: Sequence[int], params: Sequence[ParamSpec] = PARAMS) -> Plan:
    return plan_from_groups(params, groups, num_ranks=2)


def explained(plan: Plan, measured: Profile | None, *, achieved_us: float | None = None, **changes: Any) -> Explanation:
    known: dict[str, Any] = {"why": WHY, "strategy": "ddp", "history": (), **changes}
    measurement = None if achieved_us is None else SimpleNamespace(synchronised_us=achieved_us)
    tuner = Tuner()
    vars(tuner).update(profile=lambda _plan, strategy: measured, measurement=measurement)  # as if it had learned this
    return explanation(plan, None if measured is None else tuner, **known)


def test_before_anything_is_measured_only_the_plan_is_known() -> None:
    it = explained(plan_of((3, 2), (1, 0)), None)
    assert it == Explanation(num_ranks=2, strategy="ddp", bucket_mb=(2.0, 2.0), why=WHY)
    assert str(it) == f"2 buckets, ddp, 2 ranks: {WHY}"


def test_times_are_in_milliseconds_since_the_step_began() -> None:
    it = explained(plan_of((3, 2, 1), (0,)), profile(), achieved_us=7654.0)
    # Backward is over at 6 ms. b0 leaves at 5, for 3.1 ms, b1 behind it for 1.1; 1 MB at the end takes 1.1 at the least.
    assert (it.predicted_ms, it.achieved_ms) == (pytest.approx(9.2), 7.654)
    # One by one from 3 ms on, 1.1 ms each. The cells of the limit's sizes are a sixth of a percent wide.
    assert (it.best_ms, it.limit_ms) == (pytest.approx(7.4), pytest.approx(7.1, rel=1 / 600))
    assert str(it) == f"2 buckets, ddp, 2 ranks: {WHY}; 7.7 ms, limit 7.1 ms"


BOTH = "one bucket fewer, at best 0 and 1 in one: +1.90 ms", "one bucket more, at best 0 in two: -0.10 ms"
ALTERNATIVES: dict[str, tuple[Plan, Profile, tuple[str, ...]]] = {
    "the best of one bucket fewer and one more": (plan_of((3, 2), (1, 0)), profile(), BOTH),
    "one bucket of one parameter has none": (plan_of((0,), params=PARAMS[:1]), profile(PARAMS[:1]), ()),
    "buckets of different kinds are never thought to be one": (plan_of((2,), (0,), (1,), params=KINDS), profile(KINDS), ()),
    # One latency less, or more, of 0.1 ms; all pairs are as good.
    "of hundreds of buckets some are tried at every place": (
        plan_of(*[(2 * i, 2 * i + 1) for i in range(300)], params=MANY),
        Profile(params=tuple(MANY), ready_us=(0.0,) * 600, forward_us=0.0, backward_us=1.0, curves={"all_reduce": CURVE}),
        ("one bucket fewer, at best 0 and 1 in one: -0.10 ms", "one bucket more, at best 0 in two: +0.10 ms"),
    ),
}


@pytest.mark.parametrize(("plan", "measured", "alternatives"), ALTERNATIVES.values(), ids=ALTERNATIVES)
def test_alternatives(plan: Plan, measured: Profile, alternatives: tuple[str, ...]) -> None:
    assert explained(plan, measured).alternatives == alternatives


def test_two_buckets_of_a_kind_next_to_each_other_may_be_one() -> None:
    (fewer,) = explained(plan_of((2,), (1,), (0,), params=KINDS), profile(KINDS)).alternatives
    assert fewer.startswith("one bucket fewer, at best 0 and 1 in one: ")


def test_one_size_tells_what_the_network_took_and_nothing_of_other_plans() -> None:
    it = explained(plan_of((3, 2), (1, 0)), profile(all_reduce=CostCurve(points=((2e6, 2100.0),))), achieved_us=8000.0)
    assert it.network == ("all_reduce: 2 MB in 2.10 ms",)
    assert (it.predicted_ms, it.best_ms, it.limit_ms, it.alternatives) == (None, None, None, ())


def test_shards_need_reductions_and_gathers() -> None:
    plan = plan_of((3, 2), (1, 0))
    assert explained(plan, profile(), strategy="zero1").network == ()
    it = explained(plan, profile(reduce_scatter=HALF, all_gather=HALF), strategy="zero1")
    assert it.network == tuple(f"{kind}: 1 MB in 0.60 ms to 4 MB in 2.10 ms" for kind in ("reduce_scatter", "all_gather"))
    times_ms = [it.limit_ms, it.best_ms, it.predicted_ms]
    assert None not in times_ms
    assert times_ms == sorted(times_ms)  # type: ignore[type-var]


def test_every_decision_is_told_with_its_reason() -> None:
    times = {"present_us": 9200.0, "predicted_us": 7400.0, "limit_us": 7100.0}
    decisions = [
        Decision(outcome=Outcome.UNKNOWN, next_look=100),
        Decision(outcome=Outcome.FROZEN, next_look=100),
        Decision(outcome=Outcome.KEEP, next_look=100, **times),
        Decision(outcome=Outcome.MOVE, next_look=1, groups=((3,), (2, 1, 0)), **times),
        Decision(outcome=Outcome.BACK, next_look=100, groups=((3, 2, 1, 0),), **times),
    ]
    decided = [Decided(round=6 + 107 * at, decision=decision) for at, decision in enumerate(decisions)]
    assert explained(plan_of((3, 2, 1, 0)), None, history=decided).decisions == (
        "round 6: kept: too little was measured to tell what buckets of other sizes cost",
        "round 113: kept: torch.use_deterministic_algorithms is on, and another plan rounds differently",
        "round 220: kept (predicted 9.20 ms, the best plan 7.40 ms: too little to gain, or tried before)",
        "round 327: moved to 2 buckets (predicted 9.20 ms, the best plan 7.40 ms)",
        "round 434: went back to 1 bucket: measured to be faster",
    )


def test_every_outcome_has_a_text() -> None:
    decided = [Decided(round=6, decision=Decision(outcome=outcome, next_look=1)) for outcome in Outcome]
    told = explained(plan_of((3, 2, 1, 0)), None, history=decided).decisions
    assert [line.startswith("round 6: ") for line in told] == [True] * len(Outcome)


@pytest.mark.parametrize(
    ("measured", "more", "text"),
    [
        (
            profile(),
            {"achieved_us": 8123.0, "history": [Decided(round=7, decision=MOVE)]},
            "The plan: 2 buckets of 2.00, 2.00 MB, ddp, 2 ranks\n"
            f"  {WHY}\n"
            "Until gradients are through, ms since the step began: "
            "achieved 8.12, predicted 8.20, the best plan 7.40, limit 7.10\n"
            "Other plans:\n"
            f"  {BOTH[0]}\n"
            f"  {BOTH[1]}\n"
            "The network, as measured:\n"
            "  all_reduce: 1 MB in 1.10 ms to 4 MB in 4.10 ms\n"
            "Decisions:\n"
            "  round 7: moved to 2 buckets (predicted 9.20 ms, the best plan 7.40 ms)\n",
        ),
        (
            None,
            {"why": "bucket_cap_mb=[2] was asked for"},
            "The plan: 2 buckets of 2.00, 2.00 MB, ddp, 2 ranks\n  bucket_cap_mb=[2] was asked for\n",
        ),
    ],
    ids=["all that is known", "nothing measured"],
)
def test_what_is_known_is_printed(measured: Profile | None, more: dict[str, Any], text: str) -> None:
    # Narrower than the lines.
    assert printed(print_explanation, explained(plan_of((3, 2), (1, 0)), measured, **more), width=40) == text
