"""Names and texts from models, files and other ranks, as they are shown: visible, and without effect."""

from __future__ import annotations

import io
import json
import logging
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from support.command import call
from support.errors import text_of
from undertow.cost import CostCurve
from undertow.errors import ConfigError, UndertowError
from undertow.foreign import printable, printable_lines
from undertow.plan import ParamSpec, plan_from_groups
from undertow.profile import Profile
from undertow.report.explain import print_explanation
from undertow.report.terminal import print_report
from undertow.report.timeline import save_timeline
from undertow.runtime import faults
from undertow.trace import BucketRecord, Event, StepRecord, Trace, summarize
from undertow.tune import Explanation

NAMES = {
    "an end of markup": "[/bold]",
    "a link": "[link=http://x]y[/link]",
    "a style with a backslash": "\\[red]z",
    "an emoji": ":bomb:",
    "a clearing of the screen": "\x1b[2J",
    "a title of the window": "\x1b]0;t\x07",
    "another direction": "\u202ea",
    "a second line": "a\nb\rc",
    "half of a character": "\ud800",
    "eight bits": "\x9b2J",
}
each_name = pytest.mark.parametrize("name", NAMES.values(), ids=NAMES)


def spec(name: str) -> ParamSpec:
    return ParamSpec(name=name, shape=(1000,), dtype="float32", itemsize=4)


def require_shown(name: str, text: str) -> None:
    assert printable(name) in text, text
    assert all(line.isprintable() for line in text.split("\n")), text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("layer.0.weight", "layer.0.weight"),
        ("zwei Übungen, 三", "zwei Übungen, 三"),
        ("1\u00a0234\u3000m", "1\u00a0234\u3000m"),
        ("\x1b[31m\x00\x7f\x85", "\\x1b[31m\\x00\\x7f\\x85"),
        ("a\nb\tc\r", "a\\nb\\tc\\r"),
        ("\u202e\u2028\u2066\ufeff", "\\u202e\\u2028\\u2066\\ufeff"),
        ("\ud800\U000e0001", "\\ud800\\U000e0001"),
    ],
)
def test_a_character_that_could_steer_a_terminal_is_shown_as_its_escape(text: str, expected: str) -> None:
    assert printable(text) == expected
    assert printable_lines(f"{text}\n{text}") == "\n".join([expected.replace("\\n", "\n")] * 2)


@each_name
def test_a_report_shows_the_names_of_parameters_as_they_are(name: str) -> None:
    row = BucketRecord(bucket=0, num_bytes=8, ready_us=30, launched_us=30, done_us=50, waited=(60, 70))
    record = StepRecord(
        step=0, rank=0, step_us=100, forwards=((0.0, 20.0),), backwards=((20.0, 60.0),), buckets=(row,), busy_ms=(1.0, 1.0)
    )
    file = io.StringIO()
    report = summarize([record], plan_from_groups([spec(name)], [(0,)], num_ranks=2), rank=0)
    print_report(report, Console(file=file, width=200))
    require_shown(name, file.getvalue())


@each_name
def test_an_explanation_shows_texts_as_they_are(name: str) -> None:
    file = io.StringIO()
    print_explanation(Explanation(num_ranks=2, strategy="ddp", bucket_mb=(1.0,), why=name), Console(file=file, width=200))
    require_shown(name, file.getvalue())


@each_name
@pytest.mark.parametrize("kind", ["table", "saved plan", "profile"])
def test_undertow_plan_shows_the_names_of_a_file_as_they_are(
    kind: str, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = {
        "table": json.dumps({"params": [{"name": name, "shape": [3], "dtype": "float32"}]}),
        "saved plan": plan_from_groups([spec(name)], [(0,)], num_ranks=2).to_json(),
        "profile": profile_of(name).to_json(),
    }[kind]
    (tmp_path / "model.json").write_text(text)
    monkeypatch.setenv("COLUMNS", "200")
    assert call("plan", str(tmp_path / "model.json"), monkeypatch=monkeypatch) == 0
    require_shown(name, capsys.readouterr().out)


@each_name
def test_undertow_plan_shows_the_dtype_of_a_file_as_it_is(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    params = [ParamSpec(name="a", shape=(3,), dtype=name, itemsize=4)]
    (tmp_path / "plan.json").write_text(plan_from_groups(params, [(0,)], num_ranks=2).to_json())
    monkeypatch.setenv("COLUMNS", "200")
    assert call("plan", str(tmp_path / "plan.json"), monkeypatch=monkeypatch) == 0
    require_shown(name, capsys.readouterr().out)


def profile_of(name: str) -> Profile:
    curves = {"all_reduce": CostCurve(points=((1e3, 10.0), (1e6, 100.0)))}
    return Profile(
        name=name, params=(spec(name),), ready_us=(10.0,), forward_us=10.0, backward_us=20.0, num_ranks=2, curves=curves
    )


@each_name
def test_undertow_simulate_shows_the_name_of_a_profile_and_of_its_files_as_they_are(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    profile_of(name).save(tmp_path / "model.json")
    out = tmp_path / name.replace("/", "").replace("\ud800", "")
    monkeypatch.setenv("COLUMNS", "200")
    assert call("simulate", str(tmp_path / "model.json"), "--out", str(out), monkeypatch=monkeypatch) == 0
    shown = capsys.readouterr().out
    require_shown(name, shown)
    require_shown(str(out), shown)


@each_name
def test_an_error_shows_names_as_they_are(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    error = UndertowError(f"{name} is wrong.", where=name, remedy=f"Mend {name}.")
    expected = printable_lines(name)
    assert str(error) == f"{expected} is wrong.\n  {expected}\n  Mend {expected}."
    data: dict[str, Any] = {"params": [{"name": name, "shape": [3], "dtype": name}]}
    (tmp_path / "table.json").write_text(json.dumps(data))
    assert call("plan", str(tmp_path / "table.json"), monkeypatch=monkeypatch) == 2
    shown = capsys.readouterr().err
    assert all(line.isprintable() for line in shown.split("\n"))
    assert repr(name).strip("'\"") in shown


@each_name
def test_a_warning_shows_names_as_they_are(
    name: str, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with caplog.at_level(logging.WARNING, "undertow"):
        faults.tell(f"waits for {name}")
    assert caplog.messages == [f"waits for {printable_lines(name)}"]


@pytest.mark.parametrize("name", [*NAMES.values(), "$x^$", "a$b", "\\$", "$\\frac{$", "_hidden"])
def test_a_picture_draws_names_as_they_are(name: str, tmp_path: Path) -> None:
    trace = Trace(rank=0, step=0, events=(Event(lane="compute", kind="forward", start_us=0, stop_us=40_000),))
    save_timeline({name: trace, f"{name} again": trace}, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 1000


def test_the_name_of_a_file_in_an_error_has_no_control_characters(tmp_path: Path) -> None:
    from undertow.profile import profile_from_file

    text = text_of(ConfigError, lambda: profile_from_file(tmp_path / "\x1b[2Jnone"))
    assert "\\x1b[2Jnone cannot be read." in text
