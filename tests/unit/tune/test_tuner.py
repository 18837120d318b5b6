"""A tuner in a closed loop with a simulated model and network."""

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.world import Cost, World, line, model, stairs, walk
from undertow.plan import Plan
from undertow.tune import Decision, Measurement, Outcome, Tuner
from undertow.tune.tuner import NUM_STEPS_BETWEEN_LOOKS

# 24 MB: backward takes 40 ms, all bytes at once 24 ms, 96 ms, 14 ms and 24 ms; 48 parameters one by one 10, 10, 96 and 14 more.
NETWORKS = {
    "middling": line(200, 0.001),
    "slow": line(200, 0.004),
    "far": line(2000, 0.0005),
    "stairs": stairs(300, 0.001),
}
MIDDLING, SLOW, FAR = (World(cost=NETWORKS[name]) for name in ("middling", "slow", "far"))
FAST = World(cost=line(20, 0.0001))  # all plans are through with the last gradient's own bucket
HIGH = World(cost=line(50_000, 1e-5))
STEEP = World(cost=lambda num_bytes: 2000 + 0.0005 * num_bytes + (30_000 if num_bytes > 3e6 else 0))
# Of more than two buckets each takes 20 ms from the computation: no curve knows of that.
CROWDED = replace(SLOW, noise=0.01, contention_us=lambda plan: 2e4 * max(0, len(plan.buckets) - 2))
LARGE = model(num_layers=75, layer_bytes=4_000_000)
MANY, FEW = 1e5, 22.5e6  # bytes of a bucket: one per parameter, and two in all
ANY = float("inf")


def slower(cost: Cost) -> Cost:
    return lambda num_bytes: 4 * cost(num_bytes)


def in_layers(world: World, *pairs: range) -> Plan:
    """A bucket for every layer, or for two of those that are in `pairs` and the next ones."""
    layers = [(param, param - 1) for param in range(len(world.params) - 1, 0, -2)]
    firsts = {first for pair in pairs for first in pair}
    seconds = {first + 1 for first in firsts}
    return world.plan([layer + layers[at + 1] if at in firsts else layer for at, layer in enumerate(layers) if at not in seconds])


# The world, its first plan, the outcomes of looks, how much slower than the best buckets of one size the last plan may be, and
# whether that is the first one. What another plan would gain, below that a move is not worthwhile: 0.5 % of the time.


@pytest.mark.parametrize(
    ("world", "first", "num_looks", "outcomes", "most", "is_first"),
    [
        *(
            pytest.param(
                World(cost=cost, is_queued=how == "queued"), cap, 6, "...KKK", 1.005, False, id=f"{network}, {size}, {how}"
            )
            for network, cost in NETWORKS.items()
            for size, cap in (("many", MANY), ("few", FEW))
            for how in ("queued", "in turn")
        ),
        # By 2 %, gradients and collectives; so do predictions, and 20 more looks would each be a chance to move. 0.5 %, and what
        # the median of five steps that differ by 2 % is off: 1.25 * 2 % / sqrt(5).
        *(
            pytest.param(World(cost=cost, noise=0.02), FEW, 26, "......K{20}", 1.016, False, id=f"{network}, steps differ")
            for network, cost in NETWORKS.items()
        ),
        # The least gain doubles with every move from 0.5 %: by the eighth it is above half of the step.
        *(
            pytest.param(
                World(cost=NETWORKS["stairs"], noise=0.1, seed=seed),
                MANY,
                20,
                "([^M]*M){0,7}[^M]*",
                ANY,
                False,
                id=f"steps differ much, {seed}",
            )
            for seed in (1, 2)
        ),
        pytest.param(FAST, MANY, 4, "FKKK", 1.002, False, id="fewer buckets that are as good are kept"),
        pytest.param(
            replace(FAST, contention_us=lambda plan: 2e4 * (len(plan.buckets) < 48)),
            *(MANY, 6, "FBKKKK", ANY, True),
            id="fewer buckets that are slower are tried once",
        ),
        pytest.param(
            replace(FAR, params=model(layer_bytes=800_000)),
            *(1e6, 5, "L.*", 1.01, False),
            id="buckets of one size do not tell what others would take",
        ),
        pytest.param(
            replace(SLOW, params=LARGE, has_shards=True),
            *(300e6, 2, "[TK]*", ANY, True),
            id="shards that would be whole on every rank for a moment stay",
        ),
        pytest.param(CROWDED, FEW, 2, "MB", ANY, True, id="it goes back if a plan is slower than predicted"),
        pytest.param(CROWDED, FEW, 16, "MBT{14}", ANY, True, id="after going back it does not try for ever"),
        # It would forget what small buckets take, and that another plan was faster.
        pytest.param(
            STEEP,
            *(in_layers(STEEP, range(1, 22, 2)), 3, "MB.", ANY, True),
            id="a curve that is wrong about sizes never seen is no other network",
        ),
    ],
)
def test_a_walk(world: World, first: Plan | float, num_looks: int, outcomes: str, most: float, is_first: bool) -> None:
    first = first if isinstance(first, Plan) else world.plan_of_size(first)
    path = walk(tuner := Tuner(), replace(world), first, num_looks=num_looks)  # with random numbers of its own
    assert re.fullmatch(outcomes, path.outcomes), path.outcomes
    assert most == ANY or path.ratio <= most
    assert path.last == first or not is_first
    for plan, decision in zip(path.plans[1:], path.decisions, strict=True):
        assert decision.groups in (None, plan.groups)
    if world is STEEP:
        assert min(size for size, _ in tuner.curves["all_reduce"].points) < 3e6


