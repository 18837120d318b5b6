"""Where gradients, trailers and shards lie in a bucket, and what the bits of a trailer say."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.errors import Call, refusal
from support.strategies import plans
from undertow.plan import Piece, Plan, Slot, Trailer, ranks_differ, signature_bits
from undertow.plan.layout import padded_numel, weights_in, with_weights, without_weights

# Where a rank is: step, generation of the plan, mode. As far as the bits reach.
places = st.tuples(st.integers(0, 2**12 - 1), st.integers(0, 2**8 - 1), st.integers(0, 2**4 - 1))


def ranges_of(trailer: Trailer) -> list[range]:
    parts = (trailer.used, trailer.signature, trailer.failed, trailer.changed, trailer.buffers, trailer.nonfinite)
    return [*parts, trailer.late, trailer.busy]


def test_trailer_of_the_last_bucket() -> None:
    trailer = Trailer(start=100, num_slots=3, num_late=2, num_ranks=4)
    ends = (100, 103, 151, 155, 159, 163, 167, 169, 173)
    assert (trailer.has_verdict, ranges_of(trailer), trailer.stop) == (True, [range(*ends) for ends in pairwise(ends)], 173)


def test_trailer_of_another_bucket_has_no_verdict() -> None:
    trailer = Trailer(start=100, num_slots=3)
    assert (trailer.has_verdict, trailer.stop, trailer.signature.stop) == (False, 151, 151)
    assert [len(part) for part in ranges_of(trailer)] == [3, 48, 0, 0, 0, 0, 0, 0]


def test_a_slot_knows_what_of_its_parameter_it_holds() -> None:
    slot = Slot(param=5, start=10, stop=14, first=3)
    assert (slot.numel, slot.piece, slot.piece.numel) == (4, Piece(param=5, first=3, stop=7), 4)


SLOT_REMEDY = "A slot starts at zero or later and does not end before it starts."
PIECE_REMEDY = "A piece begins at zero or later and does not end before it begins."
REFUSALS: dict[str, Call] = {
    f"the slot of parameter 5 is impossible: [-1, 0), first element 0.\n  {SLOT_REMEDY}": lambda: Slot(param=5, start=-1, stop=0),
    f"the slot of parameter 5 is impossible: [3, 2), first element 0.\n  {SLOT_REMEDY}": lambda: Slot(param=5, start=3, stop=2),
    f"the slot of parameter 5 is impossible: [3, 4), first element -1.\n  {SLOT_REMEDY}": lambda: Slot(
        param=5, start=3, stop=4, first=-1
    ),
    f"the piece of parameter 5 is impossible: [-1, 0).\n  {PIECE_REMEDY}": lambda: Piece(param=5, first=-1, stop=0),
    f"the piece of parameter 5 is impossible: [3, 2).\n  {PIECE_REMEDY}": lambda: Piece(param=5, first=3, stop=2),
}


@pytest.mark.parametrize("text", REFUSALS)
def test_an_impossible_range_is_refused(text: str) -> None:
    assert refusal(REFUSALS[text]) == text


@pytest.mark.parametrize(
    ("numel", "itemsize", "num_ranks", "padded"),
    [(0, 4, 2, 0), (1, 4, 1, 4), (4, 4, 1, 4), (5, 4, 3, 12), (1, 2, 2, 8), (1, 1, 1, 16), (1, 16, 3, 3), (9, 8, 4, 12)],
)
def test_padding_reaches_the_next_multiple_of_ranks_and_16_bytes(numel: int, itemsize: int, num_ranks: int, padded: int) -> None:
    assert padded_numel(numel, itemsize=itemsize, num_ranks=num_ranks) == padded


@given(plans() | plans(splits=True))
def test_a_bucket_is_slots_a_trailer_and_equal_aligned_shards(plan: Plan) -> None:
    for bucket in plan.buckets:
        assert [*(slot.start for slot in bucket.slots), bucket.numel] == [0, *(slot.stop for slot in bucket.slots)]
        ranges = [part for part in ranges_of(bucket.trailer) if bucket.trailer.has_verdict or len(part)]
        sharded_numel = bucket.shard_numel * plan.num_ranks
        assert bucket.numel <= sharded_numel <= bucket.trailer.start == bucket.trailer.used.start
        assert all(earlier.stop == later.start for earlier, later in pairwise(ranges))
        assert ranges[-1].stop == bucket.trailer.stop == bucket.storage_numel
        # Only the last one carries the verdict: of each rank, but for the flags of late buckets.
        of_last = [plan.num_ranks] * 4 + [len(plan.buckets), plan.num_ranks]
        assert [len(part) for part in ranges_of(bucket.trailer)[2:]] == (of_last if bucket is plan.buckets[-1] else [0] * 6)
        assert bucket.storage_numel % plan.num_ranks == bucket.wire_bytes % 16 == sharded_numel * bucket.itemsize % 16 == 0


def test_signature_is_the_bits_and_their_complements() -> None:
    bits = signature_bits(step=5, generation=2, mode=1)
    assert bits[:24] == (1, 0, 1, *[0] * 9, 0, 1, *[0] * 6, 1, 0, 0, 0)
    assert bits[24:] == tuple(1 - bit for bit in bits[:24])
    assert bits == signature_bits(step=4096 + 5, generation=256 + 2, mode=1)  # steps wrap around


def summed(signatures: Iterable[tuple[int, ...]]) -> list[bool]:
    """What the ranks' signatures look like after their sum."""
    return [sum(column) != 0 for column in zip(*signatures, strict=True)]


@given(st.lists(st.tuples(places, st.sampled_from([True, False, None])), min_size=1, max_size=9), st.booleans())
def test_any_difference_of_any_rank_is_seen_and_who_has_weights(
    ranks: list[tuple[tuple[int, int, int], bool | None]], are_alike: bool
) -> None:
    if are_alike:
        ranks = [(ranks[0][0], has_weights) for _, has_weights in ranks]
    bits = [signature_bits(step=step, generation=generation, mode=mode) for (step, generation, mode), _ in ranks]
    assert ranks_differ(summed(bits)) == (len({place for place, _ in ranks}) > 1)
    said = {has_weights for _, has_weights in ranks}
    reduced = summed(with_weights(own, has_weights=has) for own, (_, has) in zip(bits, ranks, strict=True))
    assert weights_in(reduced) == (True in said, False in said)
    # Weights take the highest bit of the mode, which no mode has set.
    assert ranks_differ(without_weights(reduced)) == (len({(*place[:2], place[2] % 8) for place, _ in ranks}) > 1)
