from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from benchmarks.matrix import guard
from benchmarks.matrix.catalog import SYSTEMS
from benchmarks.matrix.picture import save_pictures
from benchmarks.matrix.rows import rows_of_cell
from benchmarks.matrix.table import markdown, validation_rows

from support.matrix import cell, played, rank_result

STAMPS = ("import_s", "wrap_s", "first_step_s")


def test_a_row_stands_beside_the_limit_of_its_own_run() -> None:
    (row,) = cell("ours", ours=played([121.0, 121.0]))["rows"]
    assert row["limit_ms"] == 110.0  # first gradient at 10 ms, then 2 MB
    assert row["over_limit"] == 1.1
    assert row["exposed_ms"] == 101.0
    assert row["step_ms"] == {"median": 122.0, "min": 122.0, "max": 122.0}
    assert (row["sent_mb"], row["collectives"]) == (4.0, 2)


def test_a_sharded_system_is_held_to_the_limit_with_a_barrier() -> None:
    (row,) = cell("fsdp2", fsdp2=played([199.0, 199.0]))["rows"]
    # 50 ms for 2 MB, less the 5 ms of forward before the last layer is read; 10 ms, and 50 again; half of the update.
    assert row["barrier_limit_ms"] == 105.5
    assert row["over_limit"] == pytest.approx(200 / 105.5, abs=1e-4)
    assert row["step_limit_ms"] == 105.0  # 10 ms, an all-reduce of 2 MB, less those 5 ms


def test_a_row_says_what_the_optimizer_keeps() -> None:
    facts = {"collectives": 2, "version": "1", "state_mb": 24.0}
    (row,) = cell("ours-zero1", ours_zero1=played([199.0, 199.0], facts=facts))["rows"]
    assert row["state_mb"] == 24.0


def test_a_step_is_as_long_as_on_its_slowest_rank() -> None:
    ranks = [rank_result({"ours": played(ms)}) for ms in ([100.0, 130.0], [120.0, 110.0])]
    (row,) = rows_of_cell([SYSTEMS["ours"]], [ranks], {}, {})
    assert row["backward_ms"] == {"median": 125.0, "min": 120.0, "max": 130.0}


def test_the_best_of_a_sweep_is_one_row() -> None:
    sweep = {"torch-ddp-best@1MB": played([140.0] * 2), "torch-ddp-best@4MB": played([130.0] * 2)}
    ranks = [rank_result(sweep)]
    (row,) = rows_of_cell([SYSTEMS["torch-ddp-best"]], [ranks], {}, {})
    assert (row["variant"], row["backward_ms"]["median"]) == ("torch-ddp-best@4MB", 130.0)
    assert {name: spread["median"] for name, spread in row["variants_ms"].items()} == {
        "torch-ddp-best@1MB": 140.0,
        "torch-ddp-best@4MB": 130.0,
    }


def test_what_could_not_be_measured_is_a_row_that_says_why() -> None:
    one = cell("ours", "fsdp2", errors={"fsdp2": "rank 1 was killed by SIGKILL."}, ours=played([121.0] * 2))
    assert one["rows"][1]["error"] == "rank 1 was killed by SIGKILL."
    text = markdown({"cpu": "one"}, [one], pictures={})
    assert "| FSDP2 per layer, no reshard | could not be measured |" in text
    assert "rank 1 was killed by SIGKILL." in text


def test_a_system_that_cannot_be_imported_says_so() -> None:
    (row,) = cell("ours", ours={"error": "ModuleNotFoundError: No module named 'x'"})["rows"]
    assert row["error"] == "ModuleNotFoundError: No module named 'x'"


