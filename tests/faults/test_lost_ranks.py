"""A rank that is killed, wherever it is, is named by all others within seconds."""

import os
import re
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from faults.conftest import Record
from faults.places import FAILED, FINISHED, GONE, PLACES, WITHIN_S, alternately
from support.faults import outcomes
from support.inside import gather_alone
from support.levels import some
from support.processes import Ended, Rank, free_port, run_ranks, script, stop_here, wait_until_stopped
from undertow import DistributedDataParallel

EVERYWHERE = [it for it in PLACES if it not in ("in hybrid backward", "in expert backward", "in launch", "before construction")]


@pytest.mark.parametrize(("place", "num_ranks"), some(alternately(EVERYWHERE), most=2))
def test_a_killed_rank_is_named_on_all_others(place: str, num_ranks: int, record: Record) -> None:
    record(f"killed {place}", PLACES[place].told(PLACES[place].fault("killed", num_ranks), "RankLost", GONE))


@pytest.mark.deep
@pytest.mark.parametrize("place", some(["in forward", "in gathers"], most=1))
def test_a_rank_that_served_the_store_is_named_too(place: str, record: Record) -> None:
    record(
        "killed, and it served the store",
        PLACES[place].told(PLACES[place].fault("killed", 3, rank=0, is_env=True), "RankLost", GONE),
    )


# Of four, rank 3 has no connection of the ring to rank 1.
@pytest.mark.slow
@pytest.mark.parametrize("place", ["in backward", "in checkpoint"])
def test_a_rank_far_away_from_the_killed_one_learns_of_it(place: str, record: Record) -> None:
    record("killed, not a neighbor", PLACES[place].told(PLACES[place].fault("killed", 4, rank=1), "RankLost", GONE))


@pytest.mark.parametrize("place", ["in hybrid backward", "in expert backward"])
@pytest.mark.parametrize("faulty", some([0, 3], most=1))
def test_a_rank_is_named_in_other_rows_and_columns_and_with_other_experts_too(place: str, faulty: int, record: Record) -> None:
    record(f"killed {place}", PLACES[place].told(PLACES[place].fault("killed", 4, rank=faulty), "RankLost", GONE))


@pytest.mark.parametrize(("kind", "error"), some([("killed", "RankLost"), ("raises", "PeerFailed")], most=1))
@pytest.mark.parametrize(
    "place", some(["in backward", "in sharded backward", "in gathers", "in comm hook", "in construction"], most=2)
)
def test_process_groups_may_be_destroyed_right_after_the_error(place: str, kind: str, error: str) -> None:
    """What is under way over them is not waited for, and the process ends as the script does."""
    survivor, faulty = outcomes(PLACES[place].fault(kind, 2, ending="destroyed"))
    assert (survivor.kind, survivor.exit_code) == (error, 1), f"{survivor.log}\n{faulty.log}"


# Not the backward, nor `destroy_process_group()`, nor the end of the process.
@pytest.mark.slow
@pytest.mark.parametrize("ending", ["left open", "destroyed"])
@pytest.mark.parametrize("is_script", [False, True])
@pytest.mark.parametrize("way", ["a hook of a stopped rank", "trailers of a stopped rank"])
def test_a_collective_that_gloo_never_ends_keeps_nobody(way: str, is_script: bool, ending: str) -> None:
    survivor = outcomes(PLACES["in comm hook"].fault("killed", 2, way=way, ending=ending), is_script=is_script)[0]
    assert (survivor.exit_code, "undertow.errors.RankLost: rank 1 is gone" in survivor.log) == (1, True), survivor.log


SURVIVES = """
import contextlib, os, signal, torch, torch.distributed as dist
import undertow

at = f"tcp://127.0.0.1:{port}"
dist.init_process_group("gloo", init_method=at, rank=rank.number, world_size=2)
model = undertow.DistributedDataParallel(torch.nn.Linear(4, 4))
with contextlib.suppress(undertow.RankLost):
    for step in range(9):
        if (rank.number, step) == (1, 3):
            os.kill(os.getpid(), signal.SIGKILL)
        model(torch.ones(2, 4)).sum().backward()
dist.destroy_process_group()
# Broken groups keep their store, so at another port.
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{next_port}", rank=0, world_size=1)
if ending == "closes":
    model.close()
again = undertow.DistributedDataParallel(torch.nn.Linear(4, 4))
again(torch.ones(2, 4)).sum().backward()
print("trained again")
"""


