"""What surrounds a step in backward: what it refuses, failures, changes, and other plans on the way."""

import contextlib
import copy
import re
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from support.alike import of_all_ranks
from support.checkpoints import copied
from support.checkpoints import require_equal as require_same_states
from support.errors import text_of
from support.inside import (
    gathers_behind,
    gathers_of,
    interleave,
    interrupted_at_the_end_of_backward,
    member_of,
    settles_after_the_round,
)
from support.models import Fragile, noise
from support.naive import wrapped
from support.ranks import in_ranks
from support.scripted import all_in_one, in_pieces, one_each, scripted
from support.sharded import (
    MLP,
    ORDERED,
    SMALL,
    TIED,
    Parameters,
    one_step,
    optimizer_for,
    parameters,
    reference,
    require_bits,
    require_equal,
    require_moved,
    require_same_everywhere,
    step_of,
    stepped,
    trained,
    training,
)
from undertow import (
    ConfigError,
    DistributedDataParallel,
    PeerFailed,
    PhaseError,
    ShardedOptimizer,
    attach,
    load_checkpoint,
    save_checkpoint,
)

IN_BACKWARD_SMALL: dict[str, Any] = {"in_backward": True, **SMALL}
IN_BACKWARD = {"strategy": "zero1", "in_backward": True}


def backward(ddp: DistributedDataParallel, opt: torch.optim.Optimizer, step: int) -> None:
    opt.zero_grad()
    MLP.loss(ddp, step).backward()


@in_ranks(2)
def test_parameters_are_updated_when_backward_returns_and_step_confirms() -> None:
    with stepped(1, **IN_BACKWARD_SMALL) as (ddp, opt):
        before = parameters(ddp)
        backward(ddp, opt, 1)
        after = parameters(ddp)
        require_moved(before, after)
        opt.step()
        require_equal(after, parameters(ddp))


@in_ranks(2)
def test_one_thread_updates_every_bucket_and_gathers_stay_in_flight() -> None:
    with training(MLP.model(), **IN_BACKWARD_SMALL) as (ddp, opt):
        threads: list[str] = []
        update = opt.update
        opt.update = lambda bucket: (threads.append(threading.current_thread().name), update(bucket))
        one_step(ddp, opt, 0)
        assert threads == []  # the first step is reduced as a whole
        one_step(ddp, opt, 1)
        (thread,) = set(threads)
        assert len(threads) == len(ddp.plan.buckets) > 1
        assert "undertow-adds" in thread
        assert len(gathers_of(ddp).in_flight) == len(ddp.plan.buckets)  # step() has not waited
        ddp.eval()
        with torch.no_grad():
            ddp(noise(2, 6))
        assert gathers_of(ddp).in_flight == {}


AGAIN = (
    "a second backward runs before step(), and with in_backward=True the last backward has updated the parameters.\n"
    "  ShardedOptimizer(..., in_backward=True)\n"
    "  Add losses up and run one backward, or run all but the last one of a step in accumulate(), or leave in_backward=True out."
)
REFUSED: dict[str, tuple[str, Any]] = {
    "clipping": (
        "clip_grad_norm_ cannot be used with in_backward=True: parameters are updated before the norm is known.\n"
        "  ShardedOptimizer\n"
        "  Leave in_backward=True out: then updates run after backward, and gathers under the next forward.",
        lambda _, opt: opt.clip_grad_norm_(1.0),
    ),
    "a closure": (
        "step(closure) cannot be used with in_backward=True: the closure's backward would update parameters before step() ends.",
        lambda _, opt: opt.step(lambda: None),
    ),
    "a training forward": (AGAIN.replace("a second backward runs", "a training forward begins"), lambda ddp, _: MLP.loss(ddp, 2)),
    "a second backward": (AGAIN, lambda ddp, _: ddp.module(noise(5, 6)).sum().backward()),
    "a backward past the model's outputs": (AGAIN, lambda ddp, _: ddp.module[2](noise(5, 8)).sum().backward()),
    "another group": (
        "hyper-parameters have changed since the backward that has updated the parameters: number of groups: 1, now 2.",
        lambda _, opt: (opt.param_groups.append(dict(opt.param_groups[0])), opt.step()),
    ),
    "other hyper-parameters": (
        "hyper-parameters have changed since the backward that has updated the parameters: lr of group 0: 0.01, now 1.0.\n"
        "  ShardedOptimizer.step, in_backward=True\n"
        "  Change them between step() and the next backward, as schedulers do, or leave in_backward=True out.",
        lambda _, opt: (opt.param_groups[0].update(lr=1.0), opt.step()),
    ),
}


