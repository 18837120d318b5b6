"""A rank that keeps others waiting is named, with what it is doing; then the step fails on every rank."""

import contextlib
import math
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from faults.conftest import Record
from faults.places import PLACES, WITHIN_S, Place, alternately
from support.faults import Fault, outcomes
from support.processes import Rank, run_ranks
from undertow import (
    DistributedDataParallel,
    GradientBucketManager,
    Outer,
    ShardedOptimizer,
    StallTimeout,
    SyncConfig,
    attach,
    load_checkpoint,
    save_checkpoint,
)
from undertow.lab.cost import link_from_text
from undertow.lab.emulation.link import BACKEND, emulated_backend

pytestmark = pytest.mark.waits
FIRST = "bucket 0 ('last.bias')"
FIFTH = "bucket 4 ('norm.bias', 'norm.weight', 'first.bias')"  # those before it have left
HEAD = "rank R has waited N s for {bucket}: rank {faulty} has not arrived."
REMEDY = "  Find out why the late ranks are late, or set stall_timeout_s higher if such waits are expected."
NEVER_CAME = (
    "rank {faulty} has made no such wrapper or ShardedOptimizer within N s, and other ranks wait for it.\n"
    "  {where}, rank {rank}\n"
    "  Make it on every rank of the group, by the same class: `undertow run` starts all ranks. "
    "If that takes longer, set stall_timeout_s and the process group's timeout higher."
)
WARNS: dict[str, Any] = {"stall_warning_s": 0.2, "stall_timeout_s": math.inf, "buffers": "off"}
STOPS: dict[str, Any] = {**WARNS, "stall_timeout_s": 1.0}
OUTSIDE = "in code outside of the model, no training forward since synchronization 3 (if its data has ended: finish())"
# What the others wait for, and what the late rank does.
LATE: dict[str, tuple[Place, str, str]] = {
    "in data": (PLACES["in data"], FIRST, OUTSIDE),
    "in evaluation": (
        Place("forward", "an evaluation"),
        FIRST,
        "in the forward of 'norm', no training forward since synchronization 3 (if its data has ended: finish())",
    ),
    "in forward": (PLACES["in forward"], FIRST, "in the forward of 'norm'"),
    "in backward": (PLACES["in backward"], FIFTH, "in backward"),
    "in mean": (PLACES["in mean"], "the mean over ranks", OUTSIDE),
    "in join": (PLACES["in join"], "the next action of ranks with data", OUTSIDE),
}


def plain(text: str) -> str:
    """Without what differs from run to run: who asked first, seconds, lines, and frames but the innermost."""
    lines = re.sub(r"rank \d has waited \d+ s", "rank R has waited N s", text).split("\n")
    frames = [line for line in lines if ", line " in line]
    return "\n".join(re.sub(r", line \d+,", ",", re.sub(r"\b\d+ s\b", "N s", line)) for line in lines if line not in frames[:-1])


def report(fault: Fault, doing: str = OUTSIDE, bucket: str = FIRST) -> list[str]:
    """The last rank is late, of two or three."""
    ranks, verb = ("ranks 0, 1", "wait") if fault.num_ranks == 3 else ("rank 0", "waits")
    waiting = f"  {ranks}: synchronization 3, {verb} for {bucket}"
    late = f"  rank {fault.rank}: synchronization 3, {doing}"
    return [HEAD.format(faulty=fault.rank, bucket=bucket), waiting, late, "    tests/support/processes.py, in waits_for"]


@pytest.mark.parametrize(("name", "num_ranks"), alternately(LATE))
def test_a_late_rank_is_reported_on_every_rank_and_training_goes_on(name: str, num_ranks: int) -> None:
    place, bucket, doing = LATE[name]
    fault = place.fault("late until reported", num_ranks, settings=WARNS)
    whole = "\n".join(report(fault, doing, bucket))
    first = f"{HEAD.format(faulty=fault.rank, bucket=bucket)} The log of rank 0 has the whole report."
    for number, rank in enumerate(outcomes(fault)):
        told = whole if number in (0, fault.rank) else first  # the lowest that waits, and the late one
        assert (rank.kind, told in [plain(text) for text in rank.words["logged"]]) == ("", True), rank.words["logged"]


@pytest.mark.smoke
def test_a_rank_that_is_too_late_fails_the_step_on_every_rank(record: Record) -> None:
    fault = PLACES["in data"].fault("late for good", 3, settings=STOPS)
    found = outcomes(fault)
    for number, rank in enumerate(found):
        first, *rest = report(fault)
        text = "\n".join([first, f"  synchronization 3, rank {number}", *rest, REMEDY])
        assert (rank.kind, plain(rank.text), rank.seconds < WITHIN_S) == ("StallTimeout", text, True)
    record(f"late, beyond stall_timeout_s={STOPS['stall_timeout_s']}", [found[other] for other in fault.others])