@pytest.mark.deep
@pytest.mark.parametrize("ending", some(["closes", "leaves it"], most=1))
def test_a_survivor_may_begin_anew_in_the_same_process(ending: str) -> None:
    """And has nothing to say when it ends."""
    survivor = run_ranks(partial(script, SURVIVES, port=free_port(), next_port=free_port(), ending=ending), 2, is_script=True)[0]
    assert (survivor.out, survivor.exit_code, "Traceback" in survivor.log) == ("trained again\n", 0, False)


# A message of which a part has come when a rank is gone: gloo never ends such a one, and whoever waits learns of the rank.
NUM_BYTES = 1 << 26  # more than sockets take
Stops = Callable[[], None] | None  # of the rank that is killed


def gathers(stops: Stops) -> None:
    """The survivor gets all that it waits for, and cannot send all of its own part."""
    gather_alone(NUM_BYTES, stops)


def wraps_a_model(stops: Stops) -> None:
    """The survivor sends its parameters."""
    model = nn.Linear(NUM_BYTES // 4 // 64, 64, bias=False)
    _stop_after_the_next_broadcast(stops)
    DistributedDataParallel(model)


def sends_buffers(stops: Stops) -> None:
    """The survivor sends its buffers, before a forward."""
    module = nn.Linear(1, 1)
    module.register_buffer("statistics", torch.zeros(NUM_BYTES // 4))
    model = DistributedDataParallel(module)
    model(torch.ones(1))
    _stop_after_the_next_broadcast(stops)
    model(torch.ones(1))


def _stop_after_the_next_broadcast(stops: Stops) -> None:
    broadcast = dist.broadcast

    def begins(tensor: torch.Tensor, *args: object, **kwargs: object) -> object:
        work = broadcast(tensor, *args, **kwargs)
        if stops is not None and tensor.nbytes >= NUM_BYTES:
            stops()
        return work

    dist.broadcast = begins


def killed_with_half_a_message(scene: Callable[[Stops], None], is_destroyed: bool, rank: Rank) -> None:
    rank.meet()
    at = rank.directory / "process"
    if rank.number == 1:
        scene(partial(stop_here, at))
    threading.Thread(target=kill_when_stopped, args=(at, rank), daemon=True).start()
    try:
        scene(None)
    finally:
        if is_destroyed:
            dist.destroy_process_group()


def kill_when_stopped(at: Path, rank: Rank) -> None:
    number = wait_until_stopped(at)
    rank.say(fault=time.monotonic())
    os.kill(number, signal.SIGKILL)


@pytest.mark.deep
@pytest.mark.parametrize("is_destroyed", [False, True], ids=["left open", "destroyed"])
@pytest.mark.parametrize("scene", some([gathers, wraps_a_model, sends_buffers], most=1))
def test_a_rank_that_is_killed_with_half_a_message_is_named_all_the_same(
    scene: Callable[[Stops], None], is_destroyed: bool, record: Record
) -> None:
    survivor, killed = run_ranks(partial(killed_with_half_a_message, scene, is_destroyed), 2)
    ends = killed.exit_code, survivor.kind, survivor.exit_code, survivor.was_killed
    assert (*ends, "rank 1 is gone" in survivor.text) == (-signal.SIGKILL, "RankLost", 1, False, True)
    seconds = survivor.words["at"] - survivor.words["fault"]
    assert seconds < WITHIN_S
    record("killed, with half a message", [Ended({"kind": "RankLost", "seconds": seconds})])


# A rank that ends with an exception tells the others, wherever it was raised; so does one whose numbers are wrong.


RAISES = ["in data", "in forward", "in backward", "in launch", "in comm hook", "in mean", "in join", "in optimizer"]


@pytest.mark.parametrize(
    ("place", "num_ranks"), some(alternately([*RAISES, "in gathers", "before checkpoint", "in construction"]), most=1)
)
def test_an_exception_is_told_to_all_others(place: str, num_ranks: int, record: Record) -> None:
    record(f"exception {place}", PLACES[place].told(PLACES[place].fault("raises", num_ranks), "PeerFailed", FAILED))


@pytest.mark.deep
@pytest.mark.parametrize(("kind", "name"), some([("closes", "closes"), ("leaves", "exits")], most=1))
def test_a_rank_that_has_finished_early_is_named_with_its_steps(kind: str, name: str, record: Record) -> None:
    record(f"{name} early, without join", PLACES["in data"].told(PLACES["in data"].fault(kind, 3), "RankLost", FINISHED))


NONFINITE = """the gradient of 'norm.bias' is not finite (NaN or Inf) on rank {faulty}.
  synchronization 3, bucket 4
  No rank has taken the step. Look for the overflow there, or set nonfinite="skip"."""
DIFFERS = """parameter 'last.weight' has other values on rank {faulty} than on rank {others}.
  synchronization 3; 1 of 8 parameters differ
  Look for what writes to parameters, or steps, on some ranks only; broadcast_parameters() makes them equal again."""


# What is wrong, with which settings, and the error.
WRONG: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "infinite gradient": ("infinite", {"nonfinite": "raise"}, "NonFiniteGradient", NONFINITE),
    "parameters changed, check_replicas_every=1": ("writes", {"check_replicas_every": 1}, "ReplicaMismatch", DIFFERS),
}


@pytest.mark.deep
@pytest.mark.parametrize("what", some(WRONG, most=1))
def test_wrong_numbers_are_named_on_all_ranks(what: str, record: Record) -> None:
    kind, settings, error, text = WRONG[what]
    fault = PLACES["in data"].fault(kind, 3, settings=settings)
    found = outcomes(fault)
    text = text.format(faulty=fault.rank, others=", ".join(map(str, fault.others)))
    assert [(rank.kind, rank.text, rank.seconds < WITHIN_S) for rank in found] == [(error, text, True)] * 3
    record(what, found)


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
RAISES = 'raise ValueError("row 7 has no label")'
LEFT = "RankLost: rank 1 has left: it has finished after 2 synchronizations, and others wait for it."
TOLD = "PeerFailed: rank 1 has failed: ValueError: row 7 has no label"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "told"),
    [
        (RAISES, TOLD),
        ("sys.exit(0)", LEFT),
        ("with contextlib.closing(model): sys.exit(0)", LEFT),
        ("os._exit(0)", "RankLost: rank 1 is gone: its process exited or was killed without reporting an error."),
    ],
    ids=["exception", "exit", "exit that closes", "without a word"],
)
def test_the_way_a_script_ends_is_told(fault: str, told: str) -> None:
    first, second = run_ranks(partial(script, SCRIPT.format(fault=fault, train=HERE)), 2, is_script=True)
    assert first.exit_code == 1
    said = first.log.replace("[rank0]: ", "")  # torch's hook puts it before each line
    assert re.search(rf"^undertow\.errors\.{re.escape(told)}$", said, re.MULTILINE), said
    assert ("ValueError: row 7 has no label" in second.log) == (fault == RAISES)
    assert ("Connection closed" in said, "another exception" in said, "direct cause" in said) == (False, False, False), said


