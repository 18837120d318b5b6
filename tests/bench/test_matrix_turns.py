"""Turns of systems, what the bare model tells of its steps, and the limits of a step over a link."""

import copy
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from benchmarks.matrix import processes, turns, worker
from benchmarks.matrix.clock import HostClock
from benchmarks.matrix.errors import RankFailed
from benchmarks.matrix.job import Job
from benchmarks.matrix.limit import Compute, Wire, barrier_limit_s, limit_s, wire_from_calibration
from benchmarks.matrix.processes import _wait
from benchmarks.matrix.systems.bare import Bare, Setting
from benchmarks.matrix.truth import Reference, bounds_of
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
    assert (calls, len(one.step_s), len(one.backward_s), len(one.cpu_s), one.to_dict()["facts"]) == (
        ["barrier", *["backward", "update"] * 4, "one finishes"] * 3,
        6,
        6,
        3,
        {"collectives": 1},
    )


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


def test_the_bare_model_tells_when_parameters_are_read_and_gradients_ready() -> None:
    system = bare(torch.nn.Sequential(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)), torch.nn.Flatten(0)))
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


SECOND_PER_BYTE, SLOW_START = Wire(seconds_per_byte=1.0, least_s=0.0), Wire(seconds_per_byte=1e-9, least_s=0.5)
GIGABIT, LAYERS = Wire(seconds_per_byte=1 / 119.5e6, least_s=0.0), [2_000_000] * 24
READY = [0.130 + 0.010 * layer for layer in range(24)]
TWO_LAYERS = Compute(ready_s=[12.0, 8.0], used_s=[0.0, 2.0], backward_s=12.0, update_s=1.0)
REPLAYED = Compute(
    ready_s=[0.360 - 0.010 * layer for layer in range(24)],
    used_s=[0.005 * layer for layer in range(24)],
    backward_s=0.360,
    update_s=0.006,
)


@pytest.mark.parametrize(
    ("found_s", "expected_s"),
    [
        pytest.param(limit_s([2.0], [3], SECOND_PER_BYTE), 5.0, id="one gradient is ready, and sent"),
        # All from 0: 0 + 4. From the second on: 5 + 3. The last alone: 6 + 1.
        pytest.param(limit_s([0.0, 5.0, 6.0], [1, 2, 1], SECOND_PER_BYTE), 8.0, id="the suffix that is latest"),
        # 24 layers of 2 MB from 130 ms on, every 10 ms; 48 MB at 119.5 MB/s are 402 ms of wire: 532 ms, as published.
        pytest.param(limit_s(READY, LAYERS, GIGABIT), 0.532, id="the replayed layers"),
        pytest.param(barrier_limit_s(TWO_LAYERS, [4, 4], SECOND_PER_BYTE), 17.0, id="the worked example of the barrier"),
        pytest.param(
            barrier_limit_s(TWO_LAYERS, [4, 4], Wire(seconds_per_byte=0.5, least_s=0.0)),
            1.0 + 13.0 + 1.0,
            id="with a barrier a fast link costs the last reduction and the first gather",
        ),
        *(
            pytest.param(
                barrier_limit_s(REPLAYED, LAYERS, Wire(seconds_per_byte=2 * (ranks - 1) / ranks / 119.5e6, least_s=0.0)),
                limit,
                id=f"the barrier of the replayed layers on {ranks} ranks",
            )
            for ranks, limit in ((2, 0.460), (4, 0.623))
        ),
    ],
)
def test_limits_by_hand(found_s: float, expected_s: float) -> None:
    is_published = round(expected_s, 1) != expected_s  # to a millisecond
    assert found_s == pytest.approx(expected_s, rel=0, abs=0.001 if is_published else 0)


def test_the_wire_is_as_fast_as_the_best_piece_size_was() -> None:
    wire = wire_from_calibration({"small_s": 0.25, "trains": [{"bytes": 100, "seconds": 2.0}, {"bytes": 100, "seconds": 1.0}]})
    assert (wire, [wire.cheapest_s(num_bytes) for num_bytes in (200, 1, 0)]) == (
        Wire(seconds_per_byte=0.01, least_s=0.25),
        [2.0, 0.25, 0.0],
    )


START, RIGHT = {"a": torch.zeros(4), "b": torch.zeros(4)}, {"a": torch.ones(4), "b": torch.ones(4)}  # steps are 2 long


