"""Averages over ranks gradients that no hook has seen."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NoReturn, final

import torch
import torch.distributed as dist
from torch import Tensor

from undertow.errors import ConfigError, PhaseError, PlanMismatch, WrongType
from undertow.plan import Bucket, ParamSpec, SizeCaps, group_by_size, plan_from_groups, signature_bits
from undertow.runtime.comm.group import GroupRef, user_group, warn_of_lone_rank
from undertow.runtime.comm.handles import WorkHandle, all_reduce_async
from undertow.runtime.gradients.storage import GradientBucket, spec_of
from undertow.runtime.gradients.trailer import TrailerCodec, to_device
from undertow.runtime.torch_private import private

_WHERE = "average_gradients(gradients, parameters)"
_ONE_BUCKET = SizeCaps(cap_bytes=math.inf)  # for each dtype and device


@private.untraced
def average_gradients(
    gradients: Iterable[Tensor | None],
    parameters: Iterable[Tensor] | None = None,
    *,
    process_group: dist.ProcessGroup | None = None,
) -> tuple[Tensor | None, ...]:
    """Returns the mean over ranks of each gradient, as from torch.autograd.grad; a collective call.

    - `gradients`: the gradients, in the same order and with the same shapes and dtypes on all ranks. A None (`allow_unused=True`)
      counts as zeros and needs `parameters`; the result is None only if every rank has None. A sparse gradient becomes a dense
      one.
    - `parameters`: the parameters of the gradients, in the same order.
    - `process_group`: the ranks to average over; the default group if None.

    The results cannot be differentiated. They are new tensors, also with one rank, with the strides of the gradient, or of the
    parameter if the gradient is None. Results of one dtype share their memory. It runs one all-reduce for each dtype and device.

    Raises ConfigError for tensors that cannot be averaged, PhaseError inside a backward, and PlanMismatch if gradients differ
    between ranks although their total sizes agree. On a device only ranks that have a None raise PlanMismatch, because the check
    makes the host wait. If sizes differ the backend fails, or waits.

    ```python
    gradients = torch.autograd.grad(loss, parameters)
    averaged = undertow.average_gradients(gradients, parameters)
    ```
    """
    _require_no_backward()
    group = user_group(process_group)
    warn_of_lone_rank(process_group, _WHERE)
    reference = GroupRef.of(group)
    given = _dense(_listed(gradients, "gradients"))
    examples = _examples(given, None if parameters is None else _listed(parameters, "parameters"))
    if not examples:
        return ()
    specs = [spec_of(f"gradient {index}", example) for index, example in enumerate(examples)]
    plan = plan_from_groups(specs, group_by_size(specs, range(len(specs)), _ONE_BUCKET), num_ranks=len(reference.ranks))
    shipments = [_Shipment(layout, given, examples, num_ranks=plan.num_ranks) for layout in plan.buckets]
    if plan.num_ranks > 1:
        _exchange(shipments, group, reference, fingerprint=_fingerprint(specs))
    averaged = dict(pair for shipment in shipments for pair in shipment.results())
    return tuple(averaged.get(index) for index in range(len(specs)))


def _exchange(shipments: Sequence[_Shipment], group: dist.ProcessGroup, reference: GroupRef, *, fingerprint: int) -> None:
    """Averages every shipment over ranks; raises PlanMismatch if other ranks have different ones."""
    handles = [shipment.send(group, reference, fingerprint=fingerprint) for shipment in shipments]
    for handle in handles:
        handle.wait()
    if any(shipment.learn() for shipment in shipments):
        raise PlanMismatch(
            "ranks gave gradients of other shapes or dtypes.",
            where=f"rank {reference.rank}: fingerprint {fingerprint:06x}",
            remedy="Give the gradients of the same parameters in the same order on every rank.",
        )


@final
class _Shipment:
    """The gradients of one dtype and device in a bucket; its trailer flags the gradients that each rank has."""

    def __init__(self, layout: Bucket, gradients: Sequence[Tensor | None], examples: Sequence[Tensor], *, num_ranks: int) -> None:
        self._params = layout.params  # positions in the user's sequence
        self._examples = [examples[index] for index in self._params]
        self._gradients = [gradients[index] for index in self._params]
        self._missing = [position for position, gradient in enumerate(self._gradients) if gradient is None]
        self._bucket = GradientBucket(layout.index, layout.num_bytes, (), layout=layout)
        self._trailer = TrailerCodec(layout, self._bucket, divisor=num_ranks)
        # Elements in logical order, whatever the strides: those may differ from rank to rank, especially if one rank has None.
        self._views = [
            self._bucket.storage[slot.start : slot.stop].view(example.shape)
            for slot, example in zip(layout.slots, self._examples, strict=True)
        ]
        self._missing_everywhere = set(self._missing)
        self._pack()

    def send(self, group: dist.ProcessGroup, reference: GroupRef, *, fingerprint: int) -> WorkHandle:
        """Starts the mean over ranks; `fingerprint`, of 24 bits, must be the same on all."""
        storage = self._bucket.storage
        # Signatures have fields for step, generation and mode of a training run; here all of their bits hold the fingerprint.
        bits = signature_bits(step=fingerprint, generation=fingerprint >> 12, mode=fingerprint >> 20)
        signature = to_device(bits, storage.dtype, storage.device)
        self._trailer.write(unused=self._missing, signature=signature, verdict=None)
        if reference.can_average:
            return all_reduce_async(storage, group, dist.ReduceOp.AVG)
        return all_reduce_async(storage.div_(len(reference.ranks)), group)

    def learn(self) -> bool:
        """Reads which gradients other ranks have, once the mean is complete; returns True if they differ from this rank's."""
        # Reading makes the host wait for a device. A rank that has every gradient learns nothing from the flags.
        must_read = self._missing or self._bucket.storage.device.type == "cpu"
        reading = self._trailer.read() if must_read else None
        if reading is None:
            return False
        self._missing_everywhere -= reading.used
        return reading.ranks_differ

    def results(self) -> Iterator[tuple[int, Tensor]]:
        """Yields the means, each with its position in the user's sequence, except gradients that no rank has."""
        for position, (index, view, example) in enumerate(zip(self._params, self._views, self._examples, strict=True)):
            if position not in self._missing_everywhere:
                yield index, _as_strided_like(example, view)

    def _pack(self) -> None:
        pairs = [(view, gradient) for view, gradient in zip(self._views, self._gradients, strict=True) if gradient is not None]
        if pairs:
            private.copy_each([view for view, _ in pairs], [gradient for _, gradient in pairs])