@pytest.mark.parametrize("warning_s", [0.1, math.inf])
@pytest.mark.parametrize("way", ["an impatient group", "a group that closes"])
def test_a_rank_is_too_late_where_the_timeout_of_the_process_group_is_over(way: str, warning_s: float) -> None:
    fault = PLACES["in data"].fault("late for good", 3, way=way, settings=WARNS | {"stall_warning_s": warning_s})
    head, *rest = report(fault) if warning_s < math.inf else ("", "")
    told = [f"  {head}", *rest] if head else []
    remedy = (
        "  Find out why the late ranks are late, or give the process group a longer timeout: "
        "stall_timeout_s has no effect above it."
    )
    for number, rank in enumerate(outcomes(fault)):
        assert (rank.kind, rank.exit_code) == ("StallTimeout", 1), rank.text
        first, where, *others = plain(rank.text).split("\n")
        assert re.fullmatch(r"rank \d has waited for the whole timeout of the process group\.", first)
        assert (where, others) == (f"  synchronization 3, rank {number}", [*told, remedy])


def test_a_rank_that_has_not_wrapped_its_model_is_reported() -> None:
    found = outcomes(PLACES["before construction"].fault("late until reported", 2, settings={"stall_warning_s": 0.2}))
    assert (
        [rank.kind for rank in found],
        "rank R has waited N s for rank 1 to synchronize a model." in map(plain, found[0].words["logged"]),
    ) == (["", ""], True)


def test_a_rank_that_never_makes_a_second_model_is_not_waited_for_for_ever() -> None:
    fault = Place("second model", "a second model").fault("late for good", 3)
    found = outcomes(fault)
    for rank in fault.others:
        text = NEVER_CAME.format(faulty=fault.rank, where="the making of a process group", rank=rank)
        assert (found[rank].kind, plain(found[rank].text), "within 1 s" in found[rank].text) == ("StallTimeout", text, True)


def test_a_rank_that_is_stopped_is_named(record: Record) -> None:
    fault = PLACES["in forward"].fault("stopped", 3, settings=STOPS)
    found = [rank for number, rank in enumerate(outcomes(fault)) if number != fault.rank]
    for rank in found:
        head = HEAD.format(faulty=fault.rank, bucket=FIRST)
        assert (rank.kind, plain(rank.text).split("\n")[0], rank.seconds < WITHIN_S) == ("StallTimeout", head, True)
        assert f"\n  rank {fault.rank}: no answer; it is stopped, " in rank.text
    record(f"stopped, beyond stall_timeout_s={STOPS['stall_timeout_s']}", found)


@pytest.mark.parametrize("place", ["in hybrid backward", "in expert backward"])
def test_a_stall_names_the_rank_in_other_rows_and_columns_and_with_other_experts_too(place: str) -> None:
    fault = PLACES[place].fault("stopped", 4, settings=STOPS)
    found = outcomes(fault)
    for rank in fault.others:
        assert (found[rank].kind, found[rank].exit_code) == ("StallTimeout", 1)
        assert re.match(r"rank \d has waited \d+ s for bucket \d .*: rank 3 has not arrived\.", found[rank].text)
        assert "\n  rank 3: no answer; it is stopped, " in found[rank].text


# Calls that all ranks have to make, and one does not: they end by stall_timeout_s, and say why.
LIMITS = SyncConfig(stall_warning_s=0.2, stall_timeout_s=1.0, buffers="off")


def without_frames(text: str) -> str:
    return "\n".join(line for line in plain(text).split("\n") if ", in " not in line or ", in code" in line)


def text_of_stall(call: Callable[[], object]) -> str:
    with pytest.raises(StallTimeout) as caught:
        call()
    return plain(str(caught.value))


def error_of(call: Callable[[], object]) -> str:
    return without_frames(text_of_stall(call))


def error_of_the_first(rank: Rank, name: str, call: Callable[[], object]) -> str:
    """What `call`, which only rank 0 makes, raises there; rank 1 comes back when that is known, and has done nothing else."""
    text = error_of(call) if rank.number == 0 else ""
    rank.tell(name)
    rank.waits_for(name, range(2))
    return text


def waits_for_the_first_wrapper(rank: Rank) -> str:
    rank.meet()
    text = error_of_the_first(rank, "first", lambda: attach(nn.Linear(4, 3), config=LIMITS))
    if rank.number == 1:  # it comes too late
        text = error_of(lambda: attach(nn.Linear(4, 3), config=LIMITS))
    logged = set(map(plain, rank.logged))
    attach(nn.Linear(4, 3), config=LIMITS).close()  # from here on both are in the same place again
    assert logged <= {"rank R has waited N s for rank 1 to synchronize a model."}
    return text