@in_ranks(2)
@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_right_raises_where_it_happens(what: str) -> None:
    text, act = REFUSED[what]
    with stepped(1, optimizer="AdamW", **IN_BACKWARD_SMALL) as (ddp, opt):
        backward(ddp, opt, 1)
        assert text_of(PhaseError, lambda: act(ddp, opt)).startswith(text)


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


@in_ranks(2)
@pytest.mark.parametrize("is_attached", [False, True], ids=["wrapper", "attach"])
@pytest.mark.parametrize("structure", ["one tensor", "a tuple", "a dictionary"])
def test_a_second_loss_of_one_forward_is_refused_with_its_reason(structure: str, is_attached: bool) -> None:
    model = TwoLosses(structure)
    target = attach(model) if is_attached else DistributedDataParallel(model)
    forward = model if is_attached else target
    opt = ShardedOptimizer(torch.optim.SGD, target, in_backward=True, lr=0.1)
    for step in range(3):
        found = tree_leaves(forward(noise(3, 6, step=step)))
        losses = [found[0].sum(), found[-1].square().sum()]
        losses[0].backward(retain_graph=True)
        if step > 0:
            with target.accumulate() if step == 2 else contextlib.nullcontext():
                assert text_of(PhaseError, losses[1].backward) == AGAIN
        opt.step()
        opt.zero_grad()
    with target.accumulate():  # as the error says
        losses = [forward(noise(3, 6)), forward(noise(3, 6))]
        sum(each.sum() for each in tree_leaves(losses[0])).backward()
    sum(each.sum() for each in tree_leaves(losses[1])).backward()
    opt.step()
    target.close()


@in_ranks(2)
def test_a_scaler_is_refused_before_the_first_update() -> None:
    scaler = torch.amp.GradScaler("cpu")
    text = "GradScaler cannot be used with in_backward=True: it looks for infinite gradients when parameters are updated"
    with training(MLP.model(), **IN_BACKWARD_SMALL) as (ddp, opt):
        scaler.scale(MLP.loss(ddp, 0)).backward()
        assert text in text_of(PhaseError, lambda: scaler.step(opt))  # the very first, before anything is updated


@in_ranks(2)
@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({}, "an optimizer of this model was made with in_backward=False before"),
        ({"overlap": False}, "in_backward=True steps during backward, and overlap=False forbids that"),
    ],
)
def test_it_is_refused_where_it_cannot_be_made(settings: dict[str, Any], text: str) -> None:
    with wrapped(MLP.model(), strategy="zero1", **settings) as ddp:
        _first = None if settings else optimizer_for(ddp, "zero1")
        assert text in text_of(ConfigError, lambda: optimizer_for(ddp, "zero1", in_backward=True))


# The lane carries gathers between the reductions of the same backward.
@pytest.mark.slow
@in_ranks(2, 3)
def test_gathers_between_reductions_change_nothing() -> None:
    def before(ddp: DistributedDataParallel, _opt: Any, step: int) -> None:
        if step >= 1:
            last = len(ddp.plan.buckets) - 1
            one_later = tuple((bucket - 1,) if bucket < last else (last, last - 1) for bucket in range(1, last + 1))
            interleave(ddp, tuple((bucket,) for bucket in range(last + 1)) if step % 2 == 0 else ((), *one_later))

    require_bits(TIED, num_steps=8, before=before, among=[IN_BACKWARD])


@in_ranks(2, is_fresh=True)
def test_an_exception_in_an_update_comes_out_of_backward_as_itself() -> None:
    def fail(bucket: int) -> None:
        raise ZeroDivisionError(f"in bucket {bucket}")

    with stepped(2, **IN_BACKWARD_SMALL) as (ddp, opt):
        opt.update = fail
        assert "in bucket 0" in text_of(ZeroDivisionError, lambda: backward(ddp, opt, 2))
        in_flight = gathers_of(ddp).in_flight
        assert len(in_flight) == len(ddp.plan.buckets)
        for handle in in_flight.values():  # what was not updated does not leave
            text_of(ZeroDivisionError, handle.wait)
        in_flight.clear()


