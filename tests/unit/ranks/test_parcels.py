"""Parcels of many ranks: the bytes of each part alone, in few calls; and trailers, in few bytes."""

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from support.levels import some
from support.models import noise
from support.unconnected import Advanced, Network, Tallied, Unconnected, advance
from undertow.plan.facts import trailer_at
from undertow.plan.layout import equal_parts, round_up
from undertow.ranks import posted_messages
from undertow.ranks.exchanges import Exchanges
from undertow.ranks.parcels import ALIGN_BYTES, Encoded, FullWidth, Parcel
from undertow.ranks.posted_messages import PostedMessages
from undertow.wire import WIRES, BlockInt8

BLOCK = 512


def room(numel: int, dtype: torch.dtype) -> Tensor:
    return torch.zeros(numel, dtype=dtype)


def values_of(numel: int, dtype: torch.dtype) -> Tensor:
    """Usual values, and blocks with all that is rare."""
    values = torch.randn(numel, generator=torch.Generator().manual_seed(numel))
    rare = [0.0, 1e-42, 1e38, math.inf, -math.inf, math.nan]
    for place, value in enumerate(rare):
        start = place * 3 * BLOCK
        values[start : start + BLOCK : 7] = value
    return values.to(dtype)


def alone(parcel: Encoded, values: Tensor, index: int, dither: Tensor | None = None) -> Tensor:
    """The message of a part, encoded without any other part."""
    part, wire = parcel.parts[index], parcel.wire
    own = values[part.start : part.stop].clone()
    num_narrow = min(max(parcel.narrow_numel - part.start, 0), len(part))
    num_bytes = wire.num_bytes(num_narrow)
    message = torch.zeros(round_up(num_bytes, ALIGN_BYTES) + (len(part) - num_narrow) * own.itemsize, dtype=torch.uint8)
    if num_narrow:
        wire.encode(own[:num_narrow], message[:num_bytes], dither)
    message[round_up(num_bytes, ALIGN_BYTES) :].view(own.dtype).copy_(own[num_narrow:])
    return message


def opened_alone(parcel: Encoded, message: Tensor, index: int, into: Tensor, *, adds: bool) -> None:
    """Decodes the message of a part, without any other one."""
    part, message = parcel.parts[index], message.clone()
    num_narrow = min(max(parcel.narrow_numel - part.start, 0), len(part))
    num_bytes = parcel.wire.num_bytes(num_narrow)
    if num_narrow:
        parcel.wire.decode(message[:num_bytes], into[:num_narrow], adds=adds)
    wide = message[round_up(num_bytes, ALIGN_BYTES) :].view(parcel.dtype)
    into[num_narrow:].add_(wide) if adds else into[num_narrow:].copy_(wide)