def test_the_first_wrapper_of_all_ends_with_the_rank_that_has_made_none() -> None:
    for number, rank in enumerate(run_ranks(waits_for_the_first_wrapper, 2)):
        assert rank.words.get("value") == NEVER_CAME.format(faulty=1, where="the making of a process group", rank=number), (
            rank.log
        )


def require_late(rank: Any, number: int, waits_for: str) -> None:
    """Two clocks run: of the meeting in the store, and of the watch. Either may be first to name rank 1."""
    text = rank.words.get("value", "")
    stalled = f"rank R has waited N s for {waits_for}: rank 1 has not arrived.\n"
    came = NEVER_CAME.format(faulty=1, where="the making of a process group", rank=number)
    assert text == came or text.startswith(f"{stalled}  synchronization 0, rank {number}\n"), rank.log


def waits_for_another_wrapper(rank: Rank) -> str:
    rank.meet()
    with contextlib.closing(attach(nn.Linear(4, 3), config=LIMITS)):
        text = error_of_the_first(rank, "another", lambda: DistributedDataParallel(nn.Linear(2, 2), config=LIMITS))
        if rank.number == 1:
            text = error_of(lambda: DistributedDataParallel(nn.Linear(2, 2), config=LIMITS))
        third = DistributedDataParallel(nn.Linear(2, 2))  # with patience: only its success counts
        third(torch.ones(2, 2)).sum().backward()
    return text


def test_another_wrapper_ends_with_the_rank_that_has_made_none() -> None:
    for number, rank in enumerate(run_ranks(waits_for_another_wrapper, 2)):
        require_late(rank, number, "all ranks, to make a process group")


# By what the rank waits for that makes the call.
CALLS: dict[str, Callable[[DistributedDataParallel, dist.ProcessGroup, Path], object]] = {
    "all ranks, to save a checkpoint": lambda model, _group, path: save_checkpoint(path, model),
    "all ranks, to load a checkpoint": lambda model, _group, path: load_checkpoint(path, model),
    "a reduction over the process group": lambda _model, group, _path: (
        GradientBucketManager(group, [torch.ones(3)]).reduce_bucket_async(0).wait()
    ),
}


def waits_alone(rank: Rank) -> dict[str, str]:
    rank.meet()
    found = {}
    for name, call in CALLS.items():
        group = dist.new_group([0, 1])  # over which only this model is synchronized: a fault breaks it
        with contextlib.closing(DistributedDataParallel(nn.Linear(4, 3), process_group=group, config=LIMITS)) as model:
            model(torch.ones(2, 4)).sum().backward()
            path = rank.directory / "checkpoint"
            found[name] = error_of_the_first(rank, name, lambda: call(model, group, path))  # noqa: B023  now
        dist.destroy_process_group(group)
    return found


def makes_no_optimizer(rank: Rank) -> str:
    rank.meet()
    model = DistributedDataParallel(nn.Linear(4, 3), config=LIMITS)
    return error_of_the_first(rank, "optimizer", lambda: ShardedOptimizer(torch.optim.SGD, model, lr=0.1))


def test_a_sharded_optimizer_ends_with_the_rank_that_has_made_none() -> None:
    first = run_ranks(makes_no_optimizer, 2)[0]
    require_late(first, 0, "the comparison of all ranks' parameters")


def test_every_call_of_all_ranks_ends_with_the_rank_that_does_not_make_it() -> None:
    first = run_ranks(waits_alone, 2)[0]
    for waits_for in CALLS:
        remedy = REMEDY
        if waits_for.endswith("a checkpoint"):
            remedy = (
                f"  Call {waits_for.split()[-3]}_checkpoint() on every rank, not under `if rank == 0`. If every rank does, find "
                "out why the late ranks are late."
            )
        assert first.words.get("value", {}).get(waits_for, "").split("\n") == [
            f"rank R has waited N s for {waits_for}: rank 1 has not arrived.",
            "  synchronization 1, rank 0",
            f"  rank 0: synchronization 1, waits for {waits_for}",
            "  rank 1: synchronization 1, in code outside of the model, no training forward since synchronization 1 "
            "(if its data has ended: finish())",
            remedy,
        ], first.log


