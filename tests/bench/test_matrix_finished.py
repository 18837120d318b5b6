from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from benchmarks.matrix import cell as cell_module
from benchmarks.matrix import environments, guard, run
from benchmarks.matrix.catalog import SYSTEMS, WORKLOADS
from benchmarks.matrix.cell import Cell, CellResult
from benchmarks.matrix.errors import NoNamespaces, RankFailed
from benchmarks.matrix.finished import START_UP, in_order, lines_of, read_cells
from benchmarks.matrix.table import markdown
from benchmarks.matrix.turns import STEPS_PER_TURN

from support.matrix import cell, played, rank_result


def at(workload: str = "replay", ranks: int = 2, link: str = "1gbit") -> dict[str, Any]:
    made = cell("bare", "ours", ours=played([121.0, 121.0]))
    effort = {"num_turns": run.FULL.num_turns, "steps_per_turn": STEPS_PER_TURN}
    rows = [{**row, "first_step_ms": 100, "peak_rss_mb": 300} for row in made["rows"]]
    conditions = {**made["conditions"], **effort}
    return {**made, "workload": workload, "ranks": ranks, "link": link, "rows": rows, "conditions": conditions}


def write(path: Path, *cells: dict[str, Any]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines_of({"cpu": "one"}, cells)), encoding="utf-8")


def test_what_was_written_is_read_again(tmp_path: Path) -> None:
    cells = [at(ranks=2), at(ranks=4)]
    write(tmp_path / "matrix.jsonl", *cells)
    assert read_cells(tmp_path / "matrix.jsonl") == cells
    assert read_cells(tmp_path / "absent.jsonl") == []


