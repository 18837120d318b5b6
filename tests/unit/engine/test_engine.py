"""Events of a step whose errors, or whose order, a program of steps does not show; on ranks in one process."""

import contextlib
import gc
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from support import one_process
from support.inside import before_lines
from support.levels import some
from support.models import noise
from support.one_process import Rank, ranks_of
from support.units import WIDTH, Units, made
from undertow import (
    ExpertGroup,
    GradientSync,
    NonFiniteGradient,
    PeerFailed,
    PhaseError,
    PlanMismatch,
    ShardedOptimizer,
    UndertowError,
)
from undertow.buckets.bucket import BucketLayout
from undertow.buckets.facts import Reading
from undertow.engine.rounds import Rounds
from undertow.engine.step_settings import GroupSettings
from undertow.errors import Desync, ReplicaMismatch
from undertow.schedule import Op, OpKind
from undertow.tune import trials

EACH, LAYER, ONE = 0.00002, 0.00008, 25.0  # MiB: a parameter in each bucket, a layer, or all of them


class Training:
    """One rank's model, and steps of it that are compared with the naive reference."""

    def __init__(self, rank: Rank, kinds: str = "linear linear linear", **settings: Any) -> None:
        self.rank, self.kinds = rank, kinds
        self.module = Units(kinds)
        self.order = "".join(map(str, range(len(self.module.units))))
        self.sync: GradientSync = rank.attach(self.module, **{"bucket_cap_mb": EACH, **settings})
        self.num_batches = 0
        self.optimizer: torch.optim.Optimizer = torch.optim.SGD(self.module.parameters(), lr=0.0)

    def batch(self) -> Tensor:
        self.num_batches += 1
        return noise(3, WIDTH, step=self.num_batches)

    def backward(self, order: str | None = None) -> None:
        self.module(self.batch(), self.order if order is None else order).square().sum().backward()

    def step(self) -> None:
        self.module.zero_grad()
        self.backward()
        self.optimizer.step()

    def own(self) -> list[Tensor]:
        """This rank's gradients for the last batch, by a bare copy of the model."""
        bare = Units(self.kinds)
        while len(bare.units) < len(self.module.units):
            bare.units.append(made("linear", 0))
        bare.load_state_dict(self.module.state_dict())
        bare(noise(3, WIDTH, step=self.num_batches), self.order).square().sum().backward()
        return [param.grad for param in bare.parameters() if param.grad is not None]

    def require_mean(self, *, of: int = 0) -> None:
        """`of` ranks that have data; others bring None."""
        everyone = self.rank.gather(self.own())
        for index, param in enumerate(self.module.parameters()):
            total = sum(grads[index] for grads in everyone)
            torch.testing.assert_close(param.grad, total / (of or len(everyone)), rtol=1e-6, atol=1e-6)


def with_unopened_group(rank: Rank, **settings: Any) -> Training:
    """As of a copied model: its ranks open the group when they first use it."""
    training = Training(rank)
    training.sync.close()
    training.sync = rank.unopened(training.module, buffers="off", **settings)
    return training


def errors_of(num_ranks: int, work: Callable[[Training], object], *args: Any, **settings: Any) -> list[str]:
    """The error of each rank, or ""; each closes its model after that."""

    def on_rank(rank: Rank) -> str:
        training = Training(rank, *args, **settings)
        try:
            work(training)
        except (UndertowError, ZeroDivisionError) as error:
            with contextlib.suppress(UndertowError):  # what it has not read yet
                training.sync.close()
            return f"{type(error).__name__}: {error}"
        training.sync.close()
        return ""

    return ranks_of(num_ranks, on_rank)


def stop(*_: object) -> None:
    raise ZeroDivisionError


# Errors that ranks agree on


@pytest.mark.parametrize("cap", [EACH, LAYER, ONE])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_backward_that_fails_on_one_rank_fails_on_all_and_the_next_is_sound(cap: float, place: int) -> None:
    def train(training: Training) -> None:
        is_cause = training.rank.number == 1
        raises = training.module.units[place].weight.register_hook(stop) if is_cause else None
        with pytest.raises(ZeroDivisionError if is_cause else PeerFailed):
            training.backward()
        if raises is not None:
            raises.remove()
        with torch.no_grad():
            training.module(noise(3, WIDTH), "0")  # which clears nothing
        with pytest.raises(PhaseError, match="SGD, rank"):
            training.optimizer.step()
        training.step()
        training.require_mean()

    def train_after_another_step(training: Training) -> None:
        training.backward()
        train(training)

    assert errors_of(2, train, bucket_cap_mb=cap) == ["", ""]
    assert errors_of(2, train_after_another_step, bucket_cap_mb=cap) == ["", ""]


def test_a_rank_whose_round_fails_to_start_is_told_of_by_the_others() -> None:
    """Nothing has been sent when it fails, and the others wait for this rank's buckets."""

    def train(training: Training) -> None:
        training.step()
        training.module.zero_grad()
        loss = training.module(training.batch(), training.order).square().sum()
        is_cause = training.rank.number == 1
        if is_cause:
            one_process.fails_to_start(training.sync)
        with pytest.raises(ZeroDivisionError if is_cause else PeerFailed):
            loss.backward()
        training.step()
        training.require_mean()

    assert errors_of(2, train) == ["", ""]


@pytest.mark.parametrize("is_late", [False, True])
def test_a_layer_that_is_made_in_a_nested_forward_is_averaged(is_late: bool) -> None:
    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = made("linear", 0)

        def forward(self, x: Tensor, depth: int = 1) -> Tensor:
            inner: Tensor = self(x, depth - 1) if depth else self.layer(x)
            if depth and is_late and not hasattr(self, "new"):
                self.new = made("linear", 1)
            return self.new(inner.detach()) if depth and is_late else inner

    def on_rank(rank: Rank) -> None:
        module = Nested()
        sync = rank.attach(module)
        for _ in range(2):
            module.zero_grad()
            module(torch.full((3, WIDTH), 1.0 + rank.number)).sum().backward()
            trained = module.new if is_late else module.layer
            of_ranks = rank.gather(trained.weight.grad)
            assert torch.equal(*of_ranks)
        sync.close()

    ranks_of(2, on_rank)


