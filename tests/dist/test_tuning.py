"""Plans that are tried on real steps: the same on every rank, and the same training; what ranks do while plans are compared."""

import contextlib
import dataclasses
import math
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
from support.errors import text_of
from support.inside import NUM_STEPS_UNTIL_A_MOVE as UNTIL_A_MOVE
from support.inside import NUM_STEPS_UNTIL_A_PROFILE as UNTIL_A_PROFILE
from support.inside import every_step_takes, observe, refusing_plans
from support.levels import some
from support.models import CASES
from support.naive import TIMEOUT_S, wrapped
from support.programs import Program, run
from support.ranks import in_ranks
from support.records import printed
from support.scripted import all_in_one, one_each, scripted
from support.sharded import parameters, require_equal, training
from support.timed import Timed
from undertow import DistributedDataParallel, PeerFailed, PhaseError, PlanMismatch
from undertow.lab.profile import profile_from_file
from undertow.plan import Plan, grouping
from undertow.schedule import Op, OpKind

MLP = CASES["mlp"]


STEP = "zero, forward 012, backward, step"
# More steps than a move takes; a unit is frozen and thawed again while steps are measured.
TRAINED = {
    "a tied weight": Program(units="linear tied linear", events=STEP, times=UNTIL_A_MOVE + 5),
    "micro-batches": Program(
        events=f"zero, forward 012, accumulate, {STEP[6:]}, zero in-place, forward 012, accumulate, {STEP[6:]}",
        times=UNTIL_A_MOVE + 3,
    ),
    "a unit that is frozen for a while": Program(events=", ".join([*[STEP] * 17, "freeze 0", *[STEP] * 3, "thaw 0"]), times=2),
}


@pytest.mark.slow
@in_ranks(2, 3, timeout_s=120)
@pytest.mark.parametrize("move", [all_in_one, one_each])
@pytest.mark.parametrize("name", TRAINED)
def test_a_plan_that_changes_leaves_every_bit_of_training_as_it_was(name: str, move: Any) -> None:
    with scripted(move) as seen:
        run(dataclasses.replace(TRAINED[name], plan="default"))
    if name == "a tied weight":
        assert len(seen) == 1  # once


HOOK, PINNED, DETERMINISTIC = "hook", "pinned", "deterministic"
FIXED: dict[str, tuple[dict[str, Any], str]] = {
    "size": ({"bucket_cap_mb": 1e-4}, "bucket_cap_mb=0.0001 is set"),
    "not tuned": ({"auto_tune": False}, "auto_tune=False: sizes follow from the size of the model"),
    "not recorded": ({"record": "off"}, "record='off': nothing is measured"),
    "no overlap": ({"overlap": False}, "overlap=False: no communication is hidden"),
    PINNED: ({}, "it is pinned: SyncConfig(plan=...)"),
    HOOK: ({}, "a communication hook may keep state for every bucket"),
    DETERMINISTIC: (
        {},
        "trials have ended after 7 steps: torch.use_deterministic_algorithms is on, and another plan rounds differently",
    ),
}


@in_ranks(2)
@pytest.mark.parametrize("name", some(FIXED, most=1))
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
    "size": "bucket_cap_mb=0.0001 is set; wire='auto' tries formats: sizes follow from the size of the model; "
    "others will be tried",
    "not tuned": "auto_tune=False: sizes follow from the size of the model; wire='auto' keeps full width",
    "not recorded": "record='off': nothing is measured; wire='auto' keeps full width",
    "no overlap": "overlap=False: no communication is hidden; wire='auto' keeps full width",
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


@pytest.mark.deep
@in_ranks(2)
@pytest.mark.parametrize("failing_step", some([3, UNTIL_A_MOVE - 2], most=1))
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


