"""Reduce-scatter, all-gather and an all-reduce in rank order, posted and native, beside a chain of adds on one rank."""

import contextlib
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from itertools import count, takewhile
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from support.inside import before_lines, opened_group
from support.levels import some
from support.models import noise
from support.ranks import in_ranks
from support.sharded import chain
from undertow.config import SyncConfig
from undertow.plan.layout import equal_parts
from undertow.ranks import posted_messages
from undertow.ranks.backend_collectives import BackendCollectives
from undertow.ranks.exchanges import Exchanges
from undertow.ranks.group import GroupRef
from undertow.ranks.handle import Handle, ThreadWork
from undertow.ranks.parcels import Encoded, FullWidth
from undertow.ranks.posted_messages import PostedMessages
from undertow.ranks.transport import OwnGroup
from undertow.wire import WIRES

KINDS: dict[str, Any] = {
    "posted": PostedMessages,
    "native in order": partial(BackendCollectives, in_order=True),  # what NCCL would be asked for, asked of gloo
    "native": partial(BackendCollectives, in_order=False),
}


def wait_with_a_handler(number: int) -> bool:
    """Returns True if a signal handler has waited before line `number` of a wait: what follows the work was done then."""
    done, found = list[str](), list[bool]()
    handle = Handle(mock.Mock(), finish=partial(done.append, "finished"))

    def handler() -> None:
        handle.wait()
        found.append(bool(done))

    with before_lines(Handle, handler, number=number):
        handle.wait()
    assert False not in found
    return bool(found)


def test_what_follows_the_work_is_done_for_a_signal_handler_that_waits_too() -> None:
    assert sum(takewhile(bool, map(wait_with_a_handler, count(1)))) > 5


def fail_late() -> None:
    raise TimeoutError("of a stage")


def test_a_wait_for_a_thread_ends_with_its_time_or_with_the_error_of_the_work() -> None:
    work = ThreadWork()
    with pytest.raises(RuntimeError, match="time limit"):
        work.wait(timedelta(milliseconds=1))
    work.run(fail_late)
    for limit in (None, timedelta(seconds=60)):
        with pytest.raises(TimeoutError, match="of a stage"):
            work.wait(limit)


@contextlib.contextmanager
def exchanging(kind: str) -> Iterator[Exchanges]:
    group = opened_group()
    exchanges = Exchanges(KINDS[kind](group), divisor=group.num_ranks)
    yield exchanges
    exchanges.close()  # with the threads that call back
    group.close()


def whole(num_ranks: int, part_numel: int, *, stop: int | None = None) -> FullWidth:
    return FullWidth(equal_parts(num_ranks, part_numel, stop=num_ranks * part_numel if stop is None else stop))


def of_ranks(numel: int, step: int, dtype: torch.dtype) -> list[Tensor]:
    """What each rank gives; two flags at the end: some set the first, all set the second."""
    found = [noise(numel + 2, step=step, rank=peer).to(dtype) for peer in range(dist.get_world_size())]
    for peer, storage in enumerate(found):
        storage[-2:] = torch.tensor([peer == 0, 1])
    return found


def chain_of_adds(parts: list[Tensor], dtype: torch.dtype) -> Tensor:
    return chain([part.to(torch.float32 if dtype.itemsize == 2 else dtype) for part in parts])


@in_ranks(2, 3)
@pytest.mark.parametrize(
    ("kind", "dtype"),
    some([*(("posted", it) for it in (torch.float64, torch.bfloat16)), *((kind, torch.float32) for kind in KINDS)], most=2),
)
def test_a_shard_is_the_mean_added_up_in_rank_order_and_every_rank_gets_every_part(kind: str, dtype: torch.dtype) -> None:
    num_ranks, rank = dist.get_world_size(), dist.get_rank()
    started, done = [], list[object]()
    with exchanging(kind) as exchanges:
        for index, numel in enumerate([5, 1, 1000, 0]):
            given = of_ranks(num_ranks * numel + 1, index, dtype)
            wanted = chain_of_adds([storage[rank * numel : (rank + 1) * numel] for storage in given], dtype) / num_ranks
            shard, trailer = torch.empty_like(wanted), given[rank][num_ranks * numel + 1 :]
            handle = exchanges.reduce_scatter(given[rank], shard, whole(num_ranks, numel), trailer=trailer)
            handle.on_done(done.append)
            started.append((handle, given[rank], shard, wanted))
        for handle, storage, shard, wanted in started:
            handle.wait()
            assert storage[-2:].tolist() == [1.0, num_ranks]
            assert handle.is_completed()
            # Without an order the backend's own: an ulp of a sum of three values.
            assert torch.equal(shard, wanted) if kind != "native" else torch.allclose(shard, wanted, rtol=1e-6, atol=1e-6)
        parts = [noise(7, rank=peer).to(dtype) for peer in range(num_ranks)]
        flat = torch.zeros(7 * num_ranks, dtype=dtype)
        flat.view(num_ranks, 7)[rank] = parts[rank]
        shards = equal_parts(num_ranks, 7, stop=7 * num_ranks)
        handle = exchanges.all_gather(flat, shards, number=0, then=lambda: done.append("then"))
        handle.on_done(done.append)
        handle.wait()
        assert torch.equal(flat, torch.cat(parts))
    assert len(done) == 6


