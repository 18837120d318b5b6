"""Streams, events and memory as vector clocks see them; without torch."""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple

_DEPTH, _SHOWN = 60, 9  # frames of a stack
Frames = list[tuple[CodeType, int]]
Clock = dict["Stream", int]  # how many operators of each stream have run for certain


class Stream:
    """A logical stream: a count of its operators, and what is certain to have run before its next one."""

    def __init__(self, name: str) -> None:
        self.name, self.count = name, 0
        self.clock: Clock = {}

    def __repr__(self) -> str:
        return self.name

    def follows(self, clock: Clock) -> None:
        """What runs here from now on runs after all of `clock`."""
        for stream, count in clock.items():
            if count > self.clock.get(stream, 0):
                self.clock[stream] = count

    def now(self) -> Clock:
        return {**self.clock, self: self.count}

    def is_behind(self, access: Access) -> bool:
        return access.stream is self or self.clock.get(access.stream, 0) >= access.count


class Access(NamedTuple):
    """An operator that reads or writes, with its number on its stream."""

    stream: Stream
    count: int
    what: str
    frames: Frames

    def __str__(self) -> str:
        return f"{self.what} on {self.stream}\n{text_of(self.frames)}"


@dataclass(slots=True)
class Segment:
    """Bytes with one history."""

    stop: int
    write: Access
    reads: dict[Stream, Access]


@dataclass(eq=False)
class Memory:
    """One allocation, and the histories of its parts."""

    start: int
    stop: int
    made: Access
    is_device: bool
    ref: Any  # weak, of the storage
    kept: set[Stream] = field(default_factory=set)
    starts: list[int] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.starts.append(self.start)
        self.segments.append(Segment(self.stop, self.made, {}))

    def between(self, start: int, stop: int) -> Iterator[Segment]:
        self._cut(start)
        self._cut(stop)
        for place in range(bisect_right(self.starts, start) - 1, len(self.starts)):
            if self.starts[place] >= stop:
                return
            yield self.segments[place]

    def _cut(self, at: int) -> None:
        place = bisect_right(self.starts, at) - 1
        segment = self.segments[place]
        if self.starts[place] < at < segment.stop:
            self.starts.insert(place + 1, at)
            self.segments.insert(place + 1, Segment(segment.stop, segment.write, dict(segment.reads)))
            segment.stop = at


@dataclass(eq=False)
class Event:
    """A moment of a stream; `checker` has the host."""

    checker: Any
    clock: Clock
    frames: Frames
    number: int
    num_queries: int = 0

    def wait(self, stream: Stream | None = None) -> None:
        """Makes a stream, by default the current one, wait; the host does not."""
        self.checker.drain()
        (stream or self.checker.current).follows(self.clock)

    def synchronize(self) -> None:
        """Makes the host wait."""
        self.checker.synchronized("event.synchronize", self.clock)

    def query(self) -> bool:
        """False at first, as on a device that is behind; what is found complete the host may read."""
        host = self.checker.host
        is_known = all(host.clock.get(stream, 0) >= count for stream, count in self.clock.items() if stream is not host)
        self.num_queries += 1
        if is_known or (self.checker.lag is not None and self.num_queries > self.checker.lag):
            self.checker.drain()
            host.follows(self.clock)
            return True
        return False

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds that nothing depends on."""
        if not (self.query() and end.query()):
            raise RuntimeError("elapsed_time of an event that the host has not seen complete")
        return (end.number - self.number) * 1e-3


def stack() -> Frames:
    frames: Frames = []
    frame = sys._getframe(2)
    while frame is not None and len(frames) < _DEPTH:
        frames.append((frame.f_code, frame.f_lineno))
        frame = frame.f_back  # type: ignore[assignment]
    return frames


def shown(frames: Frames) -> list[tuple[str, int, str]]:
    """Neither torch nor the checker itself."""
    own = str(Path(__file__).parent)
    hidden = (own, "/torch/", "<")
    lines = [(code.co_filename, line, code.co_qualname) for code, line in frames]
    return [it for it in lines if not any(each in it[0] for each in hidden)] or lines


def text_of(frames: Frames) -> str:
    return "\n".join(f"      {file}:{line} {name}" for file, line, name in shown(frames)[:_SHOWN])
