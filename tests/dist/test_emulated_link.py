from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from support.emulated import ended_over_link, run_over_link
from support.inside import BACKEND, EmulatedLink, emulated_backend, posted_exchanges
from support.models import noise
from support.processes import Rank, run_ranks
from undertow.cost import collective_seconds, link_from_text
from undertow.errors import PhaseError

LINKS = ["1gbit", "none"]
SLOW = "10mbit"  # so slow that what it carries is never done by accident


def answers_of_all_collectives(_link: EmulatedLink) -> dict[str, list[float]]:
    rank, size = dist.get_rank(), dist.get_world_size()
    mine = torch.full((2,), float(rank + 1))
    answers: dict[str, torch.Tensor] = {}

    answers["all_reduce sum"] = mine.clone()
    dist.all_reduce(answers["all_reduce sum"])
    answers["all_reduce mean"] = mine.clone()
    dist.all_reduce(answers["all_reduce mean"], op=dist.ReduceOp.AVG)
    answers["broadcast"] = mine.clone()
    dist.broadcast(answers["broadcast"], src=1)
    gathered = [torch.empty(2) for _ in range(size)]
    dist.all_gather(gathered, mine)
    answers["all_gather"] = torch.cat(gathered)
    answers["reduce_scatter"] = torch.empty(1)
    dist.reduce_scatter(answers["reduce_scatter"], list(mine.chunk(size)))
    answers["all_to_all"] = torch.empty(2)
    dist.all_to_all_single(answers["all_to_all"], mine)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch 2.13 renamed these two
        answers["all_gather_into_tensor"] = torch.empty(2 * size)
        dist.all_gather_into_tensor(answers["all_gather_into_tensor"], mine)
        answers["reduce_scatter_tensor"] = torch.empty(1)
        dist.reduce_scatter_tensor(answers["reduce_scatter_tensor"], mine)
    collected = [torch.zeros(2) for _ in range(size)] if rank == 0 else None
    dist.gather(mine, collected, dst=0)
    answers["gather"] = torch.cat(collected) if collected else torch.zeros(0)
    answers["scatter"] = torch.empty(2)
    dist.scatter(answers["scatter"], [mine, mine + 10] if rank == 0 else None, src=0)
    answers["send"], answers["send to any"] = mine.clone(), mine.clone()
    if rank == 0:
        dist.send(mine, dst=1)
        dist.send(mine, dst=1)
    else:
        dist.recv(answers["send"], src=0)
        assert dist.recv(answers["send to any"]) == 0
    dist.barrier()
    return {name: tensor.tolist() for name, tensor in answers.items()}


@pytest.mark.parametrize("link", LINKS)
def test_every_collective_has_gloos_answer(link: str) -> None:
    first, second = run_over_link(answers_of_all_collectives, link)
    for answers in (first, second):
        assert answers["all_reduce sum"] == [3, 3]
        assert answers["all_reduce mean"] == [1.5, 1.5]
        assert answers["broadcast"] == [2, 2]
        assert answers["all_gather"] == answers["all_gather_into_tensor"] == [1, 1, 2, 2]
        assert answers["reduce_scatter"] == answers["reduce_scatter_tensor"] == [3]
        assert answers["all_to_all"] == [1, 2]
        assert answers["send"] == answers["send to any"] == [1, 1]
    assert first["gather"] == [1, 1, 2, 2]
    assert (first["scatter"], second["scatter"]) == ([1, 1], [11, 11])


def log_of_two_groups(link: EmulatedLink) -> tuple[Any, ...]:
    other = dist.new_group([0, 1], backend=BACKEND)
    link.take_log()
    works = [
        dist.all_reduce(torch.zeros(numel), group=group, async_op=True)
        for numel in (50_000, 7, 200_000)
        for group in (None, other)
    ]
    for work in works:
        work.wait()
    return link.take_log()


def test_collectives_follow_one_another_over_one_link_and_take_their_time() -> None:
    logs = run_over_link(log_of_two_groups, "1gbit")
    link = link_from_text("1gbit")
    for log in logs:
        assert sorted(transfer.num_bytes for transfer in log) == [28, 28, 200_000, 200_000, 800_000, 800_000]
        costs = {t.num_bytes: collective_seconds(link, t.kind, num_bytes=t.num_bytes, num_ranks=2) for t in log}
        # A guarantee, no measurement: nothing is done before the link allows it. 1e-9: times of day are large doubles.
        assert all(t.done_s >= t.started_s + costs[t.num_bytes] - 1e-9 for t in log)
        assert all(t.started_s >= t.launched_s for t in log)
        in_turn = sorted(log, key=lambda t: t.started_s)
        assert all(later.started_s >= t.started_s + costs[t.num_bytes] - 1e-9 for t, later in pairwise(in_turn))


