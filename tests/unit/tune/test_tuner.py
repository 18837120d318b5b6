"""A tuner in a closed loop with a simulated model and network."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.world import Cost, World, line, model, stairs, walk
from undertow.cost import MeasuredCosts
from undertow.plan import Plan
from undertow.plan.finish import finish_us
from undertow.tune import Decision, Outcome, Tuner
from undertow.tune.tuner import NUM_STEPS_BETWEEN_LOOKS

# 24 MB: backward takes 40 ms, all bytes at once 24 ms, 96 ms, 14 ms and 24 ms; 48 parameters one by one 10, 10, 96 and 14 more.
NETWORKS = {
    "middling": line(200, 0.001),
    "slow": line(200, 0.004),
    "far": line(2000, 0.0005),
    "stairs": stairs(300, 0.001),
}
MANY, FEW = 1e5, 22.5e6  # bytes of a bucket: one per parameter, and two in all

each_network = pytest.mark.parametrize("cost", NETWORKS.values(), ids=NETWORKS)


@each_network
@pytest.mark.parametrize("cap_bytes", [MANY, FEW], ids=["many", "few"])
@pytest.mark.parametrize("is_queued", [True, False], ids=["queued", "in turn"])
def test_it_ends_as_fast_as_the_best_buckets_of_one_size(cost: Cost, cap_bytes: float, is_queued: bool) -> None:
    world = World(cost=cost, is_queued=is_queued)
    path = walk(Tuner(), world, world.plan_of_size(cap_bytes), num_looks=6)
    # What another plan would gain, below that a move is not worthwhile: 0.5 % of the time.
    assert world.finish_us(path.last) <= 1.005 * world.best_us()
    assert path.outcomes.endswith("KKK")


@each_network
def test_it_comes_to_rest_where_steps_differ(cost: Cost) -> None:
    """By 2 %, gradients and collectives; so do predictions, and 20 more looks would each be a chance to move."""
    world = World(cost=cost, noise=0.02)
    first = world.plan_of_size(FEW)
    path = walk(Tuner(), world, first, num_looks=26)
    assert set(path.outcomes[6:]) == {"K"}
    assert world.finish_us(path.last) <= world.finish_us(first)
    # 0.5 %, and what the median of five steps that differ by 2 % is off: 1.25 * 2 % / sqrt(5).
    assert world.finish_us(path.last) <= 1.016 * world.best_us()


@pytest.mark.parametrize("seed", [1, 2])
def test_where_steps_differ_much_it_moves_a_few_times_only(seed: int) -> None:
    """The least gain doubles with every move from 0.5 %: by the eighth it is above half of the step."""
    world = World(cost=NETWORKS["stairs"], noise=0.1, seed=seed)
    path = walk(Tuner(), world, world.plan_of_size(MANY), num_looks=20)
    assert path.outcomes.count("M") <= 7


def test_a_plan_that_is_as_good_as_any_of_as_few_buckets_stays() -> None:
    world = World(cost=line(20, 0.0001))
    first = world.plan_of_size(MANY)
    fewest = walk(Tuner(), world, first, num_looks=2).last
    path = walk(Tuner(), world, fewest, num_looks=2)
    assert (path.outcomes, path.last) == ("KK", fewest)
    assert path.decisions[0].groups is None


def test_of_plans_that_are_as_good_one_of_fewer_buckets_is_tried_and_kept() -> None:
    """All are through with the last gradient's own bucket."""
    world = World(cost=line(20, 0.0001))
    first = world.plan_of_size(MANY)
    path = walk(Tuner(), world, first, num_looks=4)
    assert path.outcomes == "FKKK"
    assert len(path.last.buckets) < 0.75 * len(first.buckets)
    assert world.finish_us(path.last) <= 1.002 * world.best_us()


def test_one_of_fewer_buckets_that_is_slower_is_tried_once() -> None:
    world = World(cost=line(20, 0.0001), contention_us=lambda plan: 2e4 * (len(plan.buckets) < 48))
    path = walk(Tuner(), world, world.plan_of_size(MANY), num_looks=6)
    assert path.outcomes == "FBKKKK"
    assert path.last == path.plans[0]