class Detached(nn.Sequential):
    """Uses the last layer a second time without autograd's knowing."""

    def forward(self, x: Tensor) -> Tensor:
        first, last = self
        return last(nn.functional.linear(first(x), last.weight.detach()).tanh())


# A use that autograd does not count delays no update, and must not be computed with what that has written.
@in_ranks(2)
def test_autograd_refuses_a_parameter_that_was_updated_too_early() -> None:
    with training(Detached(nn.Linear(6, 6), nn.Linear(6, 6)), "zero1", "SGD", **IN_BACKWARD_SMALL) as (ddp, opt):
        one_step(ddp, opt, 0)
        assert "modified by an inplace operation" in text_of(RuntimeError, lambda: backward(ddp, opt, 1))


class Twice(nn.Module):
    """Reentrant checkpoints, of which the second one with the same layer is computed only when it is told to."""

    def __init__(self, *, calls_layer: bool) -> None:
        super().__init__()
        self.layer, self.other = nn.Linear(6, 6), nn.Linear(6, 6)
        self.part, self.runs_twice = self.layer if calls_layer else self.computed, False

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
    with training(Twice(calls_layer=calls_layer), "zero1", "SGD", **IN_BACKWARD_SMALL) as (ddp, opt):
        one_step(ddp, opt, 0)
        one_step(ddp, opt, 1)
        ddp.module.runs_twice = calls_layer or dist.get_rank() == 0
        kind, found = PeerFailed, "backward failed on rank 0"
        if ddp.module.runs_twice:
            kind, found = PhaseError, "parameters are read in the backward that has updated them already"
        assert found in text_of(kind, lambda: backward(ddp, opt, 2))


@in_ranks(2)
def test_rank_0_plans_the_lane_and_all_follow() -> None:
    orders = []
    before = lambda ddp, _opt, _step: orders.append(gathers_behind(ddp))  # noqa: E731
    plan = {"bucket_cap_mb": (1e-4, 1e-3)}
    require_bits(TIED, "AdamW", num_steps=17, before=before, among=[IN_BACKWARD], plans=[plan])  # enough for a look
    assert orders[0] is None  # behind the last reduction, while nothing is known
    assert all(of_rank == orders for of_rank in of_all_ranks(orders))
    assert sorted(bucket for behind in orders[-1] for bucket in behind) == list(range(len(orders[-1])))


# Look after look another plan, taken with its state; in between rounds that are measured in another order.
@pytest.mark.slow
@in_ranks(2, 3)
def test_other_plans_are_taken_with_their_state() -> None:
    expected = reference(TIED, "ddp", num_steps=40, reduction="ordered")
    with scripted(one_each, in_pieces, all_in_one) as seen:
        require_equal(expected, trained(TIED, "zero1", num_steps=40, in_backward=True, reduction="ordered"))
    assert dist.get_rank() > 0 or len({plan.to_json() for plan in seen}) >= 4


@pytest.mark.slow
@in_ranks(2)
def test_what_is_saved_after_a_step_is_whole() -> None:
    def saved_after_steps(*, in_backward: bool) -> list[Any]:
        found = []
        with training(TIED.model(), in_backward=in_backward, **ORDERED) as (ddp, opt):
            for step in range(4):
                step_of(ddp, opt, TIED, step)
                found.append(copied([opt.full_state_dict()["state"], ddp.state_dict()]))
                if step == 2:
                    opt.load_state_dict(opt.full_state_dict())
        return found

    require_same_states(saved_after_steps(in_backward=True), saved_after_steps(in_backward=False))


# Backwards in backward that fail when they have updated a part: what may be read then, and what comes after.


IN_BACKWARD_SGD: dict[str, Any] = {"optimizer": "SGD", "in_backward": True, **SMALL}
Read = Callable[[DistributedDataParallel, Any], Parameters]


def started(op: str = "mean") -> AbstractContextManager[Any]:
    torch.manual_seed(3)
    return training(Fragile(), "hybrid" if dist.get_world_size() == 4 else "zero1", op=op, **IN_BACKWARD_SGD)