@pytest.mark.parametrize("kind", [OpKind.PACK, OpKind.BIND])
def test_a_rank_that_fails_to_pack_keeps_no_other_waiting_and_one_that_fails_to_bind_has_sent_all(kind: OpKind) -> None:
    def on_rank(rank: Rank) -> None:
        training = Training(rank)

        def fail(op: Op) -> None:
            if op.kind is kind and op.bucket == 1:
                stop()

        if rank.number == 1:
            one_process.at_each_op(training.sync, fail)
        fails = pytest.raises(ZeroDivisionError if rank.number == 1 else RuntimeError)
        with contextlib.nullcontext() if kind is OpKind.BIND and rank.number == 0 else fails:
            training.backward()

    ranks_of(2, on_rank)


def test_a_rank_that_fails_to_pack_what_it_accumulates_keeps_no_other_waiting() -> None:
    def on_rank(rank: Rank) -> None:
        training = Training(rank)
        if rank.number == 1:
            one_process.at_each_op(training.sync, lambda _op: stop())
            with training.sync.accumulate(), pytest.raises(ZeroDivisionError):
                training.backward()
        else:
            with pytest.raises(RuntimeError, match="another rank has failed"):
                training.backward()

    ranks_of(2, on_rank)


def test_ranks_that_are_not_in_the_same_step_say_where_each_is() -> None:
    def train(training: Training) -> None:
        training.step()
        training.backward()
        if training.rank.number == 0:
            training.optimizer.step()
        training.backward()

    errors = errors_of(2, train)
    for rank, error in enumerate(errors):
        assert error.splitlines()[:4] == [
            f"{Desync.__name__}: ranks are not in the same step.",
            f"  synchronization 2, rank {rank}",
            "  rank 0: synchronization 2, after an optimizer step",
            "  rank 1: synchronization 2, without an optimizer step since the one before",
        ]


def test_ranks_that_step_with_other_settings_are_told_which() -> None:
    def train(training: Training) -> None:
        training.optimizer.param_groups[0]["lr"] = 0.25 * training.rank.number
        training.optimizer.param_groups[0]["foreach"] = bool(training.rank.number)  # an implementation
        training.step()
        training.backward()

    errors = errors_of(2, train)
    assert all(error.startswith(f"{PlanMismatch.__name__}: ranks step with different settings") for error in errors)
    assert all("lr of group 0 of SGD with 'units.0.bias' is 0 on rank 0, but 0.25 on rank 1" in error for error in errors)


def test_a_gradient_that_a_hook_takes_away_is_an_error_on_all_ranks() -> None:
    def train(training: Training) -> None:
        def take(param: Tensor) -> None:
            param.grad = None

        if training.rank.number == 1:
            training.module.units[1].weight.register_post_accumulate_grad_hook(take)  # type: ignore[no-untyped-call]
        training.backward()

    errors = errors_of(2, train)
    assert all("PhaseError: `.grad` was cleared during backward on rank 1" in error for error in errors)
    assert "rank 0, synchronization 0" in errors[0]
    assert "parameter 'units.1.weight' with the hook" in errors[1]
    assert ".take, synchronization 0" in errors[1]


# Changes that ranks agree on


def add(training: Training) -> None:
    training.module.units.append(made("linear", 9))
    training.order += "3"


def freeze(training: Training) -> None:
    training.module.units[1].requires_grad_(False)


