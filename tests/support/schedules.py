"""Schedules from the text that `Schedule.to_text` prints."""

import re

from undertow.schedule import Buffer, Op, OpKind, Schedule


def schedule_from_text(text: str) -> Schedule:
    """Parses a table with one line per op; blank lines and indentation do not matter."""
    _header, *lines = filter(None, map(str.strip, text.splitlines()))
    return Schedule(tuple(map(op_from_line, lines)))


def op_from_line(line: str) -> Op:
    op_id, lane, kind, bucket, reads, writes, after = re.split(r"\s{2,}", line)
    return Op(
        id=int(op_id),
        lane=lane,
        kind=OpKind(kind),
        bucket=bucket_from_text(bucket),
        reads=buffers_from_text(reads),
        writes=buffers_from_text(writes),
        after=() if after == "-" else tuple(map(int, after.split())),
    )


def bucket_from_text(text: str) -> int | None:
    return None if text == "*" else int(text.removeprefix("b"))


def buffers_from_text(text: str) -> tuple[Buffer, ...]:
    return tuple(Buffer(name, bucket_from_text(bucket)) for name, bucket in re.findall(r"(\w+)\[(\S+)\]", text))
