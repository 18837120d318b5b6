"""Reduce-scatter and all-gather of posted sends and receives, beside a chain of adds on one rank."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from support.models import noise
from support.ranks import Ranks, in_ranks
from undertow.runtime.exchange import Exchange, Exchanges, PostedExchanges
from undertow.runtime.group import GroupRef, OwnGroup
from undertow.runtime.native_exchange import NativeExchanges


def own_group() -> OwnGroup:
    group = OwnGroup(GroupRef.of(dist.group.WORLD), device=torch.device("cpu"))
    group.open()
    return group


def chain_of_adds(parts: list[Tensor], dtype: torch.dtype) -> Tensor:
    total = parts[0].to(dtype)
    for part in parts[1:]:
        total = total + part
    return total / len(parts)


def scattered(dtype: torch.dtype, shard_numels: list[int]) -> None:
    """Several exchanges in flight; each rank's shard has the bits of the chain, and the trailer is the sum."""
    group = own_group()
    exchanges = PostedExchanges(group)
    num_ranks, rank = group.num_ranks, group.rank
    wide = torch.float32 if dtype.itemsize == 2 else dtype
    started = []
    for index, numel in enumerate(shard_numels):
        of_rank = [noise(num_ranks * numel + 3, step=index, rank=peer).to(dtype) for peer in range(num_ranks)]
        for peer, storage in enumerate(of_rank):
            storage[-2:] = torch.tensor([peer == 0, 1])  # some set a flag, all set a flag
        storage, shard = of_rank[rank].clone(), torch.empty(numel, dtype=wide)
        trailer = range(num_ranks * numel + 1, num_ranks * numel + 3)
        handle = exchanges.reduce_scatter(storage, shard, trailer=trailer, pack=int)
        mine = [storage[rank * numel : (rank + 1) * numel] for storage in of_rank]
        started.append((handle, storage, shard, chain_of_adds(mine, wide)))
    for handle, storage, shard, wanted in started:
        handle.wait()
        assert handle.is_completed()
        assert torch.equal(shard, wanted)
        assert storage[-2:].tolist() == [1.0, num_ranks]
    exchanges.close()
    group.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_shard_is_the_mean_added_up_in_rank_order(ranks: Ranks, dtype: torch.dtype) -> None:
    ranks.run(scattered, dtype, [5, 1, 1000, 0])