@pytest.mark.deep
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
        train(ddp, opt, loss_of_timed, steps=range(UNTIL_A_PROFILE))
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
        assert str(sync.report()).startswith("A single rank has nothing to communicate: no step is recorded.")
        assert sync.explain().why == "a single rank has nothing to communicate"
        for ask in (sync.profile, sync.measure_network):
            assert text_of(PhaseError, ask) == (
                "a single rank has nothing to communicate, so nothing is measured.\n"
                "  profile()\n"
                "  Train some ten steps on two or more ranks, as with torchrun --nproc-per-node=2."
            )
        assert text_of(PhaseError, lambda: sync.save_trace(tmp_path / "trace.json")).startswith("no step is recorded.")


@pytest.mark.slow
@in_ranks(2)
def test_a_sweep_over_sizes_is_in_the_profile_where_somebody_asks_for_it() -> None:
    with training(MLP.model(), "ddp") as (ddp, _):
        backwards(ddp, MLP.loss, range(UNTIL_A_PROFILE))
        ddp.measure_network()
        MLP.loss(ddp, UNTIL_A_PROFILE).backward()
        sizes = {size for size, _ in ddp.profile().curves["all_reduce"].points}
    assert sizes >= {4096.0, 65536.0, float(64 * 2**20)}


@pytest.mark.slow
@in_ranks(2, is_fresh=True, timeout_s=TIMEOUT_S)
@pytest.mark.parametrize("step_of_the_change", [1, 6, 8, UNTIL_A_MOVE - 1, UNTIL_A_MOVE])
def test_a_change_on_one_rank_is_an_error_on_all_while_ranks_compare_their_times(step_of_the_change: int) -> None:
    with scripted(one_each), training(MLP.model(), "ddp") as (ddp, _):
        backwards(ddp, MLP.loss, range(step_of_the_change))
        if dist.get_rank() == 1:
            ddp.module[0].requires_grad_(False)
        told = text_of(PlanMismatch, lambda: MLP.loss(ddp, step_of_the_change).backward())
    assert of_all_ranks(told) == [told] * 2


@in_ranks(2)
def test_an_order_that_fills_the_same_buckets_makes_no_plan() -> None:
    with wrapped(nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))), bucket_cap_mb=25.0) as ddp:
        first = ddp.plan
        for _ in range(3):
            ddp(torch.ones(2, 8)).sum().backward()
        assert ddp.plan is first


def stack() -> nn.Module:
    return nn.Sequential(*(nn.Linear(16, 16) for _ in range(16)))


def loss_of_stack(model: nn.Module, _step: int) -> torch.Tensor:
    return model(torch.ones(1, 16)).sum()


# The plan with the best number of buckets is the fastest on the slowest rank; rank 0 alone would take another one.
@pytest.mark.deep
@in_ranks(3)
@pytest.mark.parametrize("best", [1, 16])
def test_the_steps_of_the_slowest_rank_decide(best: int) -> None:
    plans: list[Callable[[], Plan]] = []

    def step_us() -> float:
        away = abs(math.log2(len(plans[0]().buckets) / best)) if plans else 0.0
        return 20_000 + 3000 * away if dist.get_rank() > 0 else 18_000 - 1000 * away

    caps = grouping.SizeCaps(cap_bytes=3000)
    with (
        mock.patch.object(grouping, "default_caps", return_value=caps),
        every_step_takes(step_us),
        training(stack(), "ddp", "SGD") as (ddp, opt),
    ):
        plans.append(lambda: ddp.plan)
        first = len(ddp.plan.buckets)
        for step in range(0, 300, 20):
            train(ddp, opt, loss_of_stack, steps=range(step, step + 20))
            told = ddp.explain()
            if told.why.startswith("its steps were the fastest: "):  # on every rank, for they decide together
                break
    assert abs(math.log2(len(ddp.plan.buckets) / best)) < 0.2 < abs(math.log2(first / best)), str(told)
    assert told.why.startswith("its steps were the fastest: "), str(told)
    assert of_all_ranks(str(told)) == [str(told)] * dist.get_world_size()
    assert len(str(told).splitlines()) <= 8