def test_start_up_is_that_of_the_slowest_rank() -> None:
    alone = {"torch_import_s": 1.0, "peak_rss_mb": 300.4, "peak_device_mb": None}
    reports = [{**alone, "systems": {"ours": dict.fromkeys(STAMPS, s)}} for s in (0.1, 0.2)]
    (row,) = rows_of_cell([SYSTEMS["ours"]], [[rank_result({"ours": played([121.0] * 2)})]], {"ours": reports}, {})
    assert [row[name] for name in ("import_ms", "wrap_ms", "first_step_ms", "peak_rss_mb")] == [1200, 200, 200, 300]
    assert row["peak_device_mb"] is None


def test_the_peak_of_memory_is_the_device_s_where_the_model_is_on_one() -> None:
    one = cell("ours", ours=played([121.0] * 2))
    for on_device, shown in ((None, "3001"), (771.6, "772")):
        alone = {"torch_import_s": 1.0, "peak_rss_mb": 3001.0, "peak_device_mb": on_device}
        reports = [{**alone, "systems": {"ours": dict.fromkeys(STAMPS, 0.1)}}]
        rows = rows_of_cell([SYSTEMS["ours"]], [[rank_result({"ours": played([121.0] * 2)})]], {"ours": reports}, {})
        text = markdown({"cpu": "one"}, [{**one, "rows": rows}], pictures={})
        assert f"| {shown} | 1100, 100, 100 |" in text


def test_the_document_compares_with_a_reduction_per_parameter_by_size() -> None:
    one = cell("bare", "per-parameter", "ours", per_parameter=played([241.0] * 2), ours=played([120.0] * 2))
    text = markdown({"cpu": "one"}, [one], pictures={})
    assert "| below 10 M | replay | 2 | 1gbit (shaped) | 2.00 |  |" in text
    assert "an all-reduce carries 20.0 MB/s, a small one takes 1.0 ms" in text


def test_a_line_for_each_cell_says_how_far_ours_are_from_the_fastest_peer() -> None:
    systems = {
        "ours": played([121.0] * 2),
        "ours_zero1": played([90.0] * 2),
        "torch_ddp": played([151.0] * 2),
        "fsdp2": played([99.0] * 2),
    }
    one = cell("bare", "ours", "ours-zero1", "torch-ddp", "fsdp2", **systems)
    alone = {**cell("bare", "ours", ours=played([121.0] * 2)), "ranks": 4}
    told = markdown({}, [one, alone], pictures={})
    table = told.partition("## At a glance (but for the first figure, whole steps)")[2].partition("##")[0].strip().splitlines()
    line = "| replay, 2 ranks, 1gbit (shaped) | 1.100 | 0.80 |  | 122 | ours-zero1 91 | fsdp2 100 | 1.22 | **0.91** |"
    assert table[2:] == [line]


def test_cells_with_all_peers_are_counted_by_who_is_faster() -> None:
    def one(ranks: int, link: str, **systems: Any) -> dict[str, Any]:
        best = {"torch-ddp-best@1MB": played([100.0] * 2)}
        made = cell("bare", "ours", "ours-eager", "torch-ddp-best", **systems, **best)
        return {**made, "ranks": ranks, "link": link}

    cells = [
        one(2, "1gbit", ours=played([90.0] * 2), ours_eager=played([110.0] * 2)),
        one(4, "1gbit", ours=played([102.0] * 2), ours_eager=played([80.0] * 2)),
        one(2, "none", ours=played([110.0] * 2), ours_eager=played([109.0] * 2)),
        {**one(2, "1gbit", ours=played([50.0] * 2), ours_eager=played([50.0] * 2)), "kind": "emulated"},
        cell("bare", "ours", "torch-ddp", ours=played([50.0] * 2), torch_ddp=played([100.0] * 2)),
    ]
    lines = markdown({}, cells, pictures={}).splitlines()
    assert "| whole steps, 3 cells | 3% faster than the fastest peer | alike | 3% slower |" in lines
    assert "| our defaults | 1 | 1 | 1 |" in lines
    assert "| the fastest of our modes | 2 | 0 | 1 |" in lines


