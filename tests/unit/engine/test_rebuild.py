"""Changes of the parameters on one rank only: the same error on every rank, in the same step, whatever the others do."""

import contextlib
from collections.abc import Callable

import pytest
import torch

from support import one_process
from support.models import noise
from support.one_process import Rank, ranks_of
from support.units import WIDTH, Units, made
from undertow import ConfigError, GradientSync, PlanMismatch, ShardedOptimizer

Step = Callable[["Training"], object]


class Training:
    """One rank's model of three units, of which the last is frozen at first."""

    def __init__(self, rank: Rank, strategy: str) -> None:
        self.rank, self.module = rank, Units("linear linear linear")
        self.module.units[2].requires_grad_(False)
        self.sync: GradientSync = rank.attach(self.module, bucket_cap_mb=0.00002, strategy=strategy)
        self.optimizer: torch.optim.Optimizer = torch.optim.SGD(self.module.parameters(), lr=0.0)
        if strategy != "ddp":
            self.optimizer = ShardedOptimizer(torch.optim.SGD, self.sync, lr=0.0)
        self.num_batches = 0

    def loss(self) -> torch.Tensor:
        self.num_batches += 1
        order = "".join(map(str, range(len(self.module.units))))
        x = noise(3, WIDTH, step=self.num_batches).to(self.module.units[0].weight.dtype)
        return self.module(x, order).square().sum()

    def step(self) -> None:
        self.module.zero_grad()
        self.loss().backward()
        self.optimizer.step()


CHANGES: dict[str, tuple[Step, str]] = {
    "unfrozen": (
        lambda training: training.module.units[2].requires_grad_(True),
        "parameter 4 is missing on rank {other} and 'units.2.weight' on rank {changed}",
    ),
    "frozen": (
        lambda training: training.module.units[1].requires_grad_(False),
        "parameter 2 is 'units.1.weight' on rank {other} and missing on rank {changed}",
    ),
    "added": (
        lambda training: training.module.units.append(made("linear", 9)),
        "parameter 4 is missing on rank {other} and 'units.3.weight' on rank {changed}",
    ),
    "removed": (
        lambda training: training.module.units.__delitem__(1),
        "parameter 2 is 'units.1.weight' on rank {other} and missing on rank {changed}",
    ),
    "cast": (
        lambda training: training.module.double(),
        "dtype of parameter 0 ('units.0.weight') is float32 on rank {other} and float64 on rank {changed}",
    ),
    "replaced by an equal one": (
        lambda training: training.module.units.__setitem__(1, made("linear", 1)),
        "new parameter 0 is missing on rank {other} and 'units.1.weight' on rank {changed}",
    ),
}


def after_others_forward(training: Training) -> None:
    """Its forward begins when the other rank's backward is over, but for the waits."""
    training.rank.gather("forward")
    training.step()


def accumulates_before(training: Training) -> None:
    training.module.zero_grad()
    with training.sync.accumulate():
        training.loss().backward()
    training.step()


def accumulates_between(training: Training) -> None:
    """A forward outside of accumulate(), whose backward comes after an accumulation."""
    training.module.zero_grad()
    loss = training.loss()
    with training.sync.accumulate():
        training.loss().backward()
    loss.backward()
    training.optimizer.step()


def finishes(training: Training) -> None:
    training.module.zero_grad()
    training.sync.finish()
    training.optimizer.step()


def shadows(training: Training) -> None:
    one_process.shadow(training.sync)


def reduces_by_hand(training: Training) -> None:
    training.module.zero_grad()
    with training.sync.accumulate():
        training.loss().backward()
    training.sync.reduce_gradients_async().wait()
    training.optimizer.step()


OTHERS: dict[str, Step] = {
    "steps": Training.step,
    "accumulates before": accumulates_before,
    "accumulates between": accumulates_between,
    "finishes": finishes,
    "shadows": shadows,
    "reduces by hand": reduces_by_hand,
}


def steps_after_forward(training: Training, change: Step) -> None:
    training.module.zero_grad()
    loss = training.loss()
    change(training)
    loss.backward()
    training.optimizer.step()
    training.step()


