"""Names of process groups: every key that torch leaves in a store has the name of its group."""

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from undertow.torch_private import private

MOST_CHARACTERS = 200
MANY = range(16_384)


@pytest.fixture
def names() -> Iterator[list[str]]:
    """The names of the groups that are made, of which none is connected; torch's own store counts them."""
    made = list[str]()

    def make(*given: Any, **_: Any) -> tuple[object, None]:
        made.append(given[5])
        return mock.Mock(), None

    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    with mock.patch.object(private._c10d, "_new_process_group_helper", make):
        yield made
    dist.destroy_process_group()


def test_the_name_of_a_group_of_many_ranks_is_short(names: list[str]) -> None:
    private.new_group(MANY, "gloo", None)
    assert max(map(len, names)) <= MOST_CHARACTERS


def test_groups_of_other_ranks_have_other_names(names: list[str]) -> None:
    groups = [MANY, MANY[1:], MANY[::2], (0, 1), (0, 11), (0, 1, 1)]
    for ranks in groups:
        private.new_group([0, *ranks], "gloo", None)
    assert len(set(names)) == len(groups)


def test_a_group_that_all_its_ranks_have_made_again_has_another_name(names: list[str]) -> None:
    for _ in range(4):  # each time two ranks
        private.new_group((0, 1), "gloo", None)
    first, *others = names
    assert [name == first for name in others] == [True, False, False]
