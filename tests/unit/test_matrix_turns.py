from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from benchmarks.matrix import turns
from benchmarks.matrix.clock import HostClock
from benchmarks.matrix.systems.bare import Bare, Setting
from benchmarks.matrix.turns import Player, Table
from torch import Tensor


class Scripted:
    """Writes down what is asked of it."""

    def __init__(self, calls: list[str]) -> None:
        self.calls = calls

    def backward(self, batch: tuple[Tensor, ...]) -> None:
        self.calls.append("backward")

    def update(self) -> None:
        self.calls.append("update")

    def finish(self) -> None:
        self.calls.append("finish")

    def parameters(self) -> Mapping[str, Tensor]:
        return {}

    def facts(self) -> Mapping[str, Any]:
        return {"collectives": 1}

    def close(self) -> None:
        pass


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    made: list[str] = []
    monkeypatch.setattr(turns.dist, "barrier", lambda group: made.append("barrier"))
    monkeypatch.setattr(turns.dist, "all_reduce", lambda tensor, op: None)
    return made


def player(calls: list[str], *, steps_per_turn: int = 1) -> Player:
    return Player(name="one", system=Scripted(calls), steps_per_turn=steps_per_turn)


def table() -> Table:
    return Table(batch=(), count_sent=None, group=None, clock=HostClock(), beat=lambda: None)  # type: ignore[arg-type]


def test_every_step_of_a_turn_follows_a_barrier(calls: list[str]) -> None:
    turns.play([player(calls)], table(), num_warmup=1, num_turns=1, turn_budget_s=60)
    assert calls == ["barrier", "backward", "update", "finish"] * 2


def test_the_wait_for_a_device_is_no_work_of_the_system_s(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    class Device(HostClock):
        def settle(self) -> None:
            calls.extend(["waits"] * 100)

    monkeypatch.setattr(turns.time, "process_time", lambda: float(len(calls)))
    one = player(calls)
    turns.play([one], replace(table(), clock=Device()), num_warmup=1, num_turns=2, turn_budget_s=60)
    assert one.cpu_s == [3.0] * 2  # backward, update, finish


def test_a_system_that_carries_over_is_timed_between_starts_of_steps_only(calls: list[str]) -> None:
    one = player(calls, steps_per_turn=4)
    turns.play([one], table(), num_warmup=1, num_turns=3, turn_budget_s=60)
    assert calls == ["barrier", *["backward", "update"] * 4, "finish"] * 4
    # Without the first and the last step of each turn.
    assert (len(one.step_s), len(one.backward_s), len(one.cpu_s)) == (6, 6, 3)


def test_warm_up_does_not_count_and_a_slow_system_has_fewer_turns(calls: list[str]) -> None:
    one = player(calls)
    turns.play([one], table(), num_warmup=3, num_turns=20, turn_budget_s=0.0)
    assert len(one.step_s) == turns.MIN_TURNS
    assert one.to_dict()["facts"] == {"collectives": 1}


def test_the_bare_model_tells_when_parameters_are_read_and_gradients_ready() -> None:
    layers = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    model = torch.nn.Sequential(layers, torch.nn.Flatten(0))
    bare = Bare(Setting(model=model, group=None, options={}))  # type: ignore[arg-type]
    bare.backward((torch.ones(1, 2),))
    used, ready = bare.used_s, bare.ready_s
    assert used[0] == used[1] < used[2] == used[3] < min(ready)
    assert max(ready[2:]) < min(ready[:2])