def _as_strided_like(example: Tensor, view: Tensor) -> Tensor:
    if example.is_contiguous():
        # As `.data`, a separate tensor: views of one tensor share a version counter, so that changing one gradient in place would
        # make autograd refuse a graph that has saved another.
        return view.data
    return torch.empty_like(example).copy_(view)


def _fingerprint(specs: Sequence[ParamSpec]) -> int:
    """Returns 24 bits that differ for different gradients; the index of a device may differ between ranks."""
    described = [(spec.shape, spec.dtype, spec.device.partition(":")[0]) for spec in specs]
    return int.from_bytes(hashlib.sha256(repr(described).encode()).digest()[:3], "big")


def _require_no_backward() -> None:
    if private.graph_task_id() != -1:
        raise PhaseError(
            "average_gradients() was called inside a backward.",
            where=_WHERE,
            remedy="Call it on what torch.autograd.grad has returned; there ranks may come in different orders.",
        )


def _listed(tensors: Iterable[Tensor | None], name: str) -> tuple[Tensor | None, ...]:
    if isinstance(tensors, Tensor) or not isinstance(tensors, Iterable):
        raise WrongType(
            f"{name} must be a sequence of tensors, got {type(tensors).__name__}.",
            where=_WHERE,
            remedy="Pass the tuple that torch.autograd.grad returned, and a tuple or list of what it was asked for.",
        )
    return tuple(tensors)


def _dense(gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Returns the gradients without their graphs, as dense tensors."""
    for index, gradient in enumerate(gradients):
        if gradient is None:
            continue
        if not isinstance(gradient, Tensor):
            _refuse_entry(f"gradient {index} must be a tensor or None, got {type(gradient).__name__}.")
        if not (gradient.is_floating_point() or gradient.is_complex()):
            _refuse_entry(f"gradient {index} must be floating-point or complex, got {gradient.dtype}.")
    return [gradient if gradient is None else _dense_one(gradient.detach()) for gradient in gradients]


def _dense_one(gradient: Tensor) -> Tensor:
    return gradient if gradient.layout is torch.strided else gradient.to_dense()


def _examples(gradients: Sequence[Tensor | None], parameters: Sequence[Tensor | None] | None) -> list[Tensor]:
    """Returns for each gradient a tensor of its shape, dtype, device and strides: itself, or its parameter if it is None."""
    if parameters is None:
        return [_known(index, gradient) for index, gradient in enumerate(gradients)]
    if len(parameters) != len(gradients):
        raise ConfigError(
            f"there are {len(gradients)} gradients and {len(parameters)} parameters.",
            where=_WHERE,
            remedy="Pass the parameters that torch.autograd.grad was given, in the same order.",
        )
    return [_like(index, *pair) for index, pair in enumerate(zip(gradients, parameters, strict=True))]


def _known(index: int, gradient: Tensor | None) -> Tensor:
    if gradient is None:
        raise ConfigError(
            f"gradient {index} is None, and nothing says how large it would be.",
            where=_WHERE,
            remedy="Pass parameters too, those that torch.autograd.grad was given.",
        )
    return gradient


def _like(index: int, gradient: Tensor | None, parameter: Tensor | None) -> Tensor:
    if not isinstance(parameter, Tensor):
        _refuse_entry(f"parameter {index} must be a tensor, got {type(parameter).__name__}.")
    # Strides may differ, but not the shape: a rank whose gradient is None uses the parameter's.
    if gradient is not None and _kind(gradient) != _kind(parameter):
        raise ConfigError(
            f"gradient {index} must be like its parameter, {_text(parameter)}, got {_text(gradient)}.",
            where=_WHERE,
            remedy="Pass the parameters that torch.autograd.grad was given, in the same order.",
        )
    return parameter if gradient is None else gradient


def _kind(tensor: Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return tensor.shape, tensor.dtype, tensor.device


def _text(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {tensor.dtype} on {tensor.device}"


def _refuse_entry(what: str) -> NoReturn:
    raise WrongType(what, where=_WHERE, remedy="Pass what torch.autograd.grad returned, and what it was asked for.")
