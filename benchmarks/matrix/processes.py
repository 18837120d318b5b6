"""The ranks of a run as processes: started, waited for, and always ended."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.matrix.errors import RankFailed
from benchmarks.matrix.job import Job
from benchmarks.matrix.links import Network, interrupts_postponed

ROOT = Path(__file__).parents[2]
_POLL_S = 0.05
_LOG_LINES = 12
_BLAME = {-signal.SIGKILL: 0, -signal.SIGSEGV: 0, -signal.SIGBUS: 0, -signal.SIGABRT: 2}  # by return code, others 1


def run_job(job: Job, network: Network, *, python: str = sys.executable, silence_s: float) -> list[dict[str, Any]]:
    """What each rank brought back. Raises RankFailed with the end of the log of the rank that failed."""
    command = [python, "-m", "benchmarks.matrix.worker", str(job.write())]
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(job.num_ranks):
            with interrupts_postponed(), job.log_path(rank).open("wb") as log:
                ranks.append(
                    subprocess.Popen(
                        network.command(rank, [*command, str(rank)]),
                        env=_environment(network),
                        cwd=job.folder,
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,  # Ctrl-C is for us, who end them; and a rank's children end with it
                    )
                )
        _wait(job, ranks, silence_s)
    finally:
        with interrupts_postponed():
            end(ranks)
    return [json.loads(job.result_path(rank).read_text(encoding="utf-8")) for rank in range(job.num_ranks)]


def _environment(network: Network) -> dict[str, str]:
    paths = [str(ROOT), str(ROOT / "src")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONDONTWRITEBYTECODE": "1",
        "GLOO_SOCKET_IFNAME": network.interface,
        "OMP_NUM_THREADS": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }


def _wait(job: Job, ranks: list[subprocess.Popen[bytes]], silence_s: float) -> None:
    began_s = time.time()
    while True:
        is_over = all(rank.poll() is not None for rank in ranks)
        failed = [index for index, rank in enumerate(ranks) if _has_failed(job, index, rank)]
        if failed:
            # The cause is among the first: who ends later may do so because they are gone. One that was killed says nothing, and
            # is what the others complain about; one that aborts may be gloo's way of ending behind an error of another rank.
            cause = min(failed, key=lambda index: _BLAME.get(ranks[index].returncode, 1))
            raise RankFailed(f"rank {cause} {_how(ranks[cause].returncode)}. {_last_words(job, cause)}")
        if is_over:
            return
        if time.time() - max(began_s, _last_sign_s(job)) > silence_s:
            raise RankFailed(f"no rank has come further for {silence_s:.0f} s. {_last_words(job, 0)}")
        time.sleep(_POLL_S)


def _last_sign_s(job: Job) -> float:
    paths = [job.alive_path(rank) for rank in range(job.num_ranks)]
    return max((path.stat().st_mtime for path in paths if path.exists()), default=0.0)


def _has_failed(job: Job, index: int, rank: subprocess.Popen[bytes]) -> bool:
    """A process that aborts at exit, after its results are written, has done its work; one that ends well without has not."""
    return rank.poll() is not None and not job.result_path(index).exists()


def _how(returncode: int) -> str:
    return f"was killed by {signal.Signals(-returncode).name}" if returncode < 0 else f"ended with exit code {returncode}"


def _last_words(job: Job, rank: int) -> str:
    text = job.log_path(rank).read_text(encoding="utf-8", errors="replace").replace(f"{ROOT}{os.sep}", "")  # rows are published
    lines = text.splitlines()[-_LOG_LINES:]
    return f"The end of rank {rank}'s log:\n" + "\n".join(lines) if lines else f"Rank {rank} has written nothing."


def end(ranks: Sequence[subprocess.Popen[Any]]) -> None:
    """Kills ranks that were started in sessions of their own, and what they have started."""
    for rank in ranks:
        # Its session is ours alone: the rank and what it has started, which may be there when the rank is not any more.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(rank.pid, signal.SIGKILL)
    for rank in ranks:
        rank.wait()