def parcel_of(num_ranks: int, wire: str, dtype: torch.dtype, *, blocks: int = 40, small: int = 903) -> Encoded:
    """`blocks` for each two ranks, then smaller parameters; the last parts are shorter, or empty."""
    narrow_numel = num_ranks * blocks // 2 * BLOCK
    numel = narrow_numel + small
    part_numel = round_up(-(-numel // num_ranks), BLOCK)
    return Encoded(WIRES[wire], dtype, narrow_numel, equal_parts(num_ranks, part_numel, stop=numel))


def equal_bits(first: Tensor, second: Tensor) -> bool:
    return torch.equal(first.contiguous().view(torch.uint8), second.contiguous().view(torch.uint8))


CASES = [
    pytest.param(*case, id=" ".join(map(str, case)))
    for case in [
        (2, "int8", torch.float32),
        (3, "int8", torch.bfloat16),
        (61, "int8", torch.float32),
        (64, "bfloat16", torch.float32),
        (5, "bfloat16", torch.float64),
    ]
]


@pytest.mark.parametrize(("num_ranks", "wire", "dtype"), CASES)
def test_messages_have_the_bytes_of_each_part_alone(num_ranks: int, wire: str, dtype: torch.dtype) -> None:
    parcel = parcel_of(num_ranks, wire, dtype)
    values = values_of(parcel.parts[-1].stop, dtype)
    dither = torch.linspace(-0.49, 0.49, BLOCK) if wire == "int8" else None
    vars_of = {"own_dither": dither}
    for each in (parcel, Encoded(parcel.wire, dtype, parcel.narrow_numel, parcel.parts, **vars_of)):
        messages = each.messages(values, room)
        assert [message.numel() for message in messages] == each.sizes
        for index, message in enumerate(messages):
            assert equal_bits(message, alone(parcel, values, index, each.own_dither)), index


@pytest.mark.parametrize("are_side_by_side", [True, False])
@pytest.mark.parametrize(("num_ranks", "wire", "dtype"), CASES)
def test_all_parts_are_opened_as_each_alone(num_ranks: int, wire: str, dtype: torch.dtype, are_side_by_side: bool) -> None:
    parcel = parcel_of(num_ranks, wire, dtype)
    values = values_of(parcel.parts[-1].stop, dtype)
    messages = parcel.messages(values, room)
    if not are_side_by_side:
        messages = [message.clone() for message in messages]
    for adds in (False, True):
        found = torch.ones_like(values)
        wanted = found.clone()
        parcel.add_to(messages, found) if adds else parcel.open(messages, found)
        for index, part in enumerate(parcel.parts):
            opened_alone(parcel, messages[index], index, wanted[part.start : part.stop], adds=adds)
        assert equal_bits(found, wanted)


@pytest.mark.parametrize("stride", [0, 16, 4096])
@pytest.mark.parametrize(("num_ranks", "wire", "dtype"), CASES)
def test_a_part_is_added_up_in_rank_order(num_ranks: int, wire: str, dtype: torch.dtype, stride: int) -> None:
    """Messages of all ranks, at equal distances in memory but for the own one; or each anywhere."""
    parcel = parcel_of(num_ranks, wire, dtype, blocks=3)
    numel = parcel.parts[-1].stop
    rank = num_ranks // 2
    of_ranks = [
        parcel.messages(torch.randn(numel, generator=torch.Generator().manual_seed(peer)).to(dtype), room)
        for peer in range(num_ranks)
    ]
    accumulation = torch.float64 if dtype == torch.float64 else torch.float32
    for index in {0, rank, num_ranks - 1}:
        sent = [messages[index] for messages in of_ranks]
        size = sent[0].numel()
        received = [message.clone() for message in sent]
        if stride:
            rows = torch.zeros(num_ranks, round_up(size, ALIGN_BYTES) + stride, dtype=torch.uint8)
            received = list(rows[:, :size].unbind())
            for peer, message in enumerate(sent):
                received[peer].copy_(message)
            received[rank] = sent[rank]
        found = torch.zeros(len(parcel.parts[index]), dtype=accumulation)
        wanted = found.clone()
        parcel.add_up(received, index, into=found)
        for peer, message in enumerate(sent):
            opened_alone(parcel, message, index, wanted, adds=peer > 0)
        assert equal_bits(found, wanted)


@dataclass(frozen=True)
class Counted(BlockInt8):
    """The format, which counts its calls."""

    num_calls: Counter[str] = field(default_factory=Counter)

    def encode(self, *given: Any, **how: Any) -> None:
        self.num_calls["encode"] += 1
        super().encode(*given, **how)

    def decode(self, *given: Any, **how: Any) -> None:
        self.num_calls["decode"] += 1
        super().decode(*given, **how)


@pytest.mark.parametrize("num_ranks", [8, 64, 1021, 1024])
def test_coding_takes_few_calls(num_ranks: int) -> None:
    wire = Counted()
    numel = 1024 * BLOCK * 4
    parts = equal_parts(num_ranks, round_up(-(-numel // num_ranks), BLOCK), stop=numel)
    parcel = Encoded(wire, torch.float32, numel, parts)
    values = torch.randn(numel)
    messages = parcel.messages(values, room)
    assert wire.num_calls["encode"] <= 2
    parcel.open(messages, values)
    assert wire.num_calls["decode"] <= 2
    wire.num_calls.clear()
    received = list(torch.zeros(num_ranks, messages[0].numel(), dtype=torch.uint8).unbind())
    received[1] = messages[1]
    parcel.add_up(received, 0, into=torch.zeros(len(parts[0])))
    assert wire.num_calls["decode"] <= 8 + numel // 2**19


# Ranks that nothing connects.


def summed(num_ranks: int, numel: int, *, tag: int = 0, is_whole: bool = False) -> Network:
    """Sums a tensor of each rank over all, and requires the sum on each."""
    network = Network()
    carriers = [PostedMessages(Unconnected(network, rank, num_ranks)) for rank in range(num_ranks)]  # type: ignore[arg-type]
    tensors = [torch.arange(numel, dtype=torch.float32) % 5 + rank % 3 for rank in range(num_ranks)]
    wanted = torch.stack(tensors).sum(0)  # of small integers: exact in any order
    arriving = [carrier.start_sum(tensor, tag, is_whole=is_whole) for carrier, tensor in zip(carriers, tensors, strict=True)]
    for carrier, each in zip(carriers, arriving, strict=True):
        carrier.expect_sum(each, tag + 1)
    receives_of_sums = {key: network.expected.pop(key) for key in list(network.expected) if key[2] == tag + 1}
    network.deliver()
    network.expected = receives_of_sums
    for carrier, each in zip(carriers, arriving, strict=True):
        carrier.share_sum(each, tag + 1)
    network.deliver()
    for carrier, tensor, each in zip(carriers, tensors, arriving, strict=True):
        carrier.finish_sum(tensor, each)
        assert torch.equal(tensor, wanted)
    return network


@pytest.mark.parametrize("numel", [0, 1, 7, 60, 1000])
@pytest.mark.parametrize("num_ranks", [1, 2, 5, 61])
@pytest.mark.parametrize("tag", [0, 4, 44])
def test_a_sum_is_the_same_on_every_rank(num_ranks: int, numel: int, tag: int) -> None:
    summed(num_ranks, numel, tag=tag)
    summed(num_ranks, numel, tag=tag, is_whole=True)


def trailer_numel(num_ranks: int) -> int:
    trailer = trailer_at(0, num_slots=12, num_buckets=20, num_ranks=num_ranks)
    return trailer.stop


@pytest.mark.parametrize(
    ("num_ranks", "most_bytes"), some([(16, 16_384), (64, 16_384), (1024, 100_000), (16_384, 1_000_000)], most=3)
)
def test_a_trailer_takes_few_bytes_on_every_rank(num_ranks: int, most_bytes: int) -> None:
    network, numel = Network(), trailer_numel(num_ranks)
    for rank in {0, 1, num_ranks // 2, num_ranks - 1}:
        carrier = PostedMessages(Tallied(network, rank, num_ranks))  # type: ignore[arg-type]
        arriving = carrier.start_sum(torch.zeros(numel), 0)
        carrier.share_sum(arriving, 1)
    assert max(network.num_bytes.values()) <= most_bytes
    assert max(network.num_messages.values()) <= 2 * (num_ranks - 1)


@pytest.mark.deep
def test_owners_of_small_trailers_take_turns() -> None:
    """The sums of 20 buckets come from 20 times as many ranks."""
    network, num_ranks = Network(), 64
    for tag in range(0, 80, 4):
        for rank in range(num_ranks):
            carrier = PostedMessages(Tallied(network, rank, num_ranks))  # type: ignore[arg-type]
            carrier.share_sum(carrier.start_sum(torch.zeros(100), tag), tag + 1)
    mean = sum(network.num_bytes.values()) / num_ranks
    assert max(network.num_bytes.values()) <= 2.5 * mean


Reduced = tuple[Network, list[Tensor], list[Tensor]]
NUM_FLAGS = 61  # an odd number: after 16-bit ones no value of four bytes is aligned


def reduced(num_ranks: int, parcel: Parcel, dtype: torch.dtype, *, with_shards: bool) -> Reduced:
    """Reduces values of each rank with a trailer; returns the reduced ones of each rank, and its reduced trailer."""
    network, reduced, trailers = Network(), list[Tensor](), list[Tensor]()
    groups = [Advanced(network, rank, num_ranks) for rank in range(num_ranks)]
    for group in groups:
        part = parcel.parts[group.rank]
        values = noise(parcel.parts[-1].stop, rank=group.rank).to(dtype)
        trailers.append((torch.arange(NUM_FLAGS) % (group.rank + 2) == 0).to(dtype))
        exchanges = Exchanges(PostedMessages(group), divisor=num_ranks)  # type: ignore[arg-type]
        if with_shards:
            reduced.append(torch.empty(len(part)))
            exchanges.reduce_scatter(values, reduced[-1], parcel, trailer=trailers[-1])
        else:
            reduced.append(values)
            exchanges.all_reduce(values, parcel, trailer=trailers[-1])
    advance(network, groups)
    return network, reduced, trailers


@pytest.mark.parametrize("with_shards", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("wire", [None, "int8"])
def test_a_small_trailer_follows_the_messages(wire: str | None, dtype: torch.dtype, with_shards: bool) -> None:
    """It takes no further messages, and all bits are as if it had travelled separately. The last parts are shorter, or empty."""
    num_ranks, num_parts = 6, 4
    parts = equal_parts(num_ranks, BLOCK, stop=3 * BLOCK + 7)
    parcel = FullWidth(parts) if wire is None else Encoded(WIRES[wire], dtype, 3 * BLOCK, parts)
    network, found, trailers = reduced(num_ranks, parcel, dtype, with_shards=with_shards)
    with mock.patch.object(posted_messages, "_MOST_COPIED", -1):
        network_apart, wanted, trailers_apart = reduced(num_ranks, parcel, dtype, with_shards=with_shards)
    total = sum((torch.arange(NUM_FLAGS) % (rank + 2) == 0).to(dtype) for rank in range(num_ranks))
    assert all(torch.equal(trailer, total) for trailer in (*trailers, *trailers_apart))
    assert all(map(equal_bits, found, wanted))
    num_means = 0 if with_shards else num_parts * (num_ranks - 1)
    num_apart = num_parts * (num_ranks - 1)
    assert network.num_messages.total() == num_ranks * (num_ranks - 1) + num_means
    assert network_apart.num_messages.total() == network.num_messages.total() + num_apart
    assert network.num_bytes == network_apart.num_bytes


@pytest.mark.parametrize(("numel", "num_messages"), [(1 << 14, 1), ((1 << 14) + 1, 2)])
def test_no_trailer_follows_a_message_that_takes_long_to_copy(numel: int, num_messages: int) -> None:
    parcel = FullWidth(equal_parts(2, numel, stop=2 * numel))
    network, _, _ = reduced(2, parcel, torch.float32, with_shards=True)
    assert network.num_messages == {0: num_messages, 1: num_messages}


def test_empty_parts_are_not_sent() -> None:
    network, num_ranks = Network(), 8
    parts = equal_parts(num_ranks, 4, stop=12)  # three ranks have one
    for rank in range(num_ranks):
        carrier = PostedMessages(Unconnected(network, rank, num_ranks))  # type: ignore[arg-type]
        storage = torch.zeros(12)
        carrier.exchange([storage[part.start : part.stop] for part in parts], 0)
    assert sum(network.num_messages.values()) == 3 * (num_ranks - 1)
    network.deliver()