def hook(training: Training) -> None:
    def mean(_state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        everyone = training.rank.gather(bucket.buffer())
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(sum(everyone) / len(everyone))
        return future

    training.sync.register_comm_hook(None, mean)


def test_a_communication_hook_of_one_rank_only_is_a_mismatch_on_all() -> None:
    def train(training: Training) -> None:
        training.step()
        if training.rank.number == 1:
            hook(training)
        training.step()

    errors = errors_of(2, train)
    difference = "communication hook is None on rank 0 and 'hook.<locals>.mean' on rank 1"
    assert all(error.startswith(PlanMismatch.__name__) for error in errors)
    assert all(f"first difference: {difference}\n" in error for error in errors), errors


def test_ranks_that_meet_about_a_change_in_different_steps_are_told() -> None:
    def train(training: Training) -> None:
        training.step()
        training.backward()
        if training.rank.number == 0:
            training.optimizer.step()
        freeze(training)
        training.backward()

    errors = errors_of(2, train)
    assert all(error.startswith("Desync: ranks are not in the same step.") for error in errors), errors


def test_a_model_that_is_attached_again_is_averaged_once() -> None:
    def on_rank(rank: Rank) -> None:
        training = Training(rank)
        older, training.sync = training.sync, rank.attach(training.module, bucket_cap_mb=ONE)
        names: list[str] = []
        rank.at_start = names.append
        training.backward()
        assert [name for name in names if name.startswith("all-reduce")] == names[:1]
        training.require_mean()
        training.sync.close()
        older.close()

    ranks_of(2, on_rank)


def test_a_parameter_that_one_rank_has_replaced_by_an_equal_one_is_a_mismatch() -> None:
    def train(training: Training) -> None:
        training.step()
        if training.rank.number == 1:
            training.module.units[1] = made("linear", 1)
        training.step()

    errors = errors_of(2, train)
    assert len(set(errors)) == 1
    assert errors[0].startswith("PlanMismatch: ranks disagree on the new parameters.\n")
    assert "first difference: new parameter 0 is missing on rank 0 and 'units.1.weight' on rank 1\n" in errors[0]


def test_the_same_parameters_under_other_names_are_agreed_on_after_the_backward() -> None:
    def train(training: Training) -> None:
        training.step()
        happened: list[str] = []
        training.rank.at_start = happened.append
        training.module.units[2].register_forward_hook(lambda *_: happened.append("forward"))
        training.module.units[1] = nn.Sequential(training.module.units[1])
        training.step()
        assert happened[0] == "forward"
        assert training.sync.plan.params[2].name == "units.1.0.weight"

    assert errors_of(2, train) == ["", ""]


@pytest.mark.parametrize("change", [add, freeze, hook])
def test_ranks_that_change_are_told_of_one_that_fails(change: Callable[[Training], None]) -> None:
    def train(training: Training) -> None:
        training.step()
        if training.rank.number == 1:
            training.module.units[1].weight.register_hook(stop)
        else:
            change(training)
        training.backward()

    errors = errors_of(3, train)
    assert [error.partition("\n")[0] for error in errors] == [
        "PeerFailed: backward failed on rank 1.",
        "ZeroDivisionError: ",
        "PeerFailed: backward failed on rank 1.",
    ]


@pytest.mark.parametrize("when", ["before the first step", "later"])
def test_a_hook_that_all_ranks_register_reduces_the_next_buckets(when: str) -> None:
    def train(training: Training) -> None:
        if when == "later":
            training.step()
        hook(training)
        for _ in range(2):
            training.module.zero_grad()
            training.backward()
            training.require_mean()
            training.optimizer.step()
        with pytest.raises(PhaseError, match="register_comm_hook can only be called once"):
            hook(training)

    assert errors_of(2, train) == ["", ""]


def finish(training: Training) -> None:
    training.sync.finish()


@pytest.mark.parametrize("kinds", ["linear linear linear", "linear norm linear"])
@pytest.mark.parametrize("then", [Training.step, Training.backward, finish])
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_new_parameters_with_other_values_are_a_mismatch(rank: int, then: Callable[[Training], None], kinds: str) -> None:
    def train(training: Training) -> None:
        training.step()
        add(training)
        with torch.no_grad():
            training.module.units[3].bias += training.rank.number == rank
        then(training)

    others = {0: "rank 0 than on rank 1, 2", 1: "rank 1 than on rank 0, 2", 2: "rank 2 than on rank 0, 1"}[rank]
    errors = errors_of(3, train, kinds)
    assert len(set(errors)) == 1
    assert errors[0].startswith(f"ReplicaMismatch: parameter 'units.3.bias' has other values on {others}.")
    assert "it was added or unfrozen, synchronization 1\n" in errors[0]
    assert "broadcast_parameters()" in errors[0]


def test_new_parameters_are_compared_after_a_second_backward_that_may_have_used_them() -> None:
    """No forward has run since the first one, and no gradient tells that their values were used."""

    def train(training: Training) -> None:
        output = training.module(training.batch(), training.order)
        output.sum().backward(retain_graph=True)
        add(training)
        values = training.module.units[3].bias.detach()
        values += training.rank.number
        (output * values).sum().backward()

    errors = errors_of(2, train)
    assert all("has other values on rank 1 than on rank 0" in error for error in errors), errors


def test_parameters_that_are_lent_for_one_forward_stay_out_of_the_plan() -> None:
    def train(training: Training) -> None:
        training.step()
        lent = {"units.0.bias": nn.Parameter(torch.zeros(WIDTH))}
        training.module.zero_grad()
        output = torch.func.functional_call(training.module, lent, (training.batch(), training.order))
        output.square().sum().backward()
        first, second = training.rank.gather(lent["units.0.bias"].grad)
        assert not torch.equal(first, second)
        first, second = training.rank.gather(training.module.units[1].bias.grad)
        assert torch.equal(first, second)
        assert training.sync.unused_parameters == ("units.0.bias",)
        training.optimizer.step()

    assert errors_of(2, train) == ["", ""]


def test_a_gradient_outside_of_the_plan_that_a_hook_takes_away_starts_nothing() -> None:
    def on_rank(rank: Rank) -> None:
        module = Units("linear linear")
        weight = module.units[1].weight
        weight.register_post_accumulate_grad_hook(lambda param: setattr(param, "grad", None))
        module.units[1].requires_grad_(False)
        sync = rank.attach(module)
        module(noise(3, WIDTH), "01").sum().backward()
        names: list[str] = []
        rank.at_start = names.append
        weight.requires_grad_(True)
        module.units[1](noise(3, WIDTH)).sum().backward()
        assert names == []
        sync.close()

    ranks_of(2, on_rank)


def test_a_part_that_is_trained_in_another_model_starts_nothing_in_this_one() -> None:
    def on_rank(rank: Rank) -> None:
        first, second = Units("linear linear"), Units("linear linear")
        second.units[0] = first.units[0]
        first.units[0].requires_grad_(False)
        sync, optimizer = rank.attach(first), torch.optim.SGD(first.units[1].parameters(), lr=0.0)
        first(noise(3, WIDTH), "01").sum().backward()
        optimizer.step()
        first.units[0].requires_grad_(True)
        other_sync = rank.attach(second)
        names: list[str] = []
        rank.at_start = names.append
        first.units[1](noise(3, WIDTH)).sum().backward()
        assert names == []
        other_sync.close()
        sync.close()

    ranks_of(2, on_rank)


def test_parts_that_came_late_once_are_waited_for_from_then_on() -> None:
    def train(training: Training) -> None:
        nums: list[int] = []

        def count(name: str) -> None:
            nums[-1] += name.startswith("all-reduce")

        training.rank.at_start = count
        for _ in range(3):
            nums.append(0)
            training.step()
        assert nums == [8, 6, 6]

    assert errors_of(2, train, "linear twice-reentrant linear") == ["", ""]


@pytest.mark.parametrize("changed", [0, 1])
def test_late_gradients_are_dropped_if_another_rank_has_changed(changed: int) -> None:
    def train(training: Training) -> None:
        is_changed = training.rank.number == changed
        if is_changed:
            training.module.units.append(made("linear", 9))
        with pytest.raises(PlanMismatch, match="in the same step on every rank"):
            training.step()
        if is_changed:
            del training.module.units[3]
        training.module.zero_grad()
        if is_changed:
            training.backward()
        else:  # its late gradients of the step before are not sent with the other rank's
            training.sync.finish()
        own = training.rank.gather(training.own())[changed]
        for param, grad in zip(training.module.parameters(), own, strict=True):
            torch.testing.assert_close(param.grad, grad / 2, rtol=1e-6, atol=1e-6)  # as in `require_mean`

    assert errors_of(2, train, "linear twice-reentrant linear") == ["", ""]


def test_gradients_of_experts_are_divided_by_their_divisor_whatever_changes() -> None:
    def on_rank(rank: Rank) -> None:
        experts = (ExpertGroup(match="*", process_group=None, divisor=4.0),)
        training = with_unopened_group(rank, experts=experts, bucket_cap_mb=EACH)

        def step() -> None:
            training.module.zero_grad()
            one_process.forward_begins(training.sync)
            training.backward()
            training.require_mean(of=4)

        step()
        last = training.module.units[2]
        del training.module.units[2]
        training.kinds, training.order = "linear linear", "01"
        step()
        new = made("linear", 9)
        new.bias.grad = torch.full((WIDTH,), 4.0)  # of a backward that nobody has followed
        training.module.units.append(new)
        one_process.forward_begins(training.sync)
        assert torch.equal(new.bias.grad, torch.full((WIDTH,), 2.0))
        last.bias.grad = None
        last(noise(3, WIDTH)).sum().backward()  # nobody's expert any more
        assert torch.equal(last.bias.grad, torch.full((WIDTH,), 3.0))
        training.sync.close()

    ranks_of(2, on_rank)


def test_narrow_gradients_accumulate_in_the_dtype_that_is_asked_for() -> None:
    def train(training: Training) -> None:
        training.step()
        params = list(training.module.parameters())
        assert [param.grad.dtype for param in params if param.grad is not None] == [torch.float32] * 4
        training.sync.close()
        assert all(param.grad.dtype == param.dtype for param in params if param.grad is not None)

    assert errors_of(2, train, "bfloat16 linear", reduce_dtype="float32") == ["", ""]


def test_a_parameter_that_is_unfrozen_in_its_backward_is_refused() -> None:
    def train(training: Training) -> None:
        first, middle, last = training.module.units
        freeze(training)
        training.step()
        training.module(training.batch(), "0")
        middle.requires_grad_(True)
        output = middle(first(training.batch()).tanh()).tanh()
        freeze(training)
        output.register_hook(lambda _: middle.requires_grad_(True) and None)  # the gradients of the last unit have arrived
        last(output).square().sum().backward()

    errors = errors_of(2, train)
    text = "PhaseError: a parameter was unfrozen while the backward ran that trains it"
    assert all(error.startswith(text) for error in errors), errors
    assert all(f"parameter 'units.1.bias', rank {rank}" in error for rank, error in enumerate(errors)), errors
    remedy = "Unfreeze parameters before their backward, and outside of functional_call."
    assert all(error.splitlines()[2].strip() == remedy for error in errors), errors


def test_buffers_follow_rank_0_before_the_forward() -> None:
    def train(training: Training) -> None:
        norm = training.module.units[1]
        norm.momentum = 0.0
        norm.running_mean.fill_(3.0 + training.rank.number)
        training.step()
        assert torch.equal(norm.running_mean, torch.full((WIDTH,), 3.0))

    assert errors_of(2, train, "linear norm linear") == ["", ""]


LATE = Reading(used=frozenset(), ranks_differ=False, flags={"failed": (1,)}, is_overdue=True)


def accumulate(training: Training) -> None:
    """Draws no conclusions, so it must not take the trailer."""
    with training.sync.accumulate():
        training.backward()


@pytest.mark.parametrize("change", [lambda _: None, accumulate, add, freeze, hook])
def test_a_trailer_that_comes_late_is_read_by_the_next_synchronization(change: Callable[[Training], None]) -> None:
    def train(training: Training) -> None:
        training.step()
        training.step()
        change(training)
        one_process.reads_late(training.sync, LATE)
        training.step()

    assert all("PeerFailed: backward failed on rank 1" in error for error in errors_of(2, train))


def test_a_trailer_that_comes_late_is_read_after_a_move() -> None:
    def train(training: Training) -> None:
        training.backward("012")  # rank 0's order is sent behind it
        one_process.reads_late(training.sync, LATE)
        groups = training.sync.plan.groups
        training.optimizer.step()
        training.module.zero_grad()
        try:
            training.backward("012")
        finally:
            assert training.sync.plan.groups != groups

    assert all("PeerFailed: backward failed on rank 1" in error for error in errors_of(2, train, "linear norm linear"))


def test_a_trailer_that_comes_late_is_read_after_parameters_are_laid_out() -> None:
    def train(training: Training) -> None:
        training.optimizer = ShardedOptimizer(torch.optim.SGD, training.sync, lr=0.0)
        training.backward()
        one_process.reads_late(training.sync, LATE)
        training.optimizer.step()
        training.module.zero_grad()
        training.backward()

    assert all("PeerFailed: backward failed on rank 1" in error for error in errors_of(2, train, strategy="zero1"))


def test_a_trailer_that_comes_late_names_the_settings_of_its_step() -> None:
    def train(training: Training) -> None:
        training.step()
        later = Reading(used=frozenset(), ranks_differ=False, unlike=("settings",), is_overdue=True)
        told = GroupSettings("group 0 of SGD", (("lr", str(training.rank.number)),))
        one_process.reads_late(training.sync, later, (told,))
        training.backward()  # after a step with the same settings

    errors = errors_of(2, train)
    assert all("first difference: lr of group 0 of SGD is 0 on rank 0, but 1 on rank 1" in error for error in errors)


# Plans that all ranks move to


MOVES_AT = one_process.NUM_STEPS_UNTIL_A_MOVE  # the first step under a plan that is taken after one window
MOVES = [[[0, 1], [2, 3, 4, 5]], [[5, 4, 3], [2, 1, 0]], [[0], [1], [2], [3], [4], [5]], None]


@pytest.mark.parametrize("groups", some(MOVES, most=1))
def test_ranks_move_to_the_plan_that_is_tried(groups: list[list[int]] | None) -> None:
    generations: set[int] = set()

    def train(training: Training) -> None:
        plans = []
        for _ in range(MOVES_AT + 3):
            training.module.zero_grad()
            training.backward()
            everyone = training.rank.gather(training.own())
            for index, param in enumerate(training.module.parameters()):
                total = sum(grads[index] for grads in everyone)
                torch.testing.assert_close(training.sync.full_gradient(param), total / 2, rtol=1e-6, atol=1e-6)
            training.optimizer.step()
            plans.append(training.sync.plan.groups)
        wanted = plans[5] if groups is None else tuple(map(tuple, groups))
        assert plans[-1] == wanted
        assert plans.index(wanted) == MOVES_AT or groups is None
        assert plans[2] == plans[MOVES_AT - 1]
        generations.add(training.sync.report().plan_since or 0)

    with one_process.decides(groups):
        assert errors_of(2, train, bucket_cap_mb=None) == ["", ""]
    assert len(generations) == 1


@pytest.mark.parametrize("strategy", ["zero1", "zero2"])
def test_no_plan_is_tried_with_shards(strategy: str) -> None:
    def train(training: Training) -> None:
        training.optimizer = ShardedOptimizer(torch.optim.SGD, training.sync, lr=0.0)
        plans = []
        for _ in range(MOVES_AT + 3):
            training.step()
            plans.append(training.sync.plan)
        assert all(plan is plans[2] for plan in plans[2:])
        assert training.sync.explain().why == "no other is tried with shards: the optimizer's state would have to move"

    with one_process.decides([[5, 4, 3, 2, 1, 0]]) as begun:
        assert errors_of(2, train, strategy=strategy, bucket_cap_mb=None) == ["", ""]
    assert begun == []


def test_shards_that_come_in_the_middle_of_trials_end_them() -> None:
    def train(training: Training) -> None:
        for _ in range(12):
            training.module.zero_grad()
            training.backward()
        training.optimizer = ShardedOptimizer(torch.optim.SGD, training.sync, lr=0.0)
        for _ in range(6):
            training.step()

    with one_process.decides([[5, 4, 3, 2, 1, 0]]) as begun:
        assert errors_of(2, train, strategy="zero1", bucket_cap_mb=None) == ["", ""]
    assert len(begun) == 2  # on each rank


class Refuses(NamedTuple):
    """What memory cannot be had for, on which rank."""

    num_buckets: int
    rank: int


@pytest.mark.parametrize("refuses", some([(Refuses(2, 0),), (Refuses(2, 1),)], most=1))
def test_a_candidate_that_a_rank_has_no_memory_for_is_left_out_on_all(refuses: Refuses) -> None:
    make = BucketLayout.live_buckets
    told: list[str] = []

    def live_buckets(layout: BucketLayout, plan: Any, *rest: Any) -> Any:
        if len(plan.buckets) == refuses.num_buckets and layout.group.rank == refuses.rank:
            raise MemoryError("none is left")
        return make(layout, plan, *rest)

    def train(training: Training) -> None:
        for _ in range(MOVES_AT + 8):
            training.module.zero_grad()
            training.backward()
            training.require_mean()
            training.optimizer.step()
        assert len(training.sync.plan.buckets) != refuses.num_buckets
        told.append(str(training.sync.explain()))
        assert len({*training.rank.gather(training.sync.plan.to_json())}) == 1

    with (
        mock.patch.object(BucketLayout, "live_buckets", live_buckets),
        mock.patch.object(trials, "is_too_large", return_value=False),
    ):
        assert errors_of(2, train, bucket_cap_mb=None) == ["", ""]
    assert told[0] == told[1]
    assert f"rank {refuses.rank} could not make its buckets" in told[0]


@pytest.mark.parametrize("bucket_cap_mb", [None, 25.0], ids=["planned", "buckets of a given size"])
def test_ranks_move_if_only_the_formats_change(bucket_cap_mb: float | None) -> None:
    def train(training: Training) -> None:
        plans = []
        for _ in range(MOVES_AT + 3):
            training.module.zero_grad()
            training.backward()
            grads = [training.sync.full_gradient(param) for param in training.module.parameters()]
            for others in training.rank.gather(grads):
                assert all(map(torch.equal, grads, others))
            training.optimizer.step()
            plans.append(training.sync.plan)
        before, after = plans[MOVES_AT - 1], plans[MOVES_AT]
        assert [plan.wires for plan in (before, after, plans[-1])] == [(None,), ("bfloat16",), ("bfloat16",)]
        assert before.groups == after.groups

    with one_process.decides([[5, 4, 3, 2, 1, 0]], ["bfloat16"]):
        assert errors_of(2, train, bucket_cap_mb=bucket_cap_mb, wire="auto") == ["", ""]


@pytest.mark.parametrize("order", ["observed", "reverse"])
def test_the_plan_follows_rank_0s_order_from_the_second_step_on(order: str) -> None:
    def train(training: Training) -> None:
        plans = []
        for _ in range(3):
            training.module.zero_grad()
            training.backward("012" if training.rank.number else "210")
            training.optimizer.step()
            plans.append(training.sync.plan.groups)
        names = [training.sync.plan.params[group[0]].name for group in plans[1]]
        assert (plans[0] != plans[1]) == (order == "observed")
        assert plans[1] == plans[2]
        assert "".join(name.split(".")[1] for name in names) == ("001122" if order == "observed" else "221100")

    assert errors_of(2, train, order=order) == ["", ""]


@pytest.mark.parametrize(
    ("settings", "num_more"),
    some(
        [({"record": "off"}, 0), ({}, 1), ({"bucket_cap_mb": None}, 2), ({"bucket_cap_mb": None, "auto_tune": False}, 1)], most=2
    ),
)
def test_ranks_measure_once_and_send_nothing_else_afterwards(settings: dict[str, Any], num_more: int) -> None:
    def train(training: Training) -> None:
        names: list[str] = []
        training.rank.at_start = names.append
        nums = []
        for _ in range(MOVES_AT + 2):
            names.clear()
            training.step()
            nums.append(len(names))
        assert nums[0] == nums[-1] + 1  # rank 0's order
        assert sum(nums[1:]) == (MOVES_AT + 1) * nums[-1] + num_more
        assert not one_process.is_timed(training.sync)

    with one_process.decides(None):
        assert errors_of(2, train, order="observed", **settings) == ["", ""]


def test_ranks_measure_again_if_the_collectives_of_shards_come_later() -> None:
    def train(training: Training) -> None:
        for _ in range(11):
            training.module.zero_grad()
            training.backward()
        training.optimizer = ShardedOptimizer(torch.optim.SGD, training.sync, lr=0.0)
        for _ in range(11):
            training.step()

    kinds: list[set[str]] = []

    def train_and_tell(training: Training) -> None:
        train(training)
        kinds.append(set(training.sync.profile().curves))

    assert errors_of(2, train_and_tell, strategy="zero1", bucket_cap_mb=None) == ["", ""]
    assert kinds == [{"all_reduce", "reduce_scatter", "all_gather"}] * 2


def test_a_copied_model_opens_its_group_in_its_first_synchronization() -> None:
    def on_rank(rank: Rank) -> None:
        training = with_unopened_group(rank)
        training.module.zero_grad()
        one_process.forward_begins(training.sync)
        training.backward()
        training.require_mean()
        training.sync.close()

    ranks_of(2, on_rank)


def test_a_gradient_that_was_written_before_a_hook_counts() -> None:
    def on_rank(rank: Rank) -> None:
        training = with_unopened_group(rank)
        bias = training.module.units[0].bias
        bias.grad = torch.full((WIDTH,), 1.0 + 2.0 * rank.number)
        hook(training)
        one_process.forward_begins(training.sync)
        training.backward("12")
        assert torch.equal(bias.grad, torch.full((WIDTH,), 2.0))
        training.sync.close()

    ranks_of(2, on_rank)


@pytest.mark.parametrize(
    ("num_ranks", "num_rows", "wanted"), [(1, 600, 0), (2, 600, 4 * 600 * 512), (2, 512, 2**20), (2, 500, 0)]
)
def test_compiled_graphs_are_cut_at_large_buckets_of_several_ranks(num_ranks: int, num_rows: int, wanted: int) -> None:
    def on_rank(rank: Rank) -> int:
        sync = rank.attach(nn.Linear(512, num_rows, bias=False))
        cut_bytes = one_process.cut_bytes(sync)
        sync.close()
        return cut_bytes

    assert ranks_of(num_ranks, on_rank) == [wanted] * num_ranks


def test_torchs_profiler_has_the_ops_by_name() -> None:
    def on_rank(rank: Rank) -> list[str]:
        training = Training(rank, bucket_cap_mb=ONE)
        with torch.profiler.profile() if rank.number == 0 else contextlib.nullcontext() as profile:
            training.step()
            rank.gather(None)
        training.sync.close()
        return [] if profile is None else [event.name for event in profile.events() if event.name.startswith("undertow.")]

    names, _ = ranks_of(2, on_rank)
    assert names == ["undertow.pack b0", "undertow.all_reduce b0", "undertow.bind b0"]


def test_a_model_closes_when_its_parameters_have_arrived() -> None:
    def train(training: Training) -> None:
        optimizer = ShardedOptimizer(torch.optim.SGD, training.sync, lr=0.5)
        training.backward()
        optimizer.step()
        training.sync.close()
        first, second = training.rank.gather(training.module.units[0].weight.detach())
        assert torch.equal(first, second)

    assert errors_of(2, train, strategy="zero1") == ["", ""]


def test_a_dropped_model_waits_for_its_parameters() -> None:
    def on_rank(rank: Rank) -> None:
        training = Training(rank, strategy="zero1")
        training.optimizer = ShardedOptimizer(torch.optim.SGD, training.sync, lr=0.5)
        training.step()
        exchanges = set(rank.exchanges)
        assert one_process.num_in_flight(exchanges) > 0
        rank.gather(None)  # the collector frees models of any rank in any thread, and must find all of them sent
        del training
        rank.gather(None)
        if rank.number == 0:  # for all threads
            gc.collect()
        rank.gather(None)
        assert one_process.num_in_flight(exchanges) == 0

    ranks_of(2, on_rank)


def test_a_backward_that_has_read_parameters_too_early_fails() -> None:
    """No forward has waited for them; autograd finds out because they arrive before the first gradient counts."""

    def train(training: Training) -> None:
        training.optimizer = ShardedOptimizer(torch.optim.SGD, training.sync, lr=0.5)
        training.step()
        training.step()
        first, middle, last = training.module.units
        with torch._C.DisableTorchFunctionSubclass():
            output = training.batch() @ first.weight @ middle.weight @ last.weight
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            output.sum().backward()

    assert errors_of(2, train, strategy="zero1") == ["", ""]


def test_a_bucket_leaves_when_its_last_gradient_arrives_and_the_last_one_after_backward() -> None:
    def train(training: Training) -> None:
        happened: list[str] = []
        training.rank.at_start = lambda name: happened.extend(["sent"] * name.startswith("all-reduce"))
        for param in training.module.parameters():
            param.register_post_accumulate_grad_hook(lambda _: happened.append("arrives"))  # type: ignore[no-untyped-call]
        for _ in range(3):
            happened.clear()
            training.step()
        assert happened == ["arrives", "arrives", "sent"] * 3

    assert errors_of(2, train, bucket_cap_mb=LAYER) == ["", ""]


# Checks of numbers and of replicas


@pytest.mark.parametrize("policy", ["raise", "skip", "ignore"])
@pytest.mark.parametrize("kinds", ["linear linear linear", "linear twice-reentrant linear"])
@pytest.mark.parametrize("overlap", [True, False])
def test_an_infinity_of_one_rank_is_met_by_all(policy: str, kinds: str, overlap: bool, caplog: pytest.LogCaptureFixture) -> None:
    def train(training: Training) -> None:
        training.step()
        training.module.zero_grad()
        factor = float("inf") if training.rank.number else 1.0
        (training.module(training.batch(), "012").square().sum() * factor).backward()
        if policy == "raise":
            with pytest.raises(NonFiniteGradient, match=r"on rank 1\.\n  synchronization 1, bucket"):
                training.optimizer.step()
            assert training.sync.report().num_skipped == 0
        else:
            training.optimizer.step()
            assert training.sync.report().num_skipped == (policy == "skip")
        training.step()

    assert errors_of(2, train, kinds, nonfinite=policy, overlap=overlap) == ["", ""]
    assert caplog.text.count("The step is skipped on every rank") == (policy == "skip")


def test_a_closure_is_judged_after_it() -> None:
    def train(training: Training) -> None:
        def closure() -> Tensor:
            training.module.zero_grad()
            loss: Tensor = training.module(training.batch(), "012").square().sum() * float("nan")
            loss.backward()
            return loss

        for call in (lambda: training.optimizer.step(closure), lambda: training.optimizer.step(closure=closure)):
            with pytest.raises(NonFiniteGradient):
                call()

    assert errors_of(2, train, nonfinite="raise") == ["", ""]


@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
@pytest.mark.parametrize("every", [1, 2, 3])
def test_replicas_that_differ_are_found_by_the_next_comparison(every: int, strategy: str) -> None:
    """Parameter 2 of 6, or a frozen one, differs from the third step on, and ranks compare after every few ones."""
    found: list[int] = []

    def train(training: Training) -> None:
        freeze(training)
        if strategy == "zero1":
            training.optimizer = ShardedOptimizer(torch.optim.SGD, training.sync, lr=0.0)
        for step in range(8):
            if step == 2:
                training.sync.wait()
                with torch.no_grad():
                    training.module.units[1].weight += training.rank.number == 2
            try:
                training.step()
            except ReplicaMismatch:
                found.append(step)
                raise

    errors = errors_of(3, train, strategy=strategy, check_replicas_every=every)
    text = "ReplicaMismatch: parameter 'units.1.weight' has other values on rank 2 than on rank 0, 1.\n  synchronization"
    assert all(error.startswith(text) and "1 of 6 parameters differ" in error for error in errors), errors
    first = next(step for step in range(2, 9) if (step + 2) % every == 0)  # the change counts as one more
    assert set(found) <= {first, first + 1}


def load(training: Training, change: float) -> None:
    state = {name: value.clone() for name, value in training.module.state_dict().items()}
    state["units.1.bias"] += change
    training.module.load_state_dict(state)


@pytest.mark.parametrize("changes", [(1.0, 1.0), (0.0, 0.0), (1.0, 0.0), (0.0, 1.0), (1.0, 2.0)])
def test_ranks_that_load_different_values_are_told(changes: tuple[float, float]) -> None:
    def train(training: Training) -> None:
        training.step()
        load(training, changes[training.rank.number])
        training.step()
        training.step()

    errors = errors_of(2, train)
    if changes[0] == changes[1]:
        assert errors == ["", ""]
    else:
        assert all("ReplicaMismatch: parameter 'units.1.bias' has other values on rank 1 than on rank 0." in e for e in errors)
        assert all("synchronization 1, load_state_dict on rank 0, 1; 1 of 6 parameters" in error for error in errors)


def test_a_load_after_a_load_is_noticed_too() -> None:
    def train(training: Training) -> None:
        load(training, 1.0)
        training.step()
        load(training, float(training.rank.number))
        training.step()

    errors = errors_of(2, train)
    assert all("ReplicaMismatch: parameter 'units.1.bias' has other values on rank 1" in error for error in errors), errors


@pytest.mark.parametrize("cure", ["broadcast", "loaded back", "written"])
def test_a_load_on_one_rank_is_fine_if_ranks_are_equal_when_they_synchronize(cure: str) -> None:
    def train(training: Training) -> None:
        training.step()
        bias = training.module.units[1].bias
        if training.rank.number == 0:
            load(training, 1.0)
        if cure == "broadcast":
            training.sync.broadcast_parameters()
        elif cure == "loaded back" and training.rank.number == 0:
            load(training, -1.0)
        elif cure == "written" and training.rank.number == 1:
            with torch.no_grad():
                bias += 1.0
        training.step()
        names: list[str] = []
        training.rank.at_start = names.append
        training.step()
        assert [name[:10] for name in names] == ["all-reduce"] * 6  # no more comparisons

    assert errors_of(2, train) == ["", ""]


# What users may not do, and what they are told


def reduces_twice(training: Training) -> None:
    accumulate(training)
    training.sync.reduce_gradients_async()
    training.sync.reduce_gradients_async()


def backward_before_wait(training: Training) -> None:
    accumulate(training)
    training.sync.reduce_gradients_async()
    training.module.forward(training.batch(), "012").square().sum().backward()


def steps_within(training: Training) -> None:
    training.module.units[0].weight.register_post_accumulate_grad_hook(lambda _: training.optimizer.step())  # type: ignore[no-untyped-call]
    training.backward()


MISUSES: list[tuple[Callable[[Training], object], str]] = [
    (reduces_twice, "gradients are being synchronized already"),
    (lambda training: training.sync.reduce_gradients_async(), "there is nothing to reduce"),
    (backward_before_wait, "a backward began while gradients are being synchronized"),
    (steps_within, "an optimizer steps within a backward"),
]


@pytest.mark.parametrize(("misuse", "text"), MISUSES)
def test_a_misuse_is_refused(misuse: Callable[[Training], object], text: str) -> None:
    def train(training: Training) -> None:
        training.step()
        misuse(training)

    assert all(f"PhaseError: {text}" in error for error in errors_of(2, train))


@pytest.mark.parametrize("is_frozen", [True, False])
@pytest.mark.parametrize("is_cleared", [True, False])
def test_an_optimizer_that_uses_gradients_of_the_bare_module_is_warned_of_once(is_cleared: bool, is_frozen: bool) -> None:
    def train(training: Training) -> None:
        training.module.units[0].requires_grad_(not is_frozen)
        training.step()
        training.module.zero_grad()
        training.module.forward(training.batch(), "12").square().sum().backward()
        if is_cleared:
            training.module.zero_grad()
        training.optimizer.step()
        training.optimizer.step()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert errors_of(2, train) == ["", ""]
    assert len(caught) == (0 if is_cleared else 2)
    assert all("no training forward of the wrapper preceded their backward" in str(each.message) for each in caught)


@pytest.mark.parametrize("reduction", some(["native", "ordered"], most=1))
@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
def test_a_closed_model_leaves_nothing_and_its_backwards_are_its_own(strategy: str, reduction: str) -> None:
    def on_rank(rank: Rank) -> None:
        training = Training(rank, strategy=strategy, reduction=reduction)
        if strategy == "zero1":
            training.optimizer = ShardedOptimizer(torch.optim.SGD, training.sync, lr=0.0)
        training.step()
        training.sync.close()
        assert not rank.exchanges
        assert not any(param._post_accumulate_grad_hooks for param in training.module.parameters())
        training.module.zero_grad()
        training.module.forward(training.batch(), "012").square().sum().backward()
        for param, own in zip(training.module.parameters(), training.own(), strict=True):
            assert torch.equal(param.grad, own)  # type: ignore[arg-type]
        training.sync.close()

    gc.collect()  # models of other tests
    num_before = one_process.num_hooks_of_torch()
    ranks_of(2, on_rank)
    assert one_process.num_hooks_of_torch() == num_before


def test_a_backward_after_close_warns() -> None:
    def train(training: Training) -> None:
        loss = training.module(training.batch(), "012").square().sum()
        training.sync.close()
        loss.backward()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert errors_of(2, train) == ["", ""]
    assert ["this backward averages nothing" in str(each.message) for each in caught] == [True] * 2


@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
@pytest.mark.parametrize("change", [add, freeze])
def test_traces_are_those_of_the_present_plan(strategy: str, change: Callable[[Training], None]) -> None:
    def train(training: Training) -> None:
        if strategy == "zero1":
            training.optimizer = ShardedOptimizer(torch.optim.SGD, training.sync, lr=0.0)
        num_traces = []
        for step in range(8):
            if step == 4:
                change(training)
            training.step()
            num_traces.append(len(training.sync.traces()))
        # A step is complete when the next one begins. Rank 0's order is a new plan, as the change is.
        assert num_traces == [1, 1, 2, 3, 0, 1, 1, 2]

    assert errors_of(2, train, strategy=strategy) == ["", ""]


def test_a_trace_has_the_forward_and_the_backward() -> None:
    def train(training: Training) -> None:
        for _ in range(4):
            training.step()
        forward, backward = training.sync.traces()[-1].events[:2]
        assert [forward.kind, backward.kind] == ["forward", "backward"]
        assert forward.start_us == 0 < forward.stop_us == backward.start_us

    assert errors_of(2, train) == ["", ""]


def test_a_reduction_is_complete_when_every_rank_has_sent() -> None:
    def train(training: Training) -> None:
        accumulate(training)
        if training.rank.number == 0:
            reduction = training.sync.reduce_gradients_async()
            assert not reduction.is_completed()
        training.rank.gather(None)
        if training.rank.number == 1:
            reduction = training.sync.reduce_gradients_async()
        training.rank.gather(None)
        assert reduction.is_completed()
        reduction.wait()
        assert reduction.is_completed()

    assert errors_of(2, train) == ["", ""]


def test_a_signal_handler_may_wait_while_buckets_are_sent() -> None:
    def train(training: Training) -> None:
        accumulate(training)
        training.rank.at_start = lambda _: training.sync.wait()
        training.sync.reduce_gradients_async().wait()
        training.rank.at_start = str
        training.require_mean()

    assert errors_of(2, train) == ["", ""]


def test_a_signal_handler_may_wait_between_the_stages_of_a_reduction() -> None:
    """As a save in it does."""

    def train(training: Training) -> None:
        engine = training.sync._engine

        def reduce_with(handler: Callable[[], object], number: int) -> list[str]:
            num_rounds = engine.progress.num_rounds
            training.module.zero_grad()
            accumulate(training)
            with before_lines(Rounds, handler, number=number) as ran:
                training.sync.reduce_gradients_async().wait()
            assert (number, engine.progress.num_rounds) == (number, num_rounds + 1)
            training.require_mean()
            return ran

        ran = reduce_with(lambda: None, 1)
        numbers = [number for number, name in enumerate(ran, start=1) if name == "advance"]
        assert len(numbers) > 10
        for number in numbers:
            reduce_with(engine.siblings.wait_for_reductions, number)

    assert errors_of(2, train, "linear") == ["", ""]


def test_skipped_steps_are_told_ever_more_rarely(caplog: pytest.LogCaptureFixture) -> None:
    def train(training: Training) -> None:
        for _ in range(5):
            training.module.zero_grad()
            (training.module(training.batch(), "012").square().sum() * float("nan")).backward()
            training.optimizer.step()
        assert training.sync.report().num_skipped == 5

    assert errors_of(2, train, nonfinite="skip") == ["", ""]
    assert [record.message.partition(" Steps like this so far: ")[2][:2] for record in caplog.records] == ["", "2.", "4."]


def window_on_top_of_a_mean(training: Training) -> list[Tensor]:
    """A backward that synchronizes, and one that accumulates and reaches nothing on rank 1. Returns what they bring in all."""
    training.module.zero_grad()
    training.backward()
    means = [param.grad.clone() for param in training.module.parameters() if param.grad is not None]
    with training.sync.accumulate():
        loss, leaf = training.module(training.batch(), training.order).square().sum(), torch.ones((), requires_grad=True)
        (loss if training.rank.number == 0 else loss.detach() * leaf).backward()
    (first, _) = training.rank.gather(training.own())
    return [mean + own / 2 for mean, own in zip(means, first, strict=True)]


def test_a_window_on_top_of_a_mean_that_reaches_nothing_on_one_rank_is_averaged_by_hand() -> None:
    def on_rank(rank: Rank) -> None:
        training = Training(rank)
        for _ in range(2):
            wanted = window_on_top_of_a_mean(training)
            training.sync.reduce_gradients_async().wait()
            for param, grad in zip(training.module.parameters(), wanted, strict=True):
                torch.testing.assert_close(param.grad, grad, rtol=1e-6, atol=1e-6)
            training.optimizer.step()
        training.sync.close()

    ranks_of(2, on_rank)


def test_a_rank_steps_without_a_window_on_top_of_a_mean_that_reaches_nothing_there() -> None:
    """It takes it for a look at the loss. The other rank waits before its step, and is not in the same step as the next one."""

    def on_rank(rank: Rank) -> None:
        training = Training(rank)
        training.step()
        window_on_top_of_a_mean(training)
        with pytest.raises(Desync, match="ranks are not in the same step"):
            step_twice(training)
        training.sync.close()

    def step_twice(training: Training) -> None:
        training.optimizer.step()
        training.step()

    ranks_of(2, on_rank)
