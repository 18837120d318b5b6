"""Changes of the parameters on one rank only: the same error on every rank, in the same step, whatever the others do."""

import contextlib
import gc
import re
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise, product
from typing import Any, NamedTuple

import pytest
import torch

from support import one_process
from support.levels import some
from support.models import noise
from support.one_process import Rank, ranks_of
from support.units import WIDTH, Units, made
from undertow import ConfigError, GradientSync, PhaseError, PlanMismatch, ShardedOptimizer
from undertow.buckets.facts import Reading

Moment = Callable[[], object]


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


class Difference(NamedTuple):
    """The first difference that the error names."""

    of: str
    on_changed: str
    on_other: str

    def text(self, changed: int) -> str:
        on_ranks = [self.on_other, self.on_other]
        on_ranks[changed] = self.on_changed
        return f"first difference: {self.of} is {on_ranks[0]} on rank 0 and {on_ranks[1]} on rank 1"


def cast(training: Training) -> None:
    training.module.zero_grad()  # no cast reads gradients in shards
    training.module.double()


CHANGES: dict[str, tuple[Callable[[Training], object], Difference]] = {
    "unfrozen": (
        lambda training: training.module.units[2].requires_grad_(True),
        Difference("parameter 4", "'units.2.weight'", "missing"),
    ),
    "frozen": (
        lambda training: training.module.units[1].requires_grad_(False),
        Difference("parameter 2", "missing", "'units.1.weight'"),
    ),
    "added": (
        lambda training: training.module.units.append(made("linear", 9)),
        Difference("parameter 4", "'units.3.weight'", "missing"),
    ),
    "removed": (
        lambda training: training.module.units.__delitem__(1),
        Difference("parameter 2", "missing", "'units.1.weight'"),
    ),
    "cast": (
        cast,
        Difference("dtype of parameter 0 ('units.0.weight')", "float64", "float32"),
    ),
    "replaced by an equal one": (
        lambda training: training.module.units.__setitem__(1, made("linear", 1)),
        Difference("new parameter 0", "'units.1.weight'", "missing"),
    ),
}
# Of parameters that nothing trains, such as a base beside adapters.
FROZEN_CHANGES: dict[str, tuple[Callable[[Training], object], Difference]] = {
    "a frozen one added": (
        lambda training: training.module.units.append(made("linear", 9).requires_grad_(False)),
        Difference("tensor 2", "'units.3.weight'", "missing"),
    ),
    "a frozen one removed": (
        lambda training: training.module.units.__delitem__(2),
        Difference("tensor 0", "missing", "'units.2.weight'"),
    ),
    "a frozen one cast": (
        lambda training: training.module.units[2].bfloat16(),
        Difference("dtype of tensor 0 ('units.2.weight')", "bfloat16", "float32"),
    ),
}
CHANGES |= FROZEN_CHANGES


# What a rank does in a step. Its moment is that of the change, on one rank, and on the other one the moment that it waits for.


def before_the_forward(training: Training, moment: Moment) -> None:
    moment()
    training.step()


def within_the_forward(training: Training, moment: Moment) -> None:
    def once(*_: object) -> None:
        handle.remove()
        moment()

    handle = training.module.units[0].register_forward_hook(once)
    training.step()


def after_the_forward(training: Training, moment: Moment) -> None:
    training.module.zero_grad()
    loss = training.loss()
    moment()
    loss.backward()
    training.optimizer.step()


def before_an_accumulation(training: Training, moment: Moment) -> None:
    training.module.zero_grad()
    moment()
    with training.sync.accumulate():
        training.loss().backward()
    training.loss().backward()
    training.optimizer.step()


def within_an_accumulation(training: Training, moment: Moment) -> None:
    training.module.zero_grad()
    with training.sync.accumulate():
        loss = training.loss()
        moment()
        loss.backward()
    training.loss().backward()
    training.optimizer.step()


def between_micro_batches(training: Training, moment: Moment) -> None:
    training.module.zero_grad()
    with training.sync.accumulate():
        training.loss().backward()
    moment()
    training.loss().backward()
    training.optimizer.step()


def keeps_gradients(training: Training, moment: Moment) -> None:
    """No zero_grad() since the step before."""
    moment()
    training.loss().backward()
    training.optimizer.step()


def around_an_accumulation(training: Training, moment: Moment) -> None:
    """A forward outside of accumulate(), whose backward comes after an accumulation."""
    training.module.zero_grad()
    loss = training.loss()
    with training.sync.accumulate():
        moment()
        training.loss().backward()
    loss.backward()
    training.optimizer.step()


