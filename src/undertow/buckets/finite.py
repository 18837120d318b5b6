"""Looks for infinities and NaN in a bucket before its launch, and marks them in its trailer."""

import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from undertow.buckets.facts import TrailerCodec
from undertow.plan import Bucket
from undertow.torch_private import private


class FiniteCheck:
    """Checks the buckets of one rank, in launch order.

    It also finds a gradient that would become infinite in a format. On the host, it reads a bucket
    once, and parameter by parameter only if it finds something. On a device, it reads each gradient
    once, and the host does not wait.
    """

    def __init__(self, *, is_host: bool) -> None:
        self.is_host = is_host  # values are on the host
        # [] bool each, in this synchronization; the exchanges' posting thread finds some
        self._found: list[Tensor] = []

    def begin(self) -> None:
        """Resets the check when a synchronization begins."""
        self._found.clear()

    @torch.no_grad()
    def check(
        self, values: Sequence[Tensor], layout: Bucket, trailer: TrailerCodec, largest: float
    ) -> None:
        """Marks gradients with a NaN or a number above `largest` in the trailer of a packed bucket.

        In full width, a gradient may be as large as its dtype allows. The last bucket also tells
        if this rank has found any.
        """
        bad = bad_slots(values, layout, largest, is_host=self.is_host)
        if bad is not None:
            trailer.mark_nonfinite(bad)
            self._found.append(bad.any())
        if self._found and layout.trailer.facts:
            device = self._found[-1].device
            trailer.tell_nonfinite(torch.stack([each.to(device) for each in self._found]).any())


def bad_slots(
    values: Sequence[Tensor], layout: Bucket, largest: float, *, is_host: bool
) -> Tensor | None:
    """Returns which gradients of a bucket have a NaN or a number above `largest`, or None if the
    host knows that there is none.

    Gradients that no format encodes may be as large as their dtype allows.
    `values` are a dense bucket's flat gradients, or each sparse gradient; `is_host` tells if they
    are on the host.
    [number of slots] bool, on the device of the values.
    """
    if not layout.slots:
        return None
    parts = values
    if not layout.is_sparse:  # rows: the host has counted them already
        (flat,) = values
        parts = [flat[slot.start : slot.stop] for slot in layout.slots]
        if is_host and not not_finite(values, largest):
            return None
    # Those that a format may encode come first.
    num_encoded = sum(slot.stop <= layout.narrow_numel for slot in layout.slots)
    largest_wide = torch.finfo(values[0].dtype).max
    groups = [(parts[:num_encoded], largest), (parts[num_encoded:], largest_wide)]
    found = [_are_bad(some, limit, is_host=is_host) for some, limit in groups if some]
    bad = torch.cat(found)
    return bad if not is_host or bad.any() else None


def _are_bad(parts: Sequence[Tensor], largest: float, *, is_host: bool) -> Tensor:
    if not is_host:
        nothing = parts[0].new_zeros(1)
        filled = [part if part.numel() else nothing for part in parts]
        return (torch.stack(private.largest_of_each(filled)) <= largest).logical_not()
    places = not_finite(parts, largest)
    return torch.tensor([place in places for place in range(len(parts))], device=parts[0].device)


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
