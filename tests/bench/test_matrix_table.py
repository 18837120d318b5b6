"""The rows and the document of the matrix, of times that were played."""

from typing import Any

import pytest
from benchmarks.matrix.catalog import SYSTEMS
from benchmarks.matrix.rows import rows_of_cell

from bench.cells import cell, played, rank_result

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


# Measured ratios, recorded ones, the systems that were asked for, and the report.
