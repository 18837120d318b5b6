"""What an earlier run of the matrix has written, and what a later one makes of it."""

import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from benchmarks.matrix import environments, guard, run
from benchmarks.matrix.catalog import SYSTEMS, WORKLOADS
from benchmarks.matrix.cell import Cell, CellResult
from benchmarks.matrix.errors import NoNamespaces, RankFailed
from benchmarks.matrix.finished import START_UP, in_order, lines_of, read_cells
from benchmarks.matrix.run import _measured
from benchmarks.matrix.table import markdown
from benchmarks.matrix.turns import STEPS_PER_TURN

from support.matrix import cell, played, rank_result


def at(workload: str = "gpt", ranks: int = 2, link: str = "1gbit", *, start_up: Any = 100, **conditions: Any) -> dict[str, Any]:
    """A cell of the bare model and of ours; `start_up` in ms, if it was measured."""
    made = cell("bare", "ours", ours=played([121.0, 121.0]))
    known = {} if start_up is None else {"first_step_ms": start_up, "peak_rss_mb": 300}
    rows = [{**{name: row[name] for name in row if name not in START_UP}, **known} for row in made["rows"]]
    conditions = {**made["conditions"], "num_turns": run.FULL.num_turns, "steps_per_turn": STEPS_PER_TURN, **conditions}
    return {**made, "workload": workload, "ranks": ranks, "link": link, "rows": rows, "conditions": conditions}


@pytest.fixture
def out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a run writes, as root, without the environments of peers."""
    monkeypatch.setattr(run, "what_is_missing", lambda: None)
    monkeypatch.setattr(run, "remove_abandoned", lambda: ([], None))
    monkeypatch.setattr(environments, "FOLDER", tmp_path / ".venv-peers")
    return tmp_path


def write(out: Path, *cells: dict[str, Any]) -> None:
    (out / "matrix.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in lines_of({"cpu": "one"}, cells)), encoding="utf-8"
    )


def written(out: Path, name: str = "matrix.jsonl") -> list[dict[str, Any]]:
    return read_cells(out / name)


def start(out: Path, *arguments: str, systems: tuple[str, ...] = ("ours",)) -> int:
    chosen = [word for system in systems for word in ("--system", system)]
    return run.main(["--workload", "gpt", "--link", "1gbit", "--out", str(out), *chosen, *arguments])


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The systems of every cell that would be measured; the second one asked for has a figure, the others fail."""
    found: list[list[str]] = []

    def measure(one: Cell, _tell: Any) -> CellResult:
        names = [spec.name for spec in one.systems]
        found.append(names)
        result = rank_result({names[1]: played([99.0, 99.0])})
        stamps = {"import_s": 0.1, "wrap_s": 0.1, "first_step_s": 0.1}
        reports = [{"torch_import_s": 1.0, "peak_rss_mb": 300.0, "peak_device_mb": None, "systems": {names[1]: stamps}}]
        return CellResult(timed=[[result, result]], start_up={names[1]: reports} if one.effort.has_start_up else {}, errors={})

    monkeypatch.setattr(run, "measure_cell", measure)
    return found


def test_what_was_written_is_read_again(out: Path) -> None:
    assert written(out) == []
    write(out, at(ranks=2), at(ranks=4))
    assert written(out) == [at(ranks=2), at(ranks=4)]
    # A cell without a figure is measured again.
    write(out, {**at(ranks=2), "rows": [{**row, "error": "no memory"} for row in at()["rows"]]}, at(ranks=4))
    assert [found["ranks"] for found in written(out)] == [4]


GONE = {**at(), "rows": [*at()["rows"], {**at()["rows"][1], "system": "ours-as-it-was"}]}  # a name that the catalog has no longer
# Cells of an earlier run, what is asked for, and what is measured of the cell of two ranks.


@pytest.mark.parametrize(
    ("cells", "systems", "expected"),
    [
        pytest.param([GONE], ("ours",), [], id="nothing lacks"),
        pytest.param([GONE], ("fsdp2",), [["bare", "ours", "fsdp2"]], id="a system lacks: with those it had"),
        pytest.param([at(num_turns=run.QUICK.num_turns)], ("ours",), [["bare", "ours"]], id="other turns"),
        pytest.param([at(steps_per_turn=1)], ("ours",), [["bare", "ours"]], id="other steps"),
        pytest.param([at(start_up=None), at(link="none")], ("ours",), [], id="start-up is known of the workload"),
        pytest.param([at(start_up=None)], ("ours",), [["bare", "ours"]], id="a first cell without start-up"),
    ],
)
def test_a_run_is_resumed(
    cells: list[dict[str, Any]], systems: tuple[str, ...], expected: list[list[str]], out: Path, measured: list[list[str]]
) -> None:
    write(out, *cells)
    for _ in range(2 if systems == ("ours",) else 1):  # what was measured now is finished
        assert start(out, "--resume", "--ranks", "2", systems=systems) == 0
    assert measured == expected


@pytest.mark.usefixtures("measured")
def test_a_cell_that_is_measured_again_has_the_systems_it_had_and_its_start_up(out: Path) -> None:
    write(out, GONE, at(ranks=4))
    start(out, "--resume", "--ranks", "2", "--ranks", "4", systems=("ours", "fsdp2"))
    two, four = written(out)
    assert (
        {row["system"]: row["error"] for row in two["rows"]},
        [one["rows"][1]["backward_ms"]["median"] for one in (two, four)],
        [row.get("peak_rss_mb") for row in four["rows"]],
    ) == ({"bare": None, "ours": None, "fsdp2": "not measured"}, [99.0, 99.0], [300, 300, None])  # where it is not measured