@in_ranks(2)
def test_a_report_counts_the_steps_before_a_trial_that_has_changed_nothing() -> None:
    caps = grouping.SizeCaps(cap_bytes=3000)
    with (
        mock.patch.object(grouping, "default_caps", return_value=caps),
        every_step_takes(lambda: 20_000),
        training(stack(), "ddp", "SGD") as (ddp, opt),
    ):
        train(ddp, opt, loss_of_stack, steps=range(4))
        first, counted = ddp.plan, []
        while "none 2 % faster" not in ddp.explain().why:
            train(ddp, opt, loss_of_stack, steps=range(1))
            if ddp.plan == first:
                counted.append(ddp.report().num_steps)
    assert min(counted[15:]) >= 15


@pytest.mark.deep
@in_ranks(2)
@pytest.mark.parametrize(
    ("longer", "why"),
    some(
        [
            ((11,), "no other plan is worth a trial"),  # the script counts none
            # one step of a window, and one of the same window as it runs again
            ((11, 17), "trials have ended after 14 steps: steps have accumulated more or fewer backwards again"),
        ],
        most=1,
    ),
)
def test_a_trial_with_a_step_of_another_length_is_dropped_and_begins_again_once(longer: tuple[int, ...], why: str) -> None:
    with scripted(one_each), training(MLP.model(), "ddp") as (ddp, opt):
        for step in range(40):
            if step in longer:
                with ddp.no_sync():
                    MLP.loss(ddp, step).backward()
            MLP.loss(ddp, step).backward()
            opt.step()
            opt.zero_grad()
        assert ddp.explain().why == why
        assert (ddp.plan.groups == one_each(ddp.plan)) == (len(longer) == 1)


@pytest.mark.deep
@in_ranks(2)
def test_models_of_one_process_try_plans_one_after_the_other() -> None:
    with (
        scripted(one_each) as seen,
        training(MLP.model(), "ddp") as (first, opt),
        training(MLP.model(), "ddp") as (second, opt_2),
    ):
        moved_at: dict[str, int] = {}
        for step in range(30):
            train(first, opt, MLP.loss, steps=[step])
            train(second, opt_2, MLP.loss, steps=[step])
            for name, ddp in (("first", first), ("second", second)):
                if ddp.plan.groups == one_each(ddp.plan):
                    moved_at.setdefault(name, step)
    assert len(seen) == 2
    assert of_all_ranks(moved_at) == [moved_at] * 2
    assert 0 < moved_at["second"] - moved_at["first"] <= 7


@pytest.mark.deep
@in_ranks(2)
def test_models_that_ranks_reach_in_opposite_orders_try_plans_one_after_the_other() -> None:
    """With two models in one backward: the one that was made first begins, on every rank."""
    with (
        scripted(one_each),
        contextlib.closing(DistributedDataParallel(stack())) as first,
        contextlib.closing(DistributedDataParallel(stack())) as second,
    ):
        order = [first, second] if dist.get_rank() == 0 else [second, first]
        opt = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=1e-3)
        moved_at: dict[str, int] = {}
        for step in range(2 * UNTIL_A_MOVE + 10):
            opt.zero_grad()
            sum(loss_of_stack(model, step) for model in order).backward()
            opt.step()
            for name, ddp in (("first", first), ("second", second)):
                if ddp.plan.groups == one_each(ddp.plan):
                    moved_at.setdefault(name, step)
    assert of_all_ranks(moved_at) == [moved_at] * 2
    assert moved_at["first"] < moved_at["second"]


@pytest.mark.deep
@in_ranks(2)
def test_parameters_that_change_in_the_middle_of_trials_have_trials_of_their_own_once() -> None:
    with training(stack(), "ddp") as (ddp, opt):
        told = []
        for step in range(60):
            if step in (15, 30):
                ddp.module[0].requires_grad_(step == 30)
            train(ddp, opt, loss_of_stack, steps=[step])
            told.append(ddp.explain().why)
    assert told[14].startswith("trials are under way")
    assert told[29].startswith("trials are under way")
    assert told[-1] == "sizes follow from the size of the model"


