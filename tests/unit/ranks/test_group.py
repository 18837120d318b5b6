"""Groups of many ranks: comparisons of ranks are counted, since a search in a tuple for each rank would be N^2 of them."""

import pytest
import torch
import torch.distributed as dist

from undertow import SyncConfig
from undertow.ranks.group import GroupRef
from undertow.ranks.transport import OwnGroup

NUM_RANKS, PER_ROW = 16_384, 8


class Rank(int):
    """A number of a rank. Each may be compared a few times: to find out this process's own one, and to show a failure."""

    num_compared = 0

    def __eq__(self, other: object) -> bool:
        Rank.num_compared += 1
        if Rank.num_compared > 8 * NUM_RANKS:
            raise AssertionError("ranks are searched for")
        return int(self) == other

    __hash__ = int.__hash__


RANKS = tuple(map(Rank, range(NUM_RANKS)))
ROWS = tuple(RANKS[first : first + PER_ROW] for first in range(0, NUM_RANKS, PER_ROW))


@pytest.fixture(autouse=True)
def compared_anew() -> None:
    Rank.num_compared = 0


def test_ranks_are_found_in_rows_without_a_search() -> None:
    places = GroupRef(RANKS[::-1], "gloo", None, rows=ROWS).row_places
    assert places[0] == tuple(range(NUM_RANKS - 1, NUM_RANKS - 1 - PER_ROW, -1))
    assert places[-1] == tuple(range(PER_ROW - 1, -1, -1))
    assert len(places) == len(ROWS)


def test_ranks_of_a_group_within_another_are_named_without_a_search(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    device, limits = torch.device("cpu"), SyncConfig()
    whole = OwnGroup(GroupRef(RANKS, "gloo", None), device=device, limits=limits)
    part = OwnGroup(GroupRef(RANKS[1::2], "gloo", None), device=device, limits=limits, within=whole)
    inner = OwnGroup(GroupRef(RANKS[1::4], "gloo", None), device=device, limits=limits, within=part)
    assert part.names == list(range(1, NUM_RANKS, 2))
    assert inner.names == list(range(1, NUM_RANKS, 4))
    assert (part.name, inner.name) == (1, 1)