def test_what_defaults_are_held_to_is_met_or_missed() -> None:
    of_gpt = {
        f"gpt, 2 ranks, 1gbit (shaped): ours / {other}": ratio for other, ratio in (("limit", 1.05), ("torch-ddp-best", 1.02))
    }
    assert guard.held_to({**of_gpt, "gpt, 4 ranks, 1gbit (shaped): ours / limit": 2.0}) == [
        "  met     gpt, 2 ranks, 1gbit (shaped): ours / limit: 1.050, wanted at most 1.15",
        "  MISSED  gpt, 2 ranks, 1gbit (shaped): ours / torch-ddp-best: 1.020, wanted at most 1.00",
    ]


def test_the_emulated_link_is_compared_with_the_shaped_one() -> None:
    shaped = cell("ours", ours=played([100.0] * 2))
    emulated = {**cell("ours", ours=played([106.0] * 2)), "kind": "emulated"}
    (row,) = validation_rows([shaped, emulated])
    assert row["difference"] == 0.06
    assert "| replay | 2 | 1gbit | ours | 100 | 106 | +6.0% | NO |" in markdown({}, [shaped, emulated], pictures={})
    assert validation_rows([shaped]) == []


def test_a_ratio_that_is_worse_by_more_than_a_tenth_is_reported() -> None:
    ratios = guard.ratios_of([cell("ours", "torch-ddp", ours=played([121.0] * 2), torch_ddp=played([242.0] * 2))])
    place = "replay, 2 ranks, 1gbit (shaped)"
    assert ratios == {f"{place}: ours / limit": 1.1, f"{place}: ours / torch-ddp": 0.5}
    changes = guard.compare(ratios, {f"{place}: ours / limit": 1.05, f"{place}: ours / torch-ddp": 0.44})
    assert guard.report(changes).splitlines() == [
        "2 of 2 ratios have a recorded one; worse by more than 10%: 1; lost: 0",
        f"  WORSE  {place}: ours / torch-ddp: 0.500, recorded 0.440 (+14%)",
    ]


def test_a_sharded_system_of_ours_is_compared_by_whole_steps_and_not_with_ours() -> None:
    systems = {"ours": played([121.0] * 2), "ours_zero1": played([99.0] * 2), "torch_ddp": played([249.0] * 2)}
    ratios = guard.ratios_of([cell("ours", "ours-zero1", "torch-ddp", **systems)])
    of_zero1 = {name.partition(": ")[2]: ratio for name, ratio in ratios.items() if ": ours-zero1" in name}
    assert of_zero1 == {"ours-zero1 / limit": pytest.approx(100 / 105.5, abs=1e-4), "ours-zero1 / torch-ddp": 0.4}


def test_a_recorded_ratio_of_a_system_that_has_no_figure_any_more_is_told() -> None:
    one = cell("bare", "ours", "torch-ddp", "fsdp2", errors={"ours": "trains wrongly"}, torch_ddp=played([242.0] * 2))
    ratios, place = guard.ratios_of([one]), "replay, 2 ranks, 1gbit (shaped)"
    recorded = {f"{place}: ours / limit": 1.018, f"{place}: ours / torch-ddp": 0.5, f"{place}: ours / fsdp2": 0.6}
    # Without what the run did not ask for, and without other cells.
    recorded |= {f"{place}: ours-zero1 / limit": 1.0, "replay, 4 ranks, 1gbit (shaped): ours / limit": 1.0}
    expected = guard.names_of(place, ["bare", "ours", "torch-ddp"])
    assert guard.report(guard.compare(ratios, recorded, expected=expected)).splitlines() == [
        "0 of 0 ratios have a recorded one; worse by more than 10%: 0; lost: 2",
        f"  LOST  {place}: ours / limit, recorded 1.018",
        f"  LOST  {place}: ours / torch-ddp, recorded 0.500",
    ]