def seconds_of_a_collective_and_a_message(link: EmulatedLink) -> tuple[float, float]:
    """Each a megabyte, which a link of 8.4 Mb/s carries in a second, behind a rest."""
    payload = torch.zeros(250_000)
    began_s = begin_together(link)
    dist.all_reduce(payload)
    collective_s = time.perf_counter() - began_s
    began_s = begin_together(link)
    if dist.get_rank() == 0:
        dist.send(payload, dst=1)
    else:
        dist.recv(payload, src=0)
    return collective_s, time.perf_counter() - began_s


def test_what_a_token_bucket_holds_passes_at_once_and_latency_does_not() -> None:
    seconds = run_over_link(seconds_of_a_collective_and_a_message, "8.4mbit,50ms", burst_bytes=20_000_000)
    assert all(0.1 <= collective_s < 0.9 for collective_s, _ in seconds)
    assert 0.05 <= seconds[1][1] < 0.9


def start_with_a_late_rank(link: EmulatedLink) -> Any:
    tensor, token = torch.zeros(10), torch.zeros(1)
    if dist.get_rank() == 0:
        work = dist.all_reduce(tensor, async_op=True)
        dist.send(token, dst=1)
    else:
        dist.recv(token, src=0)  # only now: rank 0 has launched before
        work = dist.all_reduce(tensor, async_op=True)
    assert work is not None
    work.wait()
    (transfer,) = (it for it in link.take_log() if it.kind == "all_reduce")
    return transfer


def test_a_collective_starts_when_its_last_rank_has_launched() -> None:
    first, late = run_over_link(start_with_a_late_rank, "1gbit")
    assert first.launched_s < late.launched_s <= first.started_s


def how_a_handle_behaves(_link: EmulatedLink) -> dict[str, object]:
    work = dist.all_reduce(torch.ones(100_000), async_op=True)
    assert work is not None
    seen: dict[str, object] = {"completed at once": work.is_completed()}
    try:
        work.wait(timedelta(milliseconds=1))
    except RuntimeError as error:
        seen["timeout"] = str(error)
    seen["wait"] = work.wait()
    seen["completed"] = work.is_completed()
    seen["future is done"] = work.get_future().done()
    seen["value"] = work.get_future().value()[0][0].item()
    return seen


def test_a_handle_can_be_polled_and_waited_for_with_a_timeout() -> None:
    for seen in run_over_link(how_a_handle_behaves, SLOW):
        assert seen == {
            "completed at once": False,
            "timeout": "Operation timed out! The link has not carried it after 0.001 s.",
            "wait": True,
            "completed": True,
            "future is done": True,
            "value": 2.0,
        }


def use_groups_in_different_orders(_link: EmulatedLink) -> float:
    first = dist.new_group([0, 1], backend=BACKEND)
    second = dist.new_group([0, 1], backend=BACKEND)
    total = torch.ones(1)
    if dist.get_rank() == 0:
        early = dist.all_reduce(total, group=first, async_op=True)
        dist.barrier(group=second)
        dist.barrier()
    else:
        dist.barrier(group=second)
        dist.barrier()  # which rank 0 reaches only when `second` is done there
        early = dist.all_reduce(total, group=first, async_op=True)
    assert early is not None
    early.wait()
    return total.item()


def test_groups_do_not_wait_for_each_other() -> None:
    assert run_over_link(use_groups_in_different_orders, "1gbit") == [2, 2]


def errors_of_gloo(_link: EmulatedLink) -> list[str]:
    messages = []
    for ask in (lambda work: work.wait(), lambda work: work.get_future().wait()):
        try:
            ask(dist.all_reduce(torch.ones(1), op=dist.ReduceOp.BAND, async_op=True))
        except RuntimeError as error:
            messages.append(str(error))
    usable = torch.ones(1)
    dist.all_reduce(usable)
    return [*messages, str(usable.item())]


def test_an_error_of_gloo_reaches_whoever_waits() -> None:
    for messages in run_over_link(errors_of_gloo, "1gbit"):
        assert len(messages) == 3
        assert all("BAND" in message for message in messages[:2])
        assert messages[2] == "2.0"