# A deadlock: every rank waits, and none can continue. It ends long before stall_timeout_s.
PATIENT = SyncConfig(stall_warning_s=0.2, stall_timeout_s=math.inf, buffers="off")
STATE = "the state of a ShardedOptimizer, for which every rank must call state_dict()"
# Calls of rank 0 alone, by its wait; the others take the next step.
ALONE: dict[str, Callable[[DistributedDataParallel, ShardedOptimizer, Path], object]] = {
    STATE: lambda _model, optimizer, _path: optimizer.state_dict(),
    "all ranks, to save a checkpoint": lambda model, _optimizer, path: save_checkpoint(path, model),
    "the mean over ranks": lambda model, _optimizer, _path: model.mean_over_ranks(1.0).wait(),
    "the comparison of gradients: full_gradient()": lambda model, _optimizer, _path: model.full_gradient(model.module[0].weight),
    "the comparison of all ranks' parameters": lambda model, _optimizer, _path: model.broadcast_parameters(),
    "a reduction over the process group": lambda *_: (
        GradientBucketManager(dist.group.WORLD, [torch.ones(3)]).reduce_bucket_async(0).wait()
    ),
}


def step(model: nn.Module, optimizer: ShardedOptimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()


def calls_alone(name: str, rank: Rank) -> str:
    rank.meet()
    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)), config=PATIENT)
    optimizer = ShardedOptimizer(torch.optim.SGD, model, lr=0.1)
    for _ in range(3):
        step(model, optimizer)
    return text_of_stall(
        lambda: ALONE[name](model, optimizer, rank.directory / "checkpoint") if rank.number == 0 else step(model, optimizer)
    )


@pytest.mark.parametrize(("name", "num_ranks"), alternately(ALONE))
def test_ranks_that_wait_for_different_things_fail_without_a_timeout(name: str, num_ranks: int) -> None:
    for number, rank in enumerate(run_ranks(partial(calls_alone, name), num_ranks)):
        first, where, *waits, remedy = rank.words.get("value", "\n").split("\n")
        assert first.endswith(": all ranks wait, for different things."), rank.log
        assert where == f"  synchronization 3, rank {number}"
        assert waits[0] == f"  rank 0: synchronization 3, waits for {name}"
        others = (
            r"  rank 1: synchronization 3, waits for .*" if num_ranks == 2 else r"  ranks 1, 2: synchronization 3, wait for .*"
        )
        assert re.fullmatch(others, "\n".join(waits[1:]))
        assert remedy == (
            "  Make the call on every rank, not under `if rank == 0`. To save on one rank, every rank calls "
            "consolidate_state_dict() first."
            if name == STATE
            else "  Make the same calls on every rank, in the same order: look for one under `if rank == 0` or in a branch that "
            "only some ranks take."
        )


def leaves_a_step_out(rank: Rank) -> str:
    """A rank of one replica saves while the other replica trains on alone, until it needs the first one."""
    rank.meet()
    settings = replace(PATIENT, outer=Outer(every=4, fragments=1, delay=1))
    model = DistributedDataParallel(nn.Linear(4, 3), config=settings)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def steps(number: int) -> None:
        for _ in range(number):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()

    steps(6)
    return text_of_stall(lambda: save_checkpoint(rank.directory / "checkpoint", model) if rank.number == 0 else steps(10))


def test_replicas_that_wait_for_different_things_fail_without_a_timeout() -> None:
    for rank in run_ranks(leaves_a_step_out, 2):
        assert ": all ranks wait, for different things.\n" in rank.words.get("value", ""), rank.log


@pytest.mark.parametrize("way", ["ddp", "zero1", "experts"])
@pytest.mark.parametrize("point", ["forward", "backward", "after step"])
def test_a_rank_that_is_paused_for_several_queries_is_in_no_deadlock(way: str, point: str) -> None:
    num_ranks = 4 if way == "experts" else 2
    fault = Place(point, way).fault("paused", num_ranks, settings=WARNS, seconds=2.5)
    for rank in outcomes(fault):
        assert rank.kind == "", rank.text


def trains_over_a_slow_link(rank: Rank) -> str:
    with emulated_backend(link_from_text("1mbit")):
        rank.meet(BACKEND)
        settings = replace(PATIENT, bucket_cap_mb=0.2)
        model = DistributedDataParallel(nn.Sequential(*(nn.Linear(200, 200) for _ in range(3))), config=settings)
        model(torch.ones(2, 200)).sum().backward()  # three buckets of more than a second each
        model.close()
        dist.destroy_process_group()
    return "trained"


def test_ranks_whose_transfers_take_longer_than_several_queries_are_in_no_deadlock() -> None:
    for rank in run_ranks(trains_over_a_slow_link, 2):
        assert rank.words.get("value") == "trained", rank.log
        assert any(": all ranks wait for it." in text for text in rank.words["logged"])