def measures_by(measure: Callable[[Cell, Any], CellResult], monkeypatch: pytest.MonkeyPatch) -> None:
    """Has a run, as root, measure its cells so."""
    monkeypatch.setattr(run, "measure_cell", measure)
    monkeypatch.setattr(run, "what_is_missing", lambda: None)
    monkeypatch.setattr(run, "remove_abandoned", lambda: ([], None))


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The systems of every cell that would be measured; the second one asked for has a figure, the others fail."""
    found: list[list[str]] = []

    def measure(one: Cell, _tell: Any) -> CellResult:
        names = [spec.name for spec in one.systems]
        found.append(names)
        result = rank_result({names[1]: played([99.0, 99.0])})
        alone = {"torch_import_s": 1.0, "peak_rss_mb": 300.0, "peak_device_mb": None}
        reports = [{**alone, "systems": {names[1]: {"import_s": 0.1, "wrap_s": 0.1, "first_step_s": 0.1}}}]
        start_up = {names[1]: reports} if one.effort.has_start_up else {}
        return CellResult(timed=[[result, result]], start_up=start_up, errors={})

    measures_by(measure, monkeypatch)
    return found


def resume(out: Path, *systems: str) -> int:
    """One cell, with these systems."""
    names = [word for system in systems for word in ("--system", system)]
    return run.main(["--resume", "--workload", "gpt", "--ranks", "2", "--link", "1gbit", "--out", str(out), *names])


def test_a_cell_that_lacks_a_system_is_measured_again_with_those_it_had(tmp_path: Path, measured: list[list[str]]) -> None:
    earlier = at("gpt")
    gone = {**earlier["rows"][1], "system": "ours-as-it-was"}  # a name that the catalog no longer has
    write(tmp_path / "matrix.jsonl", {**earlier, "rows": [*earlier["rows"], gone]})
    assert resume(tmp_path, "ours") == 0
    assert measured == []
    assert resume(tmp_path, "fsdp2") == 0
    assert measured == [["bare", "ours", "fsdp2"]]
    (one,) = read_cells(tmp_path / "matrix.jsonl")
    assert {row["system"]: row["error"] for row in one["rows"]} == {"bare": None, "ours": None, "fsdp2": "not measured"}
    assert one["rows"][1]["backward_ms"]["median"] == 99.0


def test_a_system_that_cannot_be_measured_here_leaves_a_cell_finished(
    tmp_path: Path, measured: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environments, "FOLDER", tmp_path / ".venv-peers")
    write(tmp_path / "matrix.jsonl", at("gpt"))
    assert resume(tmp_path, "ours", "megatron-ddp", "deepspeed-zero1") == 0
    assert measured == []
    assert resume(tmp_path, "ours", "megatron-ddp", "torch-ddp") == 0
    assert measured == [["bare", "ours", "torch-ddp", "megatron-ddp"]]


@pytest.mark.usefixtures("measured")
def test_an_earlier_cell_is_kept_where_nothing_could_be_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_cell: Cell, _tell: Any) -> CellResult:
        raise NoNamespaces("ip netns add: no")

    monkeypatch.setattr(run, "measure_cell", fail)
    write(tmp_path / "matrix.jsonl", at("gpt"))
    assert resume(tmp_path, "fsdp2") == 1
    assert read_cells(tmp_path / "matrix.jsonl") == [at("gpt")]
    told = "gpt, 2 ranks, 1gbit (shaped): nothing could be measured; the figures of an earlier run are kept"
    assert told in capsys.readouterr().err


def test_a_cell_without_a_figure_is_measured_again(tmp_path: Path) -> None:
    lost = {**at(ranks=2), "rows": [{**row, "error": "no memory"} for row in at()["rows"]]}
    write(tmp_path / "matrix.jsonl", lost, at(ranks=4))
    assert [found["ranks"] for found in read_cells(tmp_path / "matrix.jsonl")] == [4]


@pytest.mark.usefixtures("measured")
def test_a_run_tells_which_recorded_ratios_it_has_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    place = "gpt, 2 ranks, 1gbit (shaped)"
    others = ("limit", "per-parameter", "torch-ddp", "megatron-ddp")
    monkeypatch.setattr(guard, "read_recorded", lambda: {f"{place}: ours / {other}": 1.018 for other in others})
    monkeypatch.setattr(environments, "FOLDER", tmp_path / ".venv-peers")
    # torch DDP is not asked for, and Megatron-core cannot be measured here.
    resume(tmp_path, "per-parameter", "ours", "megatron-ddp")
    told = capsys.readouterr().out.splitlines()
    assert "0 of 0 ratios have a recorded one; worse by more than 10%: 0; lost: 2" in told
    lost = [f"  LOST  {place}: ours / {other}, recorded 1.018" for other in ("limit", "per-parameter")]
    assert [line for line in told if line.startswith("  LOST")] == lost


@pytest.mark.parametrize(
    "lacks",
    [{"num_turns": run.QUICK.num_turns}, {"steps_per_turn": 1}, {"steps_per_turn": None}],
    ids=["turns", "steps", "older"],
)
def test_a_cell_that_was_timed_in_another_way_is_not_taken_for_a_finished_one(
    lacks: dict[str, Any], tmp_path: Path, measured: list[list[str]]
) -> None:
    other = at("gpt")
    write(tmp_path / "matrix.jsonl", {**other, "conditions": {**other["conditions"], **lacks}})
    resume(tmp_path, "ours")
    assert measured == [["bare", "ours"]]
    resume(tmp_path, "ours")
    assert len(measured) == 1


def test_a_workload_of_which_start_up_is_known_is_not_measured_again_for_it(tmp_path: Path, measured: list[list[str]]) -> None:
    brief = at("gpt")
    brief["rows"] = [{name: value for name, value in row.items() if name not in START_UP} for row in brief["rows"]]
    write(tmp_path / "matrix.jsonl", brief, at("gpt", link="none"))
    resume(tmp_path, "ours")
    assert measured == []


def test_start_up_that_was_measured_in_another_way_is_not_kept(tmp_path: Path, measured: list[list[str]]) -> None:
    older = at("gpt")
    del older["conditions"]["steps_per_turn"]
    older["rows"] = [{**row, "first_step_ms": 999} for row in older["rows"]]
    write(tmp_path / "matrix.jsonl", older)
    resume(tmp_path, "ours")
    assert measured == [["bare", "ours"]]
    (one,) = read_cells(tmp_path / "matrix.jsonl")
    assert [row.get("first_step_ms") for row in one["rows"]] == [None, 100]  # the second one measured anew


def test_a_first_cell_without_start_up_is_measured_again(tmp_path: Path, measured: list[list[str]]) -> None:
    brief = at("gpt")
    write(
        tmp_path / "matrix.jsonl", {**brief, "rows": [{**row} for row in cell("bare", "ours", ours=played([121.0] * 2))["rows"]]}
    )
    resume(tmp_path, "ours")
    assert measured == [["bare", "ours"]]


@pytest.mark.usefixtures("measured")
def test_a_cell_that_is_measured_again_keeps_its_start_up(tmp_path: Path) -> None:
    write(tmp_path / "matrix.jsonl", at("gpt"), at("gpt", ranks=4))
    asked = ["--workload", "gpt", "--ranks", "2", "--ranks", "4", "--link", "1gbit", "--out", str(tmp_path)]
    run.main(["--resume", *asked, "--system", "ours", "--system", "torch-ddp"])
    _, one = read_cells(tmp_path / "matrix.jsonl")  # where it is not measured
    assert [row.get("peak_rss_mb") for row in one["rows"]] == [300, 300, None]
    assert one["rows"][1]["backward_ms"]["median"] == 99.0


def test_what_raises_anything_loses_its_cell_and_not_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def measure(one: Cell, _tell: Any) -> CellResult:
        asked.append(one.num_ranks)
        raise OSError("no space left on device")

    measures_by(measure, monkeypatch)
    chosen = ["--workload", "gpt", "--link", "1gbit", "--system", "ours", "--out", str(tmp_path)]
    assert run.main(chosen) == 1
    assert asked == [2, 4]
    assert "no space left on device" in (tmp_path / "matrix.md").read_text()


def test_that_the_bare_model_has_a_figure_is_not_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(_cell: Cell, _tell: Any) -> CellResult:
        result = rank_result({})
        return CellResult(timed=[[result, result]], start_up={}, errors={"ours": "not in a test"})

    measures_by(measure, monkeypatch)
    asked = ["--workload", "gpt", "--ranks", "2", "--link", "1gbit", "--out", str(tmp_path)]
    assert run.main([*asked, "--system", "ours"]) == 1
    assert run.main([*asked, "--system", "bare"]) == 0  # but where nothing else was asked for


def test_a_new_run_sets_aside_what_an_earlier_one_has_written(
    tmp_path: Path, measured: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "matrix.jsonl", at("gpt"))
    asked = ["--workload", "gpt", "--ranks", "2", "--link", "none", "--system", "ours", "--out", str(tmp_path)]
    assert run.main(asked) == 0
    assert read_cells(tmp_path / "matrix.previous.jsonl") == [at("gpt")]
    assert [one["link"] for one in read_cells(tmp_path / "matrix.jsonl")] == ["none"]
    assert f"the matrix that was in {tmp_path} is matrix.previous.jsonl and .md now" in capsys.readouterr().err
    assert len(measured) == 1
    assert run.main(asked) == 0
    assert [one["link"] for one in read_cells(tmp_path / "matrix.previous-2.jsonl")] == ["none"]


def test_what_shared_a_run_that_failed_is_measured_one_by_one_and_the_cell_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []

    def fail(_cell: Cell, _environment: str, jobs: Any, *_: Any) -> list[dict[str, Any]]:
        ran.append([job.name for job in jobs])
        if len(jobs) > 2:
            raise RankFailed("rank 1 ended with exit code 3.\nits last words")
        return [rank_result({jobs[-1].name: played([99.0, 99.0])})] * 2

    monkeypatch.setattr(cell_module, "_run", fail)
    systems = tuple(SYSTEMS[name] for name in ("bare", "ours", "torch-ddp"))
    asked = Cell(workload=WORKLOADS["gpt"], num_ranks=2, link="1gbit", kind="emulated", systems=systems, effort=run.QUICK)
    one = run._measured(asked)
    assert ran == [["bare", "ours", "torch-ddp"], ["bare", "ours"], ["bare", "torch-ddp"]]
    why = "bare, ours, torch-ddp: rank 1 ended with exit code 3. its last words"
    assert f"Measured one by one, for a run that they shared failed: {why}" in markdown({}, [one], pictures={})
    (written,) = lines_of({}, [one])[1:2]
    assert written["divided"] == [why.replace(". its", ".\nits")]


def test_cells_stand_in_one_order_whenever_they_were_measured() -> None:
    right = [at(), at(ranks=4), at(link="none"), at("gpt"), at("gpt2@0.125"), at("gpt2@1")]
    assert in_order(right[::-1]) == right


def test_a_run_that_is_resumed_measures_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = []

    def measure(one: Cell, _tell: Any) -> CellResult:
        measured.append((one.place, one.effort.has_start_up))
        return CellResult(timed=[], start_up={}, errors={"ours": "not in a test"})

    measures_by(measure, monkeypatch)
    kept = [at("gpt", 2), at("moe", 2, "none")]
    write(tmp_path / "matrix.jsonl", *kept)
    asked = ("--workload", "gpt", "--link", "1gbit", "--link", "none", "--system", "ours", "--out", str(tmp_path))
    assert run.main([*asked, "--resume"]) == 1  # for nothing was measured
    places = [("gpt", 4, "1gbit"), ("gpt", 2, "none"), ("gpt", 4, "none")]
    # The workload's first cell, where start-up is measured, is there already.
    assert measured == [((*place, "shaped", "cpu"), False) for place in places]
    assert read_cells(tmp_path / "matrix.jsonl") == kept
    measured.clear()
    run.main(asked)
    assert measured == [(("gpt", 2, "1gbit", "shaped", "cpu"), True), *(((*place, "shaped", "cpu"), False) for place in places)]