def weighted_step(ddp: DistributedDataParallel, opt: Any, step: int, *, weight: float | None = None) -> None:
    if weight is not None:
        ddp.loss_weight(weight)
    one_step(ddp, opt, step)


def train(ddp: DistributedDataParallel, opt: Any, num_steps: int = 3, **how: Any) -> Parameters:
    for step in range(num_steps):
        weighted_step(ddp, opt, step, **how)
    return parameters(ddp)


# Its error is not raised.
def failing_backward(ddp: DistributedDataParallel, opt: Any, num_failing: int, *, weight: float | None = None) -> None:
    ddp.module.fails = dist.get_rank() < num_failing
    text_of(ZeroDivisionError if ddp.module.fails else PeerFailed, lambda: weighted_step(ddp, opt, 3, weight=weight))
    ddp.module.fails = False


def evaluated(model: Callable[[Tensor], Tensor], numel: int) -> Parameters:
    with torch.no_grad():
        return {"output": model(noise(2, numel))}


def of_optimizer(opt: Any) -> Parameters:
    return {f"{number} {key}": value for number, state in opt.full_state_dict()["state"].items() for key, value in state.items()}


READS: dict[str, Read] = {
    "the state dict": lambda ddp, _: ddp.state_dict(),
    "the state dict of a layer": lambda ddp, _: ddp.module.last.state_dict(),
    "the parameters": lambda ddp, _: cloned(dict(ddp.named_parameters())),
    "a copy": lambda ddp, _: copy.deepcopy(ddp).state_dict(),
    "an evaluation": lambda ddp, _: evaluated(ddp.eval(), 6),
    "a layer's evaluation": lambda ddp, _: evaluated(ddp.module.last, 8),
    "the optimizer's state": lambda _, opt: of_optimizer(opt),
}


def cloned(found: Parameters) -> Parameters:
    return {name: value.detach().clone() for name, value in found.items()}


@in_ranks(2, 4)
@pytest.mark.parametrize("num_failing", [1, 2])
@pytest.mark.parametrize("what", READS)
def test_what_is_read_after_a_failed_backward_is_whole(what: str, num_failing: int) -> None:
    with started() as (ddp, opt):
        before = train(ddp, opt)
        failing_backward(ddp, opt, num_failing)
        found = cloned(READS[what](ddp, opt))
        ddp.wait()
        require_equal(found, cloned(READS[what](ddp, opt)))
        after = parameters(ddp)
        require_same_everywhere(after)
        assert not torch.equal(before["module.last.bias"], after["module.last.bias"])  # there was something to tear
        ddp.train()
        one_step(ddp, opt, 4)
        require_same_everywhere(parameters(ddp))


@in_ranks(2)
@pytest.mark.parametrize("num_failing", [1, 2])
def test_a_checkpoint_in_an_except_block_is_whole(tmp_path: Path, num_failing: int) -> None:
    with started() as (ddp, opt):
        train(ddp, opt)
        failing_backward(ddp, opt, num_failing)
        save_checkpoint(tmp_path / "saved", ddp, opt)
        after, state = parameters(ddp), cloned(of_optimizer(opt))
    with started() as (ddp, opt):
        load_checkpoint(tmp_path / "saved", ddp, opt)
        require_equal(after, parameters(ddp))
        require_equal(state, of_optimizer(opt))


# On rank 0 no bucket is full yet, and rank 1 has sent some.
@in_ranks(2)
def test_a_rank_that_has_updated_nothing_takes_part_in_what_others_end(tmp_path: Path) -> None:
    def fails(_gradient: Tensor) -> None:
        raise ZeroDivisionError

    with started() as (ddp, opt):
        before = train(ddp, opt)
        ddp.module.fails = dist.get_rank() == 1
        if dist.get_rank() == 0:
            ddp.module.last.weight.register_hook(fails)
        text_of(ZeroDivisionError, lambda: one_step(ddp, opt, 3))
        save_checkpoint(tmp_path / "saved", ddp, opt)
        require_equal(before, parameters(ddp))
    with started() as (ddp, opt):
        load_checkpoint(tmp_path / "saved", ddp, opt)
        require_equal(before, parameters(ddp))


