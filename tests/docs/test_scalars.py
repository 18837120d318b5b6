"""The recipes of docs/scalars.md, with the real TensorBoard and with stand-ins that note the calls."""

import re
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch.distributed as dist

from frameworks.recipes import require_installed
from support.pages import snippets
from support.project import ROOT
from support.records import record, report

PAGE = ROOT / "docs" / "scalars.md"
RECIPES = {snippet.section: snippet.code for snippet in snippets(PAGE)}
REPORT = report(*(record(step=step, busy_ms=(50.0, 65.0)) for step in range(6)))
MODEL = SimpleNamespace(report=lambda: REPORT)


def test_the_table_has_every_scalar() -> None:
    table = PAGE.read_text().split("## ")[0]
    named = {name.removeprefix("undertow/") for name in re.findall(r"`([\w/]+)`", table)}
    assert {name.removeprefix("undertow/") for name in REPORT.scalars()} - named == set()


@pytest.mark.slow
def test_tensorboard_reads_back_what_was_logged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require_installed("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.chdir(tmp_path)
    names = {"model": MODEL, "step": 7}
    exec(RECIPES["TensorBoard"], names)
    names["writer"].close()  # type: ignore[attr-defined]
    read = EventAccumulator(str(tmp_path / "runs" / "one"))
    read.Reload()
    logged = {name: [(it.step, it.value) for it in read.Scalars(name)] for name in read.Tags()["scalars"]}
    assert logged == {name: [(7, pytest.approx(value))] for name, value in REPORT.scalars().items()}


def test_weights_and_biases_gets_a_dict(monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = MagicMock()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    exec(RECIPES["Weights & Biases"], {"model": MODEL, "step": 7})
    wandb.init().log.assert_called_once_with(REPORT.scalars(), step=7)


def test_prometheus_text_has_valid_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(dist, "get_rank", lambda: 3)
    exec(RECIPES["Prometheus"], {"model": MODEL})
    lines = Path("undertow-3.prom").read_text().splitlines()
    # Of the text format: name{label="value"} number.
    assert [line for line in lines if not re.fullmatch(r'[a-zA-Z_:][a-zA-Z0-9_:]*\{rank="3"\} -?[0-9.e+-]+', line)] == []
    assert 'undertow_exposed_ms{rank="3"} 20.0' in lines
