"""Ranks that stay: processes with a gloo group among them, for which a test is a function to run."""

import contextlib
import faulthandler
import gc
import inspect
import multiprocessing
import os
import signal
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest
import torch
import torch.distributed as dist

_START_S = 120.0  # importing torch on a busy machine
_BLAME_S = 5.0  # that the other ranks have when one has failed: they may be waiting for it for ever

# What they import is imported once: ranks are forked off a server and are there in a moment.
_FORKSERVER = multiprocessing.get_context("forkserver")
_FORKSERVER.set_forkserver_preload(["support.preload"])
# Before Python 3.12.9 the server does not get sys.path, and what it cannot import it leaves out without a word.
_TESTS, _PATH = str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")
if _TESTS not in _PATH.split(os.pathsep):
    os.environ["PYTHONPATH"] = os.pathsep.join([_TESTS, *filter(None, [_PATH])])


def in_ranks(*sizes: int, is_fresh: bool = False, pool: str = "", timeout_s: float = 60.0) -> pytest.MarkDecorator:
    """Marks a test that runs on every rank of a group, once for each of these sizes.

    Ranks stay for the tests that follow, unless a test leaves them in any state: `is_fresh` gives it ranks of its own. Ranks of
    a `pool` with a name are for the tests that name it: they may keep what others would find in their way.
    """
    return pytest.mark.in_ranks(*sizes, is_fresh=is_fresh, pool=pool, timeout_s=timeout_s)


class RanksFailed(Exception):
    """What went wrong, with every rank's last word."""


@dataclass(frozen=True)
class Answer:
    value: Any = None
    failure: str = ""


class Ranks:
    """`num_ranks` processes, started when they are first needed and anew after every failure."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self._pool: _Pool | None = None

    def run(self, work: Callable[..., Any], *args: Any, timeout_s: float = 60.0) -> list[Any]:
        if self._pool is None:
            self._pool = _Pool(self.num_ranks)
        try:
            return self._pool.run(work, args, timeout_s)
        except BaseException:
            self.close()  # ranks that have failed may be anywhere
            raise

    def close(self) -> None:
        if self._pool is not None:
            self._pool.kill()
            self._pool = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class RankPools:
    def __init__(self) -> None:
        self._pools: dict[tuple[int, str], Ranks] = {}

    def of_size(self, num_ranks: int, pool: str = "") -> Ranks:
        return self._pools.setdefault((num_ranks, pool), Ranks(num_ranks))

    def run(self, test: pytest.Function, num_ranks: int, *, is_fresh: bool, pool: str, timeout_s: float) -> None:
        args = [test.funcargs[name] for name in inspect.signature(test.obj).parameters]
        with Ranks(num_ranks) if is_fresh else contextlib.nullcontext(self.of_size(num_ranks, pool)) as ranks:
            ranks.run(test.obj, *args, timeout_s=timeout_s)

    def close(self) -> None:
        for ranks in self._pools.values():
            ranks.close()


class _Pool:
    def __init__(self, num_ranks: int) -> None:
        self._directory = tempfile.TemporaryDirectory()
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._connections: list[Connection] = []
        self._processes = []
        for rank in range(num_ranks):
            ours, theirs = _FORKSERVER.Pipe()
            process = _FORKSERVER.Process(
                target=_serve,
                args=(rank, num_ranks, self._store.port, Path(self._directory.name), theirs),
                name=f"rank {rank}",
                daemon=True,
            )
            process.start()
            theirs.close()
            self._connections.append(ours)
            self._processes.append(process)
        self._answers(_START_S)

    def run(self, work: Callable[..., Any], args: tuple[Any, ...], timeout_s: float) -> list[Any]:
        for connection in self._connections:
            connection.send((work, args))
        return [answer.value for answer in self._answers(timeout_s)]

    def kill(self) -> None:
        for process, connection in zip(self._processes, self._connections, strict=True):
            process.kill()
            process.join()
            connection.close()
        self._directory.cleanup()

    def _answers(self, timeout_s: float) -> list[Answer]:
        answers: dict[int, Answer] = {}
        deadline = time.monotonic() + timeout_s
        while len(answers) < len(self._connections):
            ready = wait(
                [it for rank, it in enumerate(self._connections) if rank not in answers],
                timeout=max(0.0, deadline - time.monotonic()),
            )
            if not ready:
                break
            for connection in ready:
                rank = self._connections.index(connection)
                answers[rank] = self._receive(rank)
                if answers[rank].failure:
                    deadline = min(deadline, time.monotonic() + _BLAME_S)
        if len(answers) < len(self._connections) or any(answer.failure for answer in answers.values()):
            raise RanksFailed(self._last_words(answers, timeout_s))
        return [answers[rank] for rank in sorted(answers)]

    def _receive(self, rank: int) -> Answer:
        try:
            return self._connections[rank].recv()
        except EOFError:
            self._processes[rank].join()
            return Answer(failure=f"ended with exit code {self._processes[rank].exitcode}\n{self._stack(rank)}")

    def _last_words(self, answers: dict[int, Answer], timeout_s: float) -> str:
        words = []
        for rank in range(len(self._connections)):
            if rank in answers:
                word = answers[rank].failure or "done"
            else:
                word = f"no answer within {timeout_s:.0f} s, or since another rank failed\n{self._dump(rank)}"
            words.append(f"--- rank {rank}: {word}")
        return "\n".join(["", *words])

    def _dump(self, rank: int) -> str:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._processes[rank].pid, signal.SIGUSR1)
        time.sleep(0.3)  # for the dump to be written; it is only read by people
        return self._stack(rank)

    def _stack(self, rank: int) -> str:
        with contextlib.suppress(FileNotFoundError):
            return _stack_file(Path(self._directory.name), rank).read_text()
        return ""


def _stack_file(directory: Path, rank: int) -> Path:
    return directory / f"stack-{rank}.txt"


def _serve(rank: int, num_ranks: int, port: int, directory: Path, connection: Connection) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    warnings.simplefilter("error")  # as in the tests themselves
    warnings.filterwarnings("ignore", "the process group '.*' has 1 rank")  # here it is meant
    with _stack_file(directory, rank).open("w") as stack:
        faulthandler.register(signal.SIGUSR1, file=stack, all_threads=False)
        faulthandler.enable(file=stack)
        store = dist.TCPStore("127.0.0.1", port, is_master=False)  # a FileStore looks every 10 ms
        dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
        connection.send(Answer())
        gc.freeze()  # looking through all of torch after every test would take longer than most tests
        with contextlib.suppress(EOFError):
            while True:
                connection.send(_answer(connection))
    os._exit(0)  # the parent is gone


def _end_with_parent() -> None:
    """Ends this process when the tests are gone, also while it waits for another rank."""
    multiprocessing.parent_process().join()
    os.kill(os.getpid(), signal.SIGKILL)


def _answer(connection: Connection) -> Answer:
    try:
        work, args = connection.recv()
        torch.manual_seed(0)
        return Answer(value=_run(work, args))
    except EOFError:
        raise
    except BaseException:
        return Answer(failure=traceback.format_exc())


# Groups that tests of a pool have made for all that follow.
KEPT: set[dist.ProcessGroup] = set()


def _run(work: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    value = work(*args)
    gc.collect()
    gc.freeze()  # what is left stays: to look through it again after each test would take as long as most tests
    may_stay = KEPT | {dist.group.WORLD}
    open_groups = [group.group_desc for group in dist.distributed_c10d._world.pg_map if group not in may_stay]
    if open_groups:
        raise RuntimeError(f"{work.__name__} has left process groups open: {open_groups}")
    return value