def finishes(training: Training, moment: Moment) -> None:
    training.module.zero_grad()
    moment()
    training.sync.finish()
    training.optimizer.step()


def reduces_by_hand(training: Training, moment: Moment) -> None:
    training.module.zero_grad()
    with training.sync.accumulate():
        training.loss().backward()
    moment()
    training.sync.reduce_gradients_async().wait()
    training.optimizer.step()


def shadows(training: Training, moment: Moment) -> None:
    """As in join(), on a rank whose data has ended."""
    moment()
    one_process.shadow(training.sync)


BY_HAND, BETWEEN = "before a reduction by hand", "between micro-batches"
WAYS: dict[str, Callable[[Training, Moment], None]] = {
    "before the forward": before_the_forward,
    "within the forward": within_the_forward,
    "after the forward": after_the_forward,
    "before an accumulation": before_an_accumulation,
    "within an accumulation": within_an_accumulation,
    "around an accumulation": around_an_accumulation,
    BETWEEN: between_micro_batches,
    "with gradients of the step before": keeps_gradients,
    "before finish": finishes,
    BY_HAND: reduces_by_hand,
    "in join": shadows,
}
ACCUMULATIONS = ["before an accumulation", "within an accumulation", "around an accumulation"]
AFTER_A_FORWARD = ["within the forward", "after the forward", "within an accumulation", "around an accumulation"]


class Case(NamedTuple):
    change: str
    changed: int  # the rank
    strategy: str
    when: str  # in the step of that rank
    other: str  # where the other rank is then


def micro_batch(way: str) -> str:
    if way in ACCUMULATIONS:
        return "first of two"
    return "second of two" if way in (BY_HAND, BETWEEN) else "the only one"


def is_possible(case: Case) -> bool:
    if case.when == "in join" or (case.other == "in join" and case.strategy != "ddp"):
        return False  # such a rank trains nothing; and join() refuses shards
    # It reduces each micro-batch: all ranks have as many, and are at the same one.
    if case.strategy == "zero2" and micro_batch(case.when) != micro_batch(case.other):
        return False
    if case.change == "a frozen one removed" and case.when == "within the forward":
        return False  # that forward is about to call it
    # A graph of the forward before has the old tensors, and torch itself refuses their gradients.
    return case.change not in ("removed", "cast", "a frozen one cast") or case.when not in AFTER_A_FORWARD


def cases() -> Iterator[Any]:
    """By their ids, every change on each rank and under each strategy meets every moment of that rank, and of the other."""
    for case in map(Case._make, product(CHANGES, (0, 1), ("ddp", "zero1", "zero2"), WAYS, WAYS)):
        if is_possible(case):
            name = f"{case.change} on rank {case.changed} under {case.strategy}, {case.when}, other {case.other}"
            yield pytest.param(case, id=name)


def errors_of(case: Case) -> list[tuple[str, int]]:
    """The error of each rank, and its number of synchronizations then."""

    def on_rank(rank: Rank) -> tuple[str, int]:
        training = Training(rank, case.strategy)
        is_changed = rank.number == case.changed

        def moment() -> None:
            rank.gather("both are there")
            if is_changed:
                CHANGES[case.change][0](training)
            rank.gather("one has changed")

        training.step()
        training.step()
        way = WAYS[case.when if is_changed else case.other]
        try:
            way(training, moment)
            # Freezing is found by the next forward.
            if way is shadows:
                shadows(training, lambda: None)
            else:
                training.step()
        except PlanMismatch as error:
            return str(error), training.sync._engine.progress.num_rounds
        finally:
            with contextlib.suppress(Exception):
                training.sync.close()
        return "", 0

    return ranks_of(2, on_rank)


@pytest.mark.parametrize("case", some(cases(), most=16))
def test_a_change_on_one_rank_is_the_same_error_on_both_in_the_same_step(case: Case) -> None:
    (first, at), (second, at_second) = errors_of(case)
    assert CHANGES[case.change][1].text(case.changed) in first
    assert first == second
    assert at == at_second


@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
@pytest.mark.parametrize("change", FROZEN_CHANGES)
def test_a_change_of_what_is_frozen_is_followed_once_if_all_ranks_make_it(change: str, strategy: str) -> None:
    def on_rank(rank: Rank) -> list[int]:
        training = Training(rank, strategy)
        training.step()
        CHANGES[change][0](training)
        progress = training.sync._engine.progress
        num_rounds = [progress.num_rounds]
        for _ in range(3):
            training.step()
            num_rounds.append(progress.num_rounds)
        training.sync.close()
        return [after - before for before, after in pairwise(num_rounds)]

    # A rebuild counts as a synchronization.
    assert ranks_of(2, on_rank) == [[2, 1, 1], [2, 1, 1]]


