"""Streams, events and memory as vector clocks see them; without torch."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple

_DEPTH, _SHOWN = 40, 9  # frames of a stack
Frames = list[tuple[CodeType, int]]
Clock = dict["Stream", int]  # a number of operators for each stream


class Stream:
    """A logical stream. Its clock counts its own operators, and those of others that have run for certain before its next one."""

    device = "cpu:0"  # as a stream of torch has one

    def __init__(self, name: str) -> None:
        self.name = name
        self.clock: Clock = {self: 0}

    def __repr__(self) -> str:
        return self.name

    def follows(self, clock: Clock) -> None:
        """What runs here from now on runs after all of `clock`."""
        own = self.clock
        for stream, count in clock.items():
            if count > own.get(stream, -1):
                own[stream] = count

    def wait_stream(self, other: Stream) -> None:
        """As a stream of torch: what runs here from now on runs after all that the other one has."""
        self.follows(other.clock)

    def is_behind(self, access: Access) -> bool:
        return self.clock.get(access.stream, 0) >= access.count


class Access(NamedTuple):
    """An operator that reads or writes, with its number on its stream."""

    stream: Stream
    count: int
    what: object
    frames: Frames

    def __str__(self) -> str:
        return f"{self.what} on {self.stream}\n{text_of(self.frames)}"


@dataclass
class Segment:
    """Bytes with one history."""

    start: int
    stop: int
    write: Access
    reads: dict[Stream, Access]  # since the write, the last one of each stream


@dataclass(eq=False)
class Memory:
    """One allocation, and the histories of its parts."""

    start: int
    stop: int
    made: Access
    is_device: bool
    kept: set[Stream] = field(default_factory=set)
    ref: Any = None  # weak, of the storage

    def __post_init__(self) -> None:
        self.segments = [Segment(self.start, self.stop, self.made, {})]

    def between(self, start: int, stop: int) -> list[Segment]:
        """The histories of these bytes, which are cut off the others."""
        for at in (start, stop):
            for it in self.segments:
                if it.start < at < it.stop:
                    self.segments.append(Segment(at, it.stop, it.write, dict(it.reads)))
                    it.stop = at
                    break
        return [it for it in self.segments if start <= it.start < stop]


@dataclass(eq=False)
class Event:
    """A moment of a stream; `checker` has the host."""

    checker: Any
    clock: Clock
    frames: Frames
    num_queries: int = 0

    def record(self) -> None:
        """Makes it an event of this moment of the current stream."""
        event = self.checker.record()
        self.clock, self.frames = event.clock, event.frames

    def wait(self, stream: Stream | None = None) -> None:
        """Makes a stream, by default the current one, wait; the host does not."""
        (stream or self.checker.current).follows(self.clock)

    def synchronize(self) -> None:
        """Makes the host wait."""
        self.checker.synchronized("event.synchronize", self.clock)

    def query(self) -> bool:
        """False at first, as on a device that is behind; what is found complete the host may read."""
        host, lag = self.checker.host, self.checker.lag
        self.num_queries += 1
        is_known = all(host.clock.get(stream, 0) >= count for stream, count in self.clock.items())
        if not is_known and (lag is None or self.num_queries <= lag):
            return False
        host.follows(self.clock)
        return True

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds that nothing depends on."""
        if not (self.query() and end.query()):
            raise RuntimeError("elapsed_time of an event that the host has not seen complete")
        return 1.0


def stack() -> Frames:
    frames: Frames = []
    frame = sys._getframe(2)
    while frame is not None and len(frames) < _DEPTH:
        frames.append((frame.f_code, frame.f_lasti))  # its line takes longer to find, and few are shown
        frame = frame.f_back  # type: ignore[assignment]
    return frames


def shown(frames: Frames, *, most: int = _SHOWN) -> list[tuple[str, int, str]]:
    """The innermost ones, neither of torch nor of the checker itself."""
    own = str(Path(__file__).parent)
    hidden = (own, "/torch/", "<")
    seen = [it for it in frames if not any(each in it[0].co_filename for each in hidden)] or frames
    return [(code.co_filename, _line(code, at), code.co_qualname) for code, at in seen[:most]]


def _line(code: CodeType, at: int) -> int:
    return next((line or 0 for start, stop, line in code.co_lines() if start <= at < stop), 0)


def text_of(frames: Frames) -> str:
    return "\n".join(f"      {file}:{line} {name}" for file, line, name in shown(frames))
