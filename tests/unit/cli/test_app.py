from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

import undertow
from support.command import call
from support.project import ROOT
from undertow import demo
from undertow.cli import main
from undertow.demo import DemoSettings
from undertow.plan import Plan, plan_from_groups
from undertow.plan.table import source_from_file
from undertow.schedule import schedule_from_text


def test_the_version_is_printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("--version", monkeypatch=monkeypatch) == 0
    assert capsys.readouterr().out == f"undertow {undertow.__version__}\n"


def test_help_names_every_option_and_the_exit_codes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("demo", "--help", monkeypatch=monkeypatch) == 0
    text = capsys.readouterr().out
    names = ("--nproc", "--link", "--text", "--steps", "--out", "--seed", "--strategy", "Exit code")
    assert [name for name in names if name not in text] == []


def test_an_error_of_ours_is_text_on_stderr_and_exit_code_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("demo", "--link", "fast", monkeypatch=monkeypatch) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == (
        "Error: there is no link 'fast'.\n"
        '  Write a rate such as "1gbit", "2.5gbit" or "200mbit", a rate and a latency such as "100gbit,5us", or "none" for the '
        "bare loopback.\n"
    )


def test_an_unknown_option_is_exit_code_2(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("demo", "--ranks", "2", monkeypatch=monkeypatch) == 2
    assert "No such option: --ranks" in capsys.readouterr().err


def test_options_become_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[DemoSettings] = []
    monkeypatch.setattr(demo, "run_demo", lambda settings: seen.append(settings) or 1)
    options = ["--nproc", "3", "--link", "5gbit", "--text", "a", "--steps", "4", "--out", "b", "--seed", "5"]
    assert call("demo", *options, "--strategy", "zero1", monkeypatch=monkeypatch) == 1
    expected = DemoSettings(num_ranks=3, link="5gbit", text=Path("a"), num_steps=4, out=Path("b"), seed=5, strategy="zero1")
    assert seen == [expected]


TABLE = """{"params": [
  {"name": "stem.weight", "shape": [1000, 500], "dtype": "bfloat16"},
  {"name": "head.weight", "shape": [500, 400], "dtype": "float32"},
  {"name": "head.bias", "shape": [400], "dtype": "float32"}
]}"""

ZERO2 = """\
zero2, ranks: 3, parameters: 3, MB: 1.80, buckets: 2
┏━━━━━━━━┳━━━━━━━━━━━━━━━━━━━━━━━━━━━┳━━━━━━━┳━━━━━━━━━━┳━━━━━━┳━━━━━━━━━━━━━━┓
┃ bucket ┃ parameters                ┃ count ┃ dtype    ┃   MB ┃ MB per shard ┃
┡━━━━━━━━╇━━━━━━━━━━━━━━━━━━━━━━━━━━━╇━━━━━━━╇━━━━━━━━━━╇━━━━━━╇━━━━━━━━━━━━━━┩
│      0 │ head.bias ... head.weight │     2 │ float32  │ 0.80 │         0.27 │
│      1 │ stem.weight               │     1 │ bfloat16 │ 1.00 │         0.33 │
└────────┴───────────────────────────┴───────┴──────────┴──────┴──────────────┘

id  lane     kind            bucket  reads      writes     after
00  compute  fill            b0      -          grad[b0]   -
01  compute  pack            b0      grad[b0]   grad[b0]   00
02  comm.dp  reduce_scatter  b0      grad[b0]   shard[b0]  01
03  compute  fill            b1      -          grad[b1]   -
04  compute  end             *       -          -          00 03
05  compute  pack            b1      grad[b1]   grad[b1]   04
06  comm.dp  reduce_scatter  b1      grad[b1]   shard[b1]  05
07  compute  join            *       -          -          04
08  compute  bind            b0      shard[b0]  -          02 07
09  compute  bind            b1      shard[b1]  -          06 07
10  compute  step            *       shard[*]   own[*]     08 09
11  comm.dp  all_gather      b1      own[b1]    param[b1]  10
12  comm.dp  all_gather      b0      own[b0]    param[b0]  10
13  compute  use             b1      param[b1]  -          11
14  compute  use             b0      param[b0]  -          12
"""


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Path of a file with a table of three parameters, and a terminal that is wide enough to print about it."""
    monkeypatch.setenv("COLUMNS", "100")
    path = tmp_path / "table.json"
    path.write_text(TABLE)
    return str(path)


def test_a_plan_is_shown_as_buckets_and_a_schedule(
    table: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("plan", table, "--strategy", "zero2", "--ranks", "3", monkeypatch=monkeypatch) == 0
    assert capsys.readouterr().out == ZERO2


@pytest.mark.parametrize(
    ("options", "golden"),
    [
        ([], "data_parallel_3_buckets"),
        (["--no-overlap"], "data_parallel_3_buckets_no_overlap"),
        (["--accumulation"], "accumulation_3_buckets"),
        (["--strategy", "zero1"], "zero1_3_buckets"),
        (["--strategy", "zero2", "--accumulation"], "zero2_accumulation_3_buckets"),
    ],
)
def test_options_choose_the_schedule(
    tmp_path: Path,
    table: str,
    options: list[str],
    golden: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    params = source_from_file(Path(table))
    assert not isinstance(params, Plan)
    saved = tmp_path / "plan.json"  # each parameter in a bucket of its own, whatever the strategy
    saved.write_text(plan_from_groups(params, [[2], [1], [0]], num_ranks=2).to_json())
    assert call("plan", str(saved), *options, monkeypatch=monkeypatch) == 0
    expected = (ROOT / "tests" / "golden" / f"{golden}.txt").read_text()
    assert capsys.readouterr().out.endswith(f"\n\n{expected}")


def test_only_strategies_with_shards_cut_parameters(
    table: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for strategy, num_buckets in (("ddp", 3), ("zero1", 4)):
        assert call("plan", table, "--strategy", strategy, "--bucket-cap-mb", "0.5", monkeypatch=monkeypatch) == 0
        assert capsys.readouterr().out.splitlines()[0].endswith(f"buckets: {num_buckets}")


def test_shards_are_shown_only_where_there_are_some(
    table: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("plan", table, monkeypatch=monkeypatch) == 0
    assert "shard" not in capsys.readouterr().out


def test_without_a_file_the_demos_model_is_planned(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("plan", monkeypatch=monkeypatch) == 0
    sizes, _, rest = capsys.readouterr().out.partition("\n")
    assert sizes == "ddp, ranks: 2, parameters: 77, MB: 19.61, buckets: 10"
    assert len(schedule_from_text(rest.partition("\n\n")[2]).collectives) == 10


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            ["--strategy", "zero3"],
            "there is no strategy 'zero3'.\n  strategy\n  Use torch.distributed.fsdp.fully_shard to shard parameters.",
        ),
        (
            ["--accumulation", "--no-overlap"],
            "--accumulation and --no-overlap cannot go together.\n  undertow plan\n"
            "  Leave one of them out: a backward that only accumulates has one schedule.",
        ),
        (
            ["--ranks", "0"],
            "a plan is for one rank or more, got --ranks 0.\n  undertow plan\n  Give one or more, or leave it out.",
        ),
    ],
)
def test_what_cannot_be_planned_is_refused(
    table: str, options: list[str], expected: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("plan", table, *options, monkeypatch=monkeypatch) == 2
    assert capsys.readouterr().err == f"Error: {expected}\n"


def test_a_file_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("plan", "absent.json", monkeypatch=monkeypatch) == 2
    assert capsys.readouterr().err.startswith("Error: absent.json cannot be read.\n  No such file or directory\n  Give a file")


def test_a_missing_typer_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == (
        'The command needs typer, which is not installed.\n  Install it with: pip install "undertow[cli]"'
    )
