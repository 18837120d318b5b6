"""The command itself: its help, its exit codes, and what it makes of options."""

from __future__ import annotations

import importlib.util
import re
import shutil
from pathlib import Path

import pytest

import undertow as library
from support.cli import Undertow
from support.project import ROOT
from undertow import demo
from undertow.cli import main
from undertow.demo import DemoSettings

HELP = {
    "demo": ("--nproc", "--link", "--text", "--steps", "--out", "--seed", "--strategy", "Exit code"),
    "simulate": (
        *("--ranks", "--link", "--per-node", "--node-link", "--strategy", "--skew", "--contention", "--sweep", "--out"),
        *("Exit code", "Example: undertow simulate"),
    ),
}


def test_the_version_is_printed(undertow: Undertow) -> None:
    assert undertow("--version") == (0, f"undertow {library.__version__}\n", "")


@pytest.mark.parametrize("command", HELP)
def test_help_names_every_option_and_the_exit_codes(command: str, undertow: Undertow) -> None:
    code, text, _ = undertow(f"{command} --help")
    assert (code, [name for name in HELP[command] if name not in text]) == (0, [])


@pytest.mark.parametrize("command", ["plan", "simulate"])
def test_the_example_of_the_help_runs(command: str, undertow: Undertow, folder: Path) -> None:
    example = re.search(rf"Example: undertow ({command} .*)", undertow(f"{command} --help").out)
    assert example is not None
    shutil.copytree(ROOT / "examples" / "profiles", folder / "examples" / "profiles")
    assert undertow(example[1]).code == 0


def test_an_error_of_ours_is_text_on_stderr_and_exit_code_2(undertow: Undertow) -> None:
    assert undertow("demo --link fast") == (
        2,
        "",
        "Error: there is no link 'fast'.\n"
        '  Write a rate such as "1gbit", "2.5gbit" or "200mbit", a rate and a latency such as "100gbit,5us", or "none" for the '
        "bare loopback.\n",
    )


def test_an_unknown_option_is_exit_code_2(undertow: Undertow) -> None:
    code, _, error = undertow("demo --ranks 2")
    assert code == 2
    assert "No such option: --ranks" in error


def test_options_become_settings(undertow: Undertow, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[DemoSettings] = []
    monkeypatch.setattr(demo, "run_demo", lambda settings: seen.append(settings) or 1)
    assert undertow("demo --nproc 3 --link 5gbit --text a --steps 4 --out b --seed 5 --strategy zero1").code == 1
    assert seen == [DemoSettings(num_ranks=3, link="5gbit", text=Path("a"), num_steps=4, out=Path("b"), seed=5, strategy="zero1")]


def test_a_missing_typer_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == (
        'The command needs typer, which is not installed.\n  Install it with: pip install "undertow[cli]"'
    )
