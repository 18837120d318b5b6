"""Runs of the harness: the entry and ranks of `make bench`, cells of the matrix, and with root what shaped links carry."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch.distributed as dist
from benchmarks import host_overhead
from benchmarks.__main__ import main
from benchmarks.matrix import links, run
from benchmarks.matrix.catalog import SYSTEMS, SystemSpec
from benchmarks.matrix.environments import peers, python_of, why_absent
from benchmarks.matrix.links import PREFIX, remove_abandoned
from benchmarks.ranks import run_ranks

from support.project import ROOT

pytestmark = pytest.mark.bench
Measure, PATIENCE_S = Callable[..., dict[str, dict[str, Any]]], 120.0


def test_a_part_is_measured_judged_and_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        {"system": "torch DDP, batched_grad_copy", "above_bare_ms": 2.0, "ratio_to_torch": 0.5},
        {"system": "Undertow", "above_bare_ms": 1.0, "ratio_to_torch": 0.25},
    ]
    monkeypatch.setattr(host_overhead, "run", lambda *, num_repetitions: rows[:2] if num_repetitions == 1 else [])
    assert main(["--only", "host-overhead", "--quick", "--out", str(tmp_path)]) == 0
    machine, *lines = (json.loads(line) for line in (tmp_path / "bench.jsonl").read_text().splitlines())
    assert machine["is_quick"]
    assert [it["system"] for it in lines if it["type"] == "measurement"] == [row["system"] for row in rows]
    figures = {line["figure"]: line["target"] for line in lines if line["type"] == "figure"}
    assert figures["host overhead over torch DDP's default"] == "≤ 0.50 x"
    assert "host overhead over torch DDP's batched_grad_copy" in capsys.readouterr().out


def _one_raises(rank: int) -> None:
    if rank == 1:
        raise ValueError("not on this rank")
    dist.barrier()


def test_a_rank_that_raises_ends_the_others() -> None:
    with pytest.raises(RuntimeError, match=r"rank 1:\n(.|\n)*ValueError: not on this rank"):
        run_ranks(_one_raises, 2)
    assert _ranks() == []


def _ranks() -> list[int]:
    processes = [it.info for it in psutil.process_iter(["pid", "ppid", "cmdline"])]
    return [it["pid"] for it in processes if it["ppid"] == os.getpid() and "spawn_main" in " ".join(it["cmdline"] or ())]


def bad(how: str) -> SystemSpec:
    return SystemSpec(name=how, title=how, module="tests.support.bad_systems", variants={"": {"how": how}})


@pytest.mark.usefixtures("forked")
def test_every_system_of_the_main_environment_trains_right(measure: Measure) -> None:
    ours = ("ours", "ours-ordered", "ours-zero1", "ours-zero2")
    names = ("bare", "per-parameter", *ours, "torch-ddp", "torch-ddp-best", "torch-zero", "fsdp2")
    rows = measure(*names, kind="local", link="none")
    # Two of the four steps of a turn count.
    assert {name: (row["error"], row["num_steps"]) for name, row in rows.items()} == dict.fromkeys(names, (None, 2))
    # The sweep shows the best of its variants. Ranks share the interface: nobody's bytes can be told.
    assert rows["torch-ddp-best"]["variant"] is not None
    assert (rows["ours"]["sent_mb"], rows["per-parameter"]["collectives"]) == (None, 48)
    # Half of the momentum of 480,000 elements; torch's gives whole parameters away.
    whole = rows["per-parameter"]["state_mb"]
    for name in ("ours-zero1", "ours-zero2"):
        assert rows[name]["state_mb"] == pytest.approx(whole / 2, rel=0.02), name


@pytest.mark.parametrize("environment", peers())
def test_every_system_of_a_peer_trains_right(environment: str, measure: Measure) -> None:
    if python_of(environment) is None:
        pytest.skip(why_absent(environment))
    names = [name for name, spec in SYSTEMS.items() if spec.environment == environment]
    rows = measure("bare", *names, kind="local", link="none")
    assert {name: rows[name]["error"] for name in names} == dict.fromkeys(names)


FAILING = {
    "forgets to average": "trains wrongly: blocks.0.params.0, blocks.0.params.1, blocks.1.params.0 and 48 in all are not",
    "dies": "rank 1 was killed by SIGKILL. The end of rank 1's log:\nthe last line of rank 1",
}
ABSENT = {
    "cannot be imported": ({"module": "no_such_package"}, "ModuleNotFoundError: No module named 'no_such_package'"),
    "has no environment": (
        {"module": "x", "environment": "never-made"},
        "no virtual environment .venv-peers/never-made; make bench-peers makes it",
    ),
}


@pytest.mark.usefixtures("forked")
def test_systems_that_fail_are_lost_alone(measure: Measure) -> None:
    systems = [bad(how) for how in FAILING]
    systems += [SystemSpec(name=name, title=name, **given) for name, (given, _) in ABSENT.items()]
    rows = measure("bare", *systems, "per-parameter", kind="local", link="none")
    for name, error in FAILING.items():
        assert error in rows[name]["error"], name
    others = {name: error for name, (_, error) in ABSENT.items()} | {"bare": None, "per-parameter": None}
    assert {name: rows[name]["error"] for name in others} == others


@pytest.mark.usefixtures("forked")
def test_without_root_links_are_not_shaped_and_the_table_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(links.shutil, "which", lambda tool: f"/sbin/{tool}")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    chosen = ("--workload", "replay@0.01", "--ranks", "2", "--link", "1gbit", "--system", "ours")
    assert run.main([*chosen, "--quick", "--steps", "2", "--out", str(tmp_path)]) == 0
    assert "no shaped links: this user is not root. Ranks talk over this machine's loopback: " in capsys.readouterr().err
    machine, bare, ours = (json.loads(line) for line in (tmp_path / "matrix.jsonl").read_text().splitlines())
    assert (
        (machine["links"], bare["kind"], ours["kind"], ours["system"]),
        "1gbit (local)" in (tmp_path / "matrix.md").read_text(),
    ) == (
        ("local (this user is not root)", "local", "local", "ours"),
        True,
    )
    assert {path.name for path in tmp_path.iterdir()} == {"matrix.jsonl", "matrix.md", "profiles"}


# Over networks of namespaces.


def namespaces_of(process_id: int) -> list[str]:
    return sorted(path.name for path in Path("/run/netns").glob(f"{PREFIX}{process_id}-*"))


@pytest.fixture
def runner(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A matrix in a process of its own, which has begun with its first run."""
    chosen = ("--workload", "replay", "--ranks", "2", "--link", "1gbit", "--system", "ours", "--out", str(tmp_path))
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks", "matrix", *chosen],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()
        remove_abandoned()


