import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from benchmarks.matrix import links, run
from benchmarks.matrix.catalog import SYSTEMS, SystemSpec
from benchmarks.matrix.cell import Effort
from benchmarks.matrix.environments import peers, python_of, why_absent

pytestmark = pytest.mark.bench
Measure = Callable[..., dict[str, dict[str, Any]]]


def bad(how: str) -> SystemSpec:
    return SystemSpec(name=how, title=how, module="tests.support.bad_systems", variants={"": {"how": how}})


def test_every_system_of_the_main_environment_trains_right_over_the_emulated_link(measure: Measure) -> None:
    ours = ("ours", "ours-ordered", "ours-zero1", "ours-zero2", "ours-eager")
    names = ("bare", "per-parameter", *ours, "torch-ddp", "torch-ddp-best", "torch-zero", "fsdp2")
    rows = measure(*names, kind="emulated", link="none")
    assert {name: row["error"] for name, row in rows.items()} == dict.fromkeys(names)
    assert {row["num_steps"] for row in rows.values()} == {2}  # of the four of a turn
    # The sweep shows the best of its variants.
    assert rows["torch-ddp-best"]["variant"] is not None
    assert rows["ours"]["sent_mb"] is None  # ranks share the interface: nobody's bytes can be told
    assert rows["per-parameter"]["collectives"] == 48
    # Half of the momentum of 480,000 elements; torch's gives whole parameters away.
    whole = rows["per-parameter"]["state_mb"]
    for name in ("ours-zero1", "ours-zero2", "ours-eager"):
        assert rows[name]["state_mb"] == pytest.approx(whole / 2, rel=0.02), name


def test_start_up_and_memory_are_measured_of_each_system_alone(measure: Measure) -> None:
    rows = measure("bare", "ours", kind="emulated", link="none", effort=Effort(num_turns=1, has_start_up=True))
    for row in rows.values():
        assert row["error"] is None
        assert min(row["import_ms"], row["first_step_ms"]) > 0
        assert 100 < row["peak_rss_mb"] < 2_000  # torch alone is some 200 MB


@pytest.mark.parametrize("name", ["gpt", "resnet"])
def test_models_that_compute_train_right(name: str, measure: Measure) -> None:
    rows = measure("bare", "ours-untuned", "torch-ddp", kind="emulated", link="none", name=name)
    assert [row["error"] for row in rows.values()] == [None] * 3


@pytest.mark.parametrize("environment", peers())
def test_every_system_of_a_peer_trains_right_over_the_emulated_link(environment: str, measure: Measure) -> None:
    if python_of(environment) is None:
        pytest.skip(why_absent(environment))
    names = [name for name, spec in SYSTEMS.items() if spec.environment == environment]
    rows = measure("bare", *names, kind="emulated", link="none")
    assert {name: rows[name]["error"] for name in names} == dict.fromkeys(names)


FAILING = {
    "forgets to average": "trains wrongly: blocks.0.params.0, blocks.0.params.1, blocks.1.params.0 and 48 in all are not",
    "reads too early": "trains wrongly: blocks.0.params.0, blocks.0.params.1, blocks.1.params.0 and 48 in all are not",
    "wrong on rank 1": "on rank 1: trains wrongly: blocks.0.params.0, blocks.0.params.1, blocks.1.params.0 and 48 in all",
    "fails on rank 1": "ValueError: not on this rank",
    "dies": "rank 1 was killed by SIGKILL. The end of rank 1's log:\nthe last line of rank 1",
}
ABSENT = {
    "cannot be imported": ({"module": "no_such_package"}, "ModuleNotFoundError: No module named 'no_such_package'"),
    "has no environment": (
        {"module": "x", "environment": "never-made"},
        "no virtual environment .venv-peers/never-made; make bench-peers makes it",
    ),
}


def test_systems_that_fail_are_lost_alone(measure: Measure) -> None:
    systems = [bad(how) for how in FAILING]
    systems += [SystemSpec(name=name, title=name, **given) for name, (given, _) in ABSENT.items()]
    rows = measure("bare", *systems, "per-parameter", kind="emulated", link="none")
    for name, error in FAILING.items():
        assert error in rows[name]["error"], name
    assert {name: rows[name]["error"] for name in ABSENT} == {name: error for name, (_, error) in ABSENT.items()}
    assert (rows["bare"]["error"], rows["per-parameter"]["error"]) == (None, None)


def test_without_root_the_emulated_link_is_used_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(links.shutil, "which", lambda tool: f"/sbin/{tool}")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    chosen = ("--workload", "replay@0.01", "--ranks", "2", "--link", "1gbit", "--system", "ours")
    assert run.main([*chosen, "--quick", "--steps", "2", "--out", str(tmp_path)]) == 0
    assert "no shaped links: this user is not root. Going on with the emulated link." in capsys.readouterr().err
    machine, bare, ours = (json.loads(line) for line in (tmp_path / "matrix.jsonl").read_text().splitlines())
    assert machine["links"] == "emulated (this user is not root)"
    assert (bare["kind"], ours["kind"], ours["system"]) == ("emulated", "emulated", "ours")
    assert "1gbit (emulated)" in (tmp_path / "matrix.md").read_text()
    pictures = {f"matrix-replay@0.01.{kind}" for kind in ("png", "svg")}
    assert {path.name for path in tmp_path.iterdir()} == {"matrix.jsonl", "matrix.md", "profiles", *pictures}


def test_a_missing_tool_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links.shutil, "which", lambda tool: None if tool == "tc" else tool)
    assert links.what_is_missing() == "'tc' is not installed (Debian, Ubuntu: apt-get install iproute2)"