# The world before and after, the first plan, and how many looks are taken at each; the rest as above.


@pytest.mark.parametrize(
    ("before", "after", "cap_bytes", "num_looks", "outcomes", "most"),
    [
        pytest.param(
            HIGH, World(cost=line(200, 0.01)), 1e6, (8, 8), ".*", 1.01, id="a network changes although all is in one bucket"
        ),
        # 0.5 %, and 1.25 * 1 % / sqrt(5) that a median of five steps is off.
        *(
            pytest.param(
                World(cost=cost, noise=0.01),
                World(cost=slower(cost), noise=0.01),
                *(FEW, (5, 8), ".*", 1.011),
                id=f"{network} becomes four times slower",
            )
            for network, cost in NETWORKS.items()
        ),
        pytest.param(
            MIDDLING,
            replace(MIDDLING, cost=slower(MIDDLING.cost)),
            *(FEW, (3, 3), "[^B]*", ANY),
            id="a faster network is no reason to go back",
        ),
        # Nor does it keep the tuner from the plan that is the best one now.
        pytest.param(
            SLOW,
            replace(SLOW, backward_us=150_000.0),
            FEW,
            (4, 4),
            "[^B]*",
            1.005,
            id="a longer backward is no reason to go back",
        ),
    ],
)
def test_it_follows(
    before: World, after: World, cap_bytes: float, num_looks: tuple[int, int], outcomes: str, most: float
) -> None:
    left = walk(tuner := Tuner(), replace(before), before.plan_of_size(cap_bytes), num_looks=num_looks[0]).last
    assert before is not HIGH or len(left.buckets) == 1
    path = walk(tuner, replace(after), left, num_looks=num_looks[1])
    assert re.fullmatch(outcomes, path.outcomes), path.outcomes
    assert most == ANY or path.ratio <= most
    assert after.finish_us(path.last) <= after.finish_us(left)


def test_a_large_bucket_is_not_planned() -> None:
    # Everything in one bucket would be through first, and would hold all gradients twice.
    world = replace(HIGH, params=LARGE)
    path = walk(Tuner(), world, world.plan_of_size(30e6), num_looks=6)
    assert max(bucket.num_bytes for bucket in path.last.buckets) <= 300_000_000 / 8


