"""Ranks that may end in any way: processes of their own, what they say through a pipe, and how they end."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import support.ranks  # noqa: F401  # has what ranks import be imported once, before they are forked

_EXIT_S = 10.0  # from the last word of all to the end of the process
_FORKSERVER = multiprocessing.get_context("forkserver")
Target = Callable[[int, Path, Connection], None]  # rank, a directory of all ranks, where to send what is said


@dataclass(frozen=True)
class Ended:
    """What a rank has said, and how it ended."""

    words: dict[str, Any] = field(default_factory=dict)
    exit_code: int | None = None
    was_killed: bool = False  # by us, for it had not ended
    log: str = ""  # what it has written into its `log_file`, where it has one; if it had to be killed, its stacks too


def run_ranks(target: Target, num_ranks: int, *, patience_s: float) -> list[Ended]:
    """How each rank ends that calls `target`; one that says `stopped` is not waited for."""
    with tempfile.TemporaryDirectory() as directory:
        connections, processes = [], []
        try:
            for rank in range(num_ranks):
                ours, theirs = _FORKSERVER.Pipe(duplex=False)
                process = _FORKSERVER.Process(target=target, args=(rank, Path(directory), theirs), daemon=True)
                process.start()
                theirs.close()
                connections.append(ours)
                processes.append(process)
            said = _listen(connections, patience_s)
            until_s = time.monotonic() + _EXIT_S
            for process, words in zip(processes, said, strict=True):
                process.join(0.0 if words.get("stopped") else max(0.0, until_s - time.monotonic()))
            late = [process.is_alive() for process in processes]
            logs = [
                _log_of(log_file(Path(directory), rank), process.pid if late[rank] and not said[rank].get("stopped") else None)
                for rank, process in enumerate(processes)
            ]
        finally:
            for process in processes:
                process.kill()
                process.join()
        codes = [process.exitcode for process in processes]
        return [Ended(*how) for how in zip(said, codes, late, logs, strict=True)]


def log_file(directory: Path, rank: int) -> Path:
    """Where a rank may write for people; one that has this file is taken to write its stacks there at SIGUSR1."""
    return directory / f"log-{rank}.txt"


def stop_here(at: Path) -> None:
    """Stops this process by a signal until somebody has it go on; its number is in that file."""
    part = at.with_suffix(".part")
    part.write_text(str(os.getpid()))
    part.replace(at)
    os.kill(os.getpid(), signal.SIGSTOP)


def wait_until_stopped(at: Path) -> int:
    """The number of the process that stops there, as soon as it has."""
    while not at.exists() or Path(f"/proc/{at.read_text()}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        time.sleep(0.005)
    return int(at.read_text())


def _listen(connections: list[Connection], patience_s: float) -> list[dict[str, Any]]:
    said: list[dict[str, Any]] = [{} for _ in connections]
    still_open, until_s = list(connections), time.monotonic() + patience_s
    while ready := wait(still_open, timeout=max(0.0, until_s - time.monotonic())):
        for connection in ready:
            try:
                said[connections.index(connection)].update(connection.recv())
            except (EOFError, ConnectionResetError):
                still_open.remove(connection)
        if all(said[connections.index(connection)].get("stopped") for connection in still_open):
            break  # these will never say more
    return said


def _log_of(path: Path, late_process: int | None) -> str:
    if not path.exists():
        return ""
    if late_process is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(late_process, signal.SIGUSR1)
        time.sleep(0.5)  # for it to be written; only people read it
    return path.read_text()
