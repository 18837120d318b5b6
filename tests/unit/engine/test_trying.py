"""Windows of trials: which steps count, what ranks tell each other, and what disturbs a trial."""

from collections.abc import Callable, Iterator
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from undertow.engine.trying import NUM_FIRST_STEPS, NUM_STEPS_COUNTED, Trying
from undertow.plan import ParamSpec, Plan, plan_from_groups
from undertow.tune import Trials, Verdict, progress_text, trial_text

NUM_ROUNDS = NUM_STEPS_COUNTED + 2  # of a window
RANKS = count(1000)  # of the world, that no other test has
NUMBERS = count()  # of models, in the order in which they are made


class Group:
    """A rank, and what the other ones send: a function of its own values."""

    device = torch.device("cpu")

    def __init__(self, other: Callable[[list[float]], list[float]] = lambda values: values) -> None:
        self.rank, self.other = 0, other
        self.user = SimpleNamespace(ranks=[next(RANKS)])

    def all_reduce(self, values: torch.Tensor, _name: str, op: object) -> Any:
        assert op is dist.ReduceOp.MAX
        values.copy_(values.maximum(values.new_tensor(self.other(values.tolist()))))
        return SimpleNamespace(result=lambda: values)


class Clock:
    """A recorder whose marks are the microseconds that steps have taken so far."""

    def __init__(self) -> None:
        self.now_us = 0.0

    def mark(self) -> float:
        return self.now_us

    def us_between(self, start: float, stop: float) -> float:
        return stop - start


class Run:
    """Steps under the plans that `trying` wants."""

    def __init__(self, group: Group | None = None, *, tries_formats: bool = False, num_drops: int = 0) -> None:
        specs = tuple(ParamSpec(name=f"p{at}", shape=(100_000,), dtype="float32", itemsize=4) for at in range(8))
        self.plan = plan_from_groups(specs, [[at] for at in range(8)], num_ranks=2)
        self.clock = Clock()
        trials = Trials(self.plan, range(8), tries_formats=tries_formats)
        self.trying = Trying(
            trials,
            self.clock,  # type: ignore[arg-type]
            group or Group(),  # type: ignore[arg-type]
            number=next(NUMBERS),
            num_drops=num_drops,
        )

    def step(self, step_ms: float = 600.0, *, num_forwards: int = 1) -> Plan:
        """Runs a step unless trials are over. Returns the plan of the next one."""
        self.clock.now_us += 1000 * step_ms
        if not self.trying.trials.are_over:
            self.plan = self.trying.round_ends(num_forwards) or self.plan
        return self.plan

    @property
    def times_ms(self) -> list[float]:
        """Of the windows of the first trial."""
        return self.trying.trials.tried[0].times_ms

    @property
    def told(self) -> str:
        return progress_text(self.trying.trials, num_steps=self.trying.num_steps)


def test_the_median_of_five_steps_counts_and_the_step_of_a_move_does_not() -> None:
    run = Run()
    for step_ms in (1.0, 610.0, 590.0, 9000.0, 600.0, 9000.0, 1.0):
        run.step(step_ms)
    assert run.times_ms == [610.0]
    assert run.plan is run.trying.trials.tried[0].plan


def test_the_slowest_rank_decides() -> None:
    run = Run(Group(lambda values: [700.0, *values[1:]]))
    for _ in range(NUM_ROUNDS):
        run.step()
    assert run.times_ms == [700.0]


def test_the_first_steps_in_a_format_do_not_decide() -> None:
    run, num_in_format = Run(tries_formats=True), 0
    for _ in range(400):
        num_in_format += any(run.plan.wires)
        slow = 0 < num_in_format <= NUM_FIRST_STEPS + 1
        run.step((900.0 if slow else 400.0) if any(run.plan.wires) else 600.0)
    first = run.trying.trials.tried[0]
    assert "int8" in trial_text(first)
    assert first.verdict is Verdict.TAKEN, trial_text(first)


