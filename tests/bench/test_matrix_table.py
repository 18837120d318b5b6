"""The rows, the document and the guard of the matrix, of times that were played."""

from typing import Any

import pytest
from benchmarks.matrix.catalog import SYSTEMS
from benchmarks.matrix.rows import rows_of_cell

from bench.cells import cell, played, rank_result

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


# Measured ratios, recorded ones, the systems that were asked for, and the report.
