"""With root and iproute2: what shaped links carry, and that nothing of them stays."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from benchmarks.matrix.catalog import SystemSpec
from benchmarks.matrix.links import PREFIX, remove_abandoned, shaped_network

from support.project import ROOT

pytestmark = [pytest.mark.bench, pytest.mark.root, pytest.mark.usefixtures("needs_namespaces")]
Measure = Callable[..., dict[str, dict[str, Any]]]
PATIENCE_S = 120.0


def namespaces_of(process_id: int) -> list[str]:
    return sorted(path.name for path in Path("/run/netns").glob(f"{PREFIX}{process_id}-*"))


@pytest.fixture
def runner(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A matrix in a process of its own, which has begun with its first run."""
    chosen = ("--workload", "replay", "--ranks", "2", "--link", "1gbit", "--system", "ours", "--out", str(tmp_path))
    command = [sys.executable, "-m", "benchmarks", "matrix", *chosen]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()
        remove_abandoned()


def wait_for_its_ranks(runner: subprocess.Popen[str]) -> list[psutil.Process]:
    for line in runner.stderr:
        if ": bare, " in line:
            break
    watched = psutil.Process(runner.pid)
    while True:
        ranks = [it for it in watched.children() if "benchmarks.matrix.worker" in it.cmdline()]
        if len(ranks) == 2:
            return ranks
        assert runner.poll() is None


def test_a_shaped_link_counts_what_each_rank_sends(measure: Measure) -> None:
    rows = measure("bare", "per-parameter", "ours", kind="shaped")
    assert {row["error"] for row in rows.values()} == {None}
    # An all-reduce of 0.48 MB between two ranks sends it once each; headers and acknowledgements come on top.
    assert 0.48 <= rows["ours"]["sent_mb"] <= 0.60
    assert rows["bare"]["sent_mb"] <= 0.01
    assert namespaces_of(os.getpid()) == []


def test_a_rank_that_dies_leaves_nothing(measure: Measure) -> None:
    dying = SystemSpec(name="bad", title="bad", module="tests.support.bad_systems", variants={"": {"how": "dies"}})
    rows = measure("bare", "per-parameter", dying, kind="shaped")
    assert ("rank 1 was killed by SIGKILL" in rows["bad"]["error"], rows["per-parameter"]["error"]) == (True, None)
    assert namespaces_of(os.getpid()) == []
    assert [it for it in psutil.Process().children() if "benchmarks.matrix.worker" in it.cmdline()] == []


def fail_inside() -> None:
    with shaped_network("5gbit", 2):
        assert len(namespaces_of(os.getpid())) == 3
        raise ZeroDivisionError


def test_an_exception_inside_leaves_nothing() -> None:
    with pytest.raises(ZeroDivisionError):
        fail_inside()
    assert namespaces_of(os.getpid()) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupted_matrix_tears_down(number: signal.Signals, runner: subprocess.Popen[str]) -> None:
    ranks = wait_for_its_ranks(runner)
    runner.send_signal(number)
    assert (runner.wait(PATIENCE_S), namespaces_of(runner.pid)) == (130, [])
    assert not any(rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE for rank in ranks)


def test_what_a_killed_matrix_leaves_is_removed_by_the_next(runner: subprocess.Popen[str]) -> None:
    ranks = wait_for_its_ranks(runner)
    left = namespaces_of(runner.pid)
    assert len(left) == 3
    runner.kill()
    runner.wait(PATIENCE_S)
    psutil.wait_procs(ranks, timeout=PATIENCE_S)  # the kernel ends them with their parent
    assert not any(rank.is_running() for rank in ranks)
    removed, not_removed = remove_abandoned()
    assert (set(left) <= set(removed), not_removed, namespaces_of(runner.pid)) == (True, None, [])
