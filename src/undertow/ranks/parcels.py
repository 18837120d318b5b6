"""How the values of a bucket travel: one message for the part of each rank.

    values    | in the format, in blocks     | in full width |
    parts     | rank 0     | rank 1     | rank 2           |
    message   | encoded values | values in full width |         one for each part

In full width a message is the part itself, and nothing is copied.

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
from undertow.wire import Wire, forget_scratch

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
        found = []
        for index, part in enumerate(self.parts):
            num_narrow = self._num_narrow(index)
            wide_bytes = (len(part) - num_narrow) * self.dtype.itemsize
            found.append(round_up(self.wire.num_bytes(num_narrow), ALIGN_BYTES) + wide_bytes)
        return found

    def messages(self, values: Tensor, room: Room) -> list[Tensor]:
        found = [room(size, torch.uint8) for size in self.sizes]
        with self._noted("encode"):
            for index, part in enumerate(self.parts):
                own = values[part.start : part.stop]
                self._encode(own, index, found[index], self.own_dither)
        return found

    def write(self, part: Tensor, index: int, message: Tensor) -> None:
        with self._noted("encode"):
            self._encode(part, index, message, self.mean_dither)

    def _encode(self, part: Tensor, index: int, message: Tensor, dither: Tensor | None) -> None:
        num_narrow = self._num_narrow(index)
        num_bytes = self.wire.num_bytes(num_narrow)
        if num_narrow:
            self.wire.encode(part[:num_narrow], message[:num_bytes], dither, is_host=self.is_host)
        if num_narrow < len(part):
            self._in_full_width(message, num_bytes).copy_(part[num_narrow:])

    def add_up(
        self,
        messages: Sequence[Tensor],
        index: int,
        *,
        into: Tensor,
    ) -> None:
        with self._noted("decode"):
            for rank, message in enumerate(messages):
                self._decode(message, index, into, adds=rank > 0)

    def open(self, messages: Sequence[Tensor], into: Tensor) -> None:
        self._decode_all(messages, into, adds=False)

    def add_to(self, messages: Sequence[Tensor], values: Tensor) -> None:
        """Adds the values of the message of each part to the whole bucket `values`."""
        self._decode_all(messages, values, adds=True)

    def _decode_all(self, messages: Sequence[Tensor], into: Tensor, *, adds: bool) -> None:
        with self._noted("decode"):
            for index, part in enumerate(self.parts):
                self._decode(messages[index], index, into[part.start : part.stop], adds=adds)

    @contextmanager
    def _noted(self, kind: str) -> Iterator[None]:
        if not self.is_host:
            forget_scratch()  # this thread may have used it on another stream
        start_s = time.perf_counter()
        yield
        if self.is_host:
            self.codings.append((kind, start_s, time.perf_counter()))

    def _decode(self, message: Tensor, index: int, into: Tensor, *, adds: bool) -> None:
        num_narrow = self._num_narrow(index)
        num_bytes = self.wire.num_bytes(num_narrow)
        if num_narrow:
            self.wire.decode(message[:num_bytes], into[:num_narrow], adds=adds)
        if num_narrow < len(into):
            wide = self._in_full_width(message, num_bytes)
            rest = into[num_narrow:]
            rest.add_(wide) if adds else rest.copy_(wide)

    def _num_narrow(self, index: int) -> int:
        part = self.parts[index]
        return min(max(self.narrow_numel - part.start, 0), len(part))

    def _in_full_width(self, message: Tensor, num_bytes: int) -> Tensor:
        """Returns the values in full width of a message, which follow `num_bytes` encoded ones."""
        return message[round_up(num_bytes, ALIGN_BYTES) :].view(self.dtype)


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
