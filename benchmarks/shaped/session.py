"""The ranks of one system, alive from the first round to the last: they idle while other systems take their turns.

A system is built and finds its plan once. Later rounds then measure settled steps, and systems alternate within minutes, so a
machine that drifts drifts for all of them.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import undertow
from benchmarks.errors import RankFailed
from benchmarks.links import Network
from benchmarks.processes import end, interrupts_postponed
from benchmarks.shaped.contenders import Contender
from benchmarks.shaped.environments import python_of, why_absent

HERE = Path(undertow.__file__).parents[1]  # the folder of the library that is on the path
_ROOT = Path(__file__).parents[2]
_SILENCE_S = 1800.0  # for one turn, or to build and settle: then the ranks are given up
_GRACE_S = 0.5  # until processes that have closed their pipes have ended
_LOG_LINES = 15


class Session:
    """Live ranks of `contender`; used in a `with`, which ends them. `source` is the folder that holds the library.

    Raises RankFailed if the contender's virtual environment is not there. A call that raises it has ended all ranks.
    """

    def __init__(self, contender: Contender, workload: str, network: Network, *, num_ranks: int, source: Path) -> None:
        python = python_of(contender.environment)
        if python is None:
            raise RankFailed(why_absent(contender.environment))
        self.contender = contender
        self._ranks: list[subprocess.Popen[str]] = []
        self._folder = tempfile.TemporaryDirectory(prefix="undertow-shaped-")
        job = {
            "runner_pid": os.getpid(),
            "store": str(Path(self._folder.name) / "store"),
            "workload": workload,
            "module": contender.module,
            "options": dict(contender.options),
            "num_settling": contender.num_settling,
            "most_settling": contender.most_settling,
            "is_averaged": contender.is_averaged,
            "rounding": contender.rounding,
        }
        command = [str(python), "-m", "benchmarks.shaped.rank", json.dumps(job)]
        for rank in range(num_ranks):
            environment = {
                **os.environ,
                "PYTHONPATH": os.pathsep.join((str(source), str(_ROOT))),
                "OMP_NUM_THREADS": "1",
                "GLOO_SOCKET_IFNAME": network.interface,
                "TORCH_CPP_LOG_LEVEL": "ERROR",
                "RANK": str(rank),
                "LOCAL_RANK": "0",  # a namespace is a host
                "WORLD_SIZE": str(num_ranks),
            }
            with interrupts_postponed(), self._log(rank).open("wb") as log:
                started = subprocess.Popen(
                    network.command(rank, command),
                    env=environment,
                    cwd=self._folder.name,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                    start_new_session=True,  # Ctrl-C is for the runner, which ends the ranks
                )
                self._ranks.append(started)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_error: object) -> None:
        self.end()
        self._folder.cleanup()

    def end(self) -> None:
        """Ends the ranks."""
        with interrupts_postponed():
            end(self._ranks)
            for rank in self._ranks:
                for pipe in (rank.stdin, rank.stdout):
                    assert pipe is not None
                    with suppress(BrokenPipeError):  # a command that no rank has read
                        pipe.close()
            self._ranks = []

    def settle(self) -> list[list[float]]:
        """Waits until the system is built and its first steps are made; returns their milliseconds, rank by rank."""
        return [answer["steps_ms"] for answer in self._answers()]

    def train(self, num_steps: int) -> list[dict[str, Any]]:
        """Returns the milliseconds of `num_steps` steps and the CPU time of one, rank by rank."""
        return self._ask({"do": "train", "num_steps": num_steps})

    def told(self) -> dict[str, str]:
        """Returns the texts that the system has about itself on the first rank."""
        texts: dict[str, str] = self._ask({"do": "tell"})[0]["told"]
        return texts

    def _ask(self, command: dict[str, Any]) -> list[dict[str, Any]]:
        for rank in self._ranks:
            assert rank.stdin is not None
            with suppress(BrokenPipeError):  # its log says why, below
                rank.stdin.write(json.dumps(command) + "\n")
                rank.stdin.flush()
        return self._answers()

    def _answers(self) -> list[dict[str, Any]]:
        until_s = time.monotonic() + _SILENCE_S
        waiting = {rank.stdout: index for index, rank in enumerate(self._ranks)}
        found: dict[int, dict[str, Any]] = {}
        while waiting:
            readable, _, _ = select.select(list(waiting), [], [], max(0.0, until_s - time.monotonic()))
            if not readable:
                raise self._failure(f"no answer for {_SILENCE_S:.0f} s", 0)
            for pipe in readable:
                index, line = waiting.pop(pipe), pipe.readline()
                if not line:
                    raise self._end_of(index)
                found[index] = json.loads(line)
        return [found[index] for index in sorted(found)]

    def _log(self, rank: int) -> Path:
        return Path(self._folder.name) / f"rank-{rank}.log"

    def _end_of(self, rank: int) -> RankFailed:
        """Returns the error if the pipe of `rank` has ended; names a killed rank, which the others complain about."""
        time.sleep(_GRACE_S)
        killed = [index for index, each in enumerate(self._ranks) if (each.poll() or 0) < 0]
        if not killed:
            return self._failure(f"rank {rank} has ended", rank)
        code = self._ranks[killed[0]].returncode
        return self._failure(f"rank {killed[0]} was killed by {signal.Signals(-code).name}", killed[0])

    def _failure(self, why: str, rank: int) -> RankFailed:
        """Ends the ranks; returns the error, with the end of the log of `rank`."""
        self.end()
        lines = self._log(rank).read_text(encoding="utf-8", errors="replace").splitlines()[-_LOG_LINES:]
        last_words = "The end of its log:\n" + "\n".join(lines) if lines else "Its log is empty."
        return RankFailed(f"{self.contender.name}: {why}. {last_words}")
