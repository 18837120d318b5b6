"""The reason of a wait that has failed, as a rank finds it whom nobody tells anything."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from undertow import RankLost, StallTimeout, SyncConfig
from undertow.runtime import member as members
from undertow.runtime import patience
from undertow.runtime.guard import GUARD, Ring

WORLD = dist.HashStore()  # a ring ends with it


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> members.Member:
    """Rank 1 of two."""
    monkeypatch.setattr(patience, "ANSWERS_S", 0.0)
    monkeypatch.setattr(patience, "VERDICT_S", 0.0)
    monkeypatch.setattr(GUARD, "interrupts", lambda _members: None)
    return Ring([], rank=1, num_ranks=2, world=WORLD).join(SyncConfig())


# Words of gloo and the stores for a time that is over, and of the kernel for a connection that is lost.
WORDS = {
    "[unbound_buffer.cc:78] Timed out waiting 2000ms for recv operation to complete": True,
    "Application timeout caused pair closure": True,
    "Operation timed out!": True,
    "Operation timed out! The link has not carried it after 0.001 s.": True,
    "wait timeout after 2000ms, keys: /1//cpu//0": True,
    "Timeout waiting for key: default_pg/0//cpu//0/0 after 2000 ms": True,
    "Socket Timeout": True,
    "[pair.h:311] Connect timeout [127.0.0.1]:4711": True,
    "Connection closed by peer [127.0.0.1]:4711": False,
    "readv: Connection timed out": False,
    "Operation timed out": False,
}


@pytest.mark.parametrize("text", WORDS)
def test_a_time_that_is_over_is_told_from_a_lost_connection(text: str, alone: members.Member) -> None:
    fault = alone.reason(RuntimeError(text))
    assert fault == alone.known_fault or not WORDS[text]
    expected = (StallTimeout, "rank 1 has waited for as long as the process group's timeout lets it.")
    assert (fault and (fault.kind, fault.what)) == (expected if WORDS[text] else None)


@pytest.mark.parametrize(
    ("step", "waits_for", "since_s", "told"),
    [
        (0, "bucket 3", 70.0, "rank 1 has waited 30 s."),
        (0, "bucket 4", 101.0, ""),
        (1, "bucket 3", 70.0, ""),
        (0, "", 0.0, ""),
    ],
    ids=["this wait", "a later wait", "another step", "no wait"],
)
def test_the_last_report_is_told_with_the_wait_that_it_is_about(
    step: int, waits_for: str, since_s: float, told: str, alone: members.Member
) -> None:
    alone.told = 0, 100.0, "rank 1 has waited 30 s."
    alone.waits_for, alone.since_s, alone.num_steps = waits_for, since_s, lambda: step
    fault: Any = alone.reason(RuntimeError("Operation timed out!"))
    assert fault.told == told


def test_a_rank_whose_process_has_ended_is_the_reason(alone: members.Member) -> None:
    alone.ring.hear({"kind": "ended", "from": 0, "steps": 7, "text": ""})
    fault: Any = alone.reason(RuntimeError("Connection closed by peer"))
    left = "rank 0 has left: it has finished after 7 synchronisations, and others wait for it."
    assert (fault.kind, fault.what) == (RankLost, left)
