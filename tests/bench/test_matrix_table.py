"""The rows and the document of the matrix, of times that were played."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from benchmarks import fidelity
from benchmarks.matrix import run
from benchmarks.matrix.catalog import SYSTEMS
from benchmarks.matrix.rows import rows_of_cell
from benchmarks.matrix.table import markdown

from support.matrix import cell, played, rank_result
from support.strategies import spec
from undertow.lab.cost import CostCurve
from undertow.lab.profile import Profile

PLACE = "replay, 2 ranks, 1gbit (shaped)"
KILLED = {"fsdp2": "rank 1 was killed by SIGKILL."}


def rows(name: str, *ranks: dict[str, Any]) -> list[dict[str, Any]]:
    return rows_of_cell([SYSTEMS[name]], [[rank_result(played_by_rank) for played_by_rank in ranks]], {})


def ms(*times: float, **more: Any) -> dict[str, Any]:
    return played(list(times) if len(times) > 1 else [times[0]] * 2, **more)


# A row, and some of its fields.


@pytest.mark.parametrize(
    ("row", "fields"),
    [
        pytest.param(
            cell("ours", ours=ms(121))["rows"][0],
            {
                "sent_mb": 4.0,
                "cpu_ms": 2.0,
                "collectives": 2,
                "step_ms": {"median": 122.0, "min": 122.0, "max": 122.0},
            },
            id="medians of its steps",
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