@pytest.mark.usefixtures("measured")
def test_an_earlier_cell_is_kept_where_nothing_could_be_measured(
    out: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run, "measure_cell", Mock(side_effect=NoNamespaces("ip netns add: no")))
    write(out, at())
    assert (start(out, "--resume", "--ranks", "2", systems=("fsdp2",)), written(out)) == (1, [at()])
    told = "gpt, 2 ranks, 1gbit (shaped): nothing could be measured; the figures of an earlier run are kept"
    assert told in capsys.readouterr().err


@pytest.mark.usefixtures("measured")
def test_a_run_tells_which_recorded_ratios_it_has_lost(
    out: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    place = "gpt, 2 ranks, 1gbit (shaped)"
    others = ("limit", "per-parameter", "torch-ddp", "megatron-ddp")
    monkeypatch.setattr(guard, "read_recorded", lambda: {f"{place}: ours / {other}": 1.018 for other in others})
    # torch DDP is not asked for, and Megatron-core cannot be measured here.
    start(out, "--ranks", "2", systems=("per-parameter", "ours", "megatron-ddp"))
    told = capsys.readouterr().out.splitlines()
    assert "0 of 0 ratios have a recorded one; worse by more than 10%: 0; lost: 2" in told
    assert [line for line in told if line.startswith("  LOST")] == [
        f"  LOST  {place}: ours / {other}, recorded 1.018" for other in ("limit", "per-parameter")
    ]


def test_what_raises_anything_loses_its_cell_and_not_the_others(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "measure_cell", Mock(side_effect=OSError("no space left on device")))
    assert start(out) == 1
    lines = (out / "matrix.md").read_text().partition("## Not measured")[2].splitlines()
    lost = [line.split("| ")[1] for line in lines if "no space left on device" in line]
    assert sorted(set(lost)) == [f"gpt, {ranks} ranks, 1gbit (shaped) " for ranks in (2, 4)]


@pytest.mark.parametrize(("system", "code"), [("ours", 1), ("bare", 0)], ids=["", "but if nothing else was asked for"])
def test_that_the_bare_model_has_a_figure_is_not_enough(
    system: str, code: int, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = CellResult(timed=[[rank_result({})] * 2], start_up={}, errors={"ours": "not in a test"})
    monkeypatch.setattr(run, "measure_cell", lambda _cell, _tell: found)
    assert start(out, "--ranks", "2", systems=(system,)) == code


def test_a_new_run_sets_aside_what_an_earlier_one_has_written(
    out: Path, measured: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    write(out, at(link="5gbit"))
    assert (
        start(out, "--ranks", "2"),
        written(out, "matrix.previous.jsonl"),
        [one["link"] for one in written(out)],
        len(measured),
    ) == (0, [at(link="5gbit")], ["1gbit"], 1)
    assert f"the matrix that was in {out} is matrix.previous.jsonl and .md now" in capsys.readouterr().err
    assert (start(out, "--ranks", "2"), [one["link"] for one in written(out, "matrix.previous-2.jsonl")]) == (0, ["1gbit"])


def test_what_shared_a_run_that_failed_is_measured_one_by_one_and_the_cell_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []

    def fail(_cell: Cell, _environment: str, jobs: Any, *_: Any) -> list[dict[str, Any]]:
        ran.append([job.name for job in jobs])
        if len(jobs) > 2:
            raise RankFailed("rank 1 ended with exit code 3.\nits last words")
        return [rank_result({jobs[-1].name: played([99.0, 99.0])})] * 2

    monkeypatch.setattr("benchmarks.matrix.cell._run", fail)
    one = _measured(
        Cell(
            workload=WORKLOADS["gpt"],
            num_ranks=2,
            link="1gbit",
            kind="emulated",
            systems=tuple(SYSTEMS[name] for name in ("bare", "ours", "torch-ddp")),
            effort=run.QUICK,
        )
    )
    assert ran == [["bare", "ours", "torch-ddp"], ["bare", "ours"], ["bare", "torch-ddp"]]
    why = "bare, ours, torch-ddp: rank 1 ended with exit code 3. its last words"
    assert f"- gpt, 2 ranks, 1gbit (emulated): {why}" in markdown({}, [one])
    assert lines_of({}, [one])[1]["divided"] == [why.replace(". its", ".\nits")]


def test_cells_stand_in_one_order_whenever_they_were_measured() -> None:
    right = [at("replay"), at("replay", ranks=4), at("replay", link="none"), at("gpt"), at("gpt2@0.125"), at("gpt2@1")]
    assert in_order(right[::-1]) == right


def test_a_run_that_is_resumed_measures_what_is_missing(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[tuple[Any, bool]] = []

    def measure(one: Cell, _tell: Any) -> CellResult:
        measured.append((one.place, one.effort.has_start_up))
        return CellResult(timed=[], start_up={}, errors={"ours": "not in a test"})

    monkeypatch.setattr(run, "measure_cell", measure)
    kept = [at("gpt", 2), at("moe", 2, "none")]
    write(out, *kept)
    assert start(out, "--link", "none", "--resume") == 1  # for nothing was measured
    missing = [(("gpt", ranks, link, "shaped", "cpu"), False) for ranks, link in ((4, "1gbit"), (2, "none"), (4, "none"))]
    # The workload's first cell, where start-up is measured, is there already.
    assert (measured, written(out)) == (missing, kept)
    measured.clear()
    start(out, "--link", "none")
    assert measured == [(("gpt", 2, "1gbit", "shaped", "cpu"), True), *missing]
