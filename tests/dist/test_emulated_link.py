import os
import warnings
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from support.emulated import ended_over_link, over_link, run_over_link
from support.errors import text_of
from support.inside import BACKEND, EmulatedLink, emulated_backend
from support.levels import some
from support.processes import Rank, run_ranks
from undertow.lab.cost import collective_seconds, link_from_text

LINKS = ["1gbit", "none"]


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


@pytest.mark.deep
def test_a_collective_starts_when_its_last_rank_has_launched() -> None:
    first, late = run_over_link(start_with_a_late_rank, "1gbit")
    assert first.launched_s < late.launched_s <= first.started_s


@pytest.mark.deep
@over_link("1gbit")
def test_an_error_of_gloo_reaches_whoever_waits(link: EmulatedLink) -> None:
    for ask in (lambda work: work.wait(), lambda work: work.get_future().wait()):
        work = dist.all_reduce(torch.ones(1), op=dist.ReduceOp.BAND, async_op=True)
        assert "BAND" in text_of(RuntimeError, partial(ask, work))
    usable = torch.ones(1)
    dist.all_reduce(usable)
    assert usable == 2.0


def die_or_wait(what: str, link: EmulatedLink) -> None:
    if dist.get_rank() == 1:
        os._exit(7)
    {"a reduction": dist.all_reduce, "a message": partial(dist.recv, src=1)}[what](torch.ones(1))


@pytest.mark.parametrize("link", some(LINKS, most=1))
@pytest.mark.parametrize("what", some(["a reduction", "a message"], most=1))
def test_a_dead_rank_is_an_error_where_it_is_waited_for(what: str, link: str) -> None:
    survivor, dead = ended_over_link(partial(die_or_wait, what), link)
    assert (dead.exit_code, survivor.exit_code, survivor.was_killed) == (7, 1, False), survivor.log
    assert "Connection closed by peer" in survivor.text or "reset by peer" in survivor.text


def leave_handles(ends: Callable[[], object], rank: Rank) -> None:
    with emulated_backend(link_from_text("1gbit")):
        rank.meet(BACKEND)
        group = dist.new_group([0], backend=BACKEND)
        rank.handles = [dist.all_reduce(torch.ones(9), group=group, async_op=True) for _ in range(5)]
        ends()


@pytest.mark.parametrize("ends", some([dist.destroy_process_group, int], most=1), ids=["destroyed", "left open"])
def test_a_process_ends_with_exit_code_zero(ends: Callable[[], object]) -> None:
    (done,) = run_ranks(partial(leave_handles, ends), 1, is_script=True)
    assert (done.exit_code, done.log) == (0, "")
