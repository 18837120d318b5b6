"""Averages over ranks gradients that no hook has seen."""

import hashlib
import math
from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from undertow.errors import PhaseError, PlanMismatch, WrongType, require
from undertow.plan import Bucket, SizeCaps, group_by_size, plan_from_groups, signature_of
from undertow.runtime.comm.group import GroupRef, user_group, warn_of_lone_rank
from undertow.runtime.comm.handles import Handle, all_reduce_async
from undertow.runtime.gradients.storage import BucketStorage, spec_of
from undertow.runtime.gradients.trailer import TrailerCodec
from undertow.runtime.torch_private import private

_WHERE = "average_gradients(gradients, parameters)"
_SAME_ORDER = "Pass the parameters that torch.autograd.grad was given, in the same order."
_ENTRIES = "Pass the gradients that torch.autograd.grad returned, and the parameters that you gave it."
_ONE_BUCKET = SizeCaps(cap_bytes=math.inf)  # for each dtype and device
_Pair = tuple[Tensor | None, Tensor]  # a gradient, and a tensor of its shape, dtype, device and strides


@private.untraced
def average_gradients(
    gradients: Iterable[Tensor | None],
    parameters: Iterable[Tensor] | None = None,
    *,
    process_group: dist.ProcessGroup | None = None,
) -> tuple[Tensor | None, ...]:
    """Returns the mean over ranks of each gradient, as from torch.autograd.grad; a collective call.

    The results cannot be differentiated. They are new tensors, also with one rank, with the strides
    of the gradient, or of the parameter if the gradient is None. Results of one dtype share their
    memory. It runs one all-reduce for each dtype and device.

    Args:
        gradients: The gradients, in the same order and with the same shapes and dtypes on all ranks.
            A None (`allow_unused=True`) counts as zeros and needs `parameters`; the result is None
            only if every rank has None. A sparse gradient becomes a dense one.
        parameters: The parameters of the gradients, in the same order.
        process_group: The ranks to average over; the default group if None.

    Returns:
        A mean for each gradient, in their order, of the gradient's shape, dtype and device.

    Raises:
        ConfigError: If tensors cannot be averaged.
        PhaseError: Inside a backward.
        PlanMismatch: If gradients differ between ranks although their total sizes agree. On a
            device only ranks that have a None raise it, because the check makes the host wait.
            If sizes differ the backend fails, or waits.

    ```python
    gradients = torch.autograd.grad(loss, parameters)
    averaged = undertow.average_gradients(gradients, parameters)
    ```
    """
    require(
        private.graph_task_id() == -1,
        "average_gradients() was called inside a backward.",
        where=_WHERE,
        remedy="Call it after torch.autograd.grad has returned: during a backward, ranks may run in different orders.",
        error=PhaseError,
    )
    group = user_group(process_group)
    warn_of_lone_rank(process_group, _WHERE)
    reference = GroupRef.of(group)
    pairs = _with_examples(_listed(gradients, "gradients"), None if parameters is None else _listed(parameters, "parameters"))
    if not pairs:
        return ()
    specs = [spec_of(f"gradient {index}", example) for index, (_, example) in enumerate(pairs)]
    plan = plan_from_groups(specs, group_by_size(specs, range(len(specs)), _ONE_BUCKET), num_ranks=len(reference.ranks))
    shipments = [_Shipment(layout, [pairs[index] for index in layout.params], plan.num_ranks) for layout in plan.buckets]
    if plan.num_ranks > 1:
        # The index of a device may differ between ranks.
        described = [(spec.shape, spec.dtype, spec.device.partition(":")[0]) for spec in specs]
        fingerprint = int.from_bytes(hashlib.sha256(repr(described).encode()).digest()[:3], "big")
        for handle in [shipment.send(group, reference, fingerprint=fingerprint) for shipment in shipments]:
            handle.wait()
        require(
            not any(shipment.learn() for shipment in shipments),
            "ranks gave gradients of different shapes or dtypes.",
            where=f"rank {reference.rank}: fingerprint {fingerprint:06x}",
            remedy="Give the gradients of the same parameters in the same order on every rank.",
            error=PlanMismatch,
        )
    averaged = dict(pair for shipment in shipments for pair in shipment.results())
    return tuple(averaged.get(index) for index in range(len(specs)))


