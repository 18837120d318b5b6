"""Plans that follow what is measured: the same on every rank, and the same training; what ranks do while plans are compared."""

import contextlib
import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

import undertow
from support.alike import backwards, of_all_ranks, train
from support.emulated import over_link
from support.errors import text_of
from support.inside import NUM_STEPS_UNTIL_A_MOVE as UNTIL_A_MOVE
from support.inside import EmulatedLink, processor_time
from support.models import CASES, noise
from support.naive import TIMEOUT_S, wrapped
from support.programs import Program, run
from support.ranks import in_ranks
from support.scripted import all_in_one, one_each, scripted
from support.sharded import NARROW, parameters, require_equal, training
from support.timed import Timed
from undertow import DistributedDataParallel, PeerFailed, PhaseError, PlanMismatch, ShardedOptimizer, SyncConfig
from undertow.plan import Plan
from undertow.profile import profile_from_file
from undertow.tune import Decision, Outcome, Tuner

MLP = CASES["mlp"]


STEP = "zero, forward 012, backward, step"
# More steps than a move takes; a unit is frozen and thawed again while steps are measured.
TRAINED = {
    "a tied weight": Program(units="linear tied linear", events=STEP, times=UNTIL_A_MOVE + 5),
    "micro-batches": Program(
        events=f"zero, forward 012, accumulate, {STEP[6:]}, zero in-place, forward 012, accumulate, {STEP[6:]}",
        times=UNTIL_A_MOVE + 3,
    ),
    "a unit that is frozen for a while": Program(events=", ".join([*[STEP] * 11, "freeze 0", *[STEP] * 3, "thaw 0"]), times=5),
}


@pytest.mark.slow
@in_ranks(2, 3, timeout_s=120)
@pytest.mark.parametrize(
    ("strategy", "move"),
    [(it, move) for it in ("ddp", "zero1", "zero2") for move in (all_in_one, one_each)],
)
@pytest.mark.parametrize("name", TRAINED)
def test_a_plan_that_changes_leaves_every_bit_of_training_as_it_was(name: str, strategy: str, move: Any) -> None:
    with scripted(move) as seen:
        run(dataclasses.replace(TRAINED[name], strategy=strategy, plan="default"))
    if dist.get_rank() == 0 and name == "a tied weight":
        assert len(seen) == 1  # once


@in_ranks(2)
def test_wide_values_move_where_the_optimizer_has_no_state() -> None:
    case, results = NARROW[torch.bfloat16], []  # shards have sums that are wider than gradients
    for auto_tune in (False, True):
        with (
            scripted(one_each, all_in_one),
            contextlib.closing(
                DistributedDataParallel(
                    case.model(), config=SyncConfig(strategy="zero1", reduction="ordered", auto_tune=auto_tune)
                )
            ) as ddp,
        ):
            optimizer = ShardedOptimizer(torch.optim.SGD, ddp, lr=1e-3)
            train(ddp, optimizer, case.loss, steps=range(UNTIL_A_MOVE + 5))
            results.append(parameters(ddp))
    require_equal(*results)


@in_ranks(2, 3)
def test_rank_0_decides_for_all() -> None:
    with scripted((all_in_one, one_each)[dist.get_rank() % 2]), training(MLP.model(), "ddp") as (ddp, opt):
        train(ddp, opt, MLP.loss, steps=range(2 * UNTIL_A_MOVE))
        assert (len(set(of_all_ranks(ddp.plan.to_json()))), len(ddp.plan.buckets)) == (1, 1)


HOOK, PINNED, DETERMINISTIC = "hook", "pinned", "deterministic"
FIXED: dict[str, tuple[dict[str, Any], str]] = {
    "size": ({"bucket_cap_mb": 1e-4}, "bucket_cap_mb=0.0001 was asked for"),
    "not tuned": ({"auto_tune": False}, "auto_tune=False: sizes follow from the size of the model"),
    "not recorded": ({"record": "off"}, "record='off': nothing is measured"),
    "no overlap": ({"overlap": False}, "overlap=False: nothing is to be hidden"),
    PINNED: ({}, "it is pinned: SyncConfig(plan=...)"),
    HOOK: ({}, "a communication hook may keep state for every bucket"),
    DETERMINISTIC: ({}, "torch.use_deterministic_algorithms: another plan rounds differently"),
}