def test_a_window_that_is_forgotten_begins_again() -> None:
    run = Run()
    for _ in range(4):
        run.step(5000.0)
    run.trying.forget_window()
    for _ in range(NUM_ROUNDS):
        run.step()
    assert run.times_ms == [600.0]


@pytest.mark.parametrize("is_here", [True, False], ids=["on this rank", "on another rank"])
def test_a_step_of_another_length_drops_the_trial_which_begins_again_once(is_here: bool) -> None:
    lengths = iter([1, 1, 2, 1, 2])  # on the other rank, of each window

    def other(values: list[float]) -> list[float]:
        length = 1 if is_here else next(lengths)
        return [values[0], max(length, values[1]), max(-length, values[2]), 0.0, 0.0]

    run = Run(Group(other))
    for _ in range(2 * NUM_ROUNDS):
        run.step()
    assert run.times_ms == [600.0, 600.0]
    for at in range(NUM_ROUNDS):
        run.step(num_forwards=2 if is_here and at == 3 else 1)
    assert (run.times_ms, run.trying.num_drops) == ([], 1)
    assert run.plan is run.trying.trials.present
    for _ in range(NUM_ROUNDS):
        run.step()
    assert run.times_ms == [600.0]
    for _ in range(NUM_ROUNDS):
        run.step(num_forwards=2)  # all of this window: of another length than the one before
    assert run.told == "trials have ended after 35 steps: steps have accumulated more or fewer backwards again"
    assert run.plan is run.trying.trials.present


def test_parameters_that_change_in_a_trial_count_as_a_drop_and_later_ones_do_not() -> None:
    run = Run()
    run.step()
    run.trying.close()
    assert run.trying.num_drops == 1
    run.trying.close()
    assert run.trying.num_drops == 1
    ended = Run()
    while not ended.trying.trials.are_over:
        ended.step()
    ended.trying.close()
    assert ended.trying.num_drops == 0


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("deterministic")
def test_trials_end_if_torch_is_to_be_deterministic() -> None:
    run = Run()
    first = run.plan
    for _ in range(NUM_ROUNDS):
        run.step()
    assert run.plan is first
    assert run.told.endswith(": torch.use_deterministic_algorithms is on, and another plan rounds differently")


@pytest.mark.parametrize("is_earlier_first", [True, False])
def test_a_model_waits_while_one_that_was_made_earlier_tries_plans(is_earlier_first: bool) -> None:
    """In either order of their rounds: in one backward, ranks may reach two models in opposite orders."""
    group = Group()
    earlier, later = Run(group), Run(group)
    for _ in range(NUM_ROUNDS * 4):
        for run in (earlier, later) if is_earlier_first else (later, earlier):
            run.step()
    assert (len(earlier.times_ms), len(later.times_ms)) == (4, 0)
    for _ in range(3 * NUM_ROUNDS):
        later.step()  # the other one is not trained any more
    assert len(later.times_ms) == (3 if is_earlier_first else 2)


def test_no_model_waits_under_a_candidate() -> None:
    """One that was made earlier may begin to try plans later: it was frozen, for example."""
    group = Group()
    earlier, later = Run(group), Run(group)
    present = later.plan
    for _ in range(NUM_ROUNDS):
        later.step()
    assert later.plan is not present
    for _ in range(NUM_ROUNDS):
        earlier.step()
        later.step()
    assert later.plan is present
    assert (later.times_ms, later.trying.num_drops) == ([], 0)


def test_a_window_that_does_not_count_on_some_rank_is_repeated_on_all() -> None:
    does_not_count = iter([1.0, 0.0])
    run = Run(Group(lambda values: [*values[:3], next(does_not_count), 0.0]))
    for _ in range(NUM_ROUNDS):
        run.step()
    assert run.times_ms == []
    for _ in range(NUM_ROUNDS):
        run.step()
    assert run.times_ms == [600.0]
