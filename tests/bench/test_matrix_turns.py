"""Turns of systems, and what the bare model tells of its steps."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from benchmarks.matrix import turns
from benchmarks.matrix.clock import HostClock
from benchmarks.matrix.systems.bare import Bare, Setting
from benchmarks.matrix.turns import Player, Table


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    made: list[str] = []
    monkeypatch.setattr(turns.dist, "barrier", lambda group: made.append("barrier"))
    monkeypatch.setattr(turns.dist, "all_reduce", lambda tensor, op: None)
    return made


def player(calls: list[str], name: str = "one") -> Player:
    """Of a system that writes down what is asked of it."""
    asked: dict[str, Any] = {step: lambda *_, step=step: calls.append(step) for step in ("backward", "update")}
    asked |= {"finish": lambda: calls.append(f"{name} finishes"), "close": lambda: None}
    return Player(name=name, system=SimpleNamespace(**asked, parameters=dict, facts=lambda: {"collectives": 1}))  # type: ignore[arg-type]


def play(*players: Player, num_turns: int = 2, turn_budget_s: float = 60, **changes: Any) -> None:
    table = Table(batch=(), count_sent=None, group=None, clock=HostClock(), beat=lambda: None)  # type: ignore[arg-type]
    turns.play(list(players), replace(table, **changes), num_turns=num_turns, turn_budget_s=turn_budget_s)


def bare(model: torch.nn.Module) -> Bare:
    return Bare(Setting(model=model, group=None, options={}))  # type: ignore[arg-type]


def test_a_turn_is_four_steps_behind_a_barrier_of_which_the_inner_ones_are_timed(calls: list[str]) -> None:
    play(one := player(calls), num_turns=3)
    assert calls == ["barrier", *["backward", "update"] * 4, "one finishes"] * 3
    assert (len(one.step_s), len(one.backward_s), len(one.cpu_s)) == (6, 6, 3)
    assert one.to_dict()["facts"] == {"collectives": 1}


def test_turns_are_taken_in_an_order_that_is_reversed(calls: list[str]) -> None:
    play(player(calls), player(calls, "two"), num_turns=3)
    assert [call[:3] for call in calls if call.endswith("finishes")] == ["one", "two", "two", "one", "one", "two"]


def test_the_wait_for_a_device_is_no_work_of_the_system_s(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    class Device(HostClock):
        def settle(self) -> None:
            calls.extend(["waits"] * 100)

    monkeypatch.setattr(turns.time, "process_time", lambda: float(len(calls)))
    play(one := player(calls), clock=Device())
    assert one.cpu_s == [9 / 4] * 2  # four times backward and update, and finish


def test_a_slow_system_has_fewer_turns(calls: list[str]) -> None:
    play(one := player(calls), num_turns=20, turn_budget_s=0.0)
    assert len(one.step_s) == turns.MIN_TURNS * turns.TIMED_PER_TURN


def test_times_of_the_bare_model_are_those_of_the_steps_that_are_timed(calls: list[str]) -> None:
    play(it := Player(name="bare", system=bare(torch.nn.Linear(2, 1))), batch=(torch.ones(1, 2),))
    assert [len(times) for times in (it.step_s, it.backward_s, it.ready_s, it.used_s)] == [4] * 4
    for backward_s, ready_s, used_s in zip(it.backward_s, it.ready_s, it.used_s, strict=True):
        assert 0 < max(used_s) < min(ready_s) <= max(ready_s) < backward_s


def test_the_bare_model_tells_when_parameters_are_read_and_gradients_ready() -> None:
    layers = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    system = bare(torch.nn.Sequential(layers, torch.nn.Flatten(0)))
    system.backward((torch.ones(1, 2),))
    used, ready = system.arrivals.used_s, system.arrivals.ready_s
    assert used[0] == used[1] < used[2] == used[3] < min(ready)
    assert max(ready[2:]) < min(ready[:2])


def test_a_gradient_that_never_came_is_said_to_be_lacking() -> None:
    model = torch.nn.Linear(2, 1)
    model.register_parameter("unused", torch.nn.Parameter(torch.ones(1)))
    system = bare(model)
    system.backward((torch.ones(1, 2),))
    with pytest.raises(ValueError, match="1 parameters of the bare model have got no gradient"):
        _ = system.arrivals.ready_s
