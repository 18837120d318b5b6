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
    ("said", "common", "others"), [("aab", "a", [2]), ("abb", "b", [0]), ("ab", "a", [1]), ("aaa", "a", []), ("abc", "a", [1, 2])]
)
def test_the_ranks_that_differ_are_those_that_most_do_not_follow(said: str, common: str, others: list[int]) -> None:
    assert majority(said) == common
    assert differing(dict(enumerate(said))) == others
