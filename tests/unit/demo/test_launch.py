from __future__ import annotations

import os
import signal
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path

import psutil
import pytest

from undertow.demo.launch import LocalRanks, RanksLost, _interrupts_postponed
from undertow.demo.results import RankFailed

SILENCE_S = 60.0


def report_in(rank: int, connection: Connection) -> None:
    connection.send(f"rank {rank} was here")


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


def error_of(ranks: LocalRanks) -> str:
    with pytest.raises(RanksLost) as caught, ranks:
        list(ranks.messages())
    return str(caught.value)


def our_children() -> list[psutil.Process]:
    """Without the helper that multiprocessing keeps for its semaphores."""
    return [child for child in psutil.Process().children() if "resource_tracker" not in " ".join(child.cmdline())]


@pytest.fixture(autouse=True)
def no_process_is_left() -> object:
    before = our_children()
    yield
    assert [child for child in our_children() if child not in before] == []


def test_messages_of_all_ranks_come_in_until_the_last_has_ended() -> None:
    with LocalRanks(report_in, (), num_ranks=3, silence_s=SILENCE_S) as ranks:
        assert sorted(map(str, ranks.messages())) == ["rank 0 was here", "rank 1 was here", "rank 2 was here"]


def test_a_failure_names_the_rank_and_ends_the_others() -> None:
    text = error_of(LocalRanks(fail_on_rank_1, (), num_ranks=2, silence_s=SILENCE_S))
    assert text == "rank 1 has failed.\n  ValueError: as planned"


def test_a_death_is_blamed_rather_than_those_who_noticed_it(tmp_path: Path) -> None:
    meeting = tmp_path / "rank-1-dies"
    text = error_of(LocalRanks(rank_1_dies_and_rank_0_complains, (meeting,), num_ranks=2, silence_s=SILENCE_S))
    assert text == ("rank 1 has failed.\n  It was killed.\n  Often the machine has run out of memory: try fewer ranks.")


def test_silence_ends_the_run() -> None:
    text = error_of(LocalRanks(say_nothing, (), num_ranks=2, silence_s=1.0))
    assert text == (
        "no rank has reported for 1 s.\n"
        "  ranks that still ran: 0, 1\n"
        "  They wait for each other, or the machine is far too busy; try again with fewer ranks."
    )


def interrupt_the_parent(rank: int, connection: Connection) -> None:
    if rank == 0:
        os.kill(os.getppid(), signal.SIGINT)
    threading.Event().wait()


def tell_whether_interrupts_are_blocked(rank: int, connection: Connection) -> None:
    connection.send(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, []))


def test_ranks_do_not_hear_interrupts_themselves() -> None:
    ranks = LocalRanks(tell_whether_interrupts_are_blocked, (), num_ranks=2, silence_s=SILENCE_S)
    with ranks:
        assert list(ranks.messages()) == [True, True]


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


def test_leaving_early_ends_even_ranks_that_refuse() -> None:
    others = our_children()  # of other tests
    with LocalRanks(ignore_every_request, (), num_ranks=1, silence_s=SILENCE_S) as ranks:
        assert next(iter(ranks.messages())) == "ready"
        children = [child for child in our_children() if child not in others]
    assert children
    assert [child for child in children if child.is_running()] == []
