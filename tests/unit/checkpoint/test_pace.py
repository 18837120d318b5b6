"""The pace of a thread that writes: it rests while nobody waits for it."""

import itertools
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch import nn

from undertow import save_checkpoint
from undertow.checkpoint import pace, tensors
from undertow.checkpoint.pace import Pace


class Clock:
    """The time, and the processor time of a thread, as a test tells them."""

    def __init__(self) -> None:
        self.now_s = self.used_s = 0.0

    def monotonic(self) -> float:
        return self.now_s

    def thread_time(self) -> float:
        return self.used_s


class Writer:
    """A thread that writes parts; its rests are noted, and take no time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._clock, self.pace = Clock(), Pace()
        self.rests_s: list[float] = []
        monkeypatch.setattr(pace, "time", self._clock)
        is_awaited = self.pace._is_awaited
        monkeypatch.setattr(is_awaited, "wait", lambda rest_s: self.rests_s.append(0.0 if is_awaited.is_set() else rest_s))
        self.pace.begin()

    def writes(self, *, used_s: float, blocked_s: float = 0.0) -> None:
        self._clock.used_s += used_s
        self._clock.now_s += used_s + blocked_s
        self.pace.rest()


@pytest.fixture
def writer(monkeypatch: pytest.MonkeyPatch) -> Writer:
    return Writer(monkeypatch)


def test_it_uses_a_quarter_of_a_processor(writer: Writer) -> None:
    for used_s in (0.01, 0.02):
        writer.writes(used_s=used_s)
    assert writer.rests_s == pytest.approx([0.03, 0.06])  # differences of times in fp64


def test_a_wait_for_the_disk_counts_as_a_rest(writer: Writer) -> None:
    writer.writes(used_s=0.01, blocked_s=0.02)
    writer.writes(used_s=0.01, blocked_s=0.04)
    assert writer.rests_s == pytest.approx([0.01])  # differences of times in fp64


def test_no_rest_is_long(writer: Writer) -> None:
    writer.writes(used_s=20.0)
    assert writer.rests_s == [0.25]


def test_it_does_not_rest_while_somebody_waits(writer: Writer) -> None:
    writer.pace.hurry()
    writer.writes(used_s=0.01)
    assert writer.rests_s == [0.0]


def test_it_does_not_rest_when_the_process_is_to_end(writer: Writer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading.main_thread(), "is_alive", lambda: False)
    writer.writes(used_s=0.01)
    assert writer.rests_s == []


def test_a_save_rests_until_somebody_waits_and_its_files_are_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rests, resting = Pace.rest, threading.Event()

    def noted(self: Pace) -> None:
        resting.set()
        rests(self)

    model = nn.Linear(64, 64)
    save_checkpoint(tmp_path / "plain", model)
    monkeypatch.setattr(tensors, "_PART_BYTES", 8192)
    monkeypatch.setattr(Pace, "rest", noted)
    # Each part uses a second of the processor: it would rest for 40 seconds.
    monkeypatch.setattr(pace, "time", SimpleNamespace(monotonic=time.monotonic, thread_time=itertools.count().__next__))
    monkeypatch.setattr(pace, "_SHARE", 0.01)
    monkeypatch.setattr(pace, "_LONGEST_REST_S", 40.0)
    save = save_checkpoint(tmp_path / "paced", model, background=True)
    assert save is not None
    assert resting.wait(30)
    assert not save.is_done
    began_s = time.monotonic()
    save.wait()
    assert time.monotonic() - began_s < 20  # half of one rest
    written, plain = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("paced", "plain"))
    assert written == plain