def offload(unit: Any) -> None:
    """Keeps the frozen weight of a linear unit elsewhere, and puts an equal one into the unit for each forward."""
    value = unit.weight.detach()

    def put(*_: object, device: str) -> None:
        unit.weight = torch.nn.Parameter(value.clone().to(device), requires_grad=False)

    unit.register_forward_pre_hook(partial(put, device="cpu"))
    unit.register_forward_hook(partial(put, device="meta"))
    put(device="meta")


@pytest.mark.parametrize("changed", [(0,), (0, 1)], ids=["one rank", "both ranks"])
def test_a_frozen_parameter_that_is_replaced_by_a_like_one_is_no_change(changed: tuple[int, ...]) -> None:
    def on_rank(rank: Rank) -> int:
        training = Training(rank, "ddp")
        training.step()
        if rank.number in changed:
            offload(training.module.units[2])
        for _ in range(3):
            training.step()
        num_rounds = training.sync._engine.progress.num_rounds
        training.sync.close()
        return num_rounds

    assert ranks_of(2, on_rank) == [4, 4]


def test_replaced_parameters_that_are_gone_are_forgotten() -> None:
    def on_rank(rank: Rank) -> int:
        training = Training(rank, "ddp")
        for _ in range(5):
            training.step()
            training.module.units[1] = made("linear", 1)
            gc.collect()
        training.step()
        num_replaced = len(training.sync._engine.current_plan.replaced)
        training.sync.close()
        return num_replaced

    # The optimizer has those of the first unit, and the last ones have just left.
    assert max(ranks_of(2, on_rank)) <= 4


Way = Callable[[Training, Moment], None]
HOLDING = pytest.mark.parametrize(
    ("strategy", "way"), [("zero2", between_micro_batches), ("zero1", keeps_gradients)], ids=["zero2", "zero1"]
)


@HOLDING
@pytest.mark.parametrize("changed", [0, 1])
def test_a_change_on_one_rank_that_holds_shards_is_the_same_error_on_both(changed: int, strategy: str, way: Way) -> None:
    name = next(name for name, known in WAYS.items() if known is way)
    (first, at), (second, at_second) = errors_of(Case("frozen", changed, strategy, name, name))
    assert CHANGES["frozen"][1].text(changed) in first
    assert (first, at) == (second, at_second)


@HOLDING
def test_a_change_of_all_ranks_that_hold_shards_is_refused_on_all(strategy: str, way: Way) -> None:
    def on_rank(rank: Rank) -> list[str]:
        training = Training(rank, strategy)
        training.step()
        with pytest.raises(PhaseError, match="the parameters have changed while sharded gradients are held"):
            way(training, lambda: CHANGES["frozen"][0](training))
        training.step()  # which begins with zero_grad()
        names = [param.name for param in training.sync.plan.params]
        training.sync.close()
        return names

    assert ranks_of(2, on_rank) == [["units.0.weight", "units.0.bias"]] * 2


def test_a_change_that_only_some_ranks_can_follow_is_an_error_on_all() -> None:
    def on_rank(rank: Rank) -> str:
        training = Training(rank, "zero1")
        training.step()
        CHANGES["frozen"][0](training)
        if rank.number == 0:
            training.module.zero_grad()
        with pytest.raises(PlanMismatch) as caught:
            keeps_gradients(training, lambda: None)
        training.sync.close()
        return str(caught.value)

    assert ranks_of(2, on_rank) == [
        "the parameters, or the communication hook, have changed, and rank 1 cannot follow the change: the parameters have "
        f"changed while sharded gradients are held.\n  synchronization 1, rank {rank}\n"
        "  Call zero_grad() before parameters are frozen, unfrozen, added or replaced."
        for rank in range(2)
    ]


def test_a_gradient_that_a_hook_clears_in_the_step_of_a_change_is_an_error_on_all() -> None:
    def clear(param: torch.Tensor) -> None:
        param.grad = None

    def on_rank(rank: Rank) -> str:
        training = Training(rank, "ddp")
        training.step()
        CHANGES["frozen"][0](training)
        if rank.number == 1:
            training.module.units[0].weight.register_post_accumulate_grad_hook(clear)
        with pytest.raises(PhaseError) as caught:
            training.step()
        training.sync.close()
        return str(caught.value)

    for text in ranks_of(2, on_rank):
        assert text.startswith("`.grad` was cleared during backward on rank 1:")