@in_ranks(2, 3)
def test_ranks_may_start_gathers_in_different_orders() -> None:
    num_ranks, rank = dist.get_world_size(), dist.get_rank()
    numel = 1 << 20  # gloo does not buffer so much
    flats = [torch.full((num_ranks * numel,), float(rank + number)) for number in range(3)]
    parts = equal_parts(num_ranks, numel, stop=num_ranks * numel)
    with exchanging("posted") as exchanges:
        order = [(rank + number) % 3 for number in range(3)]
        handles = [exchanges.all_gather(flats[number], parts, number=number) for number in order]
        for handle in handles:
            handle.wait()
    for number, flat in enumerate(flats):
        assert flat.view(num_ranks, numel)[:, 0].tolist() == [peer + number for peer in range(num_ranks)]


UNEVEN = [range(5), range(5, 5), range(5, 1000)]


@in_ranks(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_parts_that_differ_much_travel_in_equal_pieces(kind: str, dtype: torch.dtype) -> None:
    """Rank 1 has none, and rank 2 nearly all. Several exchanges are in flight, between others of equal parts."""
    rank, part, started = dist.get_rank(), UNEVEN[dist.get_rank()], []
    with exchanging(kind) as exchanges:
        for index in range(4):
            given = of_ranks(3 * 340, index, dtype)
            total = chain_of_adds([storage[:1000] for storage in given], dtype) / 3
            pieces = whole(3, 340)
            own = part if index % 2 == 0 else pieces.parts[rank]
            wanted = torch.cat([total, torch.zeros(20)])[own.start : own.stop]
            storage, shard = given[rank], torch.full((len(own),), torch.nan)
            storage[1000 : 3 * 340] = 0
            parts = UNEVEN if index % 2 == 0 else None
            handle = exchanges.reduce_scatter(storage, shard, pieces, trailer=storage[3 * 340 :], parts=parts)
            started.append((handle, storage, shard, wanted))
        for handle, storage, shard, wanted in started:
            handle.wait()
            assert storage[-2:].tolist() == [1.0, 3.0]
            # Without an order the backend's own, in the gradients' dtype: two roundings of sums below 16, divided by three.
            atol = 16 * torch.finfo(dtype).eps if kind == "native" else 0.0
            torch.testing.assert_close(shard, wanted, rtol=0.0, atol=atol)
        values, wire = noise(1000, rank=0).to(dtype), WIRES["int8"]
        flat = torch.zeros(1002, dtype=dtype)
        flat[part.start : part.stop] = values[part.start : part.stop]
        parcel, sums = Encoded(wire, torch.float32, 0, UNEVEN), torch.ones(1000)
        handles = [
            exchanges.all_gather(flat, UNEVEN, number=0),
            exchanges.all_gather_differences(
                lambda into: into.copy_(values[part.start : part.stop]), sums, parcel, number=1, then=lambda: None
            ),
        ]
        for handle in handles:
            handle.wait()
        assert torch.equal(flat[:1000], values)
        assert torch.equal(sums, values.float() + 1)


@in_ranks(3)
def test_ranks_may_start_gathers_of_pieces_in_different_orders() -> None:
    rank, numel, counts = dist.get_rank(), 3 << 20, range(3)  # gloo does not buffer so much
    parts = [
        [range(numel if owner == 0 else 0), range(numel if owner == 0 else 0, numel if owner < 2 else 0)] for owner in counts
    ]
    for owner in counts:
        parts[owner].append(range(parts[owner][1].stop, numel))
    flats = [torch.full((numel,), float(number) if rank == number else -1.0) for number in counts]
    with exchanging("posted") as exchanges:
        for _ in range(5):
            order = [(rank + number) % 3 for number in counts]
            handles = [exchanges.all_gather(flats[number], parts[number], number=number) for number in order]
            for handle in handles:
                handle.wait()
    assert all(torch.equal(flat, torch.full_like(flat, number)) for number, flat in enumerate(flats))


def test_only_gathers_take_memory_for_pieces() -> None:
    carrier = BackendCollectives(mock.Mock(rank=0, device=torch.device("cpu")), in_order=True)
    messages = [torch.zeros(size) for size in (1000, 1, 1)]
    sizes = [message.numel() for message in messages]
    assert carrier.prepare(sizes, torch.float32).pieces is not None
    assert carrier.prepare(sizes, torch.float32, into=messages).pieces is None  # the means of an all-reduce


@in_ranks(3, timeout_s=30.0)
@pytest.mark.parametrize("kind", ["equal parts", "pieces", "hops"])
def test_a_rank_may_wait_for_a_gather_before_it_starts_another_that_others_have_started(kind: str) -> None:
    """As when it steps one optimizer, reads its parameters and steps the next. No rank waits for a gather that depends on it."""
    rank, numel = dist.get_rank(), 3000
    parts = [range(10), range(10, 20), range(20, numel)] if kind == "pieces" else equal_parts(3, 1000, stop=numel)
    flats = [torch.full((numel,), -1.0) for _ in range(3)]
    for number, flat in enumerate(flats):
        flat[parts[rank].start : parts[rank].stop] = number
    before_wait = [[0, 1], [1, 2], [2, 0]][rank]  # the last one of these is read before the third one starts
    most_direct = 2 if kind == "hops" else 8
    with mock.patch.object(posted_messages, "_MOST_DIRECT_RANKS", most_direct), exchanging("posted") as exchanges:
        for _ in range(5):
            handles = [exchanges.all_gather(flats[number], parts, number=number) for number in before_wait]
            if rank < 2:
                handles[-1].wait()
            third = 3 - sum(before_wait)
            handles.append(exchanges.all_gather(flats[third], parts, number=third))
            for handle in handles:
                handle.wait()
    assert all(torch.equal(flat, torch.full_like(flat, number)) for number, flat in enumerate(flats))


@in_ranks(2, 3)
def test_values_travel_only_if_the_ranks_are_alike() -> None:
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    with exchanging("posted") as exchanges:
        started = []
        for index in range(4):
            is_alike = index % 2 == 0
            numel = 1000 if is_alike else 100 * (rank + 1)  # gloo would end the process
            given = [noise(numel, step=index, rank=peer) for peer in range(num_ranks)]
            mine, trailer = given[rank].clone(), torch.tensor([1.0, index % 2])
            handle = exchanges.all_reduce(mine, trailer=trailer, is_alike=lambda told: told[1].item() == 0)
            started.append((handle, mine, trailer, chain(given) / num_ranks if is_alike else given[rank]))
        for index, (handle, mine, trailer, wanted) in enumerate(started):
            handle.wait()
            assert trailer.tolist() == [num_ranks, num_ranks * (index % 2)]
            assert torch.equal(mine, wanted)


@in_ranks(2, 3)
@pytest.mark.parametrize("kind", ["posted", "native in order"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_mean_is_added_up_in_rank_order(kind: str, dtype: torch.dtype) -> None:
    rank, num_ranks, started = dist.get_rank(), dist.get_world_size(), []
    with exchanging(kind) as exchanges:
        for index, numel in enumerate([7, 1, 1000, 0]):
            given = [noise(numel, step=index, rank=peer).to(dtype) for peer in range(num_ranks)]
            wanted = (chain_of_adds(given, dtype) / num_ranks).to(dtype)
            started.append((exchanges.all_reduce(given[rank]), given[rank], wanted))
        for handle, tensor, wanted in started:
            handle.wait()
            assert torch.equal(tensor, wanted)


@in_ranks(2, 3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_an_all_reduce_behind_a_reduction_is_over_what_that_brings(kind: str, dtype: torch.dtype) -> None:
    across, rank = opened_group(), dist.get_rank()
    inside = OwnGroup(GroupRef((rank,), "gloo", None), device=across.device, limits=SyncConfig())
    inside.open()
    first, second = Exchanges(KINDS[kind](inside), divisor=1), Exchanges(KINDS[kind](across), divisor=5)
    started = []
    for index, numel in enumerate([5, 0, 1000]):
        given = of_ranks(numel, index, dtype)
        wanted = chain_of_adds([storage[:numel] for storage in given], dtype) / 5
        storage, shard = given[rank], torch.empty(numel)
        started.append(
            (
                second.all_reduce_behind(
                    first.reduce_scatter(storage, shard, whole(1, numel), trailer=storage[numel:]),
                    shard,
                    whole(dist.get_world_size(), -(-numel // dist.get_world_size()), stop=numel),
                    trailer=storage[numel:],
                ),
                shard,
                storage,
                wanted,
            )
        )
    for handle, shard, storage, wanted in started:
        handle.wait()
        assert storage[-2:].tolist() == [1.0, dist.get_world_size()]
        # The mean comes back in the gradients' dtype. Without an order the backend adds up in that dtype, and rounds each sum.
        atol = dist.get_world_size() * torch.finfo(dtype).eps * 8 if kind == "native" else 0.0
        torch.testing.assert_close(shard, wanted.to(dtype).float(), rtol=0.0, atol=atol)
    for exchanges, of in ((first, inside), (second, across)):
        exchanges.close()
        of.close()


@in_ranks(2)
def test_what_is_behind_a_failure_fails_with_it() -> None:
    with exchanging("posted") as exchanges:

        def fail() -> None:
            raise ZeroDivisionError("while packing")

        handle = exchanges.all_reduce_behind(
            exchanges.reduce_scatter(torch.zeros(8), torch.zeros(2), whole(2, 2), trailer=torch.zeros(2), fill=fail),
            torch.zeros(2),
            whole(2, 1),
            trailer=torch.zeros(2),
        )
        with pytest.raises(ZeroDivisionError, match="while packing"):
            handle.wait()
        late = ThreadWork()
        after_end = exchanges.all_reduce_behind(Handle(late), torch.zeros(2), whole(2, 1), trailer=torch.zeros(2))
        exchanges.close()
        late.run(int)
        # This rank's end, or the other one's before.
        with pytest.raises(RuntimeError, match=r"shutdown|Connection closed"):
            after_end.wait()


@in_ranks(2, 3)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", ["posted", "native"])
def test_messages_of_any_length_are_decoded(kind: str, dtype: torch.dtype) -> None:
    """An odd number of small values makes messages whose length is no multiple of a scale's."""
    rank, num_ranks, numel = dist.get_rank(), dist.get_world_size(), 2 * 512 + 903
    parts = equal_parts(num_ranks, 512, stop=numel) if num_ranks > 2 else [range(1024), range(1024, numel)]
    parts[-1] = range(parts[-1].start, numel)
    parcel = Encoded(WIRES["int8"], dtype, 1024, parts)
    given = [noise(numel, rank=peer).to(dtype) for peer in range(num_ranks)]
    with exchanging(kind) as exchanges:
        exchanges.all_reduce(given[rank], parcel).wait()
    every = [torch.empty_like(given[rank]) for _ in range(num_ranks)]
    dist.all_gather(every, given[rank])
    assert all(torch.equal(other, every[0]) for other in every)


@in_ranks(2, 3)
@pytest.mark.parametrize(("most_whole", "most_copied"), [(0, 0), (1 << 20, 0), (1 << 20, 1 << 20)])
@pytest.mark.parametrize("wire", [None, "int8"])
def test_a_trailer_is_summed_up_in_parts_or_whole_or_behind_messages(wire: str | None, most_whole: int, most_copied: int) -> None:
    """Several exchanges are in flight, of both kinds and with trailers of several sizes."""
    limits = {"_MOST_SENT_WHOLE": most_whole, "_MOST_COPIED": most_copied}
    num_ranks, rank = dist.get_world_size(), dist.get_rank()
    started = []
    with mock.patch.multiple(posted_messages, **limits), exchanging("posted") as exchanges:
        for index, num_flags in enumerate([1, 5, 60, 1000, 60, 5] * 2):
            numel = num_ranks * 512
            given = [noise(numel, step=index, rank=peer) for peer in range(num_ranks)]
            flags = [(torch.arange(num_flags) % (peer + 2) == 0).float() for peer in range(num_ranks)]
            parts = equal_parts(num_ranks, 512, stop=numel)
            parcel = FullWidth(parts) if wire is None else Encoded(WIRES[wire], torch.float32, numel, parts)
            mine, trailer, shard = given[rank].clone(), flags[rank].clone(), torch.empty(512)
            handle = (
                exchanges.reduce_scatter(mine, shard, parcel, trailer=trailer)
                if index % 2
                else exchanges.all_reduce(mine, parcel, trailer=trailer)
            )
            found = shard if index % 2 else mine
            wanted = chain(given) / num_ranks
            wanted = wanted[parts[rank].start : parts[rank].stop] if index % 2 else wanted
            started.append((handle, found, wanted, trailer, sum(flags)))
        for handle, found, wanted, trailer, total in started:
            handle.wait()
            assert torch.equal(trailer, total)
            # Half a unit of each code, of values below 5: two roundings.
            assert torch.equal(found, wanted) if wire is None else torch.allclose(found, wanted, rtol=0.0, atol=5.0 / 127)