def test_what_is_further_away_than_rounding_is_wrong() -> None:
    bounds = bounds_of(START, RIGHT, RIGHT)
    assert bounds["a"] == pytest.approx(2 * 5e-4, rel=1e-3)
    found = {"a": RIGHT["a"] + torch.tensor([9e-4, 0, 0, 0]), "b": RIGHT["b"] + torch.tensor([0, 0, 0, 2e-3])}
    systems = [SimpleNamespace(parameters=lambda params=params: params) for params in (found, {"a": RIGHT["a"]})]
    reference = Reference(right=RIGHT, lengths={"a": 1.0, "b": 1.0}, bounds=bounds)
    assert [reference.wrong_parameters(system, rounding=0.0) for system in systems] == [["b"], ["b"]]
    # Where gradients are rounded, a parameter may be off by a part of its way.
    assert reference.wrong_parameters(systems[0], rounding=0.1) == []


# Which rank of a run is blamed, and what it says.


# A process that says this whenever it is asked how it ended, and the last of it from then on.
class Rank:
    def __init__(self, *codes: int | None) -> None:
        self.codes = list(codes)
        self.returncode: int | None = None

    def poll(self) -> int | None:
        self.returncode = self.codes.pop(0) if len(self.codes) > 1 else self.codes[0]
        return self.returncode


@pytest.fixture
def job(tmp_path: Path) -> Job:
    given: dict[str, Any] = {"workload": "replay", "scale": 1.0, "gradient_bytes": 1, "systems": (), "turn_budget_s": 1.0}
    given |= {"num_turns": 1, "counted_interface": None, "emulated": None, "burst_bytes": 0, "device": "cpu", "backend": "gloo"}
    made = Job(**given, num_ranks=2, folder=str(tmp_path))
    for rank in range(2):
        made.log_path(rank).write_text(f"the last line of rank {rank}\n")
    return made


def test_what_ranks_have_agreed_on_stays(job: Job) -> None:
    # Or a rank that is early for the next system might have spoken into a file that the last one to leave then deletes.
    for system in ("ours", "torch-ddp"):
        with ThreadPoolExecutor() as pool:
            reports: list[dict[str, Any]] = [{}, {"error": "trains wrongly"}]
            list(pool.map(partial(worker._agree, job, system), range(2), reports))
        assert reports == [{"error": "on rank 1: trains wrongly"}, {"error": "trains wrongly"}]
        assert dist.FileStore(f"{job.folder}/seats").check([f"{system}/0", f"{system}/1"])


def wait(job: Job, *ranks: Rank) -> None:
    _wait(job, [cast("subprocess.Popen[bytes]", rank) for rank in ranks], silence_s=60.0)


# How two ranks end, those that have results, and what the error says; None for none.


@pytest.mark.parametrize(
    ("ranks", "with_results", "text"),
    [
        pytest.param(
            (Rank(None, None, 1), Rank(None, None, None, None, -6)),
            (),
            "rank 0 ended with exit code 1. The end of rank 0's log:\nthe last line of rank 0",
            id="one because the first was gone",
        ),
        pytest.param((Rank(1), Rank(-9)), (), "rank 1 was killed by SIGKILL", id="at once: the one that was killed is blamed"),
        pytest.param(
            (Rank(None), Rank(None, 0)), (), "rank 1 ended with exit code 0", id="as if all were well, without a result"
        ),
        pytest.param((Rank(None, None, -6), Rank(0)), (0, 1), None, id="one aborts behind its results"),
    ],
)
def test_the_rank_that_is_blamed(ranks: tuple[Rank, Rank], with_results: tuple[int, ...], text: str | None, job: Job) -> None:
    for rank in with_results:
        job.result_path(rank).touch()
    with nullcontext() if text is None else pytest.raises(RankFailed, match=rf"^{re.escape(text)}"):
        wait(job, *copy.deepcopy(ranks))


def test_last_words_have_no_path_of_this_machine(job: Job) -> None:
    job.log_path(0).write_text(f'  File "{processes.ROOT}/benchmarks/matrix/worker.py", line 1\nRuntimeError: gone\n')
    with pytest.raises(RankFailed, match=r'log:\n  File "benchmarks/matrix/worker\.py", line 1\nRuntimeError: gone$'):
        wait(job, Rank(1), Rank(0))


@pytest.mark.parametrize(
    ("report", "told"),
    [({"error": "ValueError: not on this rank"}, "ours: ValueError: not on this rank"), ({}, "ours: another rank stays away")],
)
def test_a_rank_whose_others_wait_inside_a_system_says_its_own_error_last(
    report: dict[str, Any], told: str, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "_AGREE", timedelta(seconds=0.01))
    with pytest.raises(RuntimeError) as caught:
        worker._agree(job, "ours", 1, report)
    assert (str(caught.value), caught.value.__suppress_context__) == (told, True)
