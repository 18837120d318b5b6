"""The codec of facts: what each rank writes is read from the sum over ranks."""

import pytest
import torch
from torch import Tensor

from undertow.buckets.facts import FactCodec, Facts, differing, majority
from undertow.plan.facts import FactKind

KINDS = {
    "count": FactKind.NUMBERS,
    "digest": FactKind.DIGEST,
    "failed": FactKind.RANK_FLAGS,
    "late": FactKind.ITEM_FLAGS,
}


def told_by(*of_ranks: Facts, dtype: torch.dtype = torch.float32) -> tuple[FactCodec, Tensor]:
    """The sum over ranks of what each one writes."""
    num_ranks = len(of_ranks)
    told = torch.zeros(0)
    for rank, facts in enumerate(of_ranks):
        codec = FactCodec.alone(KINDS, rank=rank, num_ranks=num_ranks, num_items=3)
        said = torch.zeros(codec.numel, dtype=dtype)
        codec.write(said, facts)
        told = said if rank == 0 else told + said
    return codec, told


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.bfloat16])
def test_flags_name_the_ranks_and_items_that_are_marked(dtype: torch.dtype) -> None:
    first, last = Facts(flags={"failed": [0], "late": [1]}), Facts(flags={"failed": [2], "late": [0, 1]})
    codec, told = told_by(first, Facts(), last, dtype=dtype)
    assert codec.flags((told != 0).tolist()) == {"failed": (0, 2), "late": (0, 1)}


@pytest.mark.parametrize(
    ("digests", "differ"), [((5, 5, 5), False), ((5, 4, 5), True), ((5, None, 5), False), ((None, None, None), False)]
)
def test_digests_that_differ_are_found_unless_a_rank_accepts_all(digests: tuple[int | None, ...], differ: bool) -> None:
    codec, told = told_by(*(Facts(digests={"digest": digest}) for digest in digests))
    assert codec.unlike((told != 0).tolist()) == (("digest",) if differ else ())


def test_numbers_are_each_ranks_own() -> None:
    codec, told = told_by(*(Facts(numbers={"count": number}) for number in (3, 0, 1 << 20)))
    assert codec.numbers(told, "count") == (3.0, 0.0, float(1 << 20))


def test_numbers_are_multiplied_by_the_divisor_of_a_mean() -> None:
    places = {"count": range(1, 3)}
    codec = FactCodec({"count": FactKind.NUMBERS}, places, rank=1, names=range(2), divisor=2)
    memory = torch.zeros(3)
    codec.write(memory, Facts(numbers={"count": 6}))
    assert memory.tolist() == [0, 0, 6]
    assert codec.numbers(memory / 2, "count") == (0.0, 6.0)


def test_ranks_have_the_names_of_the_group_around_theirs() -> None:
    codec = FactCodec({"failed": FactKind.RANK_FLAGS}, {"failed": range(2)}, rank=0, names=(4, 7))
    assert codec.flags([False, True]) == {"failed": (7,)}


@pytest.mark.parametrize(
    ("said", "common", "others"), [("aab", "a", [2]), ("abb", "b", [0]), ("ab", "a", [1]), ("aaa", "a", []), ("abc", "a", [1, 2])]
)
def test_the_ranks_that_differ_are_those_that_most_do_not_follow(said: str, common: str, others: list[int]) -> None:
    assert majority(said) == common
    assert differing(dict(enumerate(said))) == others
