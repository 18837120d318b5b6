"""Looks for infinities and NaN in a bucket before its launch, and marks them in its trailer."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from undertow.buckets.binding import Binding
from undertow.buckets.reducer import Reducer
from undertow.buckets.trailer import TrailerCodec
from undertow.plan import Bucket
from undertow.torch_private import private


class FiniteCheck:
    """Checks the buckets of one rank, in launch order.

    It checks the values as they are sent, so it also finds a gradient that becomes infinite in a
    narrower wire dtype. On the host, it reads a bucket once, and parameter by parameter only if it
    finds something. On a device, it reads each gradient once, and the host does not wait.
    """

    def __init__(self, reducer: Reducer) -> None:
        self._reducer = reducer
        self._has_found: Tensor | None = None  # [] bool, in this synchronization

    def begin(self) -> None:
        """Resets the check when a synchronization begins."""
        self._has_found = None

    @torch.no_grad()
    def look(self, binding: Binding, layout: Bucket, trailer: TrailerCodec) -> None:
        """Marks non-finite gradients in the trailer of a packed bucket.

        The last one also tells if this rank has found any.
        """
        bad = self.bad_slots(
            binding.values() if layout.is_sparse else [binding.storage.gradients], layout
        )
        if bad is not None:
            trailer.mark_nonfinite(bad)
            self._has_found = (
                bad.any()
                if self._has_found is None
                else self._has_found | bad.any().to(self._has_found.device)
            )
        if self._has_found is not None and layout.trailer.facts:
            trailer.tell_nonfinite(self._has_found)

    def bad_slots(self, values: Sequence[Tensor], layout: Bucket) -> Tensor | None:
        """Returns which gradients in `values` (as from `Binding.values`) are not finite, or None if
        the host knows that all are.

        [number of slots] bool, on the device of the values.
        """
        if layout.is_sparse:  # rows are sent unchanged, and the host has counted them already
            places = not_finite(values)
            return (
                torch.tensor(
                    [place in places for place in range(len(values))], device=values[0].device
                )
                if places
                else None
            )
        if not layout.slots:
            return None
        parts = [values[0][slot.start : slot.stop] for slot in layout.slots]
        if values[0].device.type == "cpu":
            are_bad = (
                []
                if self._leaves_finite(values[0])
                else [not self._leaves_finite(part) for part in parts]
            )
            return torch.tensor(are_bad) if are_bad else None
        nothing = parts[0].new_zeros(1)
        largest = torch.stack(
            private.largest_of_each([part if part.numel() else nothing for part in parts])
        )
        return self._as_sent(largest, of=parts[0].dtype).isfinite().logical_not()

    def _leaves_finite(self, values: Tensor) -> bool:
        """Waits for the values."""
        return not values.numel() or _are_finite(self._as_sent(_extremes(values), of=values.dtype))

    def _as_sent(self, extremes: Tensor, *, of: torch.dtype) -> Tensor:
        """Casts the largest values as the reduction does.

        If they stay finite, the smaller ones do too.
        """
        return extremes if of.is_complex else self._reducer.as_sent(extremes)


@torch.no_grad()
def not_finite(gradients: Sequence[Tensor]) -> list[int]:
    """Returns the positions of gradients with an infinity or a NaN.

    Waits once, after all have been checked.
    """
    parts = [
        gradient.coalesce().values() if gradient.is_sparse else gradient for gradient in gradients
    ]
    extremes = {place: _extremes(part) for place, part in enumerate(parts) if part.numel()}
    return [place for place, found in extremes.items() if not _are_finite(found)]


def _extremes(values: Tensor) -> Tensor:
    """Returns the smallest and the largest value, or NaN if there is one.

    Sums and norms could overflow. [2]
    """
    return torch.stack(torch.aminmax(torch.view_as_real(values) if values.is_complex() else values))


def _are_finite(extremes: Tensor) -> bool:
    return all(map(math.isfinite, extremes.tolist()))
