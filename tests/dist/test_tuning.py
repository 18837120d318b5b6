"""Plans that follow what is measured: the same on every rank, and the same training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import undertow
from support.errors import text_of
from support.models import CASES, Case, mlp, noise
from support.ranks import Ranks, in_ranks
from support.scripted import all_in_one, in_pieces, one_each, scripted
from support.sharded import require_equal, trained, training
from support.timed import Timed
from undertow import DistributedDataParallel, PeerFailed, PhaseError, SyncConfig
from undertow.profile import profile_from_file
from undertow.runtime.tuning import NUM_STEPS_MEASURED
from undertow.tune import Decision, Outcome, Tuner

ONE_LOOK = NUM_STEPS_MEASURED + 4  # rounds until a plan that was decided on is taken
MOVES = 5


def same_bits_while_plans_change(case_name: str, strategy: str, optimizer: str) -> None:
    case, num_steps = CASES[case_name], MOVES * ONE_LOOK
    settings = {"num_steps": num_steps, "reduction": "ordered"}
    expected = trained(case, "ddp", optimizer, auto_tune=False, **settings)
    moves = (all_in_one, one_each, in_pieces) if strategy != "ddp" else (all_in_one, one_each)
    with scripted(*moves) as seen:
        require_equal(expected, trained(case, strategy, optimizer, **settings))
    if dist.get_rank() == 0:
        assert len({plan.fingerprint for plan in seen}) > len(moves)  # the first one, and each of them


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2"])
@pytest.mark.parametrize(
    ("ranks", "case", "optimizer"),
    [("two_ranks", "tied transformer", "AdamW"), ("three_ranks", "mlp", "SGD")],
    indirect=["ranks"],
)
def test_a_plan_that_changes_leaves_every_bit_of_training_as_it_was(
    ranks: Ranks, case: str, optimizer: str, strategy: str
) -> None:
    ranks.run(same_bits_while_plans_change, case, strategy, optimizer, timeout_s=120)


@in_ranks(2)
def test_so_do_shards_whose_sums_are_wider_than_gradients() -> None:
    def model() -> nn.Module:
        torch.manual_seed(0)
        return mlp().bfloat16()

    case = Case(model, lambda net, step: net(noise(5, 6, step=step).bfloat16()).float().square().sum())
    settings: dict[str, Any] = {"num_steps": 3 * ONE_LOOK, "reduction": "ordered"}
    expected = trained(case, "zero1", auto_tune=False, **settings)
    with scripted(one_each, in_pieces):
        require_equal(expected, trained(case, "zero1", **settings))


@in_ranks(2)
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2"])
def test_nothing_that_was_accumulated_is_lost_when_a_plan_changes(strategy: str) -> None:
    case = CASES["mlp"]

    def each(ddp: DistributedDataParallel, opt: torch.optim.Optimizer, step: int) -> None:
        opt.zero_grad(set_to_none=step % 3 == 0)
        with ddp.no_sync():
            case.loss(ddp, 1000 + step).backward()
        case.loss(ddp, step).backward()
        opt.step()

    settings: dict[str, Any] = {"num_steps": 3 * ONE_LOOK, "reduction": "ordered", "each": each}
    expected = trained(case, strategy, auto_tune=False, **settings)
    with scripted(all_in_one, one_each):
        require_equal(expected, trained(case, strategy, **settings))


def plans_of_ranks_that_disagree() -> list[str]:
    """Every rank would decide on another plan."""
    wanted = (all_in_one, one_each)[dist.get_rank() % 2]
    with scripted(wanted), training(CASES["mlp"].model(), "ddp") as (ddp, opt):
        for step in range(2 * ONE_LOOK):
            opt.zero_grad()
            CASES["mlp"].loss(ddp, step).backward()
            opt.step()
        return [ddp.sync.plan.fingerprint, str(len(ddp.sync.plan.buckets))]


def test_rank_0_decides_for_all(ranks: Ranks) -> None:
    answers = ranks.run(plans_of_ranks_that_disagree)
    assert {tuple(answer) for answer in answers} == {tuple(answers[0])}
    assert answers[0][1] == "1"


def fixed(settings: dict[str, Any], *, deterministic: bool = False, with_hook: bool = False) -> tuple[bool, str]:
    """Whether the plan is that of the second step, after looks that would have moved it; and what is said of it."""
    torch.use_deterministic_algorithms(deterministic)
    try:
        with scripted(all_in_one, one_each), training(CASES["mlp"].model(), "ddp", **settings) as (ddp, opt):
            if with_hook:
                ddp.register_comm_hook(None, summing)
            plans = []
            for step in range(2 * ONE_LOOK):
                opt.zero_grad()
                CASES["mlp"].loss(ddp, step).backward()
                opt.step()
                plans.append(ddp.sync.plan.fingerprint)
            return len(set(plans[1:])) == 1, ddp.explain(show=False).why
    finally:
        torch.use_deterministic_algorithms(False)


def summing(_state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    tensor = bucket.buffer().div_(dist.get_world_size())
    return dist.all_reduce(tensor, async_op=True).get_future().then(lambda done: done.value()[0])


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"bucket_cap_mb": 1e-4}, "bucket_cap_mb=0.0001 was asked for"),
        ({"auto_tune": False}, "auto_tune=False: sizes follow from the size of the model"),
        ({"record": "off"}, "record='off': nothing is measured"),
        ({"overlap": False}, "overlap=False: nothing is to be hidden"),
    ],
)
def test_a_plan_that_was_asked_for_stays(two_ranks: Ranks, settings: dict[str, Any], why: str) -> None:
    assert two_ranks.run(fixed, settings) == [(True, why)] * 2


def pinned() -> tuple[bool, str]:
    with training(CASES["mlp"].model(), "ddp", bucket_cap_mb=1e-4) as (ddp, _):
        text = ddp.sync.plan.to_json()
    return fixed({"plan": text})


def test_so_does_a_pinned_one(two_ranks: Ranks) -> None:
    assert two_ranks.run(pinned) == [(True, "it is pinned: SyncConfig(plan=...)")] * 2


def test_so_does_that_of_a_hook(two_ranks: Ranks) -> None:
    answers = two_ranks.run(with_a_hook)
    assert answers == [(True, "a communication hook may keep state for every bucket")] * 2


def with_a_hook() -> tuple[bool, str]:
    return fixed({}, with_hook=True)


def test_so_does_every_plan_under_deterministic_algorithms(two_ranks: Ranks) -> None:
    assert two_ranks.run(deterministic) == [True, True]


def deterministic() -> bool:
    return fixed({}, deterministic=True)[0]


@in_ranks(2, 3, timeout_s=120)
def test_parameters_may_change_while_a_look_is_under_way() -> None:
    """A layer is frozen and thawed again while a look is under way."""
    case = CASES["mlp"]

    def each(ddp: DistributedDataParallel, opt: torch.optim.Optimizer, step: int) -> None:
        opt.zero_grad()
        ddp.module[0].requires_grad_(step % 14 < 11)
        case.loss(ddp, step).backward()
        opt.step()

    for strategy in ("ddp", "zero1"):
        settings: dict[str, Any] = {"num_steps": 3 * ONE_LOOK, "reduction": "ordered", "each": each}
        expected = trained(case, strategy, auto_tune=False, **settings)
        with scripted(all_in_one, one_each):
            require_equal(expected, trained(case, strategy, **settings), what=strategy)


def one_rank_fails(failing_step: int) -> list[str]:
    """Rank 1 raises in one backward; all go on with the next step."""
    told = []
    with scripted(all_in_one, one_each), training(CASES["mlp"].model(), "ddp") as (ddp, opt):
        for step in range(2 * ONE_LOOK + 3):
            opt.zero_grad()
            loss = CASES["mlp"].loss(ddp, step)
            fails_here = step == failing_step and dist.get_rank() == 1
            # Behind the last layer, whose gradients are in their bucket then.
            hook = ddp.module[0].weight.register_hook(_fail) if fails_here else None
            try:
                loss.backward()
                opt.step()
            except (PeerFailed, ZeroDivisionError) as error:
                told.append(type(error).__name__)
            if hook is not None:
                hook.remove()
        return [*told, ddp.sync.plan.fingerprint]


def _fail(_gradient: torch.Tensor) -> None:
    raise ZeroDivisionError


@pytest.mark.parametrize("failing_step", [3, NUM_STEPS_MEASURED + 1, NUM_STEPS_MEASURED + 2, NUM_STEPS_MEASURED + 3])
def test_a_rank_that_fails_in_a_look_does_not_part_the_plans(two_ranks: Ranks, failing_step: int) -> None:
    first, second = two_ranks.run(one_rank_fails, failing_step)
    assert first == ["PeerFailed", first[-1]]
    assert second == ["ZeroDivisionError", first[-1]]


def uneven() -> str:
    case, num_batches = CASES["mlp"], 4 * ONE_LOOK - 13 * dist.get_rank()
    with scripted(all_in_one, one_each) as seen, training(case.model(), "ddp") as (ddp, opt):
        with ddp.join():
            for step in range(num_batches):
                opt.zero_grad()
                case.loss(ddp, step).backward()
                opt.step()
        if dist.get_rank() == 0:
            assert len({plan.fingerprint for plan in seen}) > 1
        return ddp.sync.plan.fingerprint


def test_a_rank_without_data_follows_the_plans_of_the_others(two_ranks: Ranks) -> None:
    first, second = two_ranks.run(uneven)
    assert first == second


def two_models() -> list[str]:
    """Their gradients come in another order on every rank."""
    models = [CASES["mlp"].model() for _ in range(2)]
    with scripted(all_in_one, one_each), training(models[0], "ddp") as (first, _), training(models[1], "ddp") as (second, _):
        for step in range(2 * ONE_LOOK):
            losses = [CASES["mlp"].loss(ddp, step) for ddp in (first, second)]
            (losses[0] + losses[1] if dist.get_rank() == 0 else losses[1] + losses[0]).backward()
        return [ddp.sync.plan.fingerprint for ddp in (first, second)]


def test_two_models_in_one_backward_do_not_wait_for_each_other(two_ranks: Ranks) -> None:
    first, second = two_ranks.run(two_models)
    assert first == second


def measured_profile(folder: str, rank_factor: float) -> dict[str, Any]:
    """What is in the file of each rank; rank 1 takes longer by that factor."""
    pause_s = 0.01 * (rank_factor if dist.get_rank() == 1 else 1)
    with training(Timed(numel=2000, pause_s=pause_s), "ddp", "SGD") as (ddp, opt):
        early = text_of(PhaseError, ddp.profile)
        for _ in range(ONE_LOOK):
            opt.zero_grad()
            ddp(torch.ones(1)).backward()
            opt.step()
        path = Path(folder) / f"{dist.get_rank()}.json"
        if dist.get_rank() == 0:  # alone: nothing of this communicates
            ddp.save_profile(path)
            assert profile_from_file(path) == ddp.profile()
            ddp.explain(show=False)
        profile = ddp.profile()
        return {
            "early": early,
            "ready_ms": [ready_us / 1e3 for ready_us in profile.ready_us],
            "backward_ms": profile.backward_us / 1e3,
            "kinds": sorted(profile.curves),
            "num_ranks": profile.num_ranks,
        }


def test_a_profile_has_the_times_of_the_slowest_rank(two_ranks: Ranks, tmp_path: Path) -> None:
    first, second = two_ranks.run(measured_profile, str(tmp_path), 2.0)
    assert first["ready_ms"] == second["ready_ms"]
    # Each layer pauses for 20 ms on the slower rank, behind the layer after it; sleeps never end early.
    assert [ready_ms > 20 * pauses for pauses, ready_ms in zip((4, 3, 2, 1), first["ready_ms"], strict=True)] == [True] * 4
    assert first["backward_ms"] >= first["ready_ms"][0] > first["ready_ms"][3]
    assert (first["kinds"], first["num_ranks"]) == (["all_reduce"], 2)
    assert first["early"] == (
        "nothing has been measured of this model yet.\n  profile()\n  Run some ten steps first, then ask again."
    )


def test_a_rank_alone_has_a_profile_too(tmp_path: Path) -> None:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        net = Timed(numel=2000, pause_s=0.002)
        sync = undertow.attach(net)
        for _ in range(8):
            net(torch.ones(1)).backward()
        profile = sync.profile()
        sync.close()
    finally:
        dist.destroy_process_group()
    assert [ready_us > 2000 * pauses for pauses, ready_us in zip((4, 3, 2, 1), profile.ready_us, strict=True)] == [True] * 4
    assert (profile.num_ranks, dict(profile.curves)) == (1, {})


def unscripted(strategy: str) -> list[str]:
    """With nothing but what is measured: it is looked, decided and explained."""
    with training(Timed(numel=100_000, pause_s=0.001, num_layers=24), strategy, "SGD") as (ddp, opt):
        for _ in range(3 * ONE_LOOK):
            opt.zero_grad()
            ddp(torch.ones(1)).backward()
            opt.step()
        explanation = ddp.explain(show=False)
        assert explanation.limit_ms is not None
        assert explanation.predicted_ms is not None
        # By the same costs nothing is through before the limit, and the best plan is no worse than this one.
        assert explanation.limit_ms <= explanation.best_ms <= explanation.predicted_ms * 1.002
        return [explanation.why, *explanation.decisions]


@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
def test_every_decision_is_explained_on_every_rank_alike(ranks: Ranks, strategy: str) -> None:
    answers = ranks.run(unscripted, strategy)
    assert all(answer == answers[0] for answer in answers)
    assert answers[0][0] == "planned from what was measured"
    assert answers[0][1].startswith(f"round {ONE_LOOK - 1}: ")


@in_ranks(2)
def test_a_wrong_decision_is_refused_on_every_rank() -> None:
    """A decision that no plan can be made of."""
    bad = Decision(outcome=Outcome.MOVE, next_look=1, groups=((0,), (0,)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tuner, "decide", lambda *_arguments, **_settings: bad)
        with training(CASES["mlp"].model(), "ddp") as (ddp, _):
            for step in range(ONE_LOOK - 1):
                CASES["mlp"].loss(ddp, step).backward()
            last = CASES["mlp"].loss(ddp, ONE_LOOK)
            with pytest.raises(undertow.ConfigError, match="exactly once"):
                last.backward()


def test_tuning_is_on_by_default() -> None:
    assert SyncConfig().auto_tune


def swept() -> list[float]:
    with training(CASES["mlp"].model(), "ddp") as (ddp, _):
        for step in range(ONE_LOOK):
            CASES["mlp"].loss(ddp, step).backward()
        ddp.measure_network()
        CASES["mlp"].loss(ddp, ONE_LOOK).backward()
        return [size for size, _ in ddp.profile().curves["all_reduce"].points]


def test_a_sweep_over_sizes_is_in_the_profile_where_somebody_asks_for_it(ranks: Ranks) -> None:
    answers = ranks.run(swept)
    assert all({4096.0, 65536.0, float(64 * 2**20)} <= set(sizes) for sizes in answers)
