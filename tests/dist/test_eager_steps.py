"""What surrounds a step in backward: what it refuses, gathers in flight, delays, failures, changes, re-plans."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from statistics import median
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from support.errors import text_of
from support.inside import assembly_of, late_calls, late_ops
from support.models import CASES, Fragile, noise
from support.ranks import Ranks, in_ranks
from support.scripted import all_in_one, in_pieces, one_each, scripted
from support.sharded import optimizer_for, parameters, require_equal, trained, training
from undertow import ConfigError, DistributedDataParallel, PeerFailed, PhaseError, ShardedOptimizer, SyncConfig, attach
from undertow.plan import GathersBehind, LaneTimes
from undertow.schedule import OpKind
from undertow.trace import StepRecord
from undertow.tune import Tuner

MLP = CASES["mlp"]
TIED = CASES["tied transformer"]
SMALL: dict[str, Any] = {"bucket_cap_mb": 1e-4}  # most parameters are in pieces
ORDERED: dict[str, Any] = {"reduction": "ordered", **SMALL}


def backward(ddp: DistributedDataParallel, opt: torch.optim.Optimizer, step: int) -> None:
    opt.zero_grad()
    MLP.loss(ddp, step).backward()


def tied_step(ddp: DistributedDataParallel, opt: torch.optim.Optimizer, step: int) -> None:
    opt.zero_grad()
    TIED.loss(ddp, step).backward()
    opt.step()


def one_step(ddp: DistributedDataParallel, opt: torch.optim.Optimizer, step: int) -> None:
    backward(ddp, opt, step)
    opt.step()


@in_ranks(2)
def test_parameters_are_updated_when_backward_returns_and_step_confirms() -> None:
    with training(MLP.model(), eager=True, **SMALL) as (ddp, opt):
        one_step(ddp, opt, 0)
        ddp.wait()
        before = parameters(ddp)
        backward(ddp, opt, 1)
        after = parameters(ddp)
        assert not any(torch.equal(before[name], after[name]) for name in before)
        opt.step()
        require_equal(after, parameters(ddp))


@in_ranks(2)
def test_one_thread_updates_every_bucket_and_gathers_stay_in_flight() -> None:
    with training(MLP.model(), eager=True, **SMALL) as (ddp, opt):
        threads: list[str] = []
        update = opt.update  # type: ignore[attr-defined]

        def noted(bucket: int) -> None:
            threads.append(threading.current_thread().name)
            update(bucket)

        opt.update = noted  # type: ignore[attr-defined]
        one_step(ddp, opt, 0)
        assert threads == []  # the first step is reduced as a whole
        one_step(ddp, opt, 1)
        assert len(threads) == len(ddp.plan.buckets) > 1
        assert len(set(threads)) == 1
        assert "undertow-adds" in threads[0]
        assert len(assembly_of(ddp).reducer.sharding.gathers.in_flight) == len(ddp.plan.buckets)  # step() has not waited
        ddp.eval()
        with torch.no_grad():
            ddp(noise(2, 6))
        assert assembly_of(ddp).reducer.sharding.gathers.in_flight == {}


REFUSED: dict[str, tuple[str, Any]] = {
    "clipping": (
        "clip_grad_norm_ does not go with eager=True: the norm is known when parameters are updated already.\n"
        "  ShardedOptimizer\n"
        "  Leave eager=True out: gathers lie under the next forward, and updates between them and backward.",
        lambda _, opt: opt.clip_grad_norm_(1.0),
    ),
    "a closure": (
        "step(closure) does not go with eager=True: the closure's backward would update parameters before step() is through.",
        lambda _, opt: opt.step(lambda: None),
    ),
    "a training forward": (
        "a training forward begins before step(), and an eager optimizer has updated the parameters in the backward before.\n"
        "  ShardedOptimizer(..., eager=True)\n"
        "  Add losses up and run one backward, or run all but the last one of a step in accumulate(), or leave eager=True out.",
        lambda ddp, _: MLP.loss(ddp, 2),
    ),
    "a second backward": (
        "a second backward runs before step(), and an eager optimizer has updated the parameters in the backward before.",
        lambda ddp, _: ddp.module(noise(5, 6)).sum().backward(),
    ),
    "a backward past the model's outputs": (
        "a second backward runs before step(), and an eager optimizer has updated the parameters in the backward before.",
        lambda ddp, _: ddp.module[2](noise(5, 8)).sum().backward(),
    ),
    "another group": (
        "hyper-parameters have changed since the backward that has updated the parameters: number of groups: 1, now 2.",
        lambda _, opt: (opt.param_groups.append(dict(opt.param_groups[0])), opt.step()),
    ),
    "other hyper-parameters": (
        "hyper-parameters have changed since the backward that has updated the parameters: lr of group 0: 0.01, now 1.0.\n"
        "  ShardedOptimizer.step, eager=True\n"
        "  Change them between step() and the next backward, as schedulers do, or leave eager=True out.",
        lambda _, opt: (opt.param_groups[0].update(lr=1.0), opt.step()),
    ),
}


@in_ranks(2)
@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_right_raises_where_it_happens(what: str) -> None:
    text, act = REFUSED[what]
    with training(MLP.model(), eager=True, **SMALL) as (ddp, opt):
        one_step(ddp, opt, 0)
        backward(ddp, opt, 1)
        with pytest.raises(PhaseError) as caught:
            act(ddp, opt)
        assert str(caught.value).startswith(text)


class TwoLosses(nn.Module):
    """Two outputs that share a layer, in some structure."""

    def __init__(self, structure: str) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.shared, self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 4), nn.Linear(6, 4)
        self.structure = structure

    def forward(self, x: Tensor) -> Any:
        hidden = self.shared(x).tanh()
        first, second = self.first(hidden), self.second(hidden)
        return {"a tuple": (first, [second]), "a dictionary": {"losses": (first, second)}}.get(self.structure, first + second)


def two_losses(structure: str, is_attached: bool) -> list[str]:
    """What the second backward of one forward says, in a step of its own and in accumulation."""
    texts = []
    model = TwoLosses(structure)
    target = attach(model) if is_attached else DistributedDataParallel(model)
    forward = model if is_attached else target
    opt = ShardedOptimizer(torch.optim.SGD, target, eager=True, lr=0.1)
    for step in range(3):
        found = tree_leaves(forward(noise(3, 6, step=step)))
        losses = [found[0].sum(), found[-1].square().sum()]
        losses[0].backward(retain_graph=True)
        if step > 0:
            with target.accumulate() if step == 2 else contextlib.nullcontext():
                texts.append(text_of(PhaseError, losses[1].backward))
        opt.step()
        opt.zero_grad()
    with target.accumulate():  # as the error says
        losses = [forward(noise(3, 6)), forward(noise(3, 6))]
        sum(each.sum() for each in tree_leaves(losses[0])).backward()
    sum(each.sum() for each in tree_leaves(losses[1])).backward()
    opt.step()
    target.close()
    return texts


@pytest.mark.parametrize("is_attached", [False, True], ids=["wrapper", "attach"])
@pytest.mark.parametrize("structure", ["one tensor", "a tuple", "a dictionary"])
def test_a_second_loss_of_one_forward_is_refused_with_its_reason(two_ranks: Ranks, structure: str, is_attached: bool) -> None:
    text = (
        "a second backward runs before step(), and an eager optimizer has updated the parameters in the backward before.\n"
        "  ShardedOptimizer(..., eager=True)\n"
        "  Add losses up and run one backward, or run all but the last one of a step in accumulate(), or leave eager=True out."
    )
    assert two_ranks.run(two_losses, structure, is_attached) == [[text] * 2] * 2


@in_ranks(2)
def test_a_scaler_is_refused_before_the_first_update() -> None:
    scaler = torch.amp.GradScaler("cpu")
    with training(MLP.model(), eager=True, **SMALL) as (ddp, opt):
        scaler.scale(MLP.loss(ddp, 0)).backward()
        with pytest.raises(
            PhaseError,
            match="GradScaler does not go with eager=True: it looks for infinite gradients when parameters are updated",
        ):
            scaler.step(opt)  # the very first, before anything is updated


@in_ranks(2)
def test_it_is_refused_where_it_cannot_be_made() -> None:
    with (
        training(MLP.model(), eager=False) as (ddp, _),
        pytest.raises(ConfigError, match="an optimizer of this model was made with eager=False before"),
    ):
        optimizer_for(ddp, "zero1", eager=True)
    ddp = DistributedDataParallel(MLP.model(), config=SyncConfig(strategy="zero1", overlap=False))
    with pytest.raises(ConfigError, match="eager=True steps under backward, and overlap=False lets nothing lie there"):
        optimizer_for(ddp, "zero1", eager=True)
    ddp.close()


@in_ranks(2)
@pytest.mark.parametrize(
    ("kind", "late_rank"),
    [(OpKind.PACK, 0), (OpKind.REDUCE_SCATTER, 1), (OpKind.STEP, 0), (OpKind.BIND, 1), (OpKind.ALL_GATHER, 0)],
)
def test_a_delay_at_any_op_changes_nothing(kind: OpKind, late_rank: int) -> None:
    expected, late = trained(TIED, "ddp", "SGD", num_steps=5, reduction="ordered"), []

    def each(ddp: DistributedDataParallel, opt: Any, step: int) -> None:
        nonlocal late
        if step == 1:
            late = late_ops(ddp, kind, late_rank, seconds=0.004)
        tied_step(ddp, opt, step)

    require_equal(expected, trained(TIED, "zero1", "SGD", num_steps=5, each=each, eager=True, **ORDERED))
    assert (dist.get_rank() == late_rank) == (late != [])


@in_ranks(2)
@pytest.mark.parametrize("where", ["update", "_send", "_post_all_gather"])
def test_nor_does_one_in_a_thread(where: str) -> None:
    expected = trained(TIED, "ddp", "SGD", num_steps=5, reduction="ordered")

    def each(ddp: DistributedDataParallel, opt: Any, step: int) -> None:
        if step == 1:
            owner = opt if where == "update" else assembly_of(ddp).reducer.sharding.exchanges
            late_calls(owner, where, seconds=0.003, rank=0)
        tied_step(ddp, opt, step)

    require_equal(expected, trained(TIED, "zero1", "SGD", num_steps=5, each=each, eager=True, **ORDERED))


@in_ranks(2, 3)
def test_gathers_between_reductions_change_nothing() -> None:
    """The lane carries gathers between the reductions of the same backward."""
    expected = trained(TIED, "ddp", "SGD", num_steps=8, reduction="ordered")

    def each(ddp: DistributedDataParallel, opt: Any, step: int) -> None:
        if step >= 1:
            last = len(ddp.plan.buckets) - 1
            orders = [
                tuple((bucket,) for bucket in range(last + 1)),
                tuple((bucket - 1,) if bucket < last else (last, last - 1) for bucket in range(last + 1)),
            ]
            behind = orders[step % 2] if step % 2 == 0 else ((), *orders[1][1:])
            assembly = assembly_of(ddp)
            assembly.interleave(behind)
            ddp.sync._engine.formation.watch.tuning._order = (ddp.plan.groups, behind)
        tied_step(ddp, opt, step)

    require_equal(expected, trained(TIED, "zero1", "SGD", num_steps=8, each=each, eager=True, **ORDERED))


@in_ranks(2, is_fresh=True)
def test_an_exception_in_an_update_comes_out_of_backward_as_itself() -> None:
    with training(MLP.model(), eager=True, **SMALL) as (ddp, opt):
        one_step(ddp, opt, 0)
        one_step(ddp, opt, 1)

        def fail(bucket: int) -> None:
            raise ZeroDivisionError(f"in bucket {bucket}")

        opt.update = fail  # type: ignore[attr-defined]
        with pytest.raises(ZeroDivisionError, match="in bucket 0"):
            backward(ddp, opt, 2)
        in_flight = assembly_of(ddp).reducer.sharding.gathers.in_flight
        assert len(in_flight) == len(ddp.plan.buckets)
        for handle in in_flight.values():  # what was not updated does not leave
            with pytest.raises(ZeroDivisionError):
                handle.wait()
        in_flight.clear()


@in_ranks(2)
@pytest.mark.parametrize("num_failing", [1, 2])
def test_ranks_agree_on_what_was_updated_when_backward_fails(num_failing: int) -> None:
    torch.manual_seed(3)
    with training(Fragile(), "zero1", "SGD", eager=True, bucket_cap_mb=1e-4) as (ddp, opt):
        for step in range(3):
            one_step(ddp, opt, step)
        before = parameters(ddp)
        ddp.module.fails = dist.get_rank() < num_failing
        error = ZeroDivisionError if ddp.module.fails else PeerFailed
        with pytest.raises(error):
            backward(ddp, opt, 3)
        ddp.module.fails = False
        one_step(ddp, opt, 4)  # and with it this rank ends the round that it has left open
        after = parameters(ddp)
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, after)
        for other in gathered:
            require_equal(after, other)  # whole, and the same on every rank
        assert not any(torch.equal(before[name], after[name]) for name in before)


@in_ranks(2)
def test_autograd_refuses_a_parameter_that_was_updated_too_early() -> None:
    """A use that autograd does not count delays no update, and must not be computed with what that has written."""

    class Detached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            hidden = nn.functional.linear(self.first(x), self.last.weight.detach())
            return self.last(hidden.tanh())

    torch.manual_seed(3)
    with training(Detached(), "zero1", "SGD", eager=True, bucket_cap_mb=1e-4) as (ddp, opt):
        one_step(ddp, opt, 0)
        opt.zero_grad()
        loss = MLP.loss(ddp, 1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


class Twice(nn.Module):
    """Reentrant checkpoints, of which the second one with the same layer is computed only when it is told to."""

    def __init__(self, *, calls_layer: bool) -> None:
        super().__init__()
        self.layer, self.other = nn.Linear(6, 6), nn.Linear(6, 6)
        self.part = self.layer if calls_layer else self.computed
        self.runs_twice = False

    def computed(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.layer.weight, self.layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = self.other(x)
        if self.runs_twice:
            x = checkpoint(self.part, x, use_reentrant=True)
        return checkpoint(self.part, x, use_reentrant=True)


@in_ranks(2)
@pytest.mark.parametrize("calls_layer", [True, False])
def test_a_recomputation_with_updated_parameters_is_an_error_on_every_rank(calls_layer: bool) -> None:
    torch.manual_seed(3)
    with training(Twice(calls_layer=calls_layer), "zero1", "SGD", eager=True, bucket_cap_mb=1e-4) as (ddp, opt):
        one_step(ddp, opt, 0)
        one_step(ddp, opt, 1)
        ddp.module.runs_twice = calls_layer or dist.get_rank() == 0
        kind, found = PhaseError, "parameters are read in the backward that has updated them already"
        if not ddp.module.runs_twice:
            kind, found = PeerFailed, "backward failed on rank 0"
        with pytest.raises(kind, match=found):
            backward(ddp, opt, 2)


@in_ranks(2, 3)
def test_parameters_may_change() -> None:
    """Frozen, and unfrozen again: rounds with whole gradients in between."""

    def each(ddp: DistributedDataParallel, opt: Any, step: int) -> None:
        if step in (3, 6):
            ddp.module[0].weight.requires_grad_(step == 6)
        one_step(ddp, opt, step)

    expected = trained(MLP, "zero1", "SGD", num_steps=10, each=each, **ORDERED)
    require_equal(expected, trained(MLP, "zero1", "SGD", num_steps=10, each=each, eager=True, **ORDERED))


@in_ranks(2)
def test_rank_0_plans_the_lane_and_all_follow() -> None:
    """Rounds enough for a look."""
    settings: dict[str, Any] = {"reduction": "ordered", "bucket_cap_mb": (1e-4, 1e-3), "num_steps": 16}
    expected = trained(TIED, "ddp", **settings)
    orders = []

    def each(ddp: DistributedDataParallel, opt: Any, step: int) -> None:
        tied_step(ddp, opt, step)
        orders.append(assembly_of(ddp)._gathers_behind)

    require_equal(expected, trained(TIED, "zero1", each=each, eager=True, **settings))
    assert orders[0] is None  # behind the last reduction, while nothing is known
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, orders)
    assert all(of_rank == orders for of_rank in found)
    last = orders[-1]
    assert last is not None
    assert sorted(bucket for behind in last for bucket in behind) == list(range(len(last)))


def slower_with_gathers_between() -> list[str]:
    """Whatever is predicted, steps are told to be slower where a gather leaves between reductions. What it is explained by."""
    settings: dict[str, Any] = {"reduction": "ordered", "bucket_cap_mb": (1e-4, 1e-3), "num_steps": 36}
    expected = trained(TIED, "ddp", **settings)
    are_between, reasons = [], []

    def each(ddp: DistributedDataParallel, opt: Any, step: int) -> None:
        tied_step(ddp, opt, step)
        order = assembly_of(ddp)._gathers_behind
        are_between.append(order is not None and any(order[:-1]))
        reasons.append(ddp.explain(show=False).why)

    def between(times: LaneTimes) -> GathersBehind:
        return tuple((bucket,) for bucket in range(times.num_buckets))

    def usual_us(records: Sequence[StepRecord]) -> float:
        return median(2e4 if are_between[record.step] else 1e4 for record in records)

    with contextlib.ExitStack() as patches:
        patches.enter_context(mock.patch("undertow.tune.tuner.eager_order", between))
        patches.enter_context(mock.patch("undertow.runtime.tuning._usual_us", usual_us))
        if dist.get_rank() == 1:  # whose own times say something else
            patches.enter_context(mock.patch.object(Tuner, "learn_order"))
        require_equal(expected, trained(TIED, "zero1", each=each, eager=True, **settings))
    assert sum(are_between) == 9  # tried, and found to be slower
    assert not any(are_between[-10:])
    return reasons


def test_an_order_that_is_measured_to_be_slower_is_given_up(two_ranks: Ranks) -> None:
    first, second = two_ranks.run(slower_with_gathers_between)
    assert first[-1].endswith(
        "; gathers leave behind the last reduction, which was measured to be faster than between reductions"
    )
    assert second == first  # after every step: rank 0 has judged, and told


@in_ranks(2, 3)
def test_other_plans_are_taken_with_their_state() -> None:
    """Look after look another plan, taken with its state; in between rounds that are measured in another order."""
    settings: dict[str, Any] = {"reduction": "ordered", "num_steps": 40}
    expected = trained(TIED, "ddp", **settings)
    with scripted(one_each, in_pieces, all_in_one) as seen:
        require_equal(expected, trained(TIED, "zero1", eager=True, **settings))
    if dist.get_rank() == 0:
        assert len({plan.fingerprint for plan in seen}) >= 4


def _saved(ddp: DistributedDataParallel, opt: Any) -> list[dict[str, Tensor]]:
    found = []
    for step in range(4):
        tied_step(ddp, opt, step)
        state = opt.full_state_dict()["state"]
        tensors = {f"{number} {key}": value.clone() for number, of_param in state.items() for key, value in of_param.items()}
        found.append(tensors | {name: value.clone() for name, value in ddp.state_dict().items()})
        if step == 2:
            opt.load_state_dict(opt.full_state_dict())
    return found


@in_ranks(2)
def test_what_is_saved_after_a_step_is_whole() -> None:
    with training(TIED.model(), "zero1", **ORDERED) as (ddp, opt):
        expected = _saved(ddp, opt)
    with training(TIED.model(), "zero1", eager=True, **ORDERED) as (ddp, opt):
        for mine, theirs in zip(_saved(ddp, opt), expected, strict=True):
            assert mine.keys() == theirs.keys()
            assert all(torch.equal(mine[key], theirs[key]) for key in mine)


@in_ranks(2)
def test_gradients_reduced_after_backward_are_stepped_as_well() -> None:
    def each(ddp: DistributedDataParallel, opt: Any, step: int) -> None:
        opt.zero_grad()
        with ddp.no_sync():
            MLP.loss(ddp, step).backward()
        ddp.sync.reduce_gradients_async().wait()
        opt.step()

    expected = trained(MLP, "zero1", "SGD", num_steps=5, each=each, **ORDERED)
    require_equal(expected, trained(MLP, "zero1", "SGD", num_steps=5, each=each, eager=True, **ORDERED))


@in_ranks(2)
def test_a_scheduler_between_steps_counts() -> None:
    def each(ddp: DistributedDataParallel, opt: Any, step: int) -> None:
        if step == 0:
            ddp.scheduler = torch.optim.lr_scheduler.LambdaLR(opt, lambda number: 1 / (1 + number))
        one_step(ddp, opt, step)
        ddp.scheduler.step()

    expected = trained(MLP, "ddp", "SGD", num_steps=5, each=each, **ORDERED)
    require_equal(expected, trained(MLP, "zero1", "SGD", num_steps=5, each=each, eager=True, **ORDERED))