def test_of_plans_that_are_as_good_one_of_fewer_buckets_is_taken_and_stays() -> None:
    fewest = walk(Tuner(), FAST, first := FAST.plan_of_size(MANY), num_looks=2).last
    assert len(fewest.buckets) < 0.75 * len(first.buckets)
    path = walk(Tuner(), FAST, fewest, num_looks=2)
    assert (path.outcomes, path.last, path.decisions[0].groups) == ("KK", fewest, None)


def test_fewer_buckets_that_are_slower_say_nothing_of_the_promise_of_a_move_before() -> None:
    # Of which a later move would be asked for the whole gain once more.
    moved = walk(tuner := Tuner(), SLOW, SLOW.plan_of_size(FEW), num_looks=1).last
    us = SLOW.finish_us(moved)
    look = replace(SLOW.measure(moved), synchronized_us=us, spread_us=0.0)
    best = SLOW.plan([sum(moved.groups, ())])
    assert tuner._choose(moved, best.groups, look, gain_us=0.0, move_us=0.0)[0] is Outcome.FEWER
    slower = replace(look, synchronized_us=1.1 * us)
    assert tuner._choose(best, best.groups, slower, gain_us=0.0, move_us=0.0)[0] is Outcome.BACK
    assert tuner._overrated_us == pytest.approx(0.1 * us)


def test_if_processors_bind_half_as_many_buckets_are_tried_until_they_are_slower() -> None:
    # Each bucket takes 0.1 ms from the computation, and fewer than ten take 20 ms; no curve knows of that.
    crowded = replace(
        FAST, processors_us=1e4, contention_us=lambda plan: 2e4 * (len(plan.buckets) < 10) + 1e2 * len(plan.buckets)
    )
    path = walk(Tuner(), crowded, crowded.plan_of_size(MANY), num_looks=8)
    assert path.outcomes == "FBFFFBKK"
    assert [len(plan.buckets) for plan in path.plans] == [48, 2, 48, 24, 12, 6, 12, 12, 12]
    bound_by_network = replace(crowded, network_us=2e4)
    assert walk(Tuner(), bound_by_network, crowded.plan_of_size(MANY), num_looks=4).outcomes == "FBKK"


def with_gathers(look: Measurement, *gathers: tuple[float, float]) -> Measurement:
    return replace(look, samples={**look.samples, "all_gather": (*look.samples["all_gather"], *gathers)})


# A thousand steps must pay for a move, which gathers everything three times. Each bucket fewer saves the host 0.2 s in so many
# steps; another plan gains less than 100 s, for one step takes less than 0.1 s.
@pytest.mark.parametrize(
    ("cost", "gather_us", "everything_us", "outcome"),
    [
        (line(1, 1e-6), 1e3, 1e4, Outcome.FEWER),
        (line(1, 1e-6), 1e3, 1e7, Outcome.KEEP),
        (NETWORKS["far"], 1e4, 1e6, Outcome.MOVE),
        (NETWORKS["far"], 1e4, 1e8, Outcome.KEEP),
    ],
    ids=["fewer buckets pay", "fewer buckets do not pay", "a faster plan pays", "a faster plan does not pay"],
)
def test_shards_move_if_a_thousand_steps_pay_for_it(cost: Cost, gather_us: float, everything_us: float, outcome: Outcome) -> None:
    world, tuner = World(cost=cost, has_shards=True), Tuner()
    first = in_layers(world, range(8, 24, 2))
    tuner.learn(with_gathers(world.measure(first), (12e6, gather_us), (24e6, everything_us)))
    decision = tuner.decide(first, has_shards=True)
    assert decision.outcome is outcome
    assert gather_us == 1e3 or decision.predicted_us < 0.9 * decision.present_us


# Each bucket takes 0.1 ms from the computation, which no curve knows.
BUSY = World(cost=line(100, 0.0015), contention_us=lambda plan: 100.0 * len(plan.buckets))


