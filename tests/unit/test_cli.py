from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

import undertow
from undertow.cli import app, main
from undertow.demo import DemoSettings


def call(*arguments: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """The exit code of the command with these arguments."""
    monkeypatch.setattr(sys, "argv", ["undertow", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    code = ended.value.code
    assert isinstance(code, int)
    return code


def test_the_version_is_printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("--version", monkeypatch=monkeypatch) == 0
    assert capsys.readouterr().out == f"undertow {undertow.__version__}\n"


def test_help_names_every_option_and_the_exit_codes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("demo", "--help", monkeypatch=monkeypatch) == 0
    text = capsys.readouterr().out
    assert [name for name in ("--nproc", "--link", "--text", "--steps", "--out", "--seed", "Exit code") if name not in text] == []


def test_an_error_of_ours_is_text_on_stderr_and_exit_code_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("demo", "--link", "fast", monkeypatch=monkeypatch) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == (
        "Error: there is no link 'fast'.\n"
        '  Write a rate such as "1gbit", "2.5gbit" or "200mbit", or "none" for the bare loopback.\n'
    )


def test_an_unknown_option_is_exit_code_2(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("demo", "--ranks", "2", monkeypatch=monkeypatch) == 2
    assert "No such option: --ranks" in capsys.readouterr().err


def test_options_become_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[DemoSettings] = []
    monkeypatch.setattr(app, "run_demo", lambda settings: seen.append(settings) or 1)
    options = ["--nproc", "3", "--link", "5gbit", "--text", "a", "--steps", "4", "--out", "b", "--seed", "5"]
    assert call("demo", *options, monkeypatch=monkeypatch) == 1
    expected = DemoSettings(num_ranks=3, link="5gbit", text=Path("a"), num_steps=4, out=Path("b"), seed=5)
    assert seen == [expected]


def test_a_missing_typer_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == (
        'The command needs typer, which is not installed.\n  Install it with: pip install "undertow[cli]"'
    )
