"""The states of a round."""

from types import SimpleNamespace
from typing import Any

import pytest

from undertow.engine.round import Round, RoundKind, RoundState


def started(round_: Round) -> None:
    releases = SimpleNamespace(reset=lambda: None)
    compiled: Any = SimpleNamespace(synchronizing=releases, round_begins=lambda **_: [])
    round_.start(compiled, None, round_.terms)


def ended(round_: Round) -> None:
    round_.end(round_.send)


WAYS = {
    "": RoundState.OPEN,
    "start": RoundState.FILLING,
    "end": RoundState.HELD,
    "start, end": RoundState.ENDING,
    "end, start": RoundState.ENDING,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("step", ["start", "end"])
def test_a_round_starts_once_and_its_backward_ends_once(way: str, step: str) -> None:
    begun, steps = Round(kind=RoundKind.REDUCE), {"start": started, "end": ended}
    for each in filter(None, way.split(", ")):
        steps[each](begun)
    assert begun.state is WAYS[way]
    if step not in way:
        steps[step](begun)
        return
    with pytest.raises(KeyError):
        steps[step](begun)