@pytest.mark.parametrize(
    ("processors_us", "network_us", "is_bound_by_processors"),
    [(3000.0, 1000.0, True), (1000.1, 1000.0, True), (1000.0, 1000.0, False), (1000.0, 3000.0, False)],
    ids=["processors", "processors by a little", "both alike", "network"],
)
def test_plans_have_fewer_buckets_and_rarer_looks_if_processors_are_short(
    processors_us: float, network_us: float, is_bound_by_processors: bool
) -> None:
    world = replace(BUSY, processors_us=processors_us, network_us=network_us)
    usual = walk(Tuner(), BUSY, BUSY.plan_of_size(MANY), num_looks=6)
    path = walk(tuner := Tuner(), world, world.plan_of_size(MANY), num_looks=6)
    assert tuner.is_bound_by_processors is is_bound_by_processors
    assert (path.plans == usual.plans) is not is_bound_by_processors
    assert (len(path.last.buckets) < 0.75 * len(usual.last.buckets)) is is_bound_by_processors
    assert (world.finish_us(path.last) < 0.99 * world.finish_us(usual.last)) is is_bound_by_processors
    outcome, rarer = (Outcome.TRIED, 4) if is_bound_by_processors else (Outcome.KEEP, 1)
    assert (path.decisions[-1].outcome, path.decisions[-1].next_look) == (outcome, rarer * NUM_STEPS_BETWEEN_LOOKS)


def test_fewer_buckets_are_no_longer_preferred_after_they_were_slower() -> None:
    idle = replace(BUSY, contention_us=lambda _: 0.0)  # processors are not short, whatever the times say
    usual = walk(Tuner(), idle, idle.plan_of_size(MANY), num_looks=6)
    path = walk(Tuner(), replace(idle, processors_us=1.0), idle.plan_of_size(MANY), num_looks=6)
    assert (path.outcomes, path.last) == ("FBMKKK", usual.last)


def test_a_decision_says_what_the_plans_take_and_when_to_look_again() -> None:
    first = SLOW.plan_of_size(FEW)
    path = walk(Tuner(), SLOW, first, num_looks=2)
    assert [(it.outcome, it.next_look) for it in path.decisions] == [(Outcome.MOVE, 1), (Outcome.KEEP, NUM_STEPS_BETWEEN_LOOKS)]
    # A profile has times to a tenth of a microsecond; costs are those of sizes that were measured, or on a line between them.
    assert [decision.present_us for decision in path.decisions] == pytest.approx(
        [SLOW.finish_us(first), SLOW.finish_us(path.last)], rel=1e-3
    )
    move, keep = path.decisions
    assert move.limit_us <= move.predicted_us < move.present_us
    assert (move.groups, keep.groups) == (path.last.groups, None)


def test_nothing_measured_decides_nothing() -> None:
    tuner, plan = Tuner(), SLOW.plan_of_size(FEW)
    assert (tuner.decide(plan, has_shards=False), tuner.profile(plan, strategy="ddp")) == (
        Decision(outcome=Outcome.UNKNOWN, next_look=NUM_STEPS_BETWEEN_LOOKS),
        None,
    )


@pytest.mark.parametrize("has_shards", [True, False])
@pytest.mark.parametrize(
    ("layer_bytes", "cap_bytes", "moves", "stays"),
    [(1_000_000, FEW, Outcome.MOVE, Outcome.TOO_LARGE), (800_000, 1e6, Outcome.LEARN, Outcome.UNKNOWN)],
    ids=["a better plan", "to learn"],
)
def test_shards_move_up_to_so_many_bytes(
    monkeypatch: pytest.MonkeyPatch, layer_bytes: int, cap_bytes: float, moves: Outcome, stays: Outcome, has_shards: bool
) -> None:
    # Without shards each rank has everything anyway.
    world = replace(FAR, params=model(layer_bytes=layer_bytes), has_shards=has_shards)
    plan = world.plan_of_size(cap_bytes)
    num_bytes = sum(bucket.num_bytes for bucket in plan.buckets)
    for most_bytes, outcome in ((num_bytes, moves), (num_bytes - 1, stays if has_shards else moves)):
        monkeypatch.setattr("undertow.tune.tuner._MOST_MOVED_BYTES", most_bytes)
        assert walk(Tuner(), world, plan, num_looks=1).decisions[0].outcome is outcome


