"""Comparisons of many ranks, on a group that connects nothing: the numbers that it would send are counted."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from undertow import PlanMismatch
from undertow.ranks.agreement import Extremes, require_agreement

NUM_PARAMS = 300


class Group:
    """Rank 0 of many ranks, which give what `others` makes of its tensor."""

    rank, device = 0, torch.device("cpu")

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks, self.everyone = num_ranks, self
        self.user = mock.Mock(ranks=tuple(range(num_ranks)))
        self.numels: list[int] = []  # that this rank receives
        self.given: dict[str, Callable[[int, Tensor], Tensor]] = {}

    def all_reduce(self, tensor: Tensor, name: str, op: Any) -> Any:
        assert op == dist.ReduceOp.MAX
        self.numels.append(tensor.numel())
        for rank in range(1, self.num_ranks):
            torch.maximum(tensor, self.given["reduced"](rank, tensor.clone()), out=tensor)
        return mock.Mock()

    def all_gather(self, tensor: Tensor, name: str) -> Any:
        rows = [tensor, *(self.given["gathered"](rank, tensor.clone()) for rank in range(1, self.num_ranks))]
        self.numels.append(tensor.numel() * self.num_ranks)
        return mock.Mock(result=lambda: torch.stack(rows))

    def broadcast(self, tensor: Tensor, name: str, *, source: int) -> Any:
        found = tensor if source == 0 else self.given["sent"](source, tensor)
        self.numels.append(found.numel())
        return mock.Mock(result=lambda: found)


def with_change(numel: int, place: int, of: int) -> Callable[[int, Tensor], Tensor]:
    """What rank `of` gives differs in number `place` of `numel`, for extremes of them."""

    def given(rank: int, tensor: Tensor) -> Tensor:
        if rank == of:
            tensor[1 + place] += 1
            tensor[1 + numel + place] = ~tensor[1 + place]
        return tensor

    return given


@pytest.mark.parametrize("num_ranks", [2, 1021, 1024])
def test_equal_values_are_two_numbers_each(num_ranks: int) -> None:
    group = Group(num_ranks)
    group.given["reduced"] = lambda _, tensor: tensor
    values = torch.randint(-(2**62), 2**62, (NUM_PARAMS,))
    assert Extremes(group, values, "the comparison").differing() == []  # type: ignore[arg-type]
    assert group.numels == [2 * NUM_PARAMS + 1]


@pytest.mark.parametrize("value", [0, -1, 2**63 - 2, -(2**63), 12345])
def test_a_value_that_differs_is_gathered_alone(value: int) -> None:
    num_ranks, group = 1024, Group(1024)
    values = torch.full((NUM_PARAMS,), value)
    group.given["reduced"] = with_change(NUM_PARAMS, 7, 1000)
    extremes = Extremes(group, values, "the comparison")  # type: ignore[arg-type]
    assert extremes.differing() == [7]
    group.given["gathered"] = lambda rank, row: row + torch.tensor([0, rank == 1000, 0])
    rows = extremes.of_ranks(7)
    assert rows[:2] == [(True, value, False)] * 2
    assert rows[1000] == (True, value + 1, False)
    assert sum(group.numels) == 2 * NUM_PARAMS + 1 + 3 * num_ranks  # the numbers of all would be 300 x 1,024


def test_a_rank_that_does_not_count_differs_from_none() -> None:
    group = Group(3)
    values = torch.arange(5)
    least = torch.iinfo(torch.int64).min
    group.given["reduced"] = lambda rank, tensor: torch.full_like(tensor, least) if rank == 1 else tensor
    assert Extremes(group, values, "the comparison").differing() == []  # type: ignore[arg-type]
    group.given["reduced"] = lambda _, tensor: torch.full_like(tensor, least)
    assert Extremes(group, values, "the comparison", is_counted=False).differing() == []  # type: ignore[arg-type]


def test_no_values_differ_in_nothing() -> None:
    group = Group(2)
    group.given["reduced"] = lambda _, tensor: tensor
    assert Extremes(group, torch.zeros(0, dtype=torch.int64), "the comparison").differing() == []  # type: ignore[arg-type]


def described(name: str) -> list[dict[str, Any]]:
    return [{"name": f"{name}.{index}", "shape": [8], "dtype": "float32"} for index in range(NUM_PARAMS)]


def test_an_error_of_many_ranks_needs_the_descriptions_of_two() -> None:
    import json

    group, num_ranks = Group(1024), 1024
    theirs = json.dumps({"settings": {}, "params": described("b"), "others": [], "new": []}, sort_keys=True).encode()
    differs = (torch.arange(3) < 1)[:, None]  # the first of three digests
    group.given["gathered"] = lambda rank, row: row + (rank == 1000) * differs
    group.given["sent"] = lambda _, tensor: (
        torch.tensor(len(theirs)) if tensor.dim() == 0 else torch.frombuffer(bytearray(theirs), dtype=torch.uint8)
    )
    with pytest.raises(PlanMismatch, match=r"parameter 0 is 'a\.0' on rank 0 and 'b\.0' on rank 1000"):
        require_agreement(group, settings={}, params=described("a"))  # type: ignore[arg-type]
    assert sum(group.numels) < 96 * num_ranks + 3 * len(theirs)