@in_ranks(2)
@pytest.mark.parametrize("name", FIXED)
def test_a_plan_that_was_asked_for_stays(name: str) -> None:
    """The plan of the second step stays, or with a hook the plan of the first, after looks that would have moved it."""
    settings, why = FIXED[name]
    if name == PINNED:
        with training(MLP.model(), "ddp", bucket_cap_mb=1e-4) as (ddp, _):
            settings = {"plan": ddp.plan.to_json()}
    torch.use_deterministic_algorithms(name == DETERMINISTIC)
    try:
        with scripted(all_in_one, one_each), training(MLP.model(), "ddp", **settings) as (ddp, opt):
            if name == HOOK:
                ddp.register_comm_hook(None, allreduce_hook)
            plans = []
            for step in range(2 * UNTIL_A_MOVE):
                train(ddp, opt, MLP.loss, steps=[step])
                plans.append(ddp.plan.to_json())
            assert (len(set(plans[name != HOOK :])), ddp.explain().why) == (1, why)
    finally:
        torch.use_deterministic_algorithms(False)


AUTO = {
    "size": "bucket_cap_mb=0.0001 was asked for; wire='auto' chooses the formats",
    "not tuned": "auto_tune=False: sizes follow from the size of the model; wire='auto' keeps full width",
    "not recorded": "record='off': nothing is measured; wire='auto' keeps full width",
    "no overlap": "overlap=False: nothing is to be hidden; wire='auto' keeps full width",
}


@in_ranks(2)
@pytest.mark.parametrize("name", AUTO)
def test_auto_tells_if_it_can_choose(name: str) -> None:
    settings, _ = FIXED[name]
    with training(MLP.model(), "ddp", wire="auto", **settings) as (ddp, _):
        assert ddp.explain().why == AUTO[name]


@in_ranks(2)
def test_auto_takes_the_formats_of_a_pinned_plan() -> None:
    with training(MLP.model(), "ddp", wire="bf16") as (ddp, _):
        pinned = ddp.plan
    with training(MLP.model(), "ddp", wire="auto", plan=pinned) as (ddp, opt):
        train(ddp, opt, MLP.loss, steps=range(UNTIL_A_MOVE + 1))
        assert ddp.plan.wires == pinned.wires
        assert set(pinned.wires) == {"bfloat16"}
        assert ddp.explain().why == "it is pinned: SyncConfig(plan=...)"


def fail(_gradient: torch.Tensor) -> None:
    raise ZeroDivisionError


@in_ranks(2)
@pytest.mark.parametrize("failing_step", [3, UNTIL_A_MOVE - 2])
def test_a_rank_that_fails_in_a_look_does_not_part_the_plans(failing_step: int) -> None:
    with scripted(all_in_one, one_each), training(MLP.model(), "ddp") as (ddp, opt):
        for step in range(2 * UNTIL_A_MOVE + 3):
            opt.zero_grad()
            loss, fails = MLP.loss(ddp, step), step == failing_step
            # Behind the last layer, whose gradients are in their bucket then.
            hooks = [ddp.module[0].weight.register_hook(fail)] if fails and dist.get_rank() == 1 else []
            with pytest.raises(ZeroDivisionError if hooks else PeerFailed) if fails else contextlib.nullcontext():
                loss.backward()
                opt.step()
            for hook in hooks:
                hook.remove()
        assert len(set(of_all_ranks(ddp.plan.to_json()))) == 1


@in_ranks(2)
def test_a_rank_without_data_follows_the_plans_of_the_others() -> None:
    with scripted(one_each), training(MLP.model(), "ddp") as (ddp, opt):
        first = ddp.plan.to_json()
        with ddp.join():
            train(ddp, opt, MLP.loss, steps=range(2 * UNTIL_A_MOVE - 13 * dist.get_rank()))
        last = ddp.plan.to_json()
    assert of_all_ranks(last) == [last] * 2 != [first] * 2


def loss_of_timed(model: nn.Module, _step: int) -> torch.Tensor:
    return model(torch.ones(1))


