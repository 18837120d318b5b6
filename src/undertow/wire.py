"""Formats of values on their way between ranks. Sums are always formed in a wider one.

A new format is one object in `WIRES`: settings, plans, exchanges and the simulator ask it for
everything (docs/design/exchanges.md).
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:  # planning and simulating use the sizes alone, without torch
    from torch import Tensor

# Encoded at once: on the host the values between two operators stay in a core's cache, on a device
# operators are few.
_HOST_NUMEL, _DEVICE_NUMEL = 2**19, 2**23
_LARGEST_CODE = 127
_LARGEST_FP32 = 3.4028234663852886e38
_LEAST_SCALE = 2.0**-126  # the inverse of a smaller one would overflow


class Wire(Protocol):
    """A format of real numbers. The result for an element depends on no element outside its block.

    So it does not depend on the bucket that the element travels in.
    """

    @property
    def block(self) -> int:
        """Elements. A parameter starts at a multiple of it, and a rank's part ends at one.

        A parameter with fewer elements travels in full width.
        """

    @property
    def largest(self) -> float:
        """The largest number that arrives as a finite one."""

    @property
    def coding_us_per_mb(self) -> float:
        """Microseconds by which an all-reduce takes longer on processors than its bytes alone, for
        each 10^6 bytes of fp32: to encode, add and decode them.

        For predictions. Profiles of runs that have used the format contain the time.
        """

    @property
    def bucket_us(self) -> float:
        """Microseconds of one core for a bucket on the host, whatever its size: its operators and
        messages, beyond those in full width. Plans and simulations count them.
        """

    def num_bytes(self, numel: int) -> int:
        """Returns the bytes of `numel` encoded elements, a multiple of `block`."""

    def encode(self, values: Tensor, message: Tensor) -> None:
        """Writes `values` into `message`.

        Args:
            values: [numel] of a floating-point dtype
            message: [num_bytes(numel)] uint8
        """

    def decode(self, message: Tensor, into: Tensor, *, adds: bool) -> None:
        """Writes the values of `message` into `into`, or adds them to it.

        Args:
            message: [num_bytes(numel)] uint8
            into: [numel] of a floating-point dtype
            adds: True adds.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Cast:
    """A floating-point dtype with fewer bits."""

    dtype: str  # torch's name
    largest: float  # the largest number that a cast rounds to a finite one
    itemsize: int = 2
    block: int = 1
    coding_us_per_mb: float = 800.0
    bucket_us: float = 700.0

    def num_bytes(self, numel: int) -> int:
        return numel * self.itemsize

    def encode(self, values: Tensor, message: Tensor) -> None:
        import torch

        message.view(getattr(torch, self.dtype)).copy_(values)

    def decode(self, message: Tensor, into: Tensor, *, adds: bool) -> None:
        import torch

        values = message.view(getattr(torch, self.dtype))
        if not adds:
            into.copy_(values)
            return
        # An add of two dtypes takes twice as long as a cast and an add in the cache.
        for chunk in _chunks(into):
            part = into[chunk]
            part.add_(_scratch(part).copy_(values[chunk]))


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockInt8:
    """Eight bits for an element, and an fp32 scale for each block: `scale = max|x| / 127`.

    Codes are rounded to the nearest integer, half to even: an element is off by at most half its
    scale. If a block has NaN or Inf, its scale and every decoded value are NaN. Zeros arrive as
    zeros.
    """

    block: int = 512
    largest: float = _LARGEST_FP32 * (1 - 2.0**-22)  # two roundings of 2^-24 each lie above it
    coding_us_per_mb: float = 1100.0
    bucket_us: float = 1400.0

    def num_bytes(self, numel: int) -> int:
        return numel + numel // self.block * 4

    def encode(self, values: Tensor, message: Tensor) -> None:
        blocks = values.view(-1, self.block)
        codes, scales = self._views(message, len(blocks))
        for chunk in _chunks(blocks):
            _encode_blocks(blocks[chunk], codes[chunk], scales[chunk])

    def decode(self, message: Tensor, into: Tensor, *, adds: bool) -> None:
        blocks = into.view(-1, self.block)
        codes, scales = self._views(message, len(blocks))
        for chunk in _chunks(blocks):
            _decode_blocks(codes[chunk], scales[chunk], blocks[chunk], adds=adds)

    def _views(self, message: Tensor, num_blocks: int) -> tuple[Tensor, Tensor]:
        """Returns the codes and the scales in `message`.

        [num_blocks, block] int8 and [num_blocks, 1] float32
        """
        import torch

        numel = num_blocks * self.block
        codes = message[:numel].view(torch.int8).view(-1, self.block)
        return codes, message[numel:].view(torch.float32).view(-1, 1)


