from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from support.errors import text_of
from support.strategies import plans
from undertow.errors import ConfigError
from undertow.plan import Piece, Plan, Slot, Trailer, ranks_differ, signature_bits
from undertow.plan.layout import padded_numel, weights_in, with_weights, without_weights

# Where a rank is: step, generation of the plan, mode. As far as the bits reach.
places = st.tuples(st.integers(0, 2**12 - 1), st.integers(0, 2**8 - 1), st.integers(0, 2**4 - 1))


def reduced_signature(ranks: list[tuple[int, int, int]]) -> list[bool]:
    """What the ranks' signatures look like after their sum."""
    bits = [signature_bits(step=step, generation=generation, mode=mode) for step, generation, mode in ranks]
    return [sum(column) != 0 for column in zip(*bits, strict=True)]


def trailer_ranges(trailer: Trailer) -> list[range]:
    verdict = [trailer.failed, trailer.changed, trailer.buffers, trailer.nonfinite, trailer.late, trailer.busy]
    return [trailer.used, trailer.signature, *(verdict if trailer.has_verdict else [])]


def test_trailer_of_the_last_bucket() -> None:
    trailer = Trailer(start=100, num_slots=3, num_late=2, num_ranks=4)
    assert trailer.has_verdict
    assert trailer.used == range(100, 103)
    assert trailer.signature == range(103, 151)
    assert trailer.failed == range(151, 155)
    assert trailer.changed == range(155, 159)
    assert trailer.buffers == range(159, 163)
    assert trailer.nonfinite == range(163, 167)
    assert trailer.late == range(167, 169)
    assert trailer.busy == range(169, 173)
    assert trailer.stop == 173


def test_trailer_of_another_bucket_has_no_verdict() -> None:
    trailer = Trailer(start=100, num_slots=3)
    assert not trailer.has_verdict
    assert trailer.stop == trailer.signature.stop == 151
    verdict = (trailer.failed, trailer.changed, trailer.buffers, trailer.nonfinite, trailer.late, trailer.busy)
    assert not any(map(len, verdict))


@pytest.mark.parametrize(("start", "stop", "first"), [(-1, 0, 0), (3, 2, 0), (3, 4, -1)])
def test_an_impossible_slot_is_refused(start: int, stop: int, first: int) -> None:
    assert text_of(ConfigError, lambda: Slot(param=5, start=start, stop=stop, first=first)) == (
        f"the slot of parameter 5 is impossible: [{start}, {stop}), first element {first}.\n"
        "  A slot starts at zero or later and does not end before it starts."
    )


@pytest.mark.parametrize(("first", "stop"), [(-1, 0), (3, 2)])
def test_an_impossible_piece_is_refused(first: int, stop: int) -> None:
    assert text_of(ConfigError, lambda: Piece(param=5, first=first, stop=stop)) == (
        f"the piece of parameter 5 is impossible: [{first}, {stop}).\n"
        "  A piece begins at zero or later and does not end before it begins."
    )


def test_a_slot_knows_what_of_its_parameter_it_holds() -> None:
    slot = Slot(param=5, start=10, stop=14, first=3)
    assert (slot.numel, slot.piece, slot.piece.numel) == (4, Piece(param=5, first=3, stop=7), 4)


@pytest.mark.parametrize(
    ("numel", "itemsize", "num_ranks", "padded"),
    [(0, 4, 2, 0), (1, 4, 1, 4), (4, 4, 1, 4), (5, 4, 3, 12), (1, 2, 2, 8), (1, 1, 1, 16), (1, 16, 3, 3), (9, 8, 4, 12)],
)
def test_padding_reaches_the_next_multiple_of_ranks_and_16_bytes(numel: int, itemsize: int, num_ranks: int, padded: int) -> None:
    assert padded_numel(numel, itemsize=itemsize, num_ranks=num_ranks) == padded


