"""Whole parameters of many ranks: what the busiest rank sends, receives and holds, on ranks that nothing connects."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from support.levels import some
from support.models import noise
from support.sharded import chain
from support.unconnected import ENDED, Advanced, Network, advance
from undertow.plan import Bucket, ParamSpec, plan_from_groups
from undertow.ranks.exchanges import Exchanges
from undertow.ranks.parcels import Encoded
from undertow.ranks.posted_messages import PostedMessages
from undertow.sharded.shard_exchanges import ShardExchanges
from undertow.wire import WIRES

SHAPE = (48, 64)


class Measured(Advanced):
    """A rank that counts what it receives too."""

    num_received = 0

    def receive(self, message: Tensor, peer: int, tag: int, over: object) -> Any:
        self.num_received += message.nbytes
        return super().receive(message, peer, tag, over)


class OfOneRank(ShardExchanges):
    """The exchanges of one rank, without a mesh."""

    def __init__(self, network: Network, rank: int, num_ranks: int, wire: str | None) -> None:
        self.rank, self.num_ranks, self._wires, self.across = rank, num_ranks, (wire, wire), None
        self.group: Any = Measured(network, rank, num_ranks)
        self.group.hardware.is_host = True
        self.inside = Exchanges(PostedMessages(self.group), divisor=num_ranks)

    @property
    def num_held(self) -> int:
        """Bytes of all memory for messages, which is kept."""
        held = self.inside.carrier.free.values()  # type: ignore[union-attr]
        return sum(tensor.nbytes for tensors in held for tensor in tensors)


def matrices(number: int, shape: tuple[int, ...] = SHAPE, dtype: str = "float32") -> list[ParamSpec]:
    itemsize = getattr(torch, dtype).itemsize
    return [ParamSpec(name=f"m{index}", shape=shape, dtype=dtype, itemsize=itemsize, is_whole=True) for index in range(number)]


def reduced(ranks: Sequence[OfOneRank], network: Network, bucket: Bucket) -> tuple[list[Tensor], list[Tensor]]:
    """Returns the shards of all ranks, and what each has given."""
    num_ranks, dtype = len(ranks), getattr(torch, bucket.dtype)
    given, shards, trailers = [], [], []
    for exchanges in ranks:
        storage = noise(bucket.storage_numel, rank=exchanges.rank).to(dtype)
        storage[bucket.numel :] = 0
        trailer = storage[bucket.trailer.start : bucket.trailer.stop].fill_(1)
        given.append(storage[: bucket.numel].clone())
        shards.append(torch.empty(exchanges.shard_numel(bucket)))
        trailers.append(trailer)
        inside, _ = exchanges.parcels_of(bucket)
        exchanges.inside.reduce_scatter(storage, shards[-1], inside, trailer=trailer, parts=exchanges.passed_on(bucket))
    advance(network, [exchanges.group for exchanges in ranks])
    assert all(torch.equal(trailer, torch.full_like(trailer, num_ranks)) for trailer in trailers)
    return shards, given


def gathered(ranks: Sequence[OfOneRank], network: Network, bucket: Bucket, values: Tensor) -> list[Tensor]:
    """Each rank has its part of `values`; returns what each has of all."""
    flats = []
    for exchanges in ranks:
        parts = exchanges.shards_of(bucket)
        own = parts[exchanges.rank]
        flat = torch.zeros(len(ranks) * bucket.shard_numel)
        flat[own.start : own.stop] = values[own.start : own.stop]
        exchanges.inside.all_gather(flat, parts, number=bucket.index)
        flats.append(flat[: parts[-1].stop])
    advance(network, [exchanges.group for exchanges in ranks])
    return flats


@pytest.mark.parametrize(
    ("num_ranks", "num_matrices", "num_groups"),
    some([(24, 8, 2), (24, 8, 8), (13, 3, 1), (9, 8, 1), (5, 1, 1), (61, 7, 1)], most=3),
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_rank_has_much_more_than_the_mean(num_ranks: int, num_matrices: int, num_groups: int, dtype: str) -> None:
    """Of a step. And all bits are those of a chain of adds."""
    network = Network()
    size = num_matrices // num_groups
    groups = [tuple(range(first, first + size)) for first in range(0, num_matrices, size)]
    plan = plan_from_groups(matrices(num_matrices, dtype=dtype), groups, num_ranks=num_ranks)
    ranks = [OfOneRank(network, rank, num_ranks, None) for rank in range(num_ranks)]
    for bucket in plan.buckets:
        shards, given = reduced(ranks, network, bucket)
        mean = chain([values.float() for values in given]) / num_ranks
        for shard, part in zip(shards, ranks[0].shards_of(bucket), strict=True):
            assert torch.equal(shard, mean[part.start : part.stop])
        for flat in gathered(ranks, network, bucket, mean):
            assert torch.equal(flat, mean)
    of_ranks = {
        "sent": [network.num_bytes[rank] for rank in range(num_ranks)],
        "received": [exchanges.group.num_received for exchanges in ranks],
        "held": [exchanges.num_held for exchanges in ranks],
    }
    for what, found in of_ranks.items():
        assert max(found) <= 2.2 * sum(found) / num_ranks, what


@pytest.mark.parametrize(("num_ranks", "num_matrices"), [(24, 8), (7, 2)])
def test_formats_cross_in_equal_pieces_too(num_ranks: int, num_matrices: int) -> None:
    network, wire = Network(), WIRES["int8"]
    params = matrices(num_matrices, (64, 96))
    (bucket,) = plan_from_groups(params, [range(num_matrices)], num_ranks=num_ranks, wires="int8", block=wire.block).buckets
    ranks = [OfOneRank(network, rank, num_ranks, "int8") for rank in range(num_ranks)]
    shards, given = reduced(ranks, network, bucket)
    parts = ranks[0].shards_of(bucket)
    decoded = []
    for values in given:  # each rank's own, without the others
        parcel = Encoded(wire, torch.float32, bucket.narrow_numel, [range(bucket.numel)])
        (message,) = parcel.messages(values, lambda numel, dtype: torch.empty(numel, dtype=dtype))
        decoded.append(torch.empty_like(values))
        parcel.open([message], decoded[-1])
    mean = chain(decoded) / num_ranks
    for shard, part in zip(shards, parts, strict=True):
        assert torch.equal(shard, mean[part.start : part.stop])
    reduction = Counter(network.num_bytes)
    parcel, flats = Encoded(wire, torch.float32, bucket.narrow_numel, parts), []
    for exchanges in ranks:
        own = mean[parts[exchanges.rank].start : parts[exchanges.rank].stop]
        flats.append(torch.zeros(num_ranks * bucket.shard_numel))
        exchanges.inside.all_gather_differences(
            lambda into, own=own: into.copy_(own), flats[-1], parcel, number=0, then=lambda: None
        )  # fmt: skip
    advance(network, [exchanges.group for exchanges in ranks])
    assert all(torch.equal(flats[0], flat) for flat in flats)
    # Half a unit of a code of each block.
    assert torch.allclose(flats[0][: bucket.numel], mean, rtol=0.0, atol=float(mean.abs().max()) / 127)
    sent = [network.num_bytes[rank] for rank in range(num_ranks)]
    assert max(sent) <= 2.2 * sum(sent) / num_ranks
    assert max(reduction.values()) <= 2.2 * sum(reduction.values()) / num_ranks


class Counted(Measured):
    """A rank that counts what it sends and receives only."""

    def send(self, message: Tensor, peer: int, tag: int, _over: object) -> Any:
        self.network.num_bytes[self.rank] += message.nbytes
        return ENDED

    def receive(self, message: Tensor, peer: int, tag: int, _over: object) -> Any:
        self.num_received += message.nbytes
        return ENDED


@pytest.mark.parametrize("num_ranks", some([1024, 16_384], most=1))
def test_one_large_matrix_costs_each_of_a_thousand_ranks_a_few_times_its_bytes(num_ranks: int) -> None:
    """Its owner and two others: what they send and receive is a few times the matrix, and not a thousand times."""
    network = Network()
    (bucket,) = plan_from_groups(matrices(1, (1024, 2048)), [(0,)], num_ranks=num_ranks).buckets
    assert bucket.owners is not None
    for rank in {bucket.owners[0], 1, num_ranks - 1}:
        exchanges = OfOneRank(network, rank, num_ranks, None)
        exchanges.group = Counted(network, rank, num_ranks)
        exchanges.group.hardware.is_host = True
        exchanges.inside = Exchanges(PostedMessages(exchanges.group), divisor=num_ranks)
        inside, _ = exchanges.parcels_of(bucket)
        storage, shard = torch.zeros(bucket.storage_numel), torch.empty(exchanges.shard_numel(bucket))
        exchanges.inside.reduce_scatter(storage, shard, inside, trailer=storage[:0], parts=exchanges.passed_on(bucket))
        exchanges.inside.all_gather(storage, exchanges.shards_of(bucket), number=0)
        advance(network, [exchanges.group])
        assert network.num_bytes[rank] <= 3.1 * bucket.num_bytes
        assert exchanges.group.num_received <= 4.1 * bucket.num_bytes
        assert exchanges.num_held <= 2.1 * bucket.num_bytes