IN_A_THREAD = (
    "if rank.number == 1:\n    threading.Thread(target=train, args=[wrapped()], daemon=True).start()\n    time.sleep(60)\n" + HERE
)
OF_OURS = 'atexit.register(time.sleep, 600); raise undertow.PhaseError("no batch.", where="here", remedy="None.")'


@pytest.mark.deep
@pytest.mark.parametrize(
    ("fault", "train", "told"),
    [
        (RAISES, IN_A_THREAD, TOLD),
        # Errors of ours all ranks raise at once: who still waits two seconds later waits for a rank that will not come.
        (OF_OURS, HERE, "PeerFailed: rank 1 has failed: undertow.errors.PhaseError: no batch."),
        # Rank 0 waits in the store for the second model.
        (OF_OURS, f"{HERE}\nwrapped()", "PeerFailed: rank 1 has failed: undertow.errors.PhaseError: no batch."),
    ],
    ids=["a thread", "an error of ours, and an end that lasts", "an error of ours before it"],
)
def test_a_failure_is_told_though_the_process_and_its_connections_stay(fault: str, train: str, told: str) -> None:
    number = 3 if train.endswith("wrapped()") else 2
    text = SCRIPT.replace("(1, 2)", f"(1, {number})").replace("range(3)", "range(3 + rank.number)")
    first, second = run_ranks(partial(script, text.format(fault=fault, train=train)), 2, is_script=True, stays=[1])
    assert (told in first.log, first.exit_code, second.was_killed) == (True, 1, True), first.log