def workers_of(process: psutil.Process) -> list[psutil.Process]:
    return [it for it in process.children() if "benchmarks.matrix.worker" in it.cmdline()]


def wait_for_its_ranks(runner: subprocess.Popen[str]) -> list[psutil.Process]:
    next(line for line in runner.stderr if ": bare, " in line)
    watched = psutil.Process(runner.pid)
    while True:
        if len(ranks := workers_of(watched)) == 2:
            return ranks
        assert runner.poll() is None


@pytest.mark.root
@pytest.mark.usefixtures("needs_namespaces", "forked")
def test_a_shaped_link_counts_what_each_rank_sends(measure: Measure) -> None:
    rows = measure("bare", "per-parameter", "ours", kind="shaped")
    assert ({row["error"] for row in rows.values()}, namespaces_of(os.getpid())) == ({None}, [])
    # An all-reduce of 0.48 MB between two ranks sends it once each; headers and acknowledgements come on top.
    assert rows["bare"]["sent_mb"] <= 0.01 < 0.48 <= rows["ours"]["sent_mb"] <= 0.60


@pytest.mark.root
@pytest.mark.usefixtures("needs_namespaces")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_matrix_tears_down(number: signal.Signals, runner: subprocess.Popen[str]) -> None:
    ranks = wait_for_its_ranks(runner)
    runner.send_signal(number)
    assert (runner.wait(PATIENCE_S), namespaces_of(runner.pid)) == (130, [])
    assert not any(rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE for rank in ranks)


@pytest.mark.root
@pytest.mark.usefixtures("needs_namespaces")
def test_what_a_killed_matrix_leaves_is_removed_by_the_next(runner: subprocess.Popen[str]) -> None:
    ranks, left = wait_for_its_ranks(runner), namespaces_of(runner.pid)
    assert len(left) == 3
    runner.kill()
    runner.wait(PATIENCE_S)
    psutil.wait_procs(ranks, timeout=PATIENCE_S)  # the kernel ends them with their parent
    assert not any(rank.is_running() for rank in ranks)
    _, not_removed = remove_abandoned()  # a run of another test may have removed them first
    assert (not_removed, namespaces_of(runner.pid)) == (None, [])
