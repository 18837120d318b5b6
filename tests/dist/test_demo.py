from __future__ import annotations

import io
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from support.inside import demo_ranks
from undertow.demo import DemoSettings, run_demo

PATIENCE_S = 60.0


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has the demo's ranks forked off what the tests have loaded, where it would start an interpreter for each."""
    forkserver = multiprocessing.get_context("forkserver")
    monkeypatch.setattr(multiprocessing, "get_context", lambda _method: forkserver)


def run_and_read(settings: DemoSettings) -> tuple[int, str]:
    console = Console(file=io.StringIO(), width=100)
    with console.capture() as captured:
        code = run_demo(settings, console)
    return code, captured.get()


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(
    ("num_ranks", "strategy", "verdict"),
    [
        (1, "zero2", "All 6 ways found the same gradients, parameters and loss."),
        (2, "ddp", "All 5 ways found the same gradients, parameters and loss."),
        (2, "zero1", "All 6 ways found the same gradients, parameters and loss."),
        (3, "zero2", "All 6 ways found the same gradients and loss."),
    ],
)
def test_all_ways_agree_and_the_pictures_are_there(num_ranks: int, strategy: str, verdict: str, tmp_path: Path) -> None:
    settings = DemoSettings(num_ranks=num_ranks, link="none", num_steps=1, out=tmp_path, strategy=strategy)
    code, text = run_and_read(settings)
    assert verdict in text
    assert code == 0
    assert {path.name for path in tmp_path.iterdir()} == {"demo.png", *(f"demo-{way}.png" for way in settings.ways)}
    rows = [line.split() for line in text.splitlines() if line.rstrip().endswith(" yes")]
    assert len(rows) == len(settings.ways)
    assert len({row[-2] for row in rows}) == 1  # their losses
    if strategy != "ddp" and num_ranks > 1:
        num_ops = int(rows[-1][-3])
        assert num_ops > 2
        assert num_ops % 2 == 0  # each bucket is reduced and gathered


def fail_in_rank_1(rank: int, *arguments: object) -> None:
    if rank == 1:
        os._exit(3)
    threading.Event().wait()


@pytest.mark.usefixtures("forked")
def test_a_failed_rank_is_exit_code_1(tmp_path: Path) -> None:
    with demo_ranks(fail_in_rank_1):
        code, text = run_and_read(DemoSettings(out=tmp_path))
    assert code == 1
    assert "rank 1 has failed.\n  It ended with exit code 3." in text


@pytest.fixture
def demo(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """The command, in a session of its own as on a terminal."""
    command = [sys.executable, "-c", "from undertow.cli import main; main()", "demo", "--out", str(tmp_path)]
    started = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True)
    with started:
        yield started
        started.kill()


@pytest.mark.slow
@pytest.mark.parametrize("is_interrupted", [True, False], ids=["Ctrl-C", "killed"])
def test_ranks_do_not_outlive_the_process_that_started_them(demo: subprocess.Popen[str], is_interrupted: bool) -> None:
    ranks, until_s = [], time.monotonic() + PATIENCE_S
    while len(ranks) < 2:
        assert time.monotonic() < until_s, "the ranks did not start"
        time.sleep(0.02)
        ranks = [child for child in psutil.Process(demo.pid).children() if "spawn_main" in " ".join(child.cmdline())]
    if is_interrupted:
        os.killpg(demo.pid, signal.SIGINT)
    else:
        demo.kill()
    text, _ = demo.communicate(timeout=PATIENCE_S)
    assert psutil.wait_procs(ranks, timeout=PATIENCE_S)[1] == []
    if is_interrupted:
        assert demo.returncode == 130
        assert text.endswith("Interrupted; all ranks have ended.\n")
        assert "Traceback" not in text