@in_ranks(2, 3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_rank_gets_every_part(dtype: torch.dtype) -> None:
    group = own_group()
    exchanges = PostedExchanges(group)
    parts = [noise(7, rank=peer).to(dtype) for peer in range(group.num_ranks)]
    flat = torch.zeros(7 * group.num_ranks, dtype=dtype)
    flat.view(group.num_ranks, 7)[group.rank] = parts[group.rank]
    done: list[object] = []
    handle = exchanges.all_gather(flat, number=0, then=int)
    handle.on_done(done.append)
    handle.wait()
    assert torch.equal(flat, torch.cat(parts))
    exchanges.close()  # with the thread that calls back
    assert len(done) == 1
    group.close()


KINDS = {
    "posted": PostedExchanges,
    "native in order": lambda group: NativeExchanges(group, in_order=True),
    "native": lambda group: NativeExchanges(group, in_order=False),
}


def averaged(kind: str, dtype: torch.dtype, numels: list[int]) -> None:
    group = own_group()
    exchanges: Exchanges = KINDS[kind](group)
    started = []
    for index, numel in enumerate(numels):
        of_rank = [noise(numel, step=index, rank=peer).to(dtype) for peer in range(group.num_ranks)]
        tensor = of_rank[group.rank].clone()
        started.append((exchanges.all_reduce(tensor), tensor, of_rank))
    for handle, tensor, of_rank in started:
        handle.wait()
        wide = torch.float32 if dtype.itemsize == 2 else dtype
        assert torch.equal(tensor, chain_of_adds(of_rank, wide).to(dtype))
    exchanges.close()
    group.close()


@pytest.mark.parametrize("kind", ["posted", "native in order"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_mean_is_added_up_in_rank_order(ranks: Ranks, kind: str, dtype: torch.dtype) -> None:
    ranks.run(averaged, kind, dtype, [7, 1, 1000, 0])


@in_ranks(2, 3)
@pytest.mark.parametrize("kind", ["native", "native in order"])
def test_native_exchanges_do_the_same(kind: str) -> None:
    """What NCCL would be asked for, asked of gloo."""
    group = own_group()
    exchanges: Exchanges = KINDS[kind](group)
    num_ranks, rank = group.num_ranks, group.rank
    of_rank = [noise(num_ranks * 5 + 2, rank=peer) for peer in range(num_ranks)]
    for storage in of_rank:
        storage[-2:] = 1.0
    storage, shard = of_rank[rank].clone(), torch.empty(5)
    done: list[object] = []
    handle = exchanges.reduce_scatter(storage, shard, trailer=range(num_ranks * 5, num_ranks * 5 + 2), pack=int)
    handle.on_done(done.append)
    handle.wait()
    assert len(done) == 1
    assert handle.is_completed()
    wanted = chain_of_adds([storage[rank * 5 : rank * 5 + 5] for storage in of_rank], torch.float32)
    # Without an order the backend's own: an ulp of a sum of three values.
    assert torch.equal(shard, wanted) if kind == "native in order" else torch.allclose(shard, wanted, rtol=1e-6, atol=1e-6)
    assert storage[-2:].tolist() == [num_ranks, num_ranks]
    flat = torch.zeros(num_ranks * 5)
    flat.view(num_ranks, -1)[rank] = float(rank + 1)
    exchanges.all_gather(flat, number=0, then=lambda: done.append(None)).wait()
    assert flat.view(num_ranks, -1).mean(dim=1).tolist() == [peer + 1.0 for peer in range(num_ranks)]
    assert len(done) == 2
    exchanges.close()
    group.close()


@in_ranks(2, 3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("in_order", [False, True])
@pytest.mark.parametrize("kind", ["posted", "native"])
def test_an_all_reduce_behind_a_reduction_is_over_what_that_brings(kind: str, in_order: bool, dtype: torch.dtype) -> None:
    """Shards of a row, reduced inside, become the mean over all rows."""
    group = own_group()
    num_ranks, rank, wide = group.num_ranks, group.rank, torch.float32
    make = PostedExchanges if kind == "posted" else NativeExchanges
    inside, across = OwnGroup(GroupRef((rank,), "gloo", None), device=group.device), group
    inside.open()
    first, second = make(inside, in_order=in_order, divisor=1), make(across, in_order=in_order, divisor=5)
    started = []
    for index, numel in enumerate([5, 0, 1000]):
        of_rank = [noise(numel + 2, step=index, rank=peer).to(dtype) for peer in range(num_ranks)]
        for peer, storage in enumerate(of_rank):
            storage[-2:] = torch.tensor([peer == 0, 1])
        storage, shard = of_rank[rank].clone(), torch.empty(numel, dtype=wide)
        before = first.reduce_scatter(storage, shard, trailer=range(numel, numel + 2), pack=int)
        handle = second.all_reduce_behind(before, shard, trailer=storage[numel:])
        total = torch.zeros(numel)
        for each in of_rank:
            total = total + each[:numel].float()
        started.append((handle, shard, storage, total / 5))
    for handle, shard, storage, wanted in started:
        handle.wait()
        assert storage[-2:].tolist() == [1.0, num_ranks]
        if in_order:
            assert torch.equal(shard, wanted)
        elif kind == "posted":  # what travels is rounded to what it came in, the sum once more than its summands
            assert torch.equal(shard, wanted.to(dtype).float())
        else:  # the backend adds up in the dtype itself: a rounding for each summand
            assert torch.allclose(shard, wanted, rtol=0.0, atol=num_ranks * torch.finfo(dtype).eps * 8)
    for exchanges, of in ((first, inside), (second, across)):
        exchanges.close()
        of.close()


@in_ranks(2)
def test_what_is_behind_a_failure_fails_with_it() -> None:
    """Whoever waits for the second of two reductions learns what the first has failed with."""
    group = own_group()
    exchanges = PostedExchanges(group)

    def fail() -> None:
        raise ZeroDivisionError("while packing")

    before = exchanges.reduce_scatter(torch.zeros(8), torch.zeros(2), trailer=range(6, 8), pack=fail)
    handle = exchanges.all_reduce_behind(before, torch.zeros(2), trailer=torch.zeros(2))
    with pytest.raises(ZeroDivisionError, match="while packing"):
        handle.wait()
    late = Exchange(group)
    after_end = exchanges.all_reduce_behind(late, torch.zeros(2), trailer=torch.zeros(2))
    exchanges.close()
    late.run(int)
    with pytest.raises(RuntimeError, match="shutdown"):
        after_end.wait()
    group.close()
