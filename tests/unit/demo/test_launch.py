"""Ranks as processes: started, listened to, and always ended."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import psutil
import pytest

from undertow.demo.launch import LocalRanks, RanksLost, _interrupts_postponed
from undertow.demo.results import RankFailed

SILENCE_S = 60.0


def report_in(rank: int, connection: Connection) -> None:
    connection.send((rank, signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, [])))


def fail_on_rank_1(rank: int, connection: Connection) -> None:
    if rank == 0:
        threading.Event().wait()
    connection.send(RankFailed(rank=rank, failed_s=2.0, traceback="ValueError: as planned"))


def rank_1_dies_and_rank_0_complains(rank: int, meeting: Path, connection: Connection) -> None:
    if rank == 1:
        meeting.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    while not meeting.exists():  # or rank 1 may die when rank 0 is blamed already
        time.sleep(0.005)
    connection.send(RankFailed(rank=rank, failed_s=1.0, traceback="connection closed by peer"))


def say_nothing(rank: int, connection: Connection) -> None:
    threading.Event().wait()


def ignore_every_request(rank: int, connection: Connection) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    connection.send("ready")
    threading.Event().wait()


def interrupt_the_parent(rank: int, connection: Connection) -> None:
    if rank == 0:
        os.kill(os.getppid(), signal.SIGINT)
    threading.Event().wait()


def our_children() -> list[psutil.Process]:
    """Without the helper that multiprocessing keeps for its semaphores."""
    return [child for child in psutil.Process().children() if "resource_tracker" not in " ".join(child.cmdline())]


@pytest.fixture(autouse=True)
def others() -> Iterator[list[psutil.Process]]:
    """Processes of other tests: no other one is left."""
    before = our_children()
    yield before
    assert [child for child in our_children() if child not in before] == []


@pytest.mark.slow  # interpreters of their own
def test_messages_of_all_ranks_come_in_until_the_last_has_ended() -> None:
    with LocalRanks(report_in, (), num_ranks=3, silence_s=SILENCE_S) as ranks:
        # Ranks do not hear interrupts themselves.
        assert sorted(ranks.messages()) == [(0, True), (1, True), (2, True)]  # type: ignore[type-var]


FAILURES = {
    "one fails": (fail_on_rank_1, SILENCE_S, "rank 1 has failed.\n  ValueError: as planned"),
    # It is blamed rather than those who noticed it.
    "one is killed": (
        rank_1_dies_and_rank_0_complains,
        SILENCE_S,
        "rank 1 has failed.\n  It was killed.\n  Often the machine has run out of memory: try fewer ranks.",
    ),
    "all are silent": (
        say_nothing,
        1.0,
        "no rank has reported for 1 s.\n  ranks that still ran: 0, 1\n"
        "  They wait for each other, or the machine is far too busy; try again with fewer ranks.",
    ),
}


@pytest.mark.slow  # interpreters of their own
@pytest.mark.parametrize("name", FAILURES)
def test_ranks_that_fail_are_named_and_the_others_ended(name: str, tmp_path: Path) -> None:
    target, silence_s, text = FAILURES[name]
    given = (tmp_path / "rank-1-dies",) if target is rank_1_dies_and_rank_0_complains else ()
    with pytest.raises(RanksLost) as caught, LocalRanks(target, given, num_ranks=2, silence_s=silence_s) as ranks:
        list(ranks.messages())
    assert str(caught.value) == text


@pytest.mark.slow  # interpreters of their own
def test_an_interrupt_ends_the_ranks() -> None:
    with pytest.raises(KeyboardInterrupt), LocalRanks(interrupt_the_parent, (), num_ranks=2, silence_s=SILENCE_S) as ranks:
        list(ranks.messages())


def test_an_interrupt_while_ranks_start_comes_afterwards() -> None:
    done = []

    def start() -> None:
        with _interrupts_postponed():
            os.kill(os.getpid(), signal.SIGINT)
            done.append("all of it")

    with pytest.raises(KeyboardInterrupt):
        start()
    assert done == ["all of it"]


@pytest.mark.slow  # interpreters of their own
def test_leaving_early_ends_even_ranks_that_refuse(others: list[psutil.Process]) -> None:
    with LocalRanks(ignore_every_request, (), num_ranks=1, silence_s=SILENCE_S) as ranks:
        assert next(iter(ranks.messages())) == "ready"
        (child,) = [child for child in our_children() if child not in others]
    assert not child.is_running()
