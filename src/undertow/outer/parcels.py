"""Parcels of a fragment: the mean over replicas is made where its parts are added up.

Elements from `buffers` on are a model's buffers. Equal values stay equal bits there, whatever their
number: an attention mask has infinities, and a third of three equal numbers may differ in its last
bit. NaN, from a replica that is left out, does not count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from undertow.ranks.parcels import Encoded, FullWidth


@dataclass(frozen=True, slots=True)
class MeanInFullWidth(FullWidth):
    """A parcel in full width."""

    buffers: int = 0

    def add_up(
        self,
        messages: Sequence[Tensor],
        index: int,
        *,
        into: Tensor,
    ) -> None:
        FullWidth.add_up(self, messages, index, into=into)
        _divide(into, messages, self.parts[index], buffers=self.buffers)


@dataclass(frozen=True, slots=True)
class EncodedMean(Encoded):
    """A parcel whose first elements travel in a format."""

    buffers: int = 0

    def add_up(
        self,
        messages: Sequence[Tensor],
        index: int,
        *,
        into: Tensor,
    ) -> None:
        Encoded.add_up(self, messages, index, into=into)
        _divide(into, messages, self.parts[index], buffers=self.buffers)


def _divide(total: Tensor, messages: Sequence[Tensor], part: range, *, buffers: int) -> None:
    """Turns the sum of all replicas' messages of one part into their mean.

    Each message ends with the part's buffers in full width, which have their own mean.
    """
    total.div_(len(messages))
    num_buffers = part.stop - max(buffers, part.start)
    if num_buffers > 0:
        num_bytes = num_buffers * total.itemsize
        sent = [message.view(torch.uint8)[-num_bytes:].view(total.dtype) for message in messages]
        mean_of_buffers(sent, total[-num_buffers:])


def mean_of_buffers(values: Sequence[Tensor], into: Tensor) -> None:
    """Writes the mean of the replicas' values, without NaN, into `into`, added in their order."""
    low = high = values[0]
    total, count = torch.zeros_like(into), torch.zeros_like(into)
    for value in values:
        low, high = torch.fmin(low, value), torch.fmax(high, value)
        is_there = value.isnan().logical_not_()
        total.add_(torch.where(is_there, value, 0.0))
        count.add_(is_there)
    into.copy_(torch.where(low == high, high, total.div_(count)))
