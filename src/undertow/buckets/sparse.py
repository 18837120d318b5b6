"""Sparse gradients of a bucket, such as of the weight of nn.Embedding(sparse=True): each stays a
separate tensor.

On the host: on a device, dense buckets take them.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from operator import attrgetter

import torch
from torch import Tensor

from undertow.buckets.gradients import (
    any_values,
    array_of,
    has_been_written,
    known_gradients,
    unused_positions,
)
from undertow.plan import Bucket
from undertow.torch_private import private

_grad_of = attrgetter("grad")


class SparseGradients:
    """Sparse gradients whose rows are merged; `.grad` is the reduced tensor itself.

    Only the trailer of their bucket has memory that is used again.
    """

    earlier: Collection[int] = ()

    def __init__(self, spec: Bucket, params: Sequence[Tensor]) -> None:
        self.params = params
        self.trailer = torch.zeros(
            spec.trailer.stop - spec.trailer.start,
            dtype=getattr(torch, spec.dtype),
            device=spec.device,
        )
        self.trailer_array = array_of(self.trailer)
        self._known = known_gradients(params)
        self._values: list[Tensor] = []
        self._are_dense: list[bool] = []
        # The previous `.grad` of positions that are unused on this rank.
        self._kept: dict[int, Tensor | None] = {}

    def arrived(self) -> Iterable[Tensor | None]:
        return map(_grad_of, self.params)

    @torch.no_grad()
    def pack(self, not_arrived: Collection[int], *, is_discarded: bool = False) -> list[int]:
        grads = [param.grad for param in self.params]
        unused = unused_positions(grads, not_arrived)
        self._kept = {position: grads[position] for position in unused}
        self._values = list(map(_rows, self.params, grads))
        self._are_dense = [grad is not None and not grad.is_sparse for grad in grads]
        for param in self.params:
            param.grad = None
        return list(unused)

    def values(self) -> Sequence[Tensor]:
        return self._values

    def bind(self, used_elsewhere: Collection[int]) -> None:
        restored = self._kept.keys() - set(used_elsewhere)
        for position, (param, value) in enumerate(zip(self.params, self._values, strict=True)):
            if position in restored:
                param.grad = self._kept[position]
            else:  # dense again if it was dense, because the weight is tied to a dense layer
                param.grad = value.to_dense() if self._are_dense[position] else value
        self._values = []
        self._kept = {}
        self.note_known()

    def bind_local(self) -> None:
        self.bind(())

    def note_known(self) -> None:
        self._known = known_gradients(self.params)

    def is_written(self, position: int) -> bool:
        return has_been_written(self.params[position].grad, self._known.get(position))

    def has_result(self) -> bool:
        return any_values(self.params)

    def late_values(self, late: Mapping[int, Tensor]) -> Sequence[Tensor]:
        return list(map(_rows, self.params, map(late.get, range(len(self.params)))))

    def add_late(self, values: Sequence[Tensor]) -> None:
        for param, value in zip(self.params, values, strict=True):
            param.grad = value if param.grad is None else param.grad + value

    def release(self) -> None:
        self._values = []


def _rows(param: Tensor, grad: Tensor | None) -> Tensor:
    """Returns a new sparse tensor with `grad`'s rows merged, or without rows if it is None.

    [rows, *] of param's shape
    """
    if grad is None:
        indices = torch.empty(1, 0, dtype=torch.int64, device=param.device)
        values = param.new_empty(0, *param.shape[1:], dtype=private.gradient_dtype(param))
        return torch.sparse_coo_tensor(
            indices, values, param.shape, is_coalesced=True, check_invariants=False
        )
    if not grad.is_sparse:
        return grad.to_sparse(1).coalesce()
    merged = grad.coalesce()
    return merged.clone() if merged is grad else merged
