"""Looks for infinities and NaN in a bucket before its launch, and marks them in its trailer."""

import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from undertow.buckets.trailer import TrailerCodec
from undertow.plan import Bucket
from undertow.torch_private import private


class FiniteCheck:
    """Checks the buckets of one rank, in launch order.

    It checks the values for the reduction, so it also finds a gradient that would become infinite
    in a narrower wire dtype. On the host, it reads a bucket once, and parameter by parameter only
    if it finds something. On a device, it reads each gradient once, and the host does not wait.
    """

    def __init__(self) -> None:
        self._has_found: Tensor | None = None  # [] bool, in this synchronization

    def begin(self) -> None:
        """Resets the check when a synchronization begins."""
        self._has_found = None

    @torch.no_grad()
    def check(
        self, values: Sequence[Tensor], layout: Bucket, trailer: TrailerCodec, largest: float
    ) -> None:
        """Marks gradients with a NaN or a number above `largest` in the trailer of a packed bucket.

        The last one also tells if this rank has found any.
        """
        bad = bad_slots(values, layout, largest)
        if bad is not None:
            trailer.mark_nonfinite(bad)
            has_bad = bad.any()
            if self._has_found is not None:
                has_bad |= self._has_found.to(has_bad.device)
            self._has_found = has_bad
        if self._has_found is not None and layout.trailer.facts:
            trailer.tell_nonfinite(self._has_found)


def bad_slots(values: Sequence[Tensor], layout: Bucket, largest: float) -> Tensor | None:
    """Returns which gradients of a bucket have a NaN or a number above `largest`, or None if the
    host knows that none has.

    `values` are a dense bucket's flat gradients, or each sparse gradient.
    [number of slots] bool, on the device of the values.
    """
    if not layout.slots:
        return None
    parts = values
    if not layout.is_sparse:  # rows: the host has counted them already
        (flat,) = values
        parts = [flat[slot.start : slot.stop] for slot in layout.slots]
        if not flat.is_cpu:
            nothing = flat.new_zeros(1)
            filled = [part if part.numel() else nothing for part in parts]
            return (torch.stack(private.largest_of_each(filled)) <= largest).logical_not()
        if not not_finite(values, largest):
            return None
    places = not_finite(parts, largest)
    if not places:
        return None
    are_bad = [place in places for place in range(len(parts))]
    return torch.tensor(are_bad, device=values[0].device)


@torch.no_grad()
def not_finite(gradients: Sequence[Tensor], largest: float = sys.float_info.max) -> list[int]:
    """Returns the positions of gradients with a NaN, or a number above `largest`.

    Waits once, after all have been checked.
    """
    extremes: dict[int, Tensor] = {}
    for place, gradient in enumerate(gradients):
        values = gradient.coalesce().values() if gradient.is_sparse else gradient
        if values.numel():
            real = torch.view_as_real(values) if values.is_complex() else values
            # The smallest and the largest value, or NaN if there is one. Sums and norms could
            # overflow.
            extremes[place] = torch.stack(torch.aminmax(real))
    bad: list[int] = []
    for place, found in extremes.items():
        low, high = found.tolist()
        if not (-largest <= low and high <= largest):  # also of NaN
            bad.append(place)
    return bad
