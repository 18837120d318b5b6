"""Names of process groups: every key that torch leaves in a store has the name of its group, and gloo leaves N^2 keys."""

from collections.abc import Iterator
from unittest import mock

import pytest
import torch.distributed as dist

from undertow.torch_private import process_groups

MOST_CHARACTERS = 12  # torch's own names have 1 to 3 in most programs


@pytest.fixture
def _world() -> Iterator[None]:
    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("_world")
def test_a_million_groups_have_different_short_names_that_no_group_of_torch_has() -> None:
    process_groups.default_store().add("undertow/groups", 999_998)
    names = [process_groups.new_name() for _ in range(3)]
    assert len({*names, *map(str, range(3))}) == 6
    assert max(map(len, names)) <= MOST_CHARACTERS


@pytest.mark.usefixtures("_world")
def test_a_group_has_the_name_that_its_ranks_have_agreed_on() -> None:
    with mock.patch.object(process_groups._c10d, "_new_process_group_helper", return_value=(mock.Mock(), None)) as made:
        process_groups.new_group((0, 1), "gloo", None, "u7")
    assert made.call_args.args[5] == "u7"
