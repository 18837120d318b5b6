"""How the values of a bucket travel: one message for the part of each rank.

    values    | in the format, in blocks     | in full width |
    parts     | rank 0     | rank 1     | rank 2           |
    message   | encoded values | values in full width |         one for each part

In full width a message is the part itself, and nothing is copied.

Parts of equal length are encoded, added and decoded as rows of one matrix, so that the time does
not grow with the number of ranks. A part ends at a block, so these are the bytes of each alone.

Reasons: docs/design/exchanges.md.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import ClassVar, TypeAlias

import torch
from torch import Tensor

from undertow.plan.layout import round_up
from undertow.ranks.dither import Rounding, Turn
from undertow.wire import Wire, chunk_numel, forget_scratch, scratch_of

ALIGN_BYTES = 16  # of the values in full width, so that any dtype can be viewed there

# Returns memory for so many elements of a dtype.
Room = Callable[[int, torch.dtype], Tensor]
# "encode" or "decode", with its start and stop in seconds of time.perf_counter.
Coding = tuple[str, float, float]


@dataclass(frozen=True, slots=True)
class FullWidth:
    """Parts that travel as they are: the message of a part is the part itself."""

    parts: Sequence[range]  # the elements of each rank's part
    is_narrow: ClassVar = False  # messages are not in a format, in separate memory

    def payload(self, itemsize: int) -> int:
        """Returns the bytes of all messages; an element in full width has `itemsize` of them."""
        return itemsize * sum(map(len, self.parts))

    def messages(self, values: Tensor, room: Room) -> list[Tensor]:
        """Returns the message of each part of `values`, the whole bucket."""
        return [values[part.start : part.stop] for part in self.parts]

    def write(self, part: Tensor, index: int, message: Tensor) -> None:
        """Replaces the contents of the message of a part by other values of that part."""
        message.copy_(part)

    def add_up(
        self,
        messages: Sequence[Tensor],
        index: int,
        *,
        into: Tensor,
    ) -> None:
        """Writes the sum of the messages that all ranks have sent of one part into `into`."""
        sum_in_order(messages, into=into)

    def open(self, messages: Sequence[Tensor], into: Tensor) -> None:
        """Writes the values of the message of each part into the whole bucket `into`."""
        for part, message in zip(self.parts, messages, strict=True):
            target = into[part.start : part.stop]
            if target.data_ptr() != message.data_ptr():
                target.copy_(message)


@dataclass(frozen=True, slots=True)
class _Rows:
    """Adjacent parts of equal length, whose messages are encoded and decoded at once."""

    parts: range
    start: int  # elements of the bucket, of the first part
    numel: int  # elements of each
    num_narrow: int  # of these, in the format
    num_bytes: int  # of the elements in the format
    size: int  # bytes of each message

    @property
    def elements(self) -> slice:
        """The elements of these parts in the bucket."""
        return slice(self.start, self.start + len(self.parts) * self.numel)

    @property
    def stride(self) -> int:
        """Bytes from one message to the next."""
        return round_up(self.size, ALIGN_BYTES)


@dataclass(frozen=True, slots=True)
class Encoded:
    """Parts whose first elements, [0, narrow_numel) of the bucket, travel in the format `wire`, and
    the others in `dtype`. It has the methods of `FullWidth`.

    `codings` notes when the host encoded and decoded values; its owner empties it. Unless values
    are on the host (`is_host`), both run on a stream, and nothing is noted.
    """

    wire: Wire
    dtype: torch.dtype
    narrow_numel: int
    parts: Sequence[range]
    is_narrow: ClassVar = True
    codings: list[Coding] = field(default_factory=list, compare=False)
    is_host: bool = True
    own_dither: Tensor | None = field(default=None, compare=False)
    mean_dither: Tensor | None = field(default=None, compare=False)
    _rows: Sequence[_Rows] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        if not self._rows:
            object.__setattr__(self, "_rows", self._in_rows())

    def _in_rows(self) -> list[_Rows]:
        """Returns all parts, in as few matrices as possible."""
        found = list[_Rows]()
        for index, part in enumerate(self.parts):
            num_narrow = min(max(self.narrow_numel - part.start, 0), len(part))
            last = found[-1] if found else None
            is_next = last is not None and last.elements.stop == part.start
            if (
                last is not None
                and is_next
                and (last.numel, last.num_narrow)
                == (
                    len(part),
                    num_narrow,
                )
            ):
                found[-1] = replace(last, parts=range(last.parts.start, index + 1))
                continue
            num_bytes = self.wire.num_bytes(num_narrow)
            wide_bytes = (len(part) - num_narrow) * self.dtype.itemsize
            size = round_up(num_bytes, ALIGN_BYTES) + wide_bytes
            parts = range(index, index + 1)
            found.append(_Rows(parts, part.start, len(part), num_narrow, num_bytes, size))
        return found

    def dithered(
        self, turn: Turn, stage: Rounding, *, rank: int, device: torch.device
    ) -> "Encoded":
        """Returns the parcel of one synchronization, with offsets if the format takes them.

        Args:
            turn: The one of this synchronization.
            stage: The stage of `messages`.
            rank: This rank's place in the group that exchanges the messages.
            device: Of the values.
        """
        if not self.wire.is_dithered:
            return self
        block = self.wire.block
        return replace(
            self,
            own_dither=turn.offsets(block, stage, rank=rank, device=device),
            mean_dither=turn.offsets(block, Rounding.MEAN, rank=0, device=device),
        )

    def payload(self, itemsize: int) -> int:
        return sum(self.sizes)

    @property
    def sizes(self) -> list[int]:
        """Bytes of the message of each part."""
        return [rows.size for rows in self._rows for _ in rows.parts]

    def messages(self, values: Tensor, room: Room) -> list[Tensor]:
        found = list[Tensor]()
        with self._noted("encode"):
            for rows in self._rows:
                num_parts = len(rows.parts)
                memory = room(num_parts * rows.stride, torch.uint8).view(num_parts, rows.stride)
                messages = memory[:, : rows.size]
                own = values[rows.elements].view(num_parts, rows.numel)
                self._encode(own, rows, messages, self.own_dither)
                found.extend(messages.unbind())
        return found

    def write(self, part: Tensor, index: int, message: Tensor) -> None:
        with self._noted("encode"):
            self._encode(part, self._rows_of(index), message, self.mean_dither)

    def _rows_of(self, index: int) -> _Rows:
        return next(rows for rows in self._rows if index in rows.parts)

    def _encode(self, values: Tensor, rows: _Rows, messages: Tensor, dither: Tensor | None) -> None:
        """Encodes the values of one part into its message, or of several parts, a row each."""
        num_narrow, num_bytes = rows.num_narrow, rows.num_bytes
        if num_narrow:
            narrow, codes = values[..., :num_narrow], messages[..., :num_bytes]
            self.wire.encode(narrow, codes, dither, is_host=self.is_host)
        if num_narrow < rows.numel:
            self._in_full_width(messages, num_bytes).copy_(values[..., num_narrow:])

    def add_up(
        self,
        messages: Sequence[Tensor],
        index: int,
        *,
        into: Tensor,
    ) -> None:
        rows = self._rows_of(index)
        first, *others = messages
        with self._noted("decode"):
            self._decode(first, rows, into, adds=False)
            for matrix in _matrices(others):
                self._add_in_order(matrix, rows, into)

    def _add_in_order(self, messages: Tensor, rows: _Rows, into: Tensor) -> None:
        """Adds the values of several messages of one part, in their order."""
        step = chunk_numel(into) // max(1, rows.numel)
        if step < 2 or len(messages) < 2 or rows.num_narrow < rows.numel:
            for message in messages:
                self._decode(message, rows, into, adds=True)
            return
        for some in torch.split(messages, step):
            values = scratch_of((len(some), rows.numel), into.device)  # decoding uses none
            self._decode(some, rows, values, adds=False)
            for value in values:
                into.add_(value)

    def open(self, messages: Sequence[Tensor], into: Tensor) -> None:
        self._decode_all(messages, into, adds=False)

    def add_to(self, messages: Sequence[Tensor], values: Tensor) -> None:
        """Adds the values of the message of each part to the whole bucket `values`."""
        self._decode_all(messages, values, adds=True)

    def _decode_all(self, messages: Sequence[Tensor], into: Tensor, *, adds: bool) -> None:
        with self._noted("decode"):
            for rows in self._rows:
                values = into[rows.elements].view(len(rows.parts), rows.numel)
                start = 0
                for matrix in _matrices(messages[rows.parts.start : rows.parts.stop]):
                    stop = start + len(matrix)
                    self._decode(matrix, rows, values[start:stop], adds=adds)
                    start = stop

    @contextmanager
    def _noted(self, kind: str) -> Iterator[None]:
        if not self.is_host:
            forget_scratch()  # this thread may have used it on another stream
        start_s = time.perf_counter()
        yield
        if self.is_host:
            self.codings.append((kind, start_s, time.perf_counter()))

    def _decode(self, messages: Tensor, rows: _Rows, into: Tensor, *, adds: bool) -> None:
        """Decodes one message into the values of its part, or several, a row each."""
        num_narrow, num_bytes = rows.num_narrow, rows.num_bytes
        if num_narrow:
            self.wire.decode(messages[..., :num_bytes], into[..., :num_narrow], adds=adds)
        if num_narrow < rows.numel:
            wide = self._in_full_width(messages, num_bytes)
            rest = into[..., num_narrow:]
            rest.add_(wide) if adds else rest.copy_(wide)

    def _in_full_width(self, messages: Tensor, num_bytes: int) -> Tensor:
        """Returns the values in full width of messages, which follow `num_bytes` encoded ones."""
        return messages[..., round_up(num_bytes, ALIGN_BYTES) :].view(self.dtype)


def _matrices(messages: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yields messages of one length as rows of matrices: of those at equal distances in memory.

    [rows, bytes] uint8
    """
    places = [(each.untyped_storage().data_ptr(), int(each.storage_offset())) for each in messages]
    start = 0
    while start < len(messages):
        storage, offset = places[start]
        numel, stop = messages[start].numel(), start + 1
        step = round_up(max(1, numel), ALIGN_BYTES)
        if stop < len(messages) and (places[stop][1] - offset) % ALIGN_BYTES == 0:
            step = max(step, places[stop][1] - offset)
        while stop < len(messages) and places[stop] == (storage, offset + (stop - start) * step):
            stop += 1
        yield messages[start].as_strided((stop - start, numel), (step, 1))
        start = stop


Parcel: TypeAlias = FullWidth | Encoded


def sum_in_order(parts: Sequence[Tensor], *, into: Tensor) -> Tensor:
    """Adds `parts` in their order; the order in torch.sum depends on the position of an element."""
    first, *rest = parts
    if rest and first.dtype == into.dtype:  # saves one pass over memory
        torch.add(first, rest.pop(0), out=into)
    else:
        into.copy_(first)
    for part in rest:
        into.add_(part)
    return into
