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


class Other(Scripted):
    def finish(self) -> None:
        self.calls.append("other")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    made: list[str] = []
    monkeypatch.setattr(turns.dist, "barrier", lambda group: made.append("barrier"))
    monkeypatch.setattr(turns.dist, "all_reduce", lambda tensor, op: None)
    return made


def player(calls: list[str]) -> Player:
    return Player(name="one", system=Scripted(calls))


def table() -> Table:
    return Table(batch=(), count_sent=None, group=None, clock=HostClock(), beat=lambda: None)  # type: ignore[arg-type]


def test_a_turn_is_four_steps_behind_a_barrier_of_which_the_inner_ones_are_timed(calls: list[str]) -> None:
    one = player(calls)
    turns.play([one], table(), num_turns=3, turn_budget_s=60)
    assert calls == ["barrier", *["backward", "update"] * 4, "finish"] * 3
    assert (len(one.step_s), len(one.backward_s), len(one.cpu_s)) == (6, 6, 3)
    assert one.to_dict()["facts"] == {"collectives": 1}


def test_turns_are_taken_in_an_order_that_is_reversed(calls: list[str]) -> None:
    players = [player(calls), Player(name="two", system=Other(calls))]
    turns.play(players, table(), num_turns=3, turn_budget_s=60)
    ends = [call for call in calls if call.endswith(("finish", "other"))]
    assert ends == ["finish", "other", "other", "finish", "finish", "other"]


def test_the_wait_for_a_device_is_no_work_of_the_system_s(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    class Device(HostClock):
        def settle(self) -> None:
            calls.extend(["waits"] * 100)

    monkeypatch.setattr(turns.time, "process_time", lambda: float(len(calls)))
    one = player(calls)
    turns.play([one], replace(table(), clock=Device()), num_turns=2, turn_budget_s=60)
    assert one.cpu_s == [9 / 4] * 2  # four times backward and update, and finish


def test_a_slow_system_has_fewer_turns(calls: list[str]) -> None:
    one = player(calls)
    turns.play([one], table(), num_turns=20, turn_budget_s=0.0)
    assert len(one.step_s) == turns.MIN_TURNS * turns.TIMED_PER_TURN


def test_times_of_the_bare_model_are_those_of_the_steps_that_are_timed(calls: list[str]) -> None:
    bare = Player(name="bare", system=Bare(Setting(model=torch.nn.Linear(2, 1), group=None, options={})))  # type: ignore[arg-type]
    turns.play([bare], replace(table(), batch=(torch.ones(1, 2),)), num_turns=2, turn_budget_s=60)
    assert [len(it) for it in (bare.step_s, bare.backward_s, bare.ready_s, bare.used_s)] == [4] * 4
    for backward_s, ready_s, used_s in zip(bare.backward_s, bare.ready_s, bare.used_s, strict=True):
        assert 0 < max(used_s) < min(ready_s) <= max(ready_s) < backward_s


def test_the_bare_model_tells_when_parameters_are_read_and_gradients_ready() -> None:
    layers = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    model = torch.nn.Sequential(layers, torch.nn.Flatten(0))
    bare = Bare(Setting(model=model, group=None, options={}))  # type: ignore[arg-type]
    bare.backward((torch.ones(1, 2),))
    used, ready = bare.arrivals.used_s, bare.arrivals.ready_s
    assert used[0] == used[1] < used[2] == used[3] < min(ready)
    assert max(ready[2:]) < min(ready[:2])


def test_a_gradient_that_never_came_is_said_to_be_lacking() -> None:
    model = torch.nn.Linear(2, 1)
    unused = torch.nn.Parameter(torch.ones(1))
    model.register_parameter("unused", unused)
    bare = Bare(Setting(model=model, group=None, options={}))  # type: ignore[arg-type]
    bare.backward((torch.ones(1, 2),))
    with pytest.raises(ValueError, match="1 parameters of the bare model have got no gradient"):
        _ = bare.arrivals.ready_s
