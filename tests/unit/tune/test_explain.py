"""The reasons for a plan, as the user reads them."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import pytest
from rich.console import Console

from support.strategies import spec
from undertow.cost import CostCurve
from undertow.plan import ParamSpec, Plan, plan_from_groups
from undertow.plan.finish import finish_us
from undertow.profile import Profile
from undertow.report.explain import print_explanation
from undertow.tune import Decided, Decision, Explanation, Measurement, Outcome, Tuner, explanation

# Gradients of 1 MB come at 1, 2, 3 and 4 ms of backward, the last registered first; forward takes 2 ms.
PARAMS = tuple(spec(f"p{i}", 250_000) for i in range(4))
# 0.1 ms and 1 ms per MB; measured at 1 MB and 4 MB.
CURVE = CostCurve(points=((1e6, 1100.0), (4e6, 4100.0)))
WHY = "planned from what was measured"


def profile(*, params: Sequence[ParamSpec] = PARAMS, **curves: CostCurve) -> Profile:
    return Profile(
        params=tuple(params),
        ready_us=tuple(4000.0 - 1000.0 * i for i in range(len(params))),
        forward_us=2000.0,
        backward_us=4000.0,
        num_ranks=2,
        curves=curves or {"all_reduce": CURVE},
    )


def plan_of(*groups: Sequence[int], params: Sequence[ParamSpec] = PARAMS) -> Plan:
    return plan_from_groups(params, groups, num_ranks=2)


class Learned(Tuner):
    """One that has learned this."""

    def __init__(self, measured: Profile, achieved_us: float | None) -> None:
        super().__init__()
        self._measured = measured
        if achieved_us is not None:
            nothing = dict.fromkeys(("forward_us", "backward_us", "rest_us", "spread_us"), 0.0)
            self.measurement = Measurement(synchronised_us=achieved_us, ready_us=(), samples={}, **nothing)

    def profile(self, plan: Plan, *, strategy: str) -> Profile:
        return self._measured


def explained(plan: Plan, measured: Profile | None, *, achieved_us: float | None = None, **changes: Any) -> Explanation:
    known: dict[str, Any] = {"why": WHY, "strategy": "ddp", "history": ()}
    return explanation(plan, None if measured is None else Learned(measured, achieved_us), **{**known, **changes})


def history(**outcomes: Decision) -> tuple[str, ...]:
    decided = [Decided(round=6 + 107 * at, decision=decision) for at, decision in enumerate(outcomes.values())]
    return explained(plan_of((3, 2, 1, 0)), None, history=decided).decisions


def test_before_anything_is_measured_only_the_plan_is_known() -> None:
    it = explained(plan_of((3, 2), (1, 0)), None)
    assert it == Explanation(num_ranks=2, strategy="ddp", bucket_mb=(2.0, 2.0), why=WHY)
    assert str(it) == f"2 buckets, ddp, 2 ranks: {WHY}"


def test_times_are_in_milliseconds_since_the_step_began() -> None:
    it = explained(plan_of((3, 2, 1), (0,)), profile(), achieved_us=7654.0)
    # Backward is over at 6 ms. b0 leaves at 5, for 3.1 ms, b1 behind it for 1.1; 1 MB at the end takes 1.1 at the least.
    assert (it.predicted_ms, it.achieved_ms) == (pytest.approx(9.2), 7.654)
    # One by one from 3 ms on, 1.1 ms each.
    assert it.best_ms == pytest.approx(7.4)
    assert it.limit_ms == pytest.approx(7.1, rel=1 / 600)  # the cells of its sizes are a sixth of a percent wide
    assert str(it) == f"2 buckets, ddp, 2 ranks: {WHY}; 7.7 ms, limit 7.1 ms"


def test_alternatives_are_the_best_of_one_bucket_fewer_and_one_more() -> None:
    plan, measured = plan_of((3, 2), (1, 0)), profile()
    assert explained(plan, measured).alternatives == (
        "one bucket fewer, at best 0 and 1 in one: +1.90 ms",
        "one bucket more, at best 0 in two: -0.10 ms",
    )

    def later_ms(*groups: Sequence[int]) -> float:
        timing, costs = measured.timing, measured.costs()
        times = [finish_us(PARAMS, each, timing, costs) for each in (groups, plan.groups)]
        return (times[0] - times[1]) / 1e3

    assert later_ms((3, 2, 1, 0)) == pytest.approx(1.9)
    assert later_ms((3,), (2,), (1, 0)) == pytest.approx(-0.1)
    assert later_ms((3, 2), (1,), (0,)) > -0.1


def test_one_bucket_of_one_parameter_has_no_alternative() -> None:
    params = PARAMS[:1]
    assert explained(plan_of((0,), params=params), profile(params=params)).alternatives == ()


def test_buckets_of_different_kinds_are_never_thought_to_be_one() -> None:
    params = [spec("a", 1000), spec("b", 1000, dtype="float16"), spec("c", 1000, dtype="float16")]
    apart = plan_of((2,), (0,), (1,), params=params)
    assert explained(apart, profile(params=params)).alternatives == ()
    alike = plan_of((2,), (1,), (0,), params=params)
    (fewer,) = explained(alike, profile(params=params)).alternatives
    assert fewer.startswith("one bucket fewer, at best 0 and 1 in one: ")


def test_of_hundreds_of_buckets_some_are_tried_at_every_place() -> None:
    params = [spec(f"p{i}", 1000) for i in range(600)]
    plan = plan_of(*[(2 * i, 2 * i + 1) for i in range(300)], params=params)
    measured = Profile(params=tuple(params), ready_us=(0.0,) * 600, forward_us=0.0, backward_us=1.0, curves={"all_reduce": CURVE})
    fewer, more = explained(plan, measured).alternatives
    # One latency less, or more, of 0.1 ms; all pairs are as good.
    assert fewer == "one bucket fewer, at best 0 and 1 in one: -0.10 ms"
    assert more == "one bucket more, at best 0 in two: +0.10 ms"


def test_one_size_tells_what_the_network_took_and_nothing_of_other_plans() -> None:
    one_size = CostCurve(points=((2e6, 2100.0),))
    it = explained(plan_of((3, 2), (1, 0)), profile(all_reduce=one_size), achieved_us=8000.0)
    assert it.network == ("all_reduce: 2 MB in 2.10 ms",)
    assert (it.predicted_ms, it.best_ms, it.limit_ms, it.alternatives) == (None, None, None, ())


def test_the_network_is_shown_from_the_smallest_to_the_largest_size() -> None:
    assert explained(plan_of((3, 2, 1, 0)), profile()).network == ("all_reduce: 1 MB in 1.10 ms to 4 MB in 4.10 ms",)


def test_shards_need_reductions_and_gathers() -> None:
    half = CostCurve(points=((1e6, 600.0), (4e6, 2100.0)))
    plan = plan_of((3, 2), (1, 0))
    assert explained(plan, profile(), strategy="zero1").network == ()
    it = explained(plan, profile(reduce_scatter=half, all_gather=half), strategy="zero1")
    assert it.network == tuple(f"{kind}: 1 MB in 0.60 ms to 4 MB in 2.10 ms" for kind in ("reduce_scatter", "all_gather"))
    assert it.predicted_ms is not None
    assert it.limit_ms is not None
    assert it.best_ms is not None
    assert it.limit_ms <= it.best_ms <= it.predicted_ms


def test_every_decision_is_told_with_its_reason() -> None:
    times = {"present_us": 9200.0, "predicted_us": 7400.0, "limit_us": 7100.0}
    assert history(
        unknown=Decision(outcome=Outcome.UNKNOWN, next_look=100),
        frozen=Decision(outcome=Outcome.FROZEN, next_look=100),
        keep=Decision(outcome=Outcome.KEEP, next_look=100, **times),
        move=Decision(outcome=Outcome.MOVE, next_look=1, groups=((3,), (2, 1, 0)), **times),
        back=Decision(outcome=Outcome.BACK, next_look=100, groups=((3, 2, 1, 0),), **times),
    ) == (
        "round 6: kept: too little was measured to tell what buckets of other sizes cost",
        "round 113: kept: torch.use_deterministic_algorithms is on, and another plan rounds differently",
        "round 220: kept (predicted 9.20 ms, the best plan 7.40 ms: too little to gain, or tried before)",
        "round 327: moved to 2 buckets (predicted 9.20 ms, the best plan 7.40 ms)",
        "round 434: went back to 1 bucket: measured to be faster",
    )


@pytest.mark.parametrize("outcome", Outcome)
def test_every_outcome_has_a_text(outcome: Outcome) -> None:
    assert history(it=Decision(outcome=outcome, next_look=1))[0].startswith("round 6: ")


def printed(it: Explanation) -> str:
    console = Console(file=io.StringIO(), width=40)  # narrower than the lines
    print_explanation(it, console)
    text = console.file
    assert isinstance(text, io.StringIO)
    return text.getvalue()


def test_all_that_is_known_is_printed() -> None:
    move = Decision(outcome=Outcome.MOVE, next_look=1, present_us=9200.0, predicted_us=7400.0, groups=((3, 2), (1, 0)))
    it = explained(plan_of((3, 2), (1, 0)), profile(), achieved_us=8123.0, history=[Decided(round=7, decision=move)])
    assert printed(it) == (
        "The plan: 2 buckets of 2.00, 2.00 MB, ddp, 2 ranks\n"
        "  planned from what was measured\n"
        "Until gradients are through, ms since the step began: "
        "achieved 8.12, predicted 8.20, the best plan 7.40, limit 7.10\n"
        "Other plans:\n"
        "  one bucket fewer, at best 0 and 1 in one: +1.90 ms\n"
        "  one bucket more, at best 0 in two: -0.10 ms\n"
        "The network, as measured:\n"
        "  all_reduce: 1 MB in 1.10 ms to 4 MB in 4.10 ms\n"
        "Decisions:\n"
        "  round 7: moved to 2 buckets (predicted 9.20 ms, the best plan 7.40 ms)\n"
    )


def test_what_is_not_known_is_not_printed() -> None:
    assert printed(explained(plan_of((3, 2), (1, 0)), None, why="bucket_cap_mb=[2] was asked for")) == (
        "The plan: 2 buckets of 2.00, 2.00 MB, ddp, 2 ranks\n  bucket_cap_mb=[2] was asked for\n"
    )
