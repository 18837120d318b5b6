"""Ranks that may end in any way: processes of their own, what they say through a pipe, and how they end.

They are forked off the same server as the ranks of support.ranks, and do not outlive the tests, whatever ends those.
"""

import contextlib
import ctypes
import faulthandler
import gc
import logging
import multiprocessing.forkserver
import os
import random
import runpy
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import torch
import torch.distributed as dist

import support.ranks  # noqa: F401  # has what ranks import be imported once, before they are forked
from support.inside import shorten_patience

_EXIT_S = 10.0  # from the last word of all to the end of the process
_STAYS_S = 15.0  # longer than any rank may take to learn of a fault
PATIENCE = 0.2  # of the library: tests wait for a fifth of what users wait for, but where seconds are recorded
_PR_SET_PDEATHSIG = 1
_FORKSERVER = multiprocessing.get_context("forkserver")


class Rank(logging.Handler):
    """One rank, within its process. What the library logs is kept."""

    def __init__(self, number: int, num_ranks: int, directory: Path, port: int, connection: Connection) -> None:
        super().__init__()
        self.number, self.num_ranks, self.directory = number, num_ranks, directory
        self.logged: list[str] = []
        self._store = dist.TCPStore("127.0.0.1", port, is_master=False)
        self._words = dist.PrefixStore("words", dist.TCPStore("127.0.0.1", port, is_master=False))
        self._connection = connection
        logging.getLogger("undertow").addHandler(self)

    def meet(self, backend: str = "gloo") -> None:
        dist.init_process_group(backend, store=self._store, rank=self.number, world_size=self.num_ranks)

    def enter_environment(self, port: int, *, attempt: int = 0) -> None:
        """Sets the variables that torchrun sets, by which ranks meet at env://; rank 0 serves the store at that port."""
        places = {"RANK": self.number, "LOCAL_RANK": self.number, "WORLD_SIZE": self.num_ranks}
        variables = {**places, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RESTART_COUNT": attempt}
        os.environ |= {name: str(value) for name, value in variables.items()}

    def say(self, **words: Any) -> None:
        self._connection.send(words)

    def tell(self, word: str) -> None:
        self._words.set(f"{word}/{self.number}", "")

    def waits_for(self, word: str, ranks: Iterable[int]) -> None:
        """Returns when these ranks have told it, or not in time."""
        keys, until_s = [f"{word}/{rank}" for rank in ranks], time.monotonic() + _STAYS_S
        while not self._words.check(keys) and time.monotonic() < until_s:  # a wait would keep other threads from the store
            time.sleep(0.005)

    def emit(self, record: logging.LogRecord) -> None:
        self.logged.append(self.format(record))
        self.tell(f"logged {len(self.logged)}")


Target = Callable[[Rank], Any]


@dataclass(frozen=True)
class Ended:
    words: dict[str, Any] = field(default_factory=dict)
    exit_code: int | None = None
    was_killed: bool = False  # by us, for it had not ended
    out: str = ""
    log: str = ""  # its stderr; if it had to be killed, its stacks too

    @property
    def kind(self) -> str:
        return self.words.get("kind", "")

    @property
    def text(self) -> str:
        return self.words.get("text", "")

    @property
    def seconds(self) -> float:
        return self.words.get("seconds", 0.0)


def run_ranks(
    target: Target, num_ranks: int, *, patience_s: float = 60.0, stays: Collection[int] = (), is_script: bool = False
) -> list[Ended]:
    """How each rank ends that calls `target`; those that are to stay are not waited for.

    A rank says as `value` what its target returned. If it `is_script` the interpreter ends as after a script of its own.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as directory:
        connections, processes = [], []
        try:
            for rank in range(num_ranks):
                ours, theirs = _FORKSERVER.Pipe(duplex=False)
                arguments = target, is_script, PATIENCE, (rank, num_ranks, Path(directory), store.port, theirs)
                process = _FORKSERVER.Process(target=_serve, args=arguments, daemon=True)
                process.start()
                theirs.close()
                connections.append(ours)
                processes.append(process)
            awaited = [rank for rank in range(num_ranks) if rank not in stays]
            said = _listen(connections, awaited, patience_s)
            until_s = time.monotonic() + _EXIT_S
            for rank in awaited:
                processes[rank].join(max(0.0, until_s - time.monotonic()))
            late = [process.is_alive() for process in processes]
            if any(late[rank] for rank in awaited):
                _dump_stacks(process.pid for process in processes)
        finally:
            for process in processes:
                process.kill()
                process.join()
        codes = [process.exitcode for process in processes]
        texts = [[path.read_text() for path in _files(Path(directory), rank)] for rank in range(num_ranks)]
        return [Ended(*how, *text) for *how, text in zip(said, codes, late, texts, strict=True)]


def example(path: Path, rank: Rank, *, port: int, folder: Path, arguments: Collection[str] = (), attempt: int = 0) -> None:
    """Runs a file as `__main__` in that folder, as torchrun does; for `run_ranks`."""
    rank.enter_environment(port, attempt=attempt)
    os.chdir(folder)
    sys.argv = [str(path), *arguments]
    runpy.run_path(str(path), run_name="__main__")


def free_port() -> int:
    """Outside of the ports that systems give to connections, one of which could take it before the rank does."""
    while True:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", random.SystemRandom().randrange(20_000, 32_000)))
            return probe.getsockname()[1]


def script(source: str, rank: Rank, **names: Any) -> None:
    main = sys.modules["__main__"] = ModuleType("__main__")
    vars(main).update(names, rank=rank)
    exec(compile(source, "<script>", "exec"), vars(main))


def stop_here(at: Path) -> None:
    """Stops this process by a signal until somebody has it go on; its number is in that file."""
    part = at.with_suffix(".part")
    part.write_text(str(os.getpid()))
    part.replace(at)
    os.kill(os.getpid(), signal.SIGSTOP)


def wait_until_stopped(at: Path) -> int:
    while not at.exists() or Path(f"/proc/{at.read_text()}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        time.sleep(0.005)
    return int(at.read_text())


def _files(directory: Path, rank: int) -> tuple[Path, Path]:
    return directory / f"out-{rank}.txt", directory / f"log-{rank}.txt"


def _listen(connections: list[Connection], awaited: list[int], patience_s: float) -> list[dict[str, Any]]:
    said: list[dict[str, Any]] = [{} for _ in connections]
    still_open, until_s = list(connections), time.monotonic() + patience_s
    while any(connections[rank] in still_open for rank in awaited):
        ready = wait(still_open, timeout=max(0.0, until_s - time.monotonic()))
        if not ready:
            break
        for connection in ready:
            try:
                said[connections.index(connection)].update(connection.recv())
            except (EOFError, ConnectionResetError):
                still_open.remove(connection)
    return said


def _dump_stacks(processes: Iterable[int | None]) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process or 0, signal.SIGUSR1)
    time.sleep(0.5)  # for them to be written; only people read them


def _serve(target: Target, is_script: bool, patience: float, place: tuple[int, int, Path, int, Connection]) -> None:
    _end_with_the_tests()
    number, _, directory, *_ = place
    for path, descriptor in zip(_files(directory, number), (1, 2), strict=True):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), descriptor)
    faulthandler.register(signal.SIGUSR1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    shorten_patience(patience)
    gc.freeze()  # looking through all of torch when a script ends would take longer than most scripts
    rank = Rank(*place)
    if is_script:
        _end_as_script(target, rank)
    try:
        value = target(rank)
    except Exception as error:
        rank.say(kind=type(error).__name__, text=str(error), at=time.monotonic(), logged=rank.logged)
        raise
    rank.say(value=value, at=time.monotonic(), logged=rank.logged)


def _end_with_the_tests() -> None:
    """The kernel kills this process when the server ends that it was forked off, which does so when the tests are gone."""
    os.close(multiprocessing.forkserver._forkserver._forkserver_alive_fd)  # by which it would be kept
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _end_as_script(target: Target, rank: Rank) -> NoReturn:
    """Ends the interpreter as if `target` were the script that it was started for, and not as multiprocessing does."""
    code = 0
    try:
        target(rank)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException as error:
        sys.last_value, sys.last_traceback = error, error.__traceback__  # which an interpreter holds to the end
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
    ctypes.pythonapi.Py_Exit(code)
    raise AssertionError("the process has ended")