def test_a_part_of_another_model_on_one_rank_is_the_same_error_on_both() -> None:
    def on_rank(rank: Rank) -> str:
        training, other = (Training(rank, "ddp") for _ in range(2))
        training.step()
        if rank.number == 0:
            training.module.units.append(other.module.units[0])
        with pytest.raises(PlanMismatch) as caught:
            training.step()
        for each in (training, other):
            each.sync.close()
        return str(caught.value)

    first, second = ranks_of(2, on_rank)
    assert "first difference: parameter 4 is 'units.3.weight' on rank 0 and missing on rank 1" in first
    assert first == second


def sums_by_hand(training: Training) -> None:
    training.module.zero_grad()
    with training.sync.accumulate():
        training.loss().backward()
    training.sync.reduce_gradients_async("sum").wait()


@pytest.mark.parametrize("changed", [0, 1])
def test_a_change_on_one_rank_is_named_also_in_a_sum_by_hand(changed: int) -> None:
    def on_rank(rank: Rank) -> str:
        training = Training(rank, "ddp")
        sums_by_hand(training)
        if rank.number == changed:
            CHANGES["unfrozen"][0](training)
        with pytest.raises(PlanMismatch) as caught:
            sums_by_hand(training)
        training.sync.close()
        return str(caught.value)

    first, second = ranks_of(2, on_rank)
    assert CHANGES["unfrozen"][1].text(changed) in first
    assert first == second


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2"])
@pytest.mark.parametrize("changed", [0, 1])
def test_a_layer_that_one_rank_gives_its_optimizer_before_a_step_is_named(changed: int, strategy: str) -> None:
    """Under "ddp" that rank synchronizes before the step already, and the other one after its next backward."""

    def on_rank(rank: Rank) -> tuple[str, int]:
        training = Training(rank, strategy)
        training.step()
        training.loss().backward()
        if rank.number == changed:
            CHANGES["added"][0](training)
            training.optimizer.add_param_group({"params": training.module.units[3].parameters()})

        def step_twice() -> None:
            training.optimizer.step()
            training.step()

        with pytest.raises(PlanMismatch) as caught:
            step_twice()
        training.sync.close()
        return str(caught.value), training.sync._engine.progress.num_rounds

    (first, at), (second, at_second) = ranks_of(2, on_rank)
    assert CHANGES["added"][1].text(changed) in first
    assert (first, at) == (second, at_second)


@pytest.mark.parametrize("change", ["added", "removed", "cast", "a frozen one added", "a frozen one cast"])
@pytest.mark.parametrize("changed", [0, 1])
def test_a_broadcast_of_parameters_that_one_rank_has_changed_is_an_error_on_both(changed: int, change: str) -> None:
    def on_rank(rank: Rank) -> str:
        training = Training(rank, "ddp")
        training.step()
        if rank.number == changed:
            CHANGES[change][0](training)
        with pytest.raises(PlanMismatch) as caught:
            training.sync.broadcast_parameters()
        training.sync.close()
        return str(caught.value)

    first, second = ranks_of(2, on_rank)
    assert "first difference: " in first
    assert re.search(r"'units\.\d\.weight'", first)
    assert first == second


def test_a_broadcast_gives_parameters_that_all_ranks_have_added_the_same_values() -> None:
    def on_rank(rank: Rank) -> None:
        training = Training(rank, "ddp")
        training.step()
        training.module.units.append(made("linear", rank.number))
        training.sync.broadcast_parameters()
        training.step()
        weights = rank.gather(training.module.units[3].weight)
        assert torch.equal(*weights)
        training.sync.close()

    ranks_of(2, on_rank)


def steps_without_backward(training: Training) -> None:
    training.loss()
    training.optimizer.step()


def steps_after_an_accumulation(training: Training) -> None:
    with training.sync.accumulate():
        training.loss()
    training.optimizer.step()


@pytest.mark.parametrize("changed", [0, 1])
@pytest.mark.parametrize(
    "other",
    [
        lambda training: training.sync.finish(),
        lambda training: one_process.shadow(training.sync),
    ],
    ids=["finish", "join"],
)
def test_a_rank_starts_to_train_while_the_others_train_nothing(other: Callable[[Training], object], changed: int) -> None:
    def on_rank(rank: Rank) -> str:
        training = Training(rank, "ddp")
        training.module.requires_grad_(False)
        training.loss()
        training.sync.finish()  # all agree that nothing is trained
        assert not training.sync.plan.params
        does = other
        if rank.number == changed:
            CHANGES["added"][0](training)
            does = Training.step
        with pytest.raises(PlanMismatch) as caught:
            does(training)
        training.sync.close()
        return str(caught.value)

    first, second = ranks_of(2, on_rank)
    assert Difference("parameter 0", "'units.3.weight'", "missing").text(changed) in first
    assert first == second


