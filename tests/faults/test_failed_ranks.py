"""A rank that ends with an exception tells the others, wherever it was raised; so does one whose numbers are wrong."""

from __future__ import annotations

import re
from functools import partial

import pytest

from faults.conftest import Record
from faults.places import FAILED, FINISHED, PLACES, WITHIN_S
from support.faults import outcomes
from support.processes import run_ranks, script

RAISES_IN = [
    *("in data", "in forward", "in backward", "in launch", "in comm hook", "in weights", "in join", "in optimizer"),
    *("in gathers", "before checkpoint", "in construction"),
]


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("place", RAISES_IN)
def test_an_exception_is_told_to_all_others(place: str, num_ranks: int, record: Record) -> None:
    fault = PLACES[place].fault("raises", num_ranks)
    record(f"exception {place}", PLACES[place].told(fault, "PeerFailed", FAILED))


@pytest.mark.parametrize(("kind", "name"), [("closes", "closes"), ("leaves", "exits")])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_rank_that_has_finished_early_is_named_with_its_steps(num_ranks: int, kind: str, name: str, record: Record) -> None:
    fault = PLACES["in data"].fault(kind, num_ranks)
    record(f"{name} early, without join", PLACES["in data"].told(fault, "RankLost", FINISHED))


NONFINITE = """the gradient of 'norm.bias' is infinite or no number on rank {faulty}.
  synchronisation 3, bucket 4
  No rank has taken the step. Look for what has overflowed there, or set nonfinite="skip"."""
DIFFERS = """parameter 'last.weight' has other values on rank {faulty} than on rank {others}.
  synchronisation 3; 1 of 8 parameters differ
  Look for what writes to parameters, or steps, on some ranks only; broadcast_parameters() makes them equal again."""


def require_error_on_all_ranks(num_ranks: int, kind: str, settings: dict[str, object], error: tuple[str, str]) -> None:
    fault = PLACES["in data"].fault(kind, num_ranks, settings=settings)
    found = outcomes(fault)
    text = error[1].format(faulty=fault.rank, others=", ".join(map(str, fault.others)))
    assert [(rank.kind, rank.text) for rank in found] == [(error[0], text)] * num_ranks
    assert all(rank.seconds < WITHIN_S for rank in found)
    return found


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_gradient_that_is_not_finite_is_named_on_all_ranks(num_ranks: int, record: Record) -> None:
    error = "NonFiniteGradient", NONFINITE
    record("infinite gradient", require_error_on_all_ranks(num_ranks, "infinite", {"nonfinite": "raise"}, error))


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_parameters_that_differ_are_named_on_all_ranks(num_ranks: int, record: Record) -> None:
    error, settings = ("ReplicaMismatch", DIFFERS), {"check_replicas_every": 1}
    found = require_error_on_all_ranks(num_ranks, "writes", settings, error)
    record("parameters changed, check_replicas_every=1", found)


SCRIPT = """
import atexit, contextlib, os, sys, threading, time, torch, torch.distributed as dist
import undertow

rank.meet()

def wrapped():
    return undertow.DistributedDataParallel(torch.nn.Linear(4, 4))

def train(model):
    for step in range(3):
        if (rank.number, step) == (1, 2):
            {fault}
        model(torch.ones(2, 4)).sum().backward()

{train}
"""
HERE = "model = wrapped()\ntrain(model)"
# A thread of the script's own trains, and the main thread of the failing process goes on.
IN_A_THREAD = "if rank.number == 1:\n    threading.Thread(target={target}, daemon=True).start()\n    time.sleep(60)\n" + HERE
RAISES = 'raise ValueError("row 7 has no label")'
LEFT = "RankLost: rank 1 has left: it has finished after 2 synchronisations, and others wait for it."
GONE = "RankLost: rank 1 is gone: its process has ended without a word, or was killed."
TOLD = "PeerFailed: rank 1 has failed: ValueError: row 7 has no label"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "told"),
    [
        (RAISES, TOLD),
        ("sys.exit(0)", LEFT),
        ("with contextlib.closing(model): sys.exit(0)", LEFT),
        ("os._exit(0)", GONE),
    ],
    ids=["exception", "exit", "exit that closes", "without a word"],
)
def test_the_way_a_script_ends_is_told(fault: str, told: str) -> None:
    first, second = run_ranks(partial(script, SCRIPT.format(fault=fault, train=HERE)), 2, is_script=True)
    assert first.exit_code == 1
    said = first.log.replace("[rank0]: ", "")  # torch's hook puts it before each line
    assert re.search(rf"^undertow\.errors\.{re.escape(told)}$", said, re.MULTILINE), said
    assert ("ValueError: row 7 has no label" in second.log) == (fault == RAISES)


@pytest.mark.parametrize(
    ("fault", "train", "told"),
    [
        (RAISES, IN_A_THREAD.format(target="lambda: train(wrapped())"), TOLD),
        (RAISES, IN_A_THREAD.format(target="train, args=[wrapped()]"), TOLD),
        # Errors of ours all ranks raise at once: who still waits two seconds later waits for a rank that will not come.
        (
            'atexit.register(time.sleep, 600); raise undertow.PhaseError("no batch.", where="here", remedy="None.")',
            HERE,
            "PeerFailed: rank 1 has failed: undertow.errors.PhaseError: no batch.",
        ),
    ],
    ids=["a thread", "a thread, wrapped in another one", "an error of ours, and an end that lasts"],
)
def test_a_failure_is_told_though_the_process_and_its_connections_stay(fault: str, train: str, told: str) -> None:
    first, second = run_ranks(partial(script, SCRIPT.format(fault=fault, train=train)), 2, is_script=True, stays=[1])
    assert told in first.log
    assert (first.exit_code, second.was_killed) == (1, True)
