"""Runs one injection, and says whether it has ended as it must."""

from __future__ import annotations

import faulthandler
import logging
import os
import re
import signal
import sys
import time
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from soak.injections import KINDS, STALL_TIMEOUT_S, Injection
from soak.points import Points, put_between
from soak.training import different, expected, train
from support.processes import Ended, log_file, run_ranks

WITHIN_S = 10.0  # from the fault to the error, and what it is waited for on purpose
_PATIENCE_S = 60.0


@dataclass(frozen=True)
class Verdict:
    """How an injection has ended."""

    problems: tuple[str, ...]  # empty where all is well
    outcome: str  # in a word
    seconds: tuple[float, ...]  # from the fault to the error on each rank that has raised one


def inject(injection: Injection) -> Verdict:
    """Trains once with the fault."""
    return judged(injection, run_ranks(partial(_rank, injection), injection.num_ranks, patience_s=_PATIENCE_S))


def judged(injection: Injection, ended: list[Ended]) -> Verdict:
    """What is wrong with how the ranks have ended."""
    fault = ended[injection.rank].words
    if "fault" not in fault:
        problems = [f"rank {rank}: {_last_word(one)}" for rank, one in enumerate(ended)]
        return Verdict(("the fault has not come to pass", *problems), "", ())
    problems, seconds = [], []
    for rank, one in enumerate(ended):
        found = _own_problem(injection, one) if rank == injection.rank else _problem(injection, rank, one, fault)
        problems += [f"rank {rank}: {found}\n{_last_word(one)}"] if found else []
        if one.words.get("kind") and rank != injection.rank:
            seconds.append(one.words["at"] - fault["fault"])
    kinds = sorted({one.words.get("kind", "") or "identical" for rank, one in enumerate(ended) if rank != injection.rank})
    return Verdict(tuple(problems), ", ".join(kinds), tuple(seconds))


def _own_problem(injection: Injection, one: Ended) -> str:
    kind = KINDS[injection.kind]
    if one.words.get("kind", "") != kind.own:
        return f"raised {one.words.get('kind') or 'nothing'}, and not {kind.own or 'nothing'}"
    if one.exit_code != kind.exit_code:
        return f"ended with {one.exit_code}, and not with {kind.exit_code}"
    if one.words.get("different"):
        return f"other bits: {', '.join(one.words['different'])}"
    return ""


def _problem(injection: Injection, rank: int, one: Ended, fault: dict[str, Any]) -> str:
    kind, words = KINDS[injection.kind], one.words
    if one.was_killed or "at" not in words:
        return "has not ended" if one.was_killed else f"ended with {one.exit_code}, without a word"
    if not words.get("kind"):
        if words["different"]:
            return f"other bits: {', '.join(words['different'])}"
        return "" if one.exit_code == 0 else f"ended with {one.exit_code}, after training"
    if words["kind"] != kind.others or not re.search(kind.says.format(rank=injection.rank), words["text"], re.DOTALL):
        return f"not {kind.others or 'as if nothing had been'}"
    where = re.search(r"synchronisation (\d+), (?:rank (\d+)|bucket \d+)$", words["text"], re.MULTILINE)
    is_of_step = kind.others == "PlanMismatch" or (where is not None and abs(int(where[1]) - fault["step"]) <= 1)
    if not is_of_step or (where is not None and where[2] and int(where[2]) != rank):
        return f"does not say that it was about synchronisation {fault['step']}, on rank {rank}"
    if words["at"] - fault["fault"] > WITHIN_S + (STALL_TIMEOUT_S if kind.others == "StallTimeout" else 0.0):
        return f"only {words['at'] - fault['fault']:.1f} s after the fault"
    return "" if one.exit_code == 1 else f"ended with {one.exit_code}, after its error"


def _last_word(one: Ended) -> str:
    parts = [f"exit code {one.exit_code}", *(f"{name}: {value}" for name, value in one.words.items()), one.log]
    return "    " + "\n".join(parts).replace("\n", "\n    ")


class _Logged(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(self.format(record))


def _rank(injection: Injection, rank: int, directory: Path, connection: Connection) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    logged = _Logged()
    logging.getLogger("undertow").addHandler(logged)
    log = log_file(directory, rank).open("w")
    os.dup2(log.fileno(), sys.stderr.fileno())  # only read where something is wrong
    faulthandler.register(signal.SIGUSR1, file=log, all_threads=True)

    def say(**words: Any) -> None:
        connection.send(words)

    points = Points(injection, rank, say)
    put_between(points)
    store = dist.FileStore(str(directory / "meeting-point"), injection.num_ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=injection.num_ranks)
    try:
        found = train(injection, points, KINDS[injection.kind].settings)
        say(at=time.monotonic(), different=different(found, expected(injection)), logged=logged.texts)
    except Exception as error:
        say(kind=type(error).__name__, text=str(error), at=time.monotonic(), logged=logged.texts)
        raise
