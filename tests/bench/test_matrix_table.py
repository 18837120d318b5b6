"""The rows, the document and the guard of the matrix, of times that were played."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from benchmarks import fidelity
from benchmarks.matrix import guard, run
from benchmarks.matrix.catalog import SYSTEMS
from benchmarks.matrix.rows import rows_of_cell
from benchmarks.matrix.table import markdown

from support.matrix import cell, played, rank_result
from support.strategies import spec
from undertow.lab.cost import CostCurve
from undertow.lab.profile import Profile

PLACE = "replay, 2 ranks, 1gbit (shaped)"
KILLED = {"fsdp2": "rank 1 was killed by SIGKILL."}


def rows(name: str, *ranks: dict[str, Any], start_up: Any = ()) -> list[dict[str, Any]]:
    return rows_of_cell([SYSTEMS[name]], [[rank_result(played_by_rank) for played_by_rank in ranks]], dict(start_up), {})


def ms(*times: float, **more: Any) -> dict[str, Any]:
    return played(list(times) if len(times) > 1 else [times[0]] * 2, **more)


def reported(system: str, seconds: float, **changes: Any) -> dict[str, Any]:
    return {
        "torch_import_s": 1.0,
        "peak_rss_mb": 300.4,
        "peak_device_mb": None,
        "systems": {system: dict.fromkeys(("import_s", "wrap_s", "first_step_s"), seconds)},
        **changes,
    }


# A row, and some of its fields.


@pytest.mark.parametrize(
    ("row", "fields"),
    [
        # The limit: the first gradient at 10 ms, then 2 MB.
        pytest.param(
            cell("ours", ours=ms(121))["rows"][0],
            {
                "limit_ms": 110.0,
                "over_limit": 1.1,
                "exposed_ms": 101.0,
                "sent_mb": 4.0,
                "collectives": 2,
                "step_ms": {"median": 122.0, "min": 122.0, "max": 122.0},
            },
            id="beside the limit of its own run",
        ),
        # 50 ms for 2 MB, less the 5 ms of forward before the last layer is read; 10 ms, and 50 again; half of the update.
        pytest.param(
            cell("fsdp2", fsdp2=ms(199))["rows"][0],
            {"barrier_limit_ms": 105.5, "over_limit": pytest.approx(200 / 105.5, abs=1e-4)},
            id="a sharded system is held to the limit with a barrier",
        ),
        pytest.param(
            rows("ours", {"ours": ms(100, 130)}, {"ours": ms(120, 110)})[0],
            {"backward_ms": {"median": 125.0, "min": 120.0, "max": 130.0}},
            id="as long as on its slowest rank",
        ),
        pytest.param(
            cell("ours", "fsdp2", errors=KILLED, ours=ms(121))["rows"][1],
            {"error": KILLED["fsdp2"]},
            id="what could not be measured",
        ),
        pytest.param(
            rows("ours", {"ours": ms(121)}, start_up={"ours": [reported("ours", 0.1), reported("ours", 0.2)]})[0],
            {"import_ms": 1200, "wrap_ms": 200, "first_step_ms": 200, "peak_rss_mb": 300, "peak_device_mb": None},
            id="start-up is that of the slowest rank",
        ),
        # What is exposed of a sharded step is above the bare model's whole step: that has 20 and 21 ms.
        pytest.param(cell("ours", ours=ms(50))["rows"][0], {"exposed_ms": 30.0}, id="exposed"),
    ],
)
def test_a_row(row: dict[str, Any], fields: dict[str, Any]) -> None:
    assert {name: row[name] for name in fields} == fields


def test_the_best_of_a_sweep_is_one_row() -> None:
    (row,) = rows("torch-ddp-best", {"torch-ddp-best@1MB": ms(140), "torch-ddp-best@4MB": ms(130)})
    assert (
        row["variant"],
        row["backward_ms"]["median"],
        {name: spread["median"] for name, spread in row["variants_ms"].items()},
    ) == (
        "torch-ddp-best@4MB",
        130.0,
        {
            "torch-ddp-best@1MB": 140.0,
            "torch-ddp-best@4MB": 130.0,
        },
    )


# Cells, and what their document has.


@pytest.mark.parametrize(
    ("cells", "lines"),
    [
        pytest.param(
            [cell("ours", "fsdp2", errors=KILLED, ours=ms(121))],
            [f"| {PLACE} | FSDP2 per layer, no reshard | {KILLED['fsdp2']} |"],
            id="what could not be measured says why",
        ),
    ],
)
def test_a_document(cells: list[dict[str, Any]], lines: list[str]) -> None:
    text = markdown({"cpu": "one"}, cells)
    assert [line for line in lines if line not in text] == []


def test_an_entry_for_each_cell_says_how_far_ours_are_from_torch_and_from_the_fastest_peer() -> None:
    systems = {"ours": ms(121), "ours_zero1": ms(90), "torch_ddp": ms(151), "fsdp2": ms(99)}
    told = markdown(
        {},
        [cell("bare", "ours", "ours-zero1", "torch-ddp", "fsdp2", **systems), {**cell("bare", "ours", ours=ms(121)), "ranks": 4}],
    )
    table = [line for line in told.splitlines() if line.startswith("|")]
    assert table == [
        "| workload | ranks | 1gbit (shaped) |",
        "| --- | --- | --- |",
        "| replay | 2 | 122 ms: 0.80, 1.22, 0.91 |",
        "| replay | 4 | 122 ms: -, -, - |",
    ]


def test_cells_with_all_peers_are_counted_by_interval_and_without_one_by_the_ratio() -> None:
    def one(ranks: int, link: str, ours: float, sharded: float, num_turns: int = 6, **changes: Any) -> dict[str, Any]:
        times = {"ours": ours, "ours_zero1": sharded, "torch-ddp-best@1MB": 100}
        systems = {name: ms(*[time] * num_turns) for name, time in times.items()}
        names = ("bare", "ours", "ours-zero1", "torch-ddp-best")
        return {**cell(*names, num_turns=num_turns, **systems), "ranks": ranks, "link": link, **changes}

    slow = one(2, "5gbit", 110, 110)
    slow["rows"][1]["turns_ms"] = slow["rows"][2]["turns_ms"] = [101, 101, 101, 111, 111, 111]
    cells = [
        *(one(2, "1gbit", 90, 110), one(4, "1gbit", 102, 80), one(2, "none", 110, 109), slow),
        *(one(4, "none", 110, 80, num_turns=2), one(4, "5gbit", 90, 80, num_turns=2)),
        one(2, "1gbit", 50, 50, kind="emulated"),
        cell("bare", "ours", "torch-ddp", ours=ms(50), torch_ddp=ms(100)),
    ]
    lines = markdown({}, cells).splitlines()
    counted = (
        "| whole steps, 6 cases | won | level | undecided | lost | no interval: 3% faster, alike, 3% slower |",
        "| Undertow's defaults | 1 | 1 | 1 | 1 | 1, 0, 1 |",
        "| its fastest mode | 2 | 0 | 1 | 1 | 2, 0, 0 |",
    )
    assert [line for line in counted if line not in lines] == []


def test_ratios_of_a_cell() -> None:
    # A sharded system of ours is compared by whole steps and not with ours.
    ratios = guard.ratios_of(
        [cell("bare", "ours", "ours-zero1", "torch-ddp", ours=ms(121), ours_zero1=ms(99), torch_ddp=ms(249))]
    )
    assert ratios == {
        f"{PLACE}: ours / limit": 1.1,
        f"{PLACE}: ours / torch-ddp": pytest.approx(121 / 249, abs=1e-4),
        f"{PLACE}: ours-zero1 / limit": pytest.approx(100 / 105.5, abs=1e-4),
        f"{PLACE}: ours-zero1 / torch-ddp": 0.4,
    }
    assert guard.names_of(PLACE, ["bare", "ours", "ours-zero1", "torch-ddp"]) == ratios.keys()  # those that are expected


LOST = {f"{PLACE}: ours / limit": 1.018, f"{PLACE}: ours / torch-ddp": 0.5}
# Measured ratios, recorded ones, the systems that were asked for, and the report.


@pytest.mark.parametrize(
    ("measured", "recorded", "asked", "lines"),
    [
        pytest.param(
            {f"{PLACE}: ours / limit": 1.1, f"{PLACE}: ours / torch-ddp": 0.5},
            {f"{PLACE}: ours / limit": 1.05, f"{PLACE}: ours / torch-ddp": 0.44},
            [],
            [
                "2 of 2 ratios have a recorded one; worse by more than 10%: 1; lost: 0",
                f"  WORSE  {PLACE}: ours / torch-ddp: 0.500, recorded 0.440 (+14%)",
            ],
            id="worse by more than a tenth",
        ),
        # Without what the run did not ask for, and without other cells.
        pytest.param(
            guard.ratios_of([cell("bare", "ours", "torch-ddp", "fsdp2", errors={"ours": "trains wrongly"}, torch_ddp=ms(242))]),
            {
                **LOST,
                f"{PLACE}: ours / fsdp2": 0.6,
                f"{PLACE}: ours-zero1 / limit": 1.0,
                "replay, 4 ranks, 1gbit (shaped): ours / limit": 1.0,
            },
            ["bare", "ours", "torch-ddp"],
            [
                "0 of 0 ratios have a recorded one; worse by more than 10%: 0; lost: 2",
                *(f"  LOST  {name}, recorded {ratio:.3f}" for name, ratio in LOST.items()),
            ],
            id="no figure any more",
        ),
    ],
)
def test_ratios_are_compared_with_recorded_ones(
    measured: dict[str, float], recorded: dict[str, float], asked: list[str], lines: list[str]
) -> None:
    assert guard.report(guard.compare(measured, recorded, expected=guard.names_of(PLACE, asked))).splitlines() == lines


def test_recording_keeps_what_was_not_measured_now(tmp_path: Path) -> None:
    path = tmp_path / "recorded.json"
    guard.record({"a": 1.0, "b": 2.0}, {"cpu": "one"}, path)
    guard.record({"b": 3.0}, {"cpu": "two"}, path)
    assert [guard.read_recorded(it) for it in (path, tmp_path / "absent.json")] == [{"a": 1.0, "b": 3.0}, {}]


# Two gradients of 1 MB, ready 20 and 30 ms after the step began; a reduction of one takes 50 ms: both are there after 120.
PROFILE = Profile(
    params=(spec("first", 250_000), spec("last", 250_000)),
    ready_us=(20_000.0, 10_000.0),
    forward_us=10_000.0,
    backward_us=20_000.0,
    num_ranks=2,
    curves={"all_reduce": CostCurve(points=((1e6, 50_000.0), (2e6, 100_000.0)))},
    groups=((1,), (0,)),
    step_us=121_000.0,
)


def written(out: Path, *cells: dict[str, Any]) -> None:
    run.write(out, {"cpu": "one"}, cells)


def measured(link: str, ms: float, **profiles: str) -> dict[str, Any]:
    return {**cell("bare", "ours", ours=played([ms] * 2)), "link": link, "profiles": profiles}


def test_what_the_matrix_writes_is_what_is_simulated(tmp_path: Path) -> None:
    # All in one bucket, the gradients are ready at 30 ms, and their reduction takes 100 ms.
    fewer = replace(PROFILE, groups=((1, 0),), step_us=135_000.0)
    of_two = {**cell("bare", "ours", ours=played([121.0] * 2)), "link": "5gbit"}
    of_two["rows"].append({**of_two["rows"][-1], "system": "ours-untuned"})
    of_two["profiles"] = {"ours": PROFILE.to_json(), "ours-untuned": fewer.to_json()}
    written(tmp_path, measured("1gbit", 121.0, ours=PROFILE.to_json()), of_two)
    assert fidelity.main(["--out", str(tmp_path)]) == 0
    table = (tmp_path / "fidelity.md").read_text(encoding="utf-8").splitlines()
    assert [line for line in table if line.startswith("| replay")] == [
        "| replay, 2 ranks, 1gbit (shaped) | ours | ours | 121.0 | 120.0 | -0.8% |",
        "| replay, 2 ranks, 5gbit (shaped) | ours | ours | 121.0 | 120.0 | -0.8% |",
        "| replay, 2 ranks, 5gbit (shaped) | ours-untuned | ours-untuned | 135.0 | 130.0 | -3.7% |",
        "| replay, 2 ranks, 5gbit (shaped) | ours-untuned | ours | 135.0 | 130.0 | -3.7% |",
    ]
    assert table[-1] == "From the profile of another plan: of 1 predictions 1 are within 5%."


@pytest.mark.parametrize(
    ("cells", "told"),
    [
        (
            [measured("1gbit", 121.0)],
            [
                "has no profile of a cell in",
                "Run the matrix with a system of ours: python -m benchmarks matrix --workload replay --system ours --out",
            ],
        ),
        (None, ["Run the matrix first: python -m benchmarks matrix --out"]),
    ],
    ids=["no profile", "no matrix"],
)
def test_what_is_no_matrix_is_no_success(
    cells: list[dict[str, Any]] | None, told: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if cells is not None:
        written(tmp_path, *cells)
    assert fidelity.main(["--out", str(tmp_path)]) == 2
    shown = " ".join(capsys.readouterr().out.split())
    assert ([text for text in told if text not in shown], (tmp_path / "fidelity.md").exists()) == ([], False)
