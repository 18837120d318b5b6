"""The thread that hears other ranks, and what it makes of their messages."""

from __future__ import annotations

import logging
import os
import threading
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist

from undertow.runtime import guard as guards
from undertow.runtime.guard import Guard, Ring
from undertow.runtime.ring import Neighbour


def test_the_guard_is_started_again_where_it_could_not_start(at_exit: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "register_at_fork", lambda **_: None)
    monkeypatch.setattr(guards, "tell_before_end", lambda *_, **_calls: None)
    # As much of a ring as a guard looks at when it begins.
    guard, ring = Guard(), SimpleNamespace(neighbours=(), members={}, look=lambda: None)
    no_more = patch.object(threading.Thread, "start", side_effect=RuntimeError("can't start new thread"))
    with no_more, pytest.raises(RuntimeError, match="can't start new thread"):
        guard.adopt((0, 1), ring)  # type: ignore[arg-type]
    assert at_exit == []
    guard.adopt((0, 1), ring)  # type: ignore[arg-type]
    assert guard._thread is not None
    assert guard._thread.is_alive()
    guard._is_over = True
    guard.wake()
    guard._thread.join(10.0)


GOOD = {"kind": "opens", "from": 0, "id": "0/1", "number": 3, "meeting": 0}
MESSAGES = {
    "without a kind": {"kind": None},
    "from no rank": {"from": None},
    "from a rank that is not there": {"from": 2},
    "from a rank below all": {"from": -1},
    "from infinity": {"from": float("inf")},
    "of a number that is a list": {"number": [1]},
    "of an infinite number": {"number": float("inf")},
    "with links that are a list": {"kind": "sends", "at": [], "to": []},
    "with links of a speed beyond floats": {"kind": "sends", "at": [], "to": {"x": [10**400, 1, True]}},
    "of a lost rank that is not there": {"kind": "lost", "rank": 7},
    "of lost ranks that are one": {"kind": "unreachable", "ranks": 1, "seconds": 1.0},
}


@pytest.mark.parametrize("change", MESSAGES.values(), ids=MESSAGES)
def test_a_message_that_makes_no_sense_is_dropped_with_a_word(change: Any, caplog: pytest.LogCaptureFixture) -> None:
    ring, source = Ring([], rank=1, num_ranks=2, world=dist.HashStore()), Neighbour.__new__(Neighbour)
    with caplog.at_level(logging.WARNING, "undertow"):
        ring.receive({**GOOD, **change}, source)
    assert (ring.fault, len(ring.opened)) == (None, 0)
    # One without a kind is of a later version, which says more than this one knows.
    assert change == {"kind": None} or "made no sense" in caplog.messages[0]
    ring.receive({**GOOD, "id": "0/2"}, source)
    assert ring.opened == {(3, 0): {0}}