@pytest.mark.parametrize(
    "alone",
    [
        steps_without_backward,
        steps_after_an_accumulation,
        lambda training: (training.loss(), training.sync.full_gradient(training.module.units[0].weight)),
    ],
    ids=["step", "step after accumulate", "look"],
)
def test_one_rank_steps_and_looks_alone_if_all_have_agreed_that_nothing_is_trained(
    alone: Callable[[Training], object],
) -> None:
    def on_rank(rank: Rank) -> int:
        training = Training(rank, "ddp")
        training.module.requires_grad_(False)
        training.loss()
        training.sync.finish()
        for _ in range(2 if rank.number == 0 else 0):
            alone(training)
        training.sync.finish()
        num_rounds = training.sync._engine.progress.num_rounds
        training.sync.close()
        return num_rounds

    first, second = ranks_of(2, on_rank)
    assert first == second == 3  # of which one was the rebuild


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


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["the later one's gradients first", "the earlier one's first"])
@pytest.mark.parametrize("alike", [0, 1])
@pytest.mark.parametrize("changed", [0, 1])
def test_of_two_models_in_one_backward_one_may_change_on_a_single_rank(changed: int, alike: int, order: tuple[int, int]) -> None:
    def on_rank(rank: Rank) -> str:
        models = [Training(rank, "ddp") for _ in range(2)]
        for training in models:
            training.step()
            training.module.zero_grad()
        for training in models if rank.number == changed else [models[alike]]:
            CHANGES["unfrozen"][0](training)
        first, second = (models[index].loss() for index in order)
        with pytest.raises(PlanMismatch) as caught:
            (first + second).backward()
        for training in models:
            with contextlib.suppress(PlanMismatch):
                training.sync.close()
        return str(caught.value)

    first, second = ranks_of(2, on_rank)
    assert CHANGES["unfrozen"][1].text(changed) in first
    assert first == second


def test_ranks_that_reach_two_models_in_different_backwards_wait_for_a_change() -> None:
    """A limit: rank 1 rebuilds the later model, and rank 0 waits for the earlier one first."""

    def on_rank(rank: Rank) -> None:
        earlier, later = (Training(rank, "ddp") for _ in range(2))
        for training in (earlier, later):
            training.step()
            training.module.zero_grad()
        later.module.units[2].requires_grad_(True)
        losses = [earlier.loss(), later.loss()]
        if rank.number == 0:
            sum(losses).backward()
        else:
            losses[1].backward()
            losses[0].backward()

    with pytest.raises(AssertionError, match="ranks wait for ever"):
        ranks_of(2, on_rank)


def test_a_change_that_is_read_a_step_later_is_an_error_then() -> None:
    """As on a device."""
    told = Reading(used=frozenset(), ranks_differ=False, flags={"changed": (1,)}, is_overdue=True)

    def on_rank(rank: Rank) -> str:
        training = Training(rank, "ddp")
        training.step()
        one_process.reads_late(training.sync, told)
        with pytest.raises(PlanMismatch) as caught:
            training.step()
        training.sync.close()
        return str(caught.value)

    for text in ranks_of(2, on_rank):
        assert text.startswith("the parameters, or the communication hook, have changed on rank 1, but not on rank 0.\n")


@pytest.mark.parametrize("change", ["unfrozen", "frozen", "added", "cast", "a frozen one cast"])
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


@pytest.mark.parametrize("asked", [0, 1])
@pytest.mark.parametrize("changed", [0, 1])
def test_a_request_to_stop_reaches_all_ranks_in_the_round_that_tells_of_a_change(changed: int, asked: int) -> None:
    def on_rank(rank: Rank) -> bool:
        training = Training(rank, "ddp")
        training.step()
        if rank.number == changed:
            CHANGES["unfrozen"][0](training)
        if rank.number == asked:
            training.sync._own.stop.ask()
        with pytest.raises(PlanMismatch, match="in the same step on every rank"):
            training.step()
        training.sync.close()
        return training.sync.stop_requested

    assert ranks_of(2, on_rank) == [True, True]


def test_a_change_on_one_rank_is_named_before_other_settings() -> None:
    def on_rank(rank: Rank) -> str:
        training = Training(rank, "ddp")
        training.optimizer.param_groups[0]["lr"] = 0.25 * rank.number
        training.step()
        if rank.number == 0:
            CHANGES["unfrozen"][0](training)
        with pytest.raises(PlanMismatch) as caught:
            training.step()
        training.sync.close()
        return str(caught.value)

    for text in ranks_of(3, on_rank):
        assert CHANGES["unfrozen"][1].text(0) in text


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
