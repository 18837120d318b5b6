"""Gathers of many ranks pass small messages on: in as many rounds as the logarithm of the ranks, and with the same values."""

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from support.levels import some
from support.models import noise
from support.unconnected import Advanced, Network, Tallied, Unconnected, advance
from undertow.plan.layout import equal_parts
from undertow.ranks.exchange_messages import hops_between
from undertow.ranks.exchanges import Exchanges
from undertow.ranks.parcels import Encoded
from undertow.ranks.posted_messages import _MOST_PASSED_ON, PostedMessages
from undertow.wire import WIRES

# The last ranks have a shorter part, and none.
MANY = some([(9, 5), (16, 64), (13, 12), (61, 55), (24, 24)], most=3)


def exchanging(network: Network, num_ranks: int) -> list[Exchanges]:
    groups: list[Any] = [Advanced(network, rank, num_ranks) for rank in range(num_ranks)]
    return [Exchanges(PostedMessages(group), divisor=num_ranks) for group in groups]


def started(exchanges: Sequence[Exchanges], parts: Sequence[range], wanted: Tensor, number: int) -> list[Tensor]:
    """Each rank has its part of `wanted`; returns the tensors that get all parts."""
    flats = []
    for rank, each in enumerate(exchanges):
        flat = torch.full_like(wanted, torch.nan)
        own = slice(parts[rank].start, parts[rank].stop)
        flat[own] = wanted[own]
        each.all_gather(flat, parts, number=number)
        flats.append(flat)
    return flats


@pytest.mark.parametrize(("num_ranks", "numel"), MANY)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_rank_gets_every_part_in_a_few_messages(num_ranks: int, numel: int, dtype: torch.dtype) -> None:
    """Of two gathers at the same time."""
    network, num_rounds = Network(), math.ceil(math.log2(num_ranks))
    exchanges, parts = exchanging(network, num_ranks), equal_parts(num_ranks, -(-numel // num_ranks), stop=numel)
    wanted = [noise(numel, step=number, rank=0).to(dtype) for number in range(2)]
    found = [started(exchanges, parts, values, number) for number, values in enumerate(wanted)]
    num_stages = advance(network, [each.group for each in exchanges])  # type: ignore[misc]
    assert num_stages == num_rounds + 1
    for values, flats in zip(wanted, found, strict=True):
        assert all(torch.equal(flat, values) for flat in flats)
    # Every element reaches every other rank once. A message that reaches beyond the last rank has two pieces.
    assert network.num_bytes.total() == sum(values.nbytes for values in wanted) * (num_ranks - 1)
    assert max(network.num_messages.values()) <= 2 * (2 * num_rounds - 1)


def test_differences_are_passed_on_too() -> None:
    network, num_ranks, numel = Network(), 16, 16 * 512
    parts = equal_parts(num_ranks, 512, stop=numel)
    parcel = Encoded(WIRES["int8"], torch.float32, numel, parts)
    exchanges, difference = exchanging(network, num_ranks), noise(numel, rank=0)
    sums = [torch.ones(numel) for _ in exchanges]
    for rank, each in enumerate(exchanges):
        own = difference[parts[rank].start : parts[rank].stop]
        each.all_gather_differences(lambda into, own=own: into.copy_(own), sums[rank], parcel, number=0, then=lambda: None)
    advance(network, [each.group for each in exchanges])  # type: ignore[misc]
    assert all(torch.equal(total, sums[0]) for total in sums)
    # Half a unit of a code of each block.
    assert torch.allclose(sums[0] - 1, difference, rtol=0.0, atol=float(difference.abs().max()) / 127)
    assert max(network.num_messages.values()) <= 7


@pytest.mark.parametrize("num_ranks", some([1024, 16_384], most=1))
def test_a_thousand_ranks_send_twenty_messages_each(num_ranks: int) -> None:
    network, parts = Network(), equal_parts(num_ranks, 4, stop=4 * num_ranks)
    for rank in (0, 1, num_ranks // 2, num_ranks - 1):
        carrier = PostedMessages(Tallied(network, rank, num_ranks))  # type: ignore[arg-type]
        gathering = carrier.prepare_parts(torch.zeros(4 * num_ranks), parts, over=None)
        assert len(gathering.hops) == math.log2(num_ranks)
        for hop in gathering.hops:
            carrier.send_hop(gathering, hop, 0)
    assert max(network.num_messages.values()) <= 2 * math.log2(num_ranks)


def test_few_ranks_and_large_messages_go_directly() -> None:
    for num_ranks, num_bytes, are_passed_on in (
        (8, 4, False),
        (9, 4, True),
        (9, _MOST_PASSED_ON, True),
        (9, _MOST_PASSED_ON + 4, False),
    ):
        carrier = PostedMessages(Unconnected(Network(), 0, num_ranks))  # type: ignore[arg-type]
        flat = torch.zeros(num_ranks * num_bytes, dtype=torch.uint8)
        parts = equal_parts(num_ranks, num_bytes, stop=len(flat))
        assert bool(carrier.prepare_parts(flat, parts, over=None).hops) is are_passed_on


def test_what_a_rank_sends_it_has_by_then() -> None:
    for num_ranks in range(1, 70):
        places = [range(rank, rank + 1) for rank in range(num_ranks)]
        all_hops = [hops_between(torch.arange(num_ranks), places, rank=rank) for rank in range(num_ranks)]
        held = [{rank} for rank in range(num_ranks)]
        for number in range(len(all_hops[0])):
            before = [set(each) for each in held]
            for rank, hops in enumerate(all_hops):
                hop = hops[number]
                sent = torch.cat(list(hop.sent)).tolist()
                assert before[rank].issuperset(sent)
                back = all_hops[hop.to][number]
                assert back.of == rank
                assert [piece.tolist() for piece in back.received] == [piece.tolist() for piece in hop.sent]
                held[hop.to] |= set(sent)
        assert all(each == set(range(num_ranks)) for each in held)
