"""A folder with models to plan and to simulate."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from support.cli import MEASURED, SMALL, TABLE


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The present one; pictures go there too."""
    monkeypatch.chdir(tmp_path)
    Path("table.json").write_text(TABLE)
    curve = MEASURED.curves["all_reduce"]
    for name, profile in {
        "small": SMALL,
        "sharded": replace(SMALL, strategy="zero1"),
        "measured": MEASURED,
        "linked": replace(MEASURED, link="8gbit,10us"),
        "mesh": replace(MEASURED, strategy="hybrid", curves={"reduce_scatter": curve, "all_gather": curve}),
    }.items():
        profile.save(f"{name}.json")
    return tmp_path
