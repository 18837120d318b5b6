"""Formats of values on their way between ranks. Sums are always formed in a wider one.

A new format is one object in `WIRES`: settings, plans, exchanges and the simulator ask it for
everything (docs/design/exchanges.md).
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:  # planning and simulating use the sizes alone, without torch
    from torch import Tensor, device

# Encoded at once: on the host the values between two operators stay in a core's cache, on a device
# operators are few.
_HOST_NUMEL, _DEVICE_NUMEL = 2**19, 2**23
_LARGEST_CODE = 127
_LARGEST_FP32 = 3.4028234663852886e38
_LEAST_FP32 = 2.0**-149  # above zero
_LEAST_NORMAL = 2.0**-126  # a smaller scale is inexact, and its inverse may overflow
_LEAST_USUAL = _LARGEST_CODE * _LEAST_NORMAL  # the largest number of a block with that scale


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
    def least(self) -> float:
        """Numbers of this size, and smaller ones, arrive as zero in any block."""

    @property
    def is_dithered(self) -> bool:
        """True if `encode` adds offsets before it rounds."""

    @property
    def coding_us_per_mb(self) -> float:
        """Microseconds that an all-reduce takes on processors beyond the time of its bytes, for
        each 10^6 bytes of fp32: to encode, add and decode them.

        For predictions. Profiles of runs that have used the format contain the time.
        """

    @property
    def bucket_us(self) -> float:
        """Microseconds of one core for a bucket on the host, of any size: its operators and
        messages, beyond those in full width. Plans and simulations count them.
        """

    def num_bytes(self, numel: int) -> int:
        """Returns the bytes of `numel` encoded elements, a multiple of `block`."""

    def encode(
        self,
        values: Tensor,
        message: Tensor,
        dither: Tensor | None = None,
        *,
        is_host: bool = True,
    ) -> None:
        """Writes `values` into `message`: of one part, or of several parts with a row each.

        Args:
            values: [numel] or [rows, numel] of a floating-point dtype
            message: [num_bytes(numel)] or [rows, num_bytes(numel)] uint8
            dither: [block] float32, within half a unit of the code: added to the elements of each
                block before they are rounded. None rounds to the nearest.
            is_host: False if values are on a device; the host must not wait for it.
        """

    def decode(self, message: Tensor, into: Tensor, *, adds: bool) -> None:
        """Writes the values of `message` into `into`, or adds them to it.

        Args:
            message: [num_bytes(numel)] or [rows, num_bytes(numel)] uint8
            into: [numel] or [rows, numel] of a floating-point dtype
            adds: True adds.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Cast:
    """A floating-point dtype with fewer bits."""

    dtype: str  # torch's name
    largest: float  # the largest number that a cast rounds to a finite one
    least: float  # the largest number that a cast rounds to zero
    is_dithered: bool = False
    itemsize: int = 2
    block: int = 1
    coding_us_per_mb: float = 800.0
    bucket_us: float = 700.0

    def num_bytes(self, numel: int) -> int:
        return numel * self.itemsize

    def encode(
        self,
        values: Tensor,
        message: Tensor,
        dither: Tensor | None = None,
        *,
        is_host: bool = True,
    ) -> None:
        import torch

        message.view(getattr(torch, self.dtype)).copy_(values)

    def decode(self, message: Tensor, into: Tensor, *, adds: bool) -> None:
        import torch

        if into.dim() > 1 and into.shape[-1] > chunk_numel(into):
            for row, row_message in zip(into, message, strict=True):
                self.decode(row_message, row, adds=adds)
            return
        values = message.view(getattr(torch, self.dtype))
        if not adds:
            into.copy_(values)
            return
        # An add of two dtypes takes twice as long as a cast and an add in the cache.
        for chunk in _chunks(into):
            part = into[chunk]
            part.add_(scratch(part).copy_(values[chunk]))


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockInt8:
    """Eight bits for an element, and an fp32 scale for each block: `scale = max|x| / 127`.

    Codes are rounded to the nearest integer, half to even: an element is off by at most half its
    scale. After an offset has been added, it is off by less than its scale, and by nothing on
    average over all offsets. Zeros arrive as zeros.

    In a block with NaN or Inf, each Inf arrives as such, and all other elements as NaN: its scale
    is Inf, and only an Inf has a code that is not zero.
    """

    block: int = 512
    largest: float = _LARGEST_FP32 * (1 - 2.0**-22)  # two roundings of 2^-24 each lie above it
    least: float = _LEAST_FP32 / 2
    is_dithered: bool = True
    coding_us_per_mb: float = 1100.0
    bucket_us: float = 1400.0

    def num_bytes(self, numel: int) -> int:
        return numel + numel // self.block * 4

    def encode(
        self,
        values: Tensor,
        message: Tensor,
        dither: Tensor | None = None,
        *,
        is_host: bool = True,
    ) -> None:
        encode = _encode_on_host if is_host else _encode_on_device
        for blocks, codes, scales in self._pieces(values, message):
            encode(blocks, codes, scales, dither)

    def decode(self, message: Tensor, into: Tensor, *, adds: bool) -> None:
        for blocks, codes, scales in self._pieces(into, message):
            _decode_blocks(codes, scales, blocks, adds=adds)

    def _pieces(self, values: Tensor, message: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yields blocks of values, with their codes and scales in `message`, a piece at a time.

        [..., blocks, block], [..., blocks, block] int8 and [..., blocks, 1] float32
        """
        import torch

        numel = values.shape[-1]
        if values.dim() > 1 and numel > chunk_numel(values):
            for row, row_message in zip(values, message, strict=True):
                yield from self._pieces(row, row_message)
            return
        rows = values.shape[:-1]
        blocks = values.view(*rows, -1, self.block)
        codes = message[..., :numel].view(torch.int8).view(*rows, -1, self.block)
        scales = message[..., numel:].view(torch.float32).unsqueeze(-1)
        for chunk in _chunks(blocks):
            yield blocks[chunk], codes[chunk], scales[chunk]


def _encode_on_device(blocks: Tensor, codes: Tensor, scales: Tensor, dither: Tensor | None) -> None:
    """Encodes all blocks as rare ones, because only the host could tell which are."""
    wide = scratch(blocks)
    _encode_any(blocks, _largest_of(blocks, wide), codes, scales, dither)


def _largest_of(blocks: Tensor, wide: Tensor) -> Tensor:
    """Returns the largest absolute value of each block, and overwrites `wide`.

    [..., blocks, 1] float32
    """
    import torch

    torch.abs(blocks, out=wide) if blocks.dtype == wide.dtype else wide.copy_(blocks).abs_()
    return wide.amax(-1, keepdim=True)


def _encode_on_host(blocks: Tensor, codes: Tensor, scales: Tensor, dither: Tensor | None) -> None:
    import torch

    wide = scratch(blocks)
    largest = _largest_of(blocks, wide)
    low, high = map(float, torch.aminmax(largest))  # NaN if one of them is
    torch.div(largest, _LARGEST_CODE, out=scales)
    if not low >= _LEAST_USUAL:
        scales.clamp_(min=_LEAST_NORMAL)  # zeros too need an inverse
    torch.mul(blocks, scales.reciprocal(), out=wide)
    codes.copy_(_rounded(wide, dither))
    if not (low >= _LEAST_USUAL and high <= _LARGEST_FP32):
        are_usual = (largest >= _LEAST_USUAL) & (largest <= _LARGEST_FP32) | (largest == 0)
        if are_usual.all():  # blocks of zeros only: rows that a step does not use
            return
        rare = are_usual.logical_not_().squeeze(-1).nonzero(as_tuple=True)
        rare_codes, rare_scales = codes[rare], scales[rare]
        _encode_any(blocks[rare], largest[rare], rare_codes, rare_scales, dither)
        codes[rare], scales[rare] = rare_codes, rare_scales


def _encode_any(
    blocks: Tensor, largest: Tensor, codes: Tensor, scales: Tensor, dither: Tensor | None
) -> None:
    """Encodes blocks with any values: tiny ones, NaN and Inf too.

    On the host it takes twice as long: a division is slower than a product.
    """
    import torch

    are_finite = largest <= _LARGEST_FP32
    torch.div(torch.where(are_finite, largest, _LARGEST_FP32), _LARGEST_CODE, out=scales)
    # A tiny scale is rounded to a multiple of the least number: up, so that codes end at 127.
    scales.add_((scales * _LARGEST_CODE < largest).float() * _LEAST_FP32)
    # Next to an Inf, numbers become zeros, and the Inf itself stays for a while.
    divisors = torch.where(are_finite, scales, _LARGEST_FP32)
    wide = _rounded(torch.div(blocks, divisors, out=scratch(blocks)), dither)
    # The cast of NaN is not defined on every device.
    codes.copy_(wide.nan_to_num_(nan=0.0, posinf=_LARGEST_CODE, neginf=-_LARGEST_CODE))
    scales.copy_(torch.where(are_finite, scales, math.inf))


def _rounded(wide: Tensor, dither: Tensor | None) -> Tensor:
    """Adds the offsets, and rounds, in place."""
    if dither is not None:
        wide.add_(dither)
    return wide.round_()


def _decode_blocks(codes: Tensor, scales: Tensor, into: Tensor, *, adds: bool) -> None:
    # Three operators, and no fused one: it may round differently at the end of a vector. Two dtypes
    # in one multiplication take twice as long.
    wide = into if into.dtype == scales.dtype and not adds else scratch(into)
    wide.copy_(codes).mul_(scales)
    if adds:
        into.add_(wide)
    elif wide is not into:
        into.copy_(wide)


def chunk_numel(values: Tensor) -> int:
    """Returns the elements that are encoded or decoded at once."""
    return _HOST_NUMEL if values.device.type == "cpu" else _DEVICE_NUMEL


def _chunks(rows: Tensor) -> Iterator[slice]:
    step = max(1, chunk_numel(rows) // max(1, math.prod(rows.shape[1:])))
    return (slice(start, start + step) for start in range(0, len(rows), step))


_scratches = threading.local()


def scratch(like: Tensor) -> Tensor:
    """Returns fp32 memory of the shape of `like`; the next call in this thread returns the same."""
    return scratch_of(like.shape, like.device)


def scratch_of(shape: Sequence[int], device: device) -> Tensor:
    """Returns fp32 memory of a shape; the next call in this thread returns the same."""
    import torch

    numel = math.prod(shape)
    memory: Tensor | None = getattr(_scratches, "memory", None)
    if memory is None or memory.numel() < numel or memory.device != device:
        memory = _scratches.memory = torch.empty(numel, device=device)
    return memory[:numel].view(*shape)


def forget_scratch() -> None:
    """Called before values are encoded or decoded on another stream, in this thread."""
    _scratches.memory = None


# By the names of settings. A cast rounds numbers down that lie less than half a unit above the
# largest one.
WIRES: Mapping[str, Wire] = {
    "bfloat16": Cast(
        dtype="bfloat16", largest=2.0**127 * (2 - 2.0**-8) * (1 - 2.0**-40), least=2.0**-134
    ),
    "float16": Cast(dtype="float16", largest=65519.996, least=2.0**-25),
    "int8": BlockInt8(),
}
AUTO, AUTO_WIRE = "auto", "int8"  # the setting that lets the plan choose, and the format it chooses
# Of differences of parameters, which may be too small for float16.
PARAM_WIRES = ("bfloat16", "int8")


def wire_for(name: str | None, dtype: str, itemsize: int) -> Wire | None:
    """Returns the format of values of `dtype` under a setting; None if they travel in full width.

    They do if they are not real numbers, or have no more bytes than the format.
    """
    if name is None or not dtype.startswith(("float", "bfloat")):
        return None
    wire = WIRES[name]
    return wire if wire.num_bytes(wire.block) < itemsize * wire.block else None
