"""The request to stop: told in trailers, and followed on every rank from the same round on."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from support.levels import some
from support.one_process import Rank, ranks_of
from undertow.buckets.facts import Reading
from undertow.engine.round import Findings, Round, RoundKind
from undertow.engine.stop import StopRequest


def steps_that_stop(rank: Rank, asking: int, *, settings: dict[str, Any], accumulates: int = 0) -> list[bool]:
    """After each of six backwards, if the rank is asked to stop; the rank `asking` is so before the third."""
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    sync = rank.attach(module, **settings)
    found = []
    for number in range(6):
        if number == 2 and rank.number == asking:
            sync._own.engine.checks.stop.ask()
        if number < accumulates:
            with sync.accumulate():
                module(torch.ones(2, 3)).sum().backward()
        else:
            module(torch.ones(2, 3)).sum().backward()
        found.append(sync.stop_requested)
    sync.close()
    assert sync.stop_requested == found[-1]  # it stays readable
    return found


@pytest.mark.parametrize("asking", [0, 2])
@pytest.mark.parametrize("cap", some([25.0, 1e-6], most=1))
def test_all_ranks_stop_after_the_same_backward(asking: int, cap: float) -> None:
    found = ranks_of(3, lambda rank: steps_that_stop(rank, asking, settings={"bucket_cap_mb": cap}))
    assert found == [[False, False, True, True, True, True]] * 3


def test_backwards_that_accumulate_tell_nothing() -> None:
    found = ranks_of(2, lambda rank: steps_that_stop(rank, 1, settings={}, accumulates=4))
    assert found == [[False] * 4 + [True] * 2] * 2


def followed(asking: dict[int, int], delays: tuple[int, ...]) -> list[int]:
    """The round after which each rank on a device follows the request.

    `asking` has the round before which a rank is asked. A rank reads a round's trailers when it ends if it tells itself, and
    else so many rounds later.
    """
    group = SimpleNamespace(names=range(len(delays)), name=0, hardware=SimpleNamespace(is_host=False))
    requests = [StopRequest(group, is_told_elsewhere=False) for _ in delays]  # type: ignore[arg-type]
    unread: list[list[tuple[int, Reading]]] = [[] for _ in delays]
    found = [-1 for _ in delays]
    for number in range(20):
        for rank, at in asking.items():
            if at == number:
                requests[rank].ask()
        telling = tuple(rank for rank, request in enumerate(requests) if request.is_told)
        said: dict[str, Any] = {"used": frozenset(), "ranks_differ": False, "flags": {"stopping": telling}}
        for rank, delay in enumerate(delays):
            readings = [reading for at, reading in unread[rank] if at <= number]
            unread[rank] = [each for each in unread[rank] if each[0] > number]
            if rank in telling:
                readings.append(Reading(**said))
            elif telling:
                unread[rank].append((number + delay, Reading(**said, is_overdue=True)))
            requests[rank].round_ends(Round(kind=RoundKind.REDUCE, found=Findings(readings=readings)))
            if requests[rank].is_requested and found[rank] < 0:
                found[rank] = number
    return found


@pytest.mark.parametrize("delays", [(1, 1, 1), (1, 2, 3), (4, 1, 2)])
@pytest.mark.parametrize("asking", [{0: 3}, {2: 3}, {0: 3, 1: 4}, {0: 3, 1: 3, 2: 3}])
def test_ranks_on_devices_stop_after_the_same_round(asking: dict[int, int], delays: tuple[int, ...]) -> None:
    first, *others = followed(asking, delays)
    assert others == [first] * 2
    assert first == 3 if len(asking) == 3 else first > 3


def test_a_step_that_is_longer_than_the_grace_warns_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("undertow.engine.stop.time.monotonic", lambda: now[0])
    group = SimpleNamespace(names=range(2), name=1, hardware=SimpleNamespace(is_host=True))
    request = StopRequest(group, is_told_elsewhere=False)  # type: ignore[arg-type]
    request.follow_grace(60.0)
    now[0] += 60.0
    request.round_ends(Round(kind=RoundKind.REDUCE))
    now[0] += 61.5
    with pytest.warns(UserWarning, match="passed between two synchronizations") as warned:
        request.round_ends(Round(kind=RoundKind.REDUCE))
    assert [str(each.message) for each in warned] == [
        "61.5 s passed between two synchronizations: a signal may end this process before all ranks know of it.\n"
        "  stop_on_signal(seconds=60), rank 1\n"
        "  Ask for more time between the signal and the end of the process, or synchronize more often."
    ]
    now[0] += 100.0
    request.round_ends(Round(kind=RoundKind.REDUCE))