def test_a_run_with_nothing_to_compare_with_says_so() -> None:
    told = guard.report(guard.compare({"gpt, 2 ranks, 1gbit (emulated): ours / limit": 1.02}, {}))
    assert told == "nothing to compare with: of these cells no ratio is recorded (see benchmarks/matrix/recorded.json)"


def test_the_ratios_that_are_expected_are_those_that_a_cell_has() -> None:
    systems = {"ours": played([121.0] * 2), "ours_zero1": played([99.0] * 2), "torch_ddp": played([249.0] * 2)}
    names = ["bare", "ours", "ours-zero1", "torch-ddp"]
    assert guard.names_of("replay, 2 ranks, 1gbit (shaped)", names) == guard.ratios_of([cell(*names, **systems)]).keys()


def test_recording_keeps_what_was_not_measured_now(tmp_path: Any) -> None:
    path = tmp_path / "recorded.json"
    guard.record({"a": 1.0, "b": 2.0}, {"cpu": "one"}, path)
    guard.record({"b": 3.0}, {"cpu": "two"}, path)
    assert guard.read_recorded(path) == {"a": 1.0, "b": 3.0}
    assert guard.read_recorded(tmp_path / "absent.json") == {}


def test_each_workload_has_a_picture_with_a_panel_for_each_cell_that_has_figures(tmp_path: Path) -> None:
    one = cell("ours", "fsdp2", ours=played([121.0] * 2), fsdp2=played([199.0] * 2))
    four, other = {**one, "ranks": 4}, {**one, "workload": "gpt2@0.125"}
    none = {**one, "workload": "moe", "rows": cell("ours", errors={"ours": "rank 1 was killed by SIGKILL."})["rows"]}
    pictures = save_pictures([one, four, none, other], tmp_path)
    assert {name: path.name for name, path in pictures.items()} == {
        "replay": "matrix-replay.png",
        "gpt2@0.125": "matrix-gpt2@0.125.png",
    }
    svg = (tmp_path / "matrix-replay.svg").read_text(encoding="utf-8")
    assert [svg.count(f"<!-- replay, {ranks} ranks, 1gbit (shaped) -->") for ranks in (2, 4)] == [1, 1]
    text = markdown({}, [one, four, other], pictures=pictures)
    assert text.count("![replay: milliseconds per step of every system, a panel per cell](matrix-replay.png)") == 1


def test_what_is_exposed_of_a_sharded_step_is_above_the_bare_model_s_whole_step() -> None:
    systems = {"ours": played([50.0] * 2), "ours_zero1": played([50.0] * 2, step_s=[0.090] * 2)}
    ours, zero1 = cell("ours", "ours-zero1", **systems)["rows"]
    assert (ours["exposed_ms"], zero1["exposed_ms"]) == (30.0, 69.0)  # the bare model: 20 and 21 ms


def test_start_up_of_a_sweep_is_called_by_the_variant_that_was_started() -> None:
    alone = {"torch_import_s": 1.0, "peak_rss_mb": 300.0, "peak_device_mb": None}
    reports = [{**alone, "systems": {"torch-ddp-best@1MB": dict.fromkeys(STAMPS, 0.1)}}]
    timed = [[rank_result({"torch-ddp-best@4MB": played([121.0] * 2)})]]
    (row,) = rows_of_cell([SYSTEMS["torch-ddp-best"]], timed, {"torch-ddp-best": reports}, {})
    assert (row["variant"], row["start_up_of"]) == ("torch-ddp-best@4MB", "torch-ddp-best@1MB")


def test_every_note_and_version_is_told_once() -> None:
    one = cell("ours", ours=played([121.0] * 2))
    notes = [
        {**one, "rows": [{**row, "note": note} for row in one["rows"]]} for note in ("In one run it failed.", "Slow.", "Slow.")
    ]
    told = markdown({}, notes, pictures={}).partition("## Notes")[2].strip().splitlines()
    assert told == [f"- Undertow, defaults: {note}" for note in ("version 1.", "In one run it failed.", "Slow.")]