@given(numel=st.integers(0, 10_000), itemsize=st.integers(1, 32), num_ranks=st.integers(1, 64))
def test_padding_is_aligned_and_less_than_one_unit(numel: int, itemsize: int, num_ranks: int) -> None:
    padded = padded_numel(numel, itemsize=itemsize, num_ranks=num_ranks)
    assert padded % num_ranks == 0
    assert padded * itemsize % 16 == 0
    assert numel <= padded < numel + 16 * num_ranks


@given(plans() | plans(splits=True))
def test_slots_of_a_bucket_lie_one_behind_the_other(plan: Plan) -> None:
    for bucket in plan.buckets:
        ends = [0, *(slot.stop for slot in bucket.slots)]
        assert [slot.start for slot in bucket.slots] == ends[:-1]
        assert bucket.numel == ends[-1]


@given(plans() | plans(splits=True))
def test_bucket_ends_are_multiples_of_the_number_of_ranks_and_of_16_bytes(plan: Plan) -> None:
    for bucket in plan.buckets:
        assert bucket.storage_numel % plan.num_ranks == 0
        assert bucket.wire_bytes % 16 == 0


@given(plans() | plans(splits=True))
def test_trailer_lies_between_the_gradients_and_the_end_without_gaps(plan: Plan) -> None:
    for bucket in plan.buckets:
        ranges = trailer_ranges(bucket.trailer)
        assert bucket.numel <= bucket.trailer.start == ranges[0].start
        assert all(earlier.stop == later.start for earlier, later in pairwise(ranges))
        assert ranges[-1].stop == bucket.trailer.stop == bucket.storage_numel


@given(plans())
def test_only_the_last_bucket_carries_the_verdict(plan: Plan) -> None:
    *others, last = plan.buckets
    assert not any(bucket.trailer.has_verdict for bucket in others)
    assert len(last.trailer.late) == len(plan.buckets)
    assert len(last.trailer.failed) == len(last.trailer.changed) == len(last.trailer.busy) == plan.num_ranks


def test_signature_is_the_bits_and_their_complements() -> None:
    bits = signature_bits(step=5, generation=2, mode=1)
    assert bits[:24] == (1, 0, 1, *[0] * 9, 0, 1, *[0] * 6, 1, 0, 0, 0)
    assert bits[24:] == tuple(1 - bit for bit in bits[:24])


@given(place=places, num_ranks=st.integers(1, 9))
def test_ranks_in_one_place_do_not_differ(place: tuple[int, int, int], num_ranks: int) -> None:
    assert not ranks_differ(reduced_signature([place] * num_ranks))


@given(st.lists(places, min_size=2, max_size=9))
def test_any_difference_of_any_rank_is_seen(ranks: list[tuple[int, int, int]]) -> None:
    assume(len(set(ranks)) > 1)
    assert ranks_differ(reduced_signature(ranks))


@given(st.lists(st.tuples(places, st.sampled_from([True, False, None])), min_size=1, max_size=9))
def test_who_has_weights_is_seen_beside_where_ranks_are(ranks: list[tuple[tuple[int, int, int], bool | None]]) -> None:
    """The highest bit of the mode says it, which no mode has set."""
    low = [((step, generation, mode % 8), has_weights) for (step, generation, mode), has_weights in ranks]
    bits = [
        with_weights(signature_bits(step=step, generation=generation, mode=mode), has_weights=has_weights)
        for (step, generation, mode), has_weights in low
    ]
    reduced = [sum(column) != 0 for column in zip(*bits, strict=True)]
    said = {has_weights for _, has_weights in low}
    assert weights_in(reduced) == (True in said, False in said)
    assert ranks_differ(without_weights(reduced)) == (len({place for place, _ in low}) > 1)


def test_steps_wrap_around() -> None:
    assert signature_bits(step=4096 + 7, generation=256, mode=0) == signature_bits(step=7, generation=0, mode=0)


@given(plans() | plans(splits=True))
def test_shards_are_equal_and_hold_all_gradients(plan: Plan) -> None:
    for bucket in plan.buckets:
        sharded_numel = bucket.shard_numel * plan.num_ranks
        assert bucket.numel <= sharded_numel <= bucket.trailer.start
        assert sharded_numel * bucket.itemsize % 16 == 0
