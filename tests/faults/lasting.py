"""Tests that last, and are not collected: test_interrupted.py runs them and interrupts them."""

import os
import signal
import time

import pytest
from benchmarks.matrix.links import shaped_network

from faults.places import PLACES
from support.faults import outcomes
from support.ranks import in_ranks


def test_with_a_rank_that_is_stopped() -> None:
    outcomes(PLACES["in data"].fault("stopped", 2))


@in_ranks(2)
def test_with_ranks_of_a_pool() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


@pytest.mark.usefixtures("needs_namespaces")
def test_with_namespaces() -> None:
    with shaped_network("1gbit", 2):
        os.kill(os.getpid(), signal.SIGSTOP)  # no `ip` is under way that would end after its parent
        for _ in range(1200):  # another thread may take a signal, which ends no sleep
            time.sleep(0.1)