@pytest.mark.deep
@in_ranks(2, is_fresh=True, timeout_s=TIMEOUT_S)
@pytest.mark.parametrize("left_out", some([0, 1], most=1))
@pytest.mark.parametrize("place", some([UNTIL_A_MOVE, UNTIL_A_MOVE - 1], most=1))
def test_a_rank_that_leaves_a_model_out_in_the_step_of_a_move_holds_nobody_up(left_out: int, place: int) -> None:
    """With two models in one backward, a rank may come to one of them first, and messages about plans wait there."""
    with (
        scripted(one_each),
        contextlib.closing(DistributedDataParallel(stack())) as first,
        contextlib.closing(DistributedDataParallel(stack())) as second,
    ):
        models = [first, second]
        opt = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=1e-3)
        for step in range(2 * UNTIL_A_MOVE):
            opt.zero_grad()
            losses = [loss_of_stack(model, step) for model in models]
            if dist.get_rank() == 1 and step == place:
                del losses[left_out]
            torch.stack(losses).sum().backward()
            opt.step()
        for model in models:
            assert of_all_ranks(model.plan.to_json()) == [model.plan.to_json()] * 2
            assert model.plan.groups == one_each(model.plan)


@pytest.mark.deep
@in_ranks(2)
@pytest.mark.parametrize("refusing_rank", some([0, 1], most=1))
def test_gradients_are_right_if_a_rank_has_no_memory_for_the_next_plan(refusing_rank: int) -> None:
    with (
        scripted(one_each),
        refusing_plans(3 if dist.get_rank() == refusing_rank else None),
        training(MLP.model(), "ddp") as (ddp, opt),
        training(MLP.model(), "ddp", auto_tune=False) as (twin, other),
    ):
        for step in range(UNTIL_A_MOVE + 4):
            train(ddp, opt, MLP.loss, steps=[step])
            train(twin, other, MLP.loss, steps=[step])
        assert len(ddp.plan.buckets) == 1
        require_equal(parameters(ddp), parameters(twin))
        (failure,) = ddp.report().not_tried
        assert failure.endswith(f": rank {refusing_rank} could not make its buckets")
        assert f"the present plan stayed: {failure}" in " ".join(printed(ddp.report(), width=200).split())


OUT_OF_MEMORY = (
    f"rank 1 has failed: MemoryError: none is left\n  synchronization {UNTIL_A_MOVE + 1}, rank {{rank}}\n"
    "  The step is incomplete on every rank. The traceback is in the log of rank 1."
)


@pytest.mark.deep
@in_ranks(2, is_fresh=True, timeout_s=TIMEOUT_S)
@pytest.mark.parametrize("wire", some([None, "int8"], most=1))
def test_a_candidate_that_fails_in_its_first_exchange_ends_training_on_all_ranks(wire: str | None) -> None:
    """Every rank has made its buckets, so other ranks may wait for a message that is never sent."""
    is_failing = dist.get_rank() == 1
    with scripted(one_each, wires=() if wire is None else [wire] * 4), training(MLP.model(), "ddp", wire=wire) as (ddp, opt):

        def run_out_of_memory(op: Op) -> None:
            if is_failing and op.kind is OpKind.ALL_REDUCE and ddp.plan.groups == one_each(ddp.plan):
                raise MemoryError("none is left")

        observe(ddp, before=run_out_of_memory)
        train(ddp, opt, MLP.loss, steps=range(UNTIL_A_MOVE + 1))
        with pytest.raises(MemoryError if is_failing else PeerFailed) as caught:
            train(ddp, opt, MLP.loss, steps=[UNTIL_A_MOVE + 1])
        assert str(caught.value) == ("none is left" if is_failing else OUT_OF_MEMORY.format(rank=0))
        told = text_of(PeerFailed, lambda: train(ddp, opt, MLP.loss, steps=[UNTIL_A_MOVE + 2]))
        assert told == OUT_OF_MEMORY.format(rank=dist.get_rank())