def test_fewer_buckets_that_are_slower_say_nothing_of_the_promise_of_a_move_before() -> None:
    """Of which a later move would be asked for the whole gain once more."""
    world, tuner = World(cost=NETWORKS["slow"]), Tuner()
    moved = walk(tuner, world, world.plan_of_size(FEW), num_looks=1).last
    us = world.finish_us(moved)
    look = replace(world.measure(moved), synchronised_us=us, spread_us=0.0)
    best = moved.groups[: len(moved.groups) // 2]
    assert tuner._choose(moved.groups, best, look, gain_us=0.0, move_us=0.0)[0] is Outcome.FEWER
    slower = replace(look, synchronised_us=1.1 * us)
    assert tuner._choose(best, best, slower, gain_us=0.0, move_us=0.0)[0] is Outcome.BACK
    assert tuner._overrated_us == pytest.approx(0.1 * us)


def test_shards_are_moved_to_have_fewer_buckets_where_a_thousand_steps_pay_for_it() -> None:
    """Each bucket fewer saves the host 0.2 s in so many steps; a move gathers everything three times."""
    world = World(cost=line(1, 1e-6), has_shards=True)
    layers = [(param, param - 1) for param in range(len(world.params) - 1, 0, -2)]
    first = world.plan([*layers[:8], *(layers[at] + layers[at + 1] for at in range(8, 24, 2))])
    look = world.measure(first)
    outcomes = []
    for everything_us in (1e4, 1e7):
        tuner = Tuner()
        gathers = (*look.samples["all_gather"], (12e6, 1e3), (24e6, everything_us))
        tuner.learn(replace(look, samples={**look.samples, "all_gather": gathers}))
        outcomes.append(tuner.decide(first, has_shards=True).outcome)
    assert outcomes == [Outcome.FEWER, Outcome.KEEP]


def test_a_decision_says_what_the_plans_take_and_when_to_look_again() -> None:
    world = World(cost=NETWORKS["slow"])
    first = world.plan_of_size(FEW)
    path = walk(Tuner(), world, first, num_looks=2)
    move, keep = path.decisions
    assert (move.outcome, move.next_look, keep.outcome, keep.next_look) == (
        Outcome.MOVE,
        1,
        Outcome.KEEP,
        NUM_STEPS_BETWEEN_LOOKS,
    )
    assert move.groups == path.last.groups
    # A profile has times to a tenth of a microsecond; costs are those of sizes that were measured, or on a line between them.
    assert move.present_us == pytest.approx(world.finish_us(first), rel=1e-3)
    assert keep.present_us == pytest.approx(world.finish_us(path.last), rel=1e-3)
    assert move.limit_us <= move.predicted_us < move.present_us


def test_nothing_measured_decides_nothing() -> None:
    world = World(cost=NETWORKS["slow"])
    tuner = Tuner()
    plan = world.plan_of_size(FEW)
    assert tuner.decide(plan, has_shards=False) == Decision(outcome=Outcome.UNKNOWN, next_look=NUM_STEPS_BETWEEN_LOOKS)
    assert tuner.profile(plan, strategy="ddp") is None


def test_buckets_of_one_size_do_not_tell_what_others_would_take_so_that_another_is_tried() -> None:
    world = World(cost=NETWORKS["far"], params=model(layer_bytes=800_000))
    path = walk(Tuner(), world, world.plan_of_size(1e6), num_looks=5)
    assert path.outcomes[0] == "L"
    assert world.finish_us(path.last) <= 1.01 * world.best_us()


def test_it_follows_a_network_that_has_changed_although_all_is_in_one_bucket() -> None:
    world = World(cost=line(50_000, 1e-5))
    tuner = Tuner()
    before = walk(tuner, world, world.plan_of_size(1e6), num_looks=8)
    assert len(before.last.buckets) == 1
    slow = replace(world, cost=line(200, 0.01))
    after = walk(tuner, slow, before.last, num_looks=8)
    assert slow.finish_us(after.last) <= 1.01 * slow.best_us()


def test_a_large_bucket_is_not_planned() -> None:
    """Everything in one bucket would be through first, and would hold all gradients twice."""
    world = World(cost=line(50_000, 1e-5), params=model(num_layers=75, layer_bytes=4_000_000))
    path = walk(Tuner(), world, world.plan_of_size(30e6), num_looks=6)
    assert max(bucket.num_bytes for bucket in path.last.buckets) <= 300_000_000 / 8


def test_shards_that_would_be_whole_on_every_rank_for_a_moment_stay_where_they_are() -> None:
    world = World(cost=NETWORKS["slow"], params=model(num_layers=75, layer_bytes=4_000_000), has_shards=True)
    path = walk(Tuner(), world, world.plan_of_size(300e6), num_looks=2)
    assert path.last == path.plans[0]
    assert set(path.outcomes) <= {"T", "K"}


@pytest.mark.parametrize("has_shards", [True, False])
@pytest.mark.parametrize(
    ("layer_bytes", "cap_bytes", "moves", "stays"),
    [(1_000_000, FEW, Outcome.MOVE, Outcome.TOO_LARGE), (800_000, 1e6, Outcome.LEARN, Outcome.UNKNOWN)],
    ids=["a better plan", "to learn"],
)
def test_shards_move_up_to_so_many_bytes(
    monkeypatch: pytest.MonkeyPatch, layer_bytes: int, cap_bytes: float, moves: Outcome, stays: Outcome, has_shards: bool
) -> None:
    """Without shards each rank has everything anyway."""
    world = World(cost=NETWORKS["far"], params=model(layer_bytes=layer_bytes), has_shards=has_shards)
    plan = world.plan_of_size(cap_bytes)
    num_bytes = sum(bucket.num_bytes for bucket in plan.buckets)
    for most_bytes, outcome in ((num_bytes, moves), (num_bytes - 1, stays if has_shards else moves)):
        monkeypatch.setattr("undertow.tune.tuner._MOST_MOVED_BYTES", most_bytes)
        assert walk(Tuner(), world, plan, num_looks=1).decisions[0].outcome is outcome


def test_a_look_that_measured_nothing_decides_nothing() -> None:
    """Else what the plan before took would count as what the present one takes."""
    world = World(cost=NETWORKS["slow"])
    tuner = Tuner()
    path = walk(tuner, world, world.plan_of_size(FEW), num_looks=1)
    assert path.outcomes == "M"
    assert tuner.decide(path.last, has_shards=False).outcome is Outcome.UNKNOWN
    assert walk(tuner, world, path.last, num_looks=1).outcomes == "K"


@each_network
def test_it_follows_a_network_that_becomes_four_times_slower(cost: Cost) -> None:
    world = World(cost=cost, noise=0.01)
    tuner = Tuner()
    before = walk(tuner, world, world.plan_of_size(FEW), num_looks=5).last
    slower = World(cost=lambda num_bytes: 4 * cost(num_bytes), noise=0.01)
    path = walk(tuner, slower, before, num_looks=8)
    assert slower.finish_us(path.last) <= slower.finish_us(before)
    # 0.5 %, and 1.25 * 1 % / sqrt(5) that a median of five steps is off.
    assert slower.finish_us(path.last) <= 1.011 * slower.best_us()


def test_what_another_network_took_is_forgotten_at_once() -> None:
    cost = NETWORKS["middling"]
    world, slower = World(cost=cost), World(cost=lambda num_bytes: 4 * cost(num_bytes))
    plan, tuner = world.plan_of_size(FEW), Tuner()
    for each in (world, world, world, slower):
        tuner.learn(each.measure(plan))
    sizes = [bucket.num_bytes for bucket in plan.buckets]
    assert tuner.curves["all_reduce"].us(sizes) == pytest.approx([4 * cost(size) for size in sizes])


def test_a_network_that_varies_a_little_is_the_same_one() -> None:
    cost = NETWORKS["middling"]
    plan, tuner = World(cost=cost).plan_of_size(FEW), Tuner()
    for factor in (1.0, 1.0, 1.2):  # below a quarter
        tuner.learn(World(cost=lambda num_bytes, factor=factor: factor * cost(num_bytes)).measure(plan))
    sizes = [bucket.num_bytes for bucket in plan.buckets]
    assert tuner.curves["all_reduce"].us(sizes) == pytest.approx([cost(size) for size in sizes])  # the medians of three looks


def test_what_a_faster_network_took_is_no_reason_to_go_back() -> None:
    world = World(cost=NETWORKS["middling"])
    tuner = Tuner()
    path = walk(tuner, world, world.plan_of_size(FEW), num_looks=3)
    slower = World(cost=lambda num_bytes: 4 * NETWORKS["middling"](num_bytes))
    assert "B" not in walk(tuner, slower, path.last, num_looks=3).outcomes


def test_what_a_longer_backward_takes_is_no_reason_to_go_back() -> None:
    """Nor does it keep the tuner from the plan that is the best one now."""
    world = World(cost=NETWORKS["slow"])
    tuner = Tuner()
    path = walk(tuner, world, world.plan_of_size(FEW), num_looks=4)
    longer = World(cost=NETWORKS["slow"], backward_us=150_000.0)
    later = walk(tuner, longer, path.last, num_looks=4)
    assert "B" not in later.outcomes
    assert longer.finish_us(later.last) <= 1.005 * longer.best_us()


def crowded(most_buckets: int) -> World:
    """Of more buckets each takes 20 ms from the computation: no curve knows of that."""
    return World(cost=NETWORKS["slow"], noise=0.01, contention_us=lambda plan: 2e4 * max(0, len(plan.buckets) - most_buckets))


def test_it_goes_back_where_a_plan_is_slower_than_predicted() -> None:
    world = crowded(2)
    first = world.plan_of_size(FEW)
    path = walk(Tuner(), world, first, num_looks=2)
    assert path.outcomes == "MB"
    assert path.last == first
    assert path.decisions[1].groups == first.groups


@pytest.mark.parametrize(("spread_share", "outcome"), [(0.1, Outcome.KEEP), (0.0, Outcome.BACK)])
def test_it_goes_back_where_steps_differ_less_from_one_another_than_from_those_before(
    spread_share: float, outcome: Outcome
) -> None:
    world, tuner = World(cost=NETWORKS["slow"]), Tuner()
    first = world.plan_of_size(FEW)
    moved = walk(tuner, world, first, num_looks=1).last
    us = world.finish_us(first)
    tuner.learn(replace(world.measure(moved), synchronised_us=1.05 * us, spread_us=spread_share * us))
    assert tuner.decide(moved, has_shards=False).outcome is outcome


def test_after_going_back_it_does_not_try_for_ever() -> None:
    world = crowded(2)
    path = walk(Tuner(), world, world.plan_of_size(FEW), num_looks=16)
    assert set(path.outcomes[6:]) == {"K"}
    assert path.last == path.plans[0]


def test_a_curve_that_is_wrong_about_sizes_never_seen_is_no_other_network() -> None:
    """It would forget what small buckets take, and that another plan was faster."""
    steep = World(cost=lambda num_bytes: 2000 + 0.0005 * num_bytes + (30_000 if num_bytes > 3e6 else 0))
    layers = [(param, param - 1) for param in range(len(steep.params) - 1, 0, -2)]
    first = steep.plan([layers[0], *(layers[at] + layers[at + 1] for at in range(1, 23, 2)), layers[23]])
    path = walk(tuner := Tuner(), steep, first, num_looks=3)
    assert path.outcomes[:2] == "MB"
    assert path.last == first
    assert min(size for size, _ in tuner.curves["all_reduce"].points) < 3e6


def test_what_was_measured_under_earlier_plans_counts() -> None:
    world = World(cost=NETWORKS["middling"])
    path = walk(tuner := Tuner(), world, world.plan_of_size(FEW), num_looks=2)
    sizes = [size for size, _ in tuner.curves["all_reduce"].points]
    assert {bucket.num_bytes for bucket in path.plans[0].buckets} <= set(sizes)
    assert len(sizes) > len(path.plans[0].buckets)


def test_an_order_that_the_user_has_chosen_is_kept() -> None:
    world = World(cost=NETWORKS["slow"])
    order = range(len(world.params))  # the opposite of that in which gradients come
    first = world.plan([[*order[:1]], [*order[1:]]])
    path = walk(Tuner(order), world, first, num_looks=4)
    assert [param for group in path.last.groups for param in group] == list(order)


def test_a_profile_has_what_was_learned() -> None:
    world = World(cost=NETWORKS["slow"])
    plan, tuner = world.plan_of_size(FEW), Tuner()
    walk(tuner, world, plan, num_looks=1)
    profile = tuner.profile(plan, strategy="ddp")
    assert profile is not None
    assert (profile.forward_us, profile.backward_us, profile.update_us) == (10_000.0, 40_000.0, 1_000.0)
    assert (profile.groups, profile.num_ranks, profile.params) == (plan.groups, plan.num_ranks, plan.params)
    assert profile.step_us == pytest.approx(world.finish_us(plan) + 1_000.0, abs=0.1)
    assert profile.curves == tuner.curves


def predicted_us(tuner: Tuner, plan: Plan) -> float:
    profile = tuner.profile(plan, strategy="zero1")
    assert profile is not None
    return finish_us(plan.params, plan.groups, profile.timing, MeasuredCosts(profile.curves), has_shards=True)


def test_shards_move_where_the_gain_pays_for_it() -> None:
    world = World(cost=NETWORKS["far"], has_shards=True)
    first = world.plan_of_size(FEW)
    path = walk(tuner := Tuner(), world, first, num_looks=4)
    assert path.outcomes[0] == "M"
    assert predicted_us(tuner, path.last) < 0.995 * predicted_us(tuner, first)
    assert world.finish_us(path.last) < world.finish_us(first)


def test_shards_stay_where_a_move_costs_more_than_it_gains_in_a_thousand_steps() -> None:
    world = World(cost=NETWORKS["far"], has_shards=True)
    layers = [(param, param - 1) for param in range(len(world.params) - 1, 0, -2)]
    first = world.plan([*layers[:8], *(layers[at] + layers[at + 1] for at in range(8, 24, 2))])
    look = world.measure(first)
    # What moves are all bytes, three times; 1000 steps gain less than 100 s, for one takes less than 0.1 s.
    for everything_us, outcome in ((1e6, Outcome.MOVE), (1e8, Outcome.KEEP)):
        tuner = Tuner()
        gathers = (*look.samples["all_gather"], (12e6, 1e4), (24e6, everything_us))
        tuner.learn(replace(look, samples={**look.samples, "all_gather": gathers}))
        decision = tuner.decide(first, has_shards=True)
        assert decision.outcome is outcome
        assert decision.predicted_us < 0.9 * decision.present_us


def test_gathers_leave_between_reductions_as_long_as_that_is_faster() -> None:
    world = World(cost=line(100, 0.0003), has_shards=True)
    plan = walk(tuner := Tuner(), world, world.plan_of_size(MANY), num_looks=4).last
    predicted = tuner.gathers_behind(plan)
    assert predicted is not None
    assert any(predicted[:-1])
    tuner.learn_order(plan.groups, interleaved_us=100.9, last_us=100.0)  # within what some steps differ by
    assert tuner.gathers_behind(plan) == predicted
    tuner.learn_order(plan.groups, interleaved_us=101.1, last_us=100.0)
    last = tuner.gathers_behind(plan)
    assert last is not None
    assert not any(last[:-1])
    tuner.learn(World(cost=NETWORKS["slow"], has_shards=True).measure(plan))
    assert tuner.would_interleave  # another network is another question
    assert not tuner.has_compared_orders(plan.groups)  # to be answered as soon as the first time


@settings(max_examples=15, deadline=None)
@given(
    latency_us=st.floats(10, 5000),
    us_per_byte=st.floats(1e-5, 1e-2),
    noise=st.sampled_from([0.0, 0.05, 0.3]),
    cap_bytes=st.floats(5e4, 2e7),
    has_shards=st.booleans(),
)
def test_the_same_measurements_make_the_same_decisions(
    latency_us: float, us_per_byte: float, noise: float, cap_bytes: float, has_shards: bool
) -> None:
    def path() -> list[Decision]:
        world = World(cost=line(latency_us, us_per_byte), params=model(num_layers=6), noise=noise, has_shards=has_shards)
        return walk(Tuner(), world, world.plan_of_size(cap_bytes), num_looks=4).decisions

    decisions = path()
    assert path() == decisions
    assert all(0 <= it.limit_us <= it.predicted_us for it in decisions if it.outcome is not Outcome.UNKNOWN)
    moves = (Outcome.MOVE, Outcome.FEWER, Outcome.BACK, Outcome.LEARN)
    assert all((it.groups is not None) == (it.outcome in moves) for it in decisions)