# When the last layer's buckets are on their way.
@in_ranks(2)
def test_another_thread_is_told_that_a_backward_updates_what_it_reads() -> None:
    with started() as (ddp, opt), ThreadPoolExecutor(1) as thread:
        train(ddp, opt)
        reads: list[Future[object]] = []

        def in_a_thread(_gradient: Tensor) -> None:
            reads.append(thread.submit(ddp.state_dict))
            reads[0].exception()

        hook = ddp.module.first.weight.register_hook(in_a_thread)
        one_step(ddp, opt, 3)
        hook.remove()
        one_step(ddp, opt, 4)
        require_same_everywhere(parameters(ddp))
        first, where, remedy = text_of(PhaseError, reads[0].result).splitlines()
    assert first == "parameters are read while a backward updates them: the shards of other ranks have not arrived."
    assert re.fullmatch(rf"  ShardedOptimizer\(\.\.\., in_backward=True\), bucket .*, rank {dist.get_rank()}", where)
    assert (remedy, len(reads)) == (
        "  Read them in the thread that trains, after backward. If none runs, start again from a checkpoint.",
        1,
    )


# An interrupt where the synchronization ends: what cannot be ended any more is neither read nor trained on.
@in_ranks(2)
def test_what_cannot_be_made_whole_raises_wherever_it_is_read() -> None:
    with started() as (ddp, opt):
        train(ddp, opt)
        with interrupted_at_the_end_of_backward(ddp), pytest.raises(KeyboardInterrupt):
            one_step(ddp, opt, 3)
        for act in (ddp.state_dict, lambda: MLP.loss(ddp, 4).backward(), ddp.state_dict, ddp.close):
            assert "parameters are read while a backward updates them" in text_of(PhaseError, act)


# Of a backward that has updated a part; the other rank will never send its shards.
@in_ranks(2, is_fresh=True)
def test_what_a_lost_rank_leaves_in_part_is_not_read() -> None:
    with started() as (ddp, opt):
        train(ddp, opt)
        member, has_updated, update = member_of(ddp), threading.Event(), opt.update

        def noted(bucket: int) -> None:
            update(bucket)
            has_updated.set()

        def fails(_gradient: Tensor) -> None:
            assert has_updated.wait(30.0)
            if dist.get_rank() == 1:
                member.ring.says_failed(ZeroDivisionError())
                raise ZeroDivisionError
            with member.ring.condition:
                member.ring.condition.wait_for(lambda: member.known_fault)

        opt.update = noted
        ddp.module.first.weight.register_hook(fails)
        with pytest.raises((PeerFailed, ZeroDivisionError)):
            one_step(ddp, opt, 3)
        for read in [*READS.values()] * 2:
            assert "rank 1 has failed: ZeroDivisionError" in text_of(PeerFailed, partial(read, ddp, opt))


@in_ranks(2)
@pytest.mark.parametrize("num_failing", [1, 2])
def test_steps_behind_a_micro_batch_that_failed_are_as_ever(num_failing: int) -> None:
    def trained(*, fails: bool) -> Parameters:
        torch.manual_seed(3)
        with training(Fragile(), "zero2", **IN_BACKWARD_SGD) as (ddp, opt):
            train(ddp, opt)
            if fails:
                with ddp.no_sync():
                    failing_backward(ddp, opt, num_failing)
            for step in range(4, 6):
                one_step(ddp, opt, step)
            return parameters(ddp)

    require_equal(trained(fails=False), trained(fails=True))


# Rank 0 fails, and gives the synchronization up, before what it has sent of the last layer is complete.
@in_ranks(2, 4)
def test_a_bucket_that_left_before_the_failure_is_divided_by_its_weights() -> None:
    weight = 3.0 + dist.get_rank()
    with started("weighted") as (ddp, opt):
        healthy = train(ddp, opt, 4, weight=weight)
    with started("weighted") as (ddp, opt):
        before = train(ddp, opt, weight=weight)
        with settles_after_the_round(ddp):
            failing_backward(ddp, opt, 1, weight=weight)
            after = parameters(ddp)
    require_same_everywhere(after)
    for name, value in after.items():
        assert bool(((value == before[name]) | (value == healthy[name])).all()), name
    assert torch.equal(after["module.last.bias"], healthy["module.last.bias"])