@dataclass(frozen=True)
class Exchanged:
    """What one rank saw of an exchange."""

    is_right: bool
    began_s: float
    ended_s: float
    log: tuple[Any, ...]


NUM_BYTES = 600_000  # that a rank gives to the exchange; a part of it is kept
# Above the time of the link: sockets, threads that wake up, and ranks that leave the barrier one after another.
MARGIN_S = 0.15
NUM_ATTEMPTS = 3  # for a machine on which a rank may not be scheduled for longer than that


def exchange_parts(link: EmulatedLink) -> Exchanged:
    """Every rank sends every other one its part, all at once, under two tags in turn."""
    rank, size = dist.get_rank(), dist.get_world_size()
    numel = NUM_BYTES // 4 // size // 2
    received = {(peer, tag): torch.empty(numel) for peer in range(size) if peer != rank for tag in (0, 1)}
    sent = {(peer, tag): torch.full((numel,), 10.0 * rank + tag) for peer, tag in received}
    began_s = begin_together(link)
    works = [dist.irecv(tensor, peer, tag=tag) for (peer, tag), tensor in received.items()]
    works += [dist.isend(tensor, peer, tag=tag) for (peer, tag), tensor in sent.items()]
    for work in works:
        assert work is not None
        work.wait()
    ended_s = time.perf_counter()
    is_right = all(bool((tensor == 10.0 * peer + tag).all()) for (peer, tag), tensor in received.items())
    return Exchanged(is_right, began_s, ended_s, link.take_log())


def scatter_and_gather(link: EmulatedLink) -> Exchanged:
    """The exchanges that sharded steps are made of."""
    size, rank = dist.get_world_size(), dist.get_rank()
    numel = NUM_BYTES // 4 // size
    storages = [noise(numel * size + 1, rank=peer) for peer in range(size)]
    shard, gathered = torch.empty(numel), torch.empty(numel * size)
    trailer = range(numel * size, numel * size + 1)
    with posted_exchanges() as exchanges:
        began_s = begin_together(link)
        exchanges.reduce_scatter(storages[rank].clone(), shard, trailer=trailer, pack=int).wait()
        gathered.view(size, -1)[rank] = shard
        exchanges.all_gather(gathered, number=0, then=int).wait()
        ended_s = time.perf_counter()
    total = storages[0].clone()
    for storage in storages[1:]:
        total += storage
    return Exchanged(torch.equal(gathered, (total / size)[:-1]), began_s, ended_s, link.take_log())


def begin_together(link: EmulatedLink) -> float:
    dist.barrier()
    link.take_log()
    return time.perf_counter()


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize(("program", "num_rounds"), [(exchange_parts, 1), (scatter_and_gather, 2)])
def test_sends_and_receives_take_what_they_would_on_the_link(
    program: Callable[[EmulatedLink], Exchanged], num_rounds: int, num_ranks: int
) -> None:
    link = link_from_text(SLOW)
    least_s = num_rounds * (num_ranks - 1) / num_ranks * NUM_BYTES / link.bytes_per_s
    longest_s = []
    while not longest_s or (longest_s[-1] > least_s + num_rounds * MARGIN_S and len(longest_s) < NUM_ATTEMPTS):
        found = run_over_link(program, SLOW, num_ranks=num_ranks)
        longest_s.append(max(seen.ended_s - seen.began_s for seen in found))
        for seen in found:
            assert seen.is_right
            assert least_s + num_rounds * link.hop_s <= seen.ended_s - seen.began_s
            assert {transfer.kind for transfer in seen.log} == {"send"}
            in_turn = sorted(seen.log, key=lambda t: t.started_s)
            assert all(later.started_s >= t.started_s + t.num_bytes / link.bytes_per_s - 1e-9 for t, later in pairwise(in_turn))
    assert min(longest_s) <= least_s + num_rounds * MARGIN_S


def exchange_over_a_free_link(link: EmulatedLink) -> tuple[bool, bool, bool]:
    return exchange_parts(link).is_right, scatter_and_gather(link).is_right, link.take_log() == ()


def test_a_free_link_leaves_sends_and_receives_alone() -> None:
    assert run_over_link(exchange_over_a_free_link, "none", num_ranks=3) == [(True, True, True)] * 3