@pytest.mark.deep
@in_ranks(2)
def test_a_profile_has_the_times_of_the_slowest_rank(tmp_path: Path) -> None:
    slower_s = 0.02
    with training(Timed(numel=2000, pause_s=slower_s if dist.get_rank() == 1 else slower_s / 2), "ddp", "SGD") as (ddp, opt):
        assert text_of(PhaseError, ddp.profile) == (
            "nothing has been measured of this model yet.\n  profile()\n  Run some ten steps first, then ask again."
        )
        train(ddp, opt, loss_of_timed, steps=range(UNTIL_A_MOVE))
        if dist.get_rank() == 0:  # alone: nothing of this communicates
            ddp.save_profile(tmp_path / "0.json")
            assert profile_from_file(tmp_path / "0.json") == ddp.profile()
            ddp.explain()
        profile = ddp.profile()
    assert of_all_ranks(profile.ready_us) == [profile.ready_us] * 2
    # Each layer pauses on the slower rank, behind the layer after it; sleeps never end early.
    assert [ready > 1e6 * slower_s * pauses for pauses, ready in zip((4, 3, 2, 1), profile.ready_us, strict=True)] == [True] * 4
    assert profile.backward_us >= profile.ready_us[0] > profile.ready_us[3]
    assert (list(profile.curves), profile.num_ranks) == (["all_reduce"], 2)


@in_ranks(1)
def test_a_single_rank_has_nothing_to_report_plan_or_measure(tmp_path: Path) -> None:
    net = MLP.model()
    with contextlib.closing(undertow.attach(net)) as sync:
        backwards(net, MLP.loss, range(3))
        assert str(sync.report()) == "A single rank has nothing to communicate: no step is recorded."
        assert sync.explain().why == "a single rank has nothing to communicate"
        for ask in (sync.profile, sync.measure_network):
            assert text_of(PhaseError, ask) == (
                "a single rank has nothing to communicate, so nothing is measured.\n"
                "  profile()\n"
                "  Train some ten steps on two or more ranks, as with torchrun --nproc-per-node=2."
            )
        assert text_of(PhaseError, lambda: sync.save_trace(tmp_path / "trace.json")).startswith("no step is recorded.")


# With nothing but what is measured: it is looked, decided and explained.
@pytest.mark.slow
@in_ranks(2, 3)
@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
def test_every_decision_is_explained_on_every_rank_alike(strategy: str) -> None:
    with training(Timed(numel=100_000, pause_s=0.001, num_layers=24), strategy, "SGD") as (ddp, opt):
        train(ddp, opt, loss_of_timed, steps=range(UNTIL_A_MOVE + 3))
        explanation = ddp.explain()
    assert explanation.plans
    told = [explanation.why, explanation.decision]
    assert (of_all_ranks(told), told[0]) == ([told] * dist.get_world_size(), "planned from measurements")
    assert told[1].startswith(("kept (", "moved to "))
    assert sum("(this plan)" in row for row in explanation.plans) == told[1].startswith("moved to ")


# Over the slow link 2.6 MB take 50 ms, and layers pause for 12. Over the bare one layers pause for 36 ms.
SLOW, BARE = "400mbit", "none"


@pytest.mark.deep
@over_link(SLOW, BARE)
def test_auto_sends_in_int8_what_a_slow_link_does_not_hide(link: EmulatedLink) -> None:
    is_slow = link.link.name == SLOW
    pause_s = 0.002 if is_slow else 0.006
    layers = (*Timed(numel=20_000, pause_s=pause_s, num_layers=2), *Timed(numel=300_000, pause_s=pause_s, num_layers=2))
    with training(nn.Sequential(*layers), "ddp", "SGD", wire="auto") as (ddp, opt):
        first = ddp.plan.wires
        train(ddp, opt, loss_of_timed, steps=range(UNTIL_A_MOVE + 1))
        wires, told = ddp.plan.wires, ddp.explain()
        assert (set(first), set(wires)) == ({None}, {"int8"} if is_slow else {None}), str(told)
        assert of_all_ranks((wires, told.wires)) == [(wires, wires)] * 2
        for param in ddp.module.parameters():
            everyone = [torch.empty_like(param) for _ in range(2)]
            dist.all_gather(everyone, param.detach())
            assert torch.equal(*everyone)


@in_ranks(2)
def test_auto_chooses_again_if_a_sharded_optimizer_first_steps_after_the_choice() -> None:
    decided_on = []

    def decide(_tuner: Tuner, plan: Plan, *, has_shards: bool) -> Decision:
        decided_on.append(has_shards)
        return Decision(outcome=Outcome.MOVE, groups=all_in_one(plan), wires=("int8",))

    wide = CASES["wide"]
    ddp = DistributedDataParallel(wide.model(), config=SyncConfig(strategy="zero1", wire="auto"))
    with mock.patch.object(Tuner, "decide", decide), contextlib.closing(ddp):
        backwards(ddp, wide.loss, range(UNTIL_A_MOVE + 1))
        assert set(ddp.plan.wires) == {"int8"}
        sharded = ShardedOptimizer(torch.optim.SGD, ddp, lr=0.1)
        train(ddp, sharded, wide.loss, steps=range(1))
        assert set(ddp.plan.wires) == {None}
        train(ddp, sharded, wide.loss, steps=range(2 * UNTIL_A_MOVE))
        assert set(ddp.plan.wires) == {"int8"}
        assert ddp.explain().why == "planned from measurements"
    assert decided_on == ([False, True] if dist.get_rank() == 0 else [])


