"""Windows of trials: which of their steps count."""

from types import SimpleNamespace
from typing import Any

import torch

from undertow.engine.trying import NUM_FIRST_STEPS, Trying
from undertow.plan import ParamSpec, plan_from_groups
from undertow.tune import Trials, Verdict


class OneRank:
    """A rank that is alone: what it sends is what it receives."""

    name, device = 0, torch.device("cpu")

    def all_reduce(self, _times: torch.Tensor, _name: str, _op: object) -> Any:
        return SimpleNamespace(wait=lambda: None)


class Clock:
    """A recorder whose marks are the microseconds that steps have taken so far."""

    def __init__(self) -> None:
        self.now_us = 0.0

    def mark(self) -> float:
        return self.now_us

    def us_between(self, start: float, stop: float) -> float:
        return stop - start


def test_the_first_steps_in_a_format_do_not_decide() -> None:
    specs = tuple(ParamSpec(name=f"p{at}", shape=(100_000,), dtype="float32", itemsize=4) for at in range(8))
    present = plan_from_groups(specs, [[at] for at in range(8)], num_ranks=2)
    clock = Clock()
    trying = Trying(clock, OneRank(), lambda plan: Trials(plan, range(8), wire="auto"))  # type: ignore[arg-type]
    plan, num_rounds_in_format = present, 0
    for _ in range(400):
        step_us = 600.0
        if any(plan.wires):
            num_rounds_in_format += 1
            step_us = 900.0 if num_rounds_in_format <= NUM_FIRST_STEPS + 1 else 400.0
        clock.now_us += step_us
        plan = trying.round_ends(plan, num_forwards=1) or plan
        if trying.is_over:
            break
    assert trying.trials is not None
    first = trying.trials.done[0]
    assert "int8" in str(first)
    assert first.verdict is Verdict.TAKEN, trying.texts()