class _Shipment:
    """The gradients of one dtype and device in a bucket; its trailer flags the gradients that each rank has."""

    def __init__(self, layout: Bucket, pairs: Sequence[_Pair], num_ranks: int) -> None:
        storage = BucketStorage(layout, ())
        self._flat, self._trailer = storage.flat, TrailerCodec(layout, storage, divisor=num_ranks)
        self._params = layout.params  # positions in the user's sequence
        self._examples = [example for _, example in pairs]
        # Elements in logical order, whatever the strides: those may differ from rank to rank, especially if one rank has None.
        places = zip(layout.slots, self._examples, strict=True)
        self._views = [self._flat[slot.start : slot.stop].view(example.shape) for slot, example in places]
        self._missing = {position for position, (gradient, _) in enumerate(pairs) if gradient is None}
        present = [(view, gradient) for view, (gradient, _) in zip(self._views, pairs, strict=True) if gradient is not None]
        if present:
            private.copy_each([view for view, _ in present], [gradient for _, gradient in present])

    def send(self, group: dist.ProcessGroup, reference: GroupRef, *, fingerprint: int) -> Handle:
        """Starts the mean over ranks; `fingerprint`, of 24 bits, must be the same on all."""
        # Signatures have fields for step, generation and mode of a training run; here all of their bits hold the fingerprint.
        signature = signature_of(generation=fingerprint >> 12, mode=fingerprint >> 20)
        self._trailer.write(unused=sorted(self._missing), signature=signature, step=fingerprint, verdict=None)
        if reference.can_average:
            return all_reduce_async(self._flat, group, dist.ReduceOp.AVG)
        return all_reduce_async(self._flat.div_(len(reference.ranks)), group)

    def learn(self) -> bool:
        """Reads which gradients other ranks have, once the mean is complete; returns True if they differ from this rank's."""
        # Reading makes the host wait for a device. A rank that has every gradient learns nothing from the flags.
        reading = self._trailer.read() if self._missing or self._flat.device.type == "cpu" else None
        self._missing -= frozenset() if reading is None else reading.used
        return reading is not None and reading.ranks_differ

    def results(self) -> Iterator[tuple[int, Tensor]]:
        """Yields the means, each with its position in the user's sequence, except gradients that no rank has."""
        for position, (index, view, example) in enumerate(zip(self._params, self._views, self._examples, strict=True)):
            if position not in self._missing:
                # `.data` is a separate tensor. Views of one tensor share a version counter: changing one gradient in place would
                # make autograd refuse a graph that has saved another.
                yield index, view.data if example.is_contiguous() else torch.empty_like(example).copy_(view)


def _listed(tensors: Iterable[Tensor | None], name: str) -> tuple[Tensor | None, ...]:
    require(
        isinstance(tensors, Iterable) and not isinstance(tensors, Tensor),
        f"{name} must be a sequence of tensors, got {type(tensors).__name__}.",
        where=_WHERE,
        remedy="Pass the tuple that torch.autograd.grad returned, and a tuple or list of the parameters that you gave it.",
        error=WrongType,
    )
    return tuple(tensors)


def _with_examples(gradients: Sequence[Tensor | None], parameters: Sequence[Tensor | None] | None) -> list[_Pair]:
    """Returns each gradient, dense and without its graph, and a tensor like it: itself, or its parameter if it is None."""
    require(
        parameters is None or len(parameters) == len(gradients),
        f"there are {len(gradients)} gradients and {len(parameters or ())} parameters.",
        where=_WHERE,
        remedy=_SAME_ORDER,
    )
    pairs: list[_Pair] = []
    for index, given in enumerate(gradients):
        gradient = _dense(index, given)
        example = gradient if parameters is None else parameters[index]
        require(
            parameters is not None or gradient is not None,
            f"gradient {index} is None, and its size is unknown.",
            where=_WHERE,
            remedy="Pass parameters too: the same ones that you gave to torch.autograd.grad.",
        )
        if not isinstance(example, Tensor):
            raise WrongType(f"parameter {index} must be a tensor, got {type(example).__name__}.", where=_WHERE, remedy=_ENTRIES)
        like = example if gradient is None else gradient
        require(  # strides may differ, but not the shape: a rank whose gradient is None uses the parameter's
            _text(like) == _text(example),
            f"gradient {index} must be like its parameter, {_text(example)}, got {_text(like)}.",
            where=_WHERE,
            remedy=_SAME_ORDER,
        )
        pairs.append((gradient, like))
    return pairs


def _dense(index: int, gradient: Tensor | None) -> Tensor | None:
    if gradient is None:
        return None
    require(
        isinstance(gradient, Tensor),
        f"gradient {index} must be a tensor or None, got {type(gradient).__name__}.",
        where=_WHERE,
        remedy=_ENTRIES,
        error=WrongType,
    )
    require(
        gradient.is_floating_point() or gradient.is_complex(),
        f"gradient {index} must be floating-point or complex, got {gradient.dtype}.",
        where=_WHERE,
        remedy=_ENTRIES,
        error=WrongType,
    )
    return gradient.detach() if gradient.layout is torch.strided else gradient.detach().to_dense()


def _text(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {tensor.dtype} on {tensor.device}"