def reduce_in_the_middle_of_an_exchange(_link: EmulatedLink) -> list[float]:
    """Rank 1 sends only when a collective is over that rank 0 launches behind its receive."""
    mine, theirs, total = torch.full((1,), dist.get_rank() + 1.0), torch.zeros(1), torch.ones(1)
    peer = 1 - dist.get_rank()
    receive = dist.irecv(theirs, peer)
    reduction = dist.all_reduce(total, async_op=True)
    if dist.get_rank() == 1:
        assert reduction is not None
        reduction.wait()
    dist.send(mine, peer)
    for work in (receive, reduction):
        assert work is not None
        work.wait()
    return [theirs.item(), total.item()]


def test_receives_and_collectives_of_one_group_do_not_wait_for_each_other() -> None:
    assert run_over_link(reduce_in_the_middle_of_an_exchange, "1gbit") == [[2, 2], [1, 2]]


def die_or_reduce(_link: EmulatedLink) -> None:
    if dist.get_rank() == 1:
        os._exit(7)
    dist.all_reduce(torch.ones(1))


def die_or_receive(_link: EmulatedLink) -> None:
    if dist.get_rank() == 1:
        os._exit(7)
    dist.recv(torch.ones(1), src=1)


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("program", [die_or_reduce, die_or_receive])
def test_a_dead_rank_is_an_error_where_it_is_waited_for(program: Callable[[EmulatedLink], None], link: str) -> None:
    survivor, dead = ended_over_link(program, link)
    assert dead.exit_code == 7
    assert (survivor.exit_code, survivor.was_killed) == (1, False), survivor.log
    assert "Connection closed by peer" in survivor.text or "reset by peer" in survivor.text


def train_with_torch(link: EmulatedLink) -> tuple[bool, list[tuple[str, int]]]:
    def gradients(module: nn.Module) -> list[torch.Tensor]:
        module(torch.full((4, 8), float(dist.get_rank() + 1))).sum().backward()
        return [param.grad.clone() for param in module.parameters() if param.grad is not None]

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    expected = gradients(model)
    for gradient in expected:
        dist.all_reduce(gradient, op=dist.ReduceOp.AVG)
    model.zero_grad()
    wrapped = nn.parallel.DistributedDataParallel(model)
    link.take_log()
    are_equal = all(map(torch.equal, gradients(wrapped), expected))
    return are_equal, [(transfer.kind, transfer.num_bytes) for transfer in link.take_log()]


def test_torchs_own_wrapper_trains_over_it() -> None:
    num_bytes = 4 * 2 * (8 * 8 + 8)
    assert run_over_link(train_with_torch, "1gbit") == [(True, [("all_reduce", num_bytes)])] * 2


def kinds_in_the_log(link: EmulatedLink) -> list[tuple[str, int, bool]]:
    dist.all_reduce(torch.zeros(3))
    dist.reduce_scatter(torch.zeros(2), [torch.zeros(2), torch.zeros(2)])
    dist.barrier()
    dist.barrier()  # the log is written when gloo says that it is done: that of the first barrier is surely in
    return [(t.kind, t.num_bytes, t.launched_s == t.started_s <= t.done_s) for t in link.take_log()[:3]]


def test_a_free_link_records_what_it_does_not_delay() -> None:
    expected = [("all_reduce", 12, True), ("reduce_scatter", 16, True), ("barrier", 0, True)]
    for recorded in run_over_link(kinds_in_the_log, "none"):
        assert sorted(recorded) == sorted(expected)


def test_a_closed_link_makes_no_groups() -> None:
    with emulated_backend(link_from_text("1gbit")):
        pass
    with pytest.raises(PhaseError) as caught:
        dist.init_process_group(BACKEND, store=dist.HashStore(), rank=0, world_size=1)
    assert str(caught.value) == (
        "the emulated link '1gbit' is closed.\n"
        '  init_process_group or new_group with backend="emulated"\n'
        "  Make process groups inside `with emulated_backend(link):`."
    )


def leave_handles(ends: Callable[[], object], rank: Rank) -> None:
    with emulated_backend(link_from_text("1gbit")):
        rank.meet(BACKEND)
        group = dist.new_group([0], backend=BACKEND)
        rank.handles = [dist.all_reduce(torch.ones(9), group=group, async_op=True) for _ in range(5)]
        ends()


@pytest.mark.parametrize("ends", [dist.destroy_process_group, int], ids=["destroyed", "left open"])
def test_a_process_ends_with_exit_code_zero(ends: Callable[[], object]) -> None:
    (done,) = run_ranks(partial(leave_handles, ends), 1, is_script=True)
    assert (done.exit_code, done.log) == (0, "")