def _encode_blocks(blocks: Tensor, codes: Tensor, scales: Tensor) -> None:
    import torch

    wide = _scratch(blocks)
    torch.abs(blocks, out=wide) if blocks.dtype == wide.dtype else wide.copy_(blocks).abs_()
    largest = wide.amax(1, keepdim=True)
    torch.div(largest, _LARGEST_CODE, out=scales).clamp_(min=_LEAST_SCALE)
    torch.mul(blocks, scales.reciprocal(), out=wide)
    wide.round_()
    # The cast of NaN is not defined on every device. With NaN instead of an infinite scale,
    # every code is decoded as NaN, and the host need not read a scale.
    scales.add_(largest, alpha=0.0)
    codes.copy_(wide)


def _decode_blocks(codes: Tensor, scales: Tensor, into: Tensor, *, adds: bool) -> None:
    # Three operators, and no fused one: it may round differently at the end of a vector. Two dtypes
    # in one multiplication take twice as long.
    wide = into if into.dtype == scales.dtype and not adds else _scratch(into)
    wide.copy_(codes).mul_(scales)
    if adds:
        into.add_(wide)
    elif wide is not into:
        into.copy_(wide)


def _chunks(rows: Tensor) -> Iterator[slice]:
    numel = _HOST_NUMEL if rows.device.type == "cpu" else _DEVICE_NUMEL
    step = numel // math.prod(rows.shape[1:])
    return (slice(start, start + step) for start in range(0, len(rows), step))


_scratches = threading.local()


def _scratch(like: Tensor) -> Tensor:
    """Returns fp32 memory of the shape of `like`; the next call in this thread returns the same."""
    import torch

    numel = like.numel()
    memory: Tensor | None = getattr(_scratches, "memory", None)
    if memory is None or memory.numel() < numel or memory.device != like.device:
        memory = _scratches.memory = torch.empty(numel, device=like.device)
    return memory[:numel].view(like.shape)


def forget_scratch() -> None:
    """Called before values are encoded or decoded on another stream, in this thread."""
    _scratches.memory = None


# By the names of settings. A cast rounds numbers down that lie less than half a unit above the
# largest one.
WIRES: Mapping[str, Wire] = {
    "bfloat16": Cast(dtype="bfloat16", largest=2.0**127 * (2 - 2.0**-8) * (1 - 2.0**-40)),
    "float16": Cast(dtype="float16", largest=65519.996),
    "int8": BlockInt8(),
}
AUTO, AUTO_WIRE = "auto", "int8"  # the setting that lets the plan choose, and the format it chooses
PARAM_WIRES = ("bfloat16", "int8")  # differences may be too small for float16


def wire_for(name: str | None, dtype: str, itemsize: int) -> Wire | None:
    """Returns the format of values of `dtype` under a setting; None if they travel in full width.

    They do if they are not real numbers, or have no more bytes than the format.
    """
    if name is None or not dtype.startswith(("float", "bfloat")):
        return None
    wire = WIRES[name]
    return wire if wire.num_bytes(wire.block) < itemsize * wire.block else None