def steps_within_forward(training: Training, change: Step) -> None:
    def once(*_: object) -> None:
        handle.remove()
        change(training)

    handle = training.module.units[0].register_forward_hook(once)
    steps_after_forward(training, lambda _: None)


def steps_before_forward(training: Training, change: Step) -> None:
    change(training)
    training.step()


def accumulates(training: Training, change: Step) -> None:
    change(training)
    accumulates_before(training)


WHEN: dict[str, Callable[[Training, Step], None]] = {
    "before the forward": steps_before_forward,
    "after the forward": steps_after_forward,
    "within the forward": steps_within_forward,
    "before an accumulation": accumulates,
}


def errors_of(strategy: str, changed: int, change: Step, when: str, other: str) -> list[tuple[str, int]]:
    """The error of each rank, and its number of synchronizations then."""

    def on_rank(rank: Rank) -> tuple[str, int]:
        training = Training(rank, strategy)
        training.step()
        training.step()
        try:
            if rank.number == changed:
                WHEN[when](training, change)
            else:
                OTHERS[other](training)
                training.step()
        except PlanMismatch as error:
            return str(error), training.sync._engine.progress.num_rounds
        finally:
            with contextlib.suppress(Exception):
                training.sync.close()
        return "", 0

    return ranks_of(2, on_rank)


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("changed", [0, 1])
def test_a_change_on_one_rank_is_the_same_error_on_both(changed: int, change: str, other: str) -> None:
    make_change, difference = CHANGES[change]
    (first, at), (second, at_second) = errors_of("ddp", changed, make_change, "before the forward", other)
    assert first
    assert first == second
    assert at == at_second
    if changed == 1:
        assert difference.format(other=0, changed=1) in first


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2"])
@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("change", ["unfrozen", "added", "frozen"])
def test_it_is_the_same_error_whenever_it_comes_and_with_shards(change: str, when: str, strategy: str) -> None:
    (first, at), (second, at_second) = errors_of(strategy, 1, CHANGES[change][0], when, "steps")
    assert first
    assert first == second
    assert at == at_second


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_backward_does_not_wait_for_a_model_that_leaves_outside_of_it(order: tuple[int, int]) -> None:
    def on_rank(rank: Rank) -> None:
        models = [Training(rank, "ddp") for _ in range(2)]
        early, late = (models[index] for index in order)
        for training in models:
            training.step()
            training.module.zero_grad()
            training.module.units[2].requires_grad_(True)
        with early.sync.accumulate():
            early.loss().backward()
        reduction = early.sync.reduce_gradients_async()
        late.loss().backward()
        reduction.wait()
        for training in models:
            grads = rank.gather([param.grad.clone() for param in training.module.parameters()])
            assert all(map(torch.equal, grads[0], grads[1]))
            training.sync.close()

    ranks_of(2, on_rank)


@pytest.mark.parametrize("change", ["unfrozen", "frozen", "added", "cast"])
@pytest.mark.parametrize("changed", [0, 1])
def test_ranks_go_on_once_they_have_changed_alike(changed: int, change: str) -> None:
    def on_rank(rank: Rank) -> None:
        training = Training(rank, "ddp")
        training.step()
        if rank.number == changed:
            CHANGES[change][0](training)
        with pytest.raises(PlanMismatch, match="in the same step on every rank"):
            training.step()
        if rank.number != changed:
            CHANGES[change][0](training)
        training.step()
        grads = rank.gather([param.grad for param in training.module.parameters() if param.grad is not None])
        assert all(map(torch.equal, grads[0], grads[1]))
        training.sync.close()

    ranks_of(2, on_rank)


def test_a_model_that_could_not_leave_holds_no_other_one_up() -> None:
    """Its backward is over, by an exception of another model."""

    def on_rank(rank: Rank) -> None:
        first, second, third = (Training(rank, "ddp") for _ in range(3))
        for training in (first, second):
            training.step()
        first.module.units[2].requires_grad_(True)
        second.module.units.append(third.module.units[0])  # of another model
        with pytest.raises(ConfigError, match="is synchronized already"):
            (first.loss() + second.loss()).backward()
        del second.module.units[3]
        second.module.units[2].requires_grad_(True)
        second.step()
        for training in (second, third, first):
            training.sync.close()

    ranks_of(2, on_rank)