def test_a_look_that_measured_nothing_decides_nothing() -> None:
    # Else what the plan before took would count as what the present one takes.
    path = walk(tuner := Tuner(), SLOW, SLOW.plan_of_size(FEW), num_looks=1)
    assert path.outcomes == "M"
    assert tuner.decide(path.last, has_shards=False).outcome is Outcome.UNKNOWN
    assert walk(tuner, SLOW, path.last, num_looks=1).outcomes == "K"


# What another network took is forgotten at once; one that varies by less than a quarter is the same: the medians of three looks.
@pytest.mark.parametrize(("factors", "expected"), [((1.0, 1.0, 1.0, 4.0), 4.0), ((1.0, 1.0, 1.2), 1.0)])
def test_what_is_known_of_a_network(factors: tuple[float, ...], expected: float) -> None:
    plan, tuner, cost = MIDDLING.plan_of_size(FEW), Tuner(), MIDDLING.cost
    for factor in factors:
        tuner.learn(World(cost=lambda num_bytes, factor=factor: factor * cost(num_bytes)).measure(plan))
    sizes = [bucket.num_bytes for bucket in plan.buckets]
    assert tuner.curves["all_reduce"].us(sizes) == pytest.approx([expected * cost(size) for size in sizes])


@pytest.mark.parametrize(("spread_share", "outcome"), [(0.1, Outcome.KEEP), (0.0, Outcome.BACK)])
def test_it_goes_back_where_steps_differ_less_from_one_another_than_from_those_before(
    spread_share: float, outcome: Outcome
) -> None:
    tuner, first = Tuner(), SLOW.plan_of_size(FEW)
    moved, us = walk(tuner, SLOW, first, num_looks=1).last, SLOW.finish_us(first)
    tuner.learn(replace(SLOW.measure(moved), synchronized_us=1.05 * us, spread_us=spread_share * us))
    assert tuner.decide(moved, has_shards=False).outcome is outcome


def test_what_was_measured_under_earlier_plans_counts() -> None:
    path = walk(tuner := Tuner(), MIDDLING, MIDDLING.plan_of_size(FEW), num_looks=2)
    assert {bucket.num_bytes for bucket in path.plans[0].buckets} < {size for size, _ in tuner.curves["all_reduce"].points}


def test_an_order_that_the_user_has_chosen_is_kept() -> None:
    order = range(len(SLOW.params))  # the opposite of that in which gradients come
    path = walk(Tuner(order), SLOW, SLOW.plan([[*order[:1]], [*order[1:]]]), num_looks=4)
    assert [param for group in path.last.groups for param in group] == list(order)


def test_a_profile_has_what_was_learned() -> None:
    plan, tuner = SLOW.plan_of_size(FEW), Tuner()
    walk(tuner, SLOW, plan, num_looks=1)
    profile = tuner.profile(plan, strategy="ddp")
    assert (profile.forward_us, profile.backward_us, profile.update_us) == (10_000.0, 40_000.0, 1_000.0)
    assert (profile.groups, profile.num_ranks, profile.params, profile.step_us, profile.curves) == (
        plan.groups,
        plan.num_ranks,
        plan.params,
        pytest.approx(SLOW.finish_us(plan) + 1_000.0, abs=0.1),
        tuner.curves,
    )


@pytest.mark.slow
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
    how = {"cost": line(latency_us, us_per_byte), "params": model(num_layers=6), "noise": noise, "has_shards": has_shards}
    decisions, again = (
        walk(Tuner(), world, world.plan_of_size(cap_bytes), num_looks=4).decisions for world in (World(**how), World(**how))
    )
    assert decisions == again
    assert all(0 <= it.limit_us <= it.predicted_us for it in decisions if it.outcome is not Outcome.UNKNOWN)
    moves = (Outcome.MOVE, Outcome.FEWER, Outcome.BACK, Outcome.LEARN)
    assert all((it.groups is not None) == (it.outcome in moves) for it in decisions)
