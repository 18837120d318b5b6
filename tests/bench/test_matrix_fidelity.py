"""The simulator beside the matrix: that it finds what the matrix has written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from benchmarks import fidelity
from benchmarks.matrix import run

from support.matrix import cell, played
from support.strategies import spec
from undertow.cost import CostCurve
from undertow.profile import Profile

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
    run._write(out, {"cpu": "one"}, cells)


def measured(link: str, ms: float, **profiles: str) -> dict[str, Any]:
    return {**cell("bare", "ours", ours=played([ms] * 2)), "link": link, "profiles": profiles}


def test_what_the_matrix_writes_is_what_is_simulated(tmp_path: Path) -> None:
    written(tmp_path, *(measured(link, ms, ours=PROFILE.to_json()) for link, ms in (("1gbit", 121.0), ("5gbit", 107.0))))
    assert fidelity.main(["--out", str(tmp_path)]) == 0
    table = (tmp_path / "fidelity.md").read_text(encoding="utf-8").splitlines()
    # On 1gbit a reduction of 1 MB has 8.4 ms of wire, on 5gbit 1.7.
    assert [line for line in table if line.startswith("| replay")] == [
        "| replay, 2 ranks, 1gbit (shaped) | ours | 121.0 | 120.0 | -0.8% |",
        "| replay, 2 ranks, 5gbit (shaped) | ours | 121.0 | 120.0 | -0.8% |",
        "| replay, 2 ranks, 5gbit (shaped) | ours | 107.0 | 106.6 | -0.3% |",
    ]


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
    assert [text for text in told if text not in shown] == []
    assert not (tmp_path / "fidelity.md").exists()