# The processor time of rank 1 counts: there the backend's threads work in the whole wait, or not at all.
@in_ranks(2)
@pytest.mark.parametrize(("of_rank_1", "bound_by"), [(time.perf_counter, "bound by processors"), (float, "bound by the network")])
def test_ranks_agree_on_what_limits_communication(of_rank_1: Callable[[], float], bound_by: str) -> None:
    cpu_s = time.perf_counter if dist.get_rank() == 0 else of_rank_1
    # Packing of a single bucket is after backward, and counts as waiting.
    with processor_time(cpu_s), training(MLP.model(), "ddp", bucket_cap_mb=25.0) as (ddp, opt):
        train(ddp, opt, MLP.loss, steps=range(UNTIL_A_MOVE))
        told = ddp.explain().bound_by
    assert told.startswith(bound_by)
    assert of_all_ranks(told) == [told] * 2


@in_ranks(2)
def test_a_wrong_decision_is_refused_on_every_rank() -> None:
    bad = Decision(outcome=Outcome.MOVE, groups=((0,), (0,)), wires=(None, None))
    with pytest.MonkeyPatch.context() as patch, training(MLP.model(), "ddp") as (ddp, _):
        patch.setattr(Tuner, "decide", lambda *_arguments, **_settings: bad)
        backwards(ddp, MLP.loss, range(UNTIL_A_MOVE))
        assert "exactly once" in text_of(undertow.ConfigError, MLP.loss(ddp, UNTIL_A_MOVE).backward)


@pytest.mark.slow
@in_ranks(2, 3)
def test_a_sweep_over_sizes_is_in_the_profile_where_somebody_asks_for_it() -> None:
    with training(MLP.model(), "ddp") as (ddp, _):
        backwards(ddp, MLP.loss, range(UNTIL_A_MOVE))
        ddp.measure_network()
        MLP.loss(ddp, UNTIL_A_MOVE).backward()
        sizes = {size for size, _ in ddp.profile().curves["all_reduce"].points}
    assert sizes >= {4096.0, 65536.0, float(64 * 2**20)}


@pytest.mark.slow
@in_ranks(2, is_fresh=True, timeout_s=TIMEOUT_S)
@pytest.mark.parametrize("step_of_the_change", [1, 6, 8, 10])
def test_a_change_on_one_rank_is_an_error_on_all_while_ranks_compare_their_times(step_of_the_change: int) -> None:
    with scripted(one_each), training(MLP.model(), "ddp") as (ddp, _):
        backwards(ddp, MLP.loss, range(step_of_the_change))
        if dist.get_rank() == 1:
            ddp.module[0].requires_grad_(False)
        told = text_of(PlanMismatch, lambda: MLP.loss(ddp, step_of_the_change).backward())
    assert of_all_ranks(told) == [told] * 2


@in_ranks(2, is_fresh=True, timeout_s=TIMEOUT_S)
def test_what_one_rank_looks_at_between_backward_and_step_does_not_part_the_plans() -> None:
    with scripted(one_each, all_in_one), training(MLP.model(), "zero1", "SGD") as (ddp, optimizer):
        first = ddp.plan.to_json()
        for step in range(UNTIL_A_MOVE + 3):
            optimizer.zero_grad()
            MLP.loss(ddp, step).backward()
            for is_trained in (False, True) if dist.get_rank() == 1 else ():
                ddp.module[0].requires_grad_(is_trained)
                ddp(noise(5, 6))
            optimizer.step()
        last = ddp.plan.to_json()
    assert of_all_ranks(last) == [last] * 2 != [first] * 2


@in_ranks(2)
def test_an_order_that_fills_the_same_buckets_makes_no_plan() -> None:
    with wrapped(nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))), bucket_cap_mb=25.0) as ddp:
        first = ddp.plan
        for _ in range(3):
            ddp(torch.ones(2, 8)).sum().backward()
        assert ddp.plan is first
