import os
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from support.emulated import ended_over_link, over_link, run_over_link
from support.errors import text_of
from support.inside import BACKEND, EmulatedLink, emulated_backend, equal_shards, posted_exchanges
from support.models import noise
from support.processes import Rank, run_ranks
from undertow.lab.cost import collective_seconds, link_from_text

LINKS = ["1gbit", "none"]
SLOW = "10mbit"  # so slow that what it carries is never done by accident


@over_link(*LINKS)
def test_every_collective_has_gloos_answer(link: EmulatedLink) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    mine, other = torch.full((2,), rank + 1.0), torch.full((2,), 2.0 - rank)
    both, total = torch.tensor([1.0, 1.0, 2.0, 2.0]), torch.full((1,), 3.0)

    # What is written to, the call, and the answer; only rank 0 gathers and scatters.
    calls: dict[str, tuple[Tensor, Callable[[Tensor], object], Tensor]] = {
        "a sum": (mine.clone(), dist.all_reduce, mine + other),
        "a mean": (mine.clone(), partial(dist.all_reduce, op=dist.ReduceOp.AVG), (mine + other) / 2),
        "broadcast": (mine.clone(), partial(dist.broadcast, src=1), both[2:]),
        "all_gather": (torch.empty(size, 2), lambda out: dist.all_gather(list(out), mine), both.view(size, 2)),
        "reduce_scatter": (torch.empty(1), lambda out: dist.reduce_scatter(out, list(mine.chunk(size))), total),
        "all_to_all": (torch.empty(2), lambda out: dist.all_to_all_single(out, mine), torch.tensor([1.0, 2.0])),
        "one tensor gathered": (torch.empty(4), lambda out: dist.all_gather_into_tensor(out, mine), both),
        "one tensor scattered": (torch.empty(1), lambda out: dist.reduce_scatter_tensor(out, mine), total),
        "gather": (
            torch.zeros(size, 2),
            lambda out: dist.gather(mine, None if rank else list(out), dst=0),
            torch.zeros(size, 2) if rank else both.view(size, 2),
        ),
        "scatter": (
            torch.empty(2),
            lambda out: dist.scatter(out, None if rank else [mine, mine + 10], src=0),
            torch.full((2,), 1.0 + 10 * rank),
        ),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch 2.13 renamed those of one tensor
        for name, (found, call, answer) in calls.items():
            call(found)
            assert torch.equal(found, answer), name
    if rank == 0:
        dist.send(mine, dst=1)
        dist.send(mine, dst=1)
    else:
        received = torch.zeros(2, 2)
        dist.recv(received[0], src=0)
        dist.recv(received[1], src=0)
        assert torch.equal(received, torch.ones(2, 2))
    dist.barrier()


@over_link("1gbit")
def test_collectives_follow_one_another_over_one_link_and_take_their_time(link: EmulatedLink) -> None:
    groups = None, dist.new_group([0, 1], backend=BACKEND)
    link.drain_log()
    numels = [numel for numel in (50_000, 7, 200_000) for _ in groups]
    works = [dist.all_reduce(torch.zeros(n), group=group, async_op=True) for n, group in zip(numels, groups * 3, strict=True)]
    for work in works:
        work.wait()
    log = link.drain_log()
    assert sorted(transfer.num_bytes for transfer in log) == sorted(4 * numel for numel in numels)
    cable = link_from_text("1gbit")
    costs = {t.num_bytes: collective_seconds(cable, t.kind, num_bytes=t.num_bytes, num_ranks=2) for t in log}
    # A guarantee, no measurement: nothing is done before the link allows it. 1e-9: times of day are large doubles.
    assert all(t.done_s >= t.started_s + costs[t.num_bytes] - 1e-9 for t in log)
    assert all(t.started_s >= t.launched_s for t in log)
    in_turn = sorted(log, key=lambda t: t.started_s)
    assert all(later.started_s >= t.started_s + costs[t.num_bytes] - 1e-9 for t, later in pairwise(in_turn))


def start_with_a_late_rank(link: EmulatedLink) -> Any:
    tensor, token = torch.zeros(10), torch.zeros(1)
    if dist.get_rank() == 0:
        work = dist.all_reduce(tensor, async_op=True)
        dist.send(token, dst=1)
    else:
        dist.recv(token, src=0)  # only now: rank 0 has launched before
        work = dist.all_reduce(tensor, async_op=True)
    work.wait()
    (transfer,) = (it for it in link.drain_log() if it.kind == "all_reduce")
    return transfer


def test_a_collective_starts_when_its_last_rank_has_launched() -> None:
    first, late = run_over_link(start_with_a_late_rank, "1gbit")
    assert first.launched_s < late.launched_s <= first.started_s


@over_link("1gbit")
def test_an_error_of_gloo_reaches_whoever_waits(link: EmulatedLink) -> None:
    for ask in (lambda work: work.wait(), lambda work: work.get_future().wait()):
        work = dist.all_reduce(torch.ones(1), op=dist.ReduceOp.BAND, async_op=True)
        assert "BAND" in text_of(RuntimeError, partial(ask, work))
    usable = torch.ones(1)
    dist.all_reduce(usable)
    assert usable == 2.0


@dataclass(frozen=True)
class Exchanged:
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
    peers = [(rank + step) % size for step in range(1, size)]  # or all would send to rank 0 first, and wait for its way in
    received = {(peer, tag): torch.empty(numel) for tag in (0, 1) for peer in peers}
    sent = {(peer, tag): torch.full((numel,), 10.0 * rank + tag) for peer, tag in received}
    began_s = begin_together(link)
    works = [dist.irecv(tensor, peer, tag=tag) for (peer, tag), tensor in received.items()]
    works += [dist.isend(tensor, peer, tag=tag) for (peer, tag), tensor in sent.items()]
    for work in works:
        work.wait()
    ended_s = time.perf_counter()
    return Exchanged(
        all(bool((tensor == 10.0 * peer + tag).all()) for (peer, tag), tensor in received.items()),
        began_s,
        ended_s,
        link.drain_log(),
    )


def scatter_and_gather(link: EmulatedLink) -> Exchanged:
    """The exchanges that sharded steps are made of."""
    size, rank = dist.get_world_size(), dist.get_rank()
    numel = NUM_BYTES // 4 // size
    storages = [noise(numel * size + 1, rank=peer) for peer in range(size)]
    shard, gathered = torch.empty(numel), torch.empty(numel * size)
    storage = storages[rank].clone()
    with posted_exchanges() as exchanges:
        began_s = begin_together(link)
        exchanges.reduce_scatter(storage, shard, equal_shards(size, numel), trailer=storage[numel * size :]).wait()
        gathered.view(size, -1)[rank] = shard
        exchanges.all_gather(gathered, equal_shards(size, numel).parts, number=0).wait()
        ended_s = time.perf_counter()
    total = storages[0].clone()
    for storage in storages[1:]:
        total += storage
    return Exchanged(torch.equal(gathered, (total / size)[:-1]), began_s, ended_s, link.drain_log())


def begin_together(link: EmulatedLink) -> float:
    dist.barrier()
    link.drain_log()
    return time.perf_counter()


@pytest.mark.alone
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
    assert min(longest_s) <= least_s + num_rounds * MARGIN_S


def die_or_wait(what: str, link: EmulatedLink) -> None:
    if dist.get_rank() == 1:
        os._exit(7)
    {"a reduction": dist.all_reduce, "a message": partial(dist.recv, src=1)}[what](torch.ones(1))


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("what", ["a reduction", "a message"])
def test_a_dead_rank_is_an_error_where_it_is_waited_for(what: str, link: str) -> None:
    survivor, dead = ended_over_link(partial(die_or_wait, what), link)
    assert (dead.exit_code, survivor.exit_code, survivor.was_killed) == (7, 1, False), survivor.log
    assert "Connection closed by peer" in survivor.text or "reset by peer" in survivor.text


@over_link("1gbit")
def test_torchs_own_wrapper_trains_over_it(link: EmulatedLink) -> None:
    def gradients(module: nn.Module) -> list[Tensor]:
        module(torch.full((4, 8), float(dist.get_rank() + 1))).sum().backward()
        return [param.grad.clone() for param in module.parameters() if param.grad is not None]

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    expected = gradients(model)
    for gradient in expected:
        dist.all_reduce(gradient, op=dist.ReduceOp.AVG)
    model.zero_grad()
    wrapped = nn.parallel.DistributedDataParallel(model)
    link.drain_log()
    assert all(map(torch.equal, gradients(wrapped), expected))
    assert [(transfer.kind, transfer.num_bytes) for transfer in link.drain_log()] == [("all_reduce", 4 * 2 * (8 * 8 + 8))]


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
