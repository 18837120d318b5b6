"""Averages over ranks gradients that no hook has seen."""

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from undertow.device import device_of
from undertow.errors import PhaseError, PlanMismatch, WrongType, require
from undertow.ranks.group import GroupRef, user_group, warn_of_lone_rank
from undertow.ranks.transport import Handle, all_reduce_over
from undertow.torch_private import private

_WHERE = "average_gradients(gradients, parameters)"
_SAME_ORDER = "Pass the parameters that torch.autograd.grad was given, in the same order."
_ENTRIES = (
    "Pass the gradients that torch.autograd.grad returned, and the parameters that you gave it."
)
# A gradient, and a tensor of its shape, dtype, device and strides.
_Pair = tuple[Tensor | None, Tensor]


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
        gradients: The gradients, in the same order and with the same shapes and dtypes on all
            ranks. A None (`allow_unused=True`) counts as zeros and needs `parameters`; the result
            is None only if every rank has None. A sparse gradient becomes a dense one.
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
        remedy="Call it after torch.autograd.grad has returned: during a backward, ranks may run "
        "in different orders.",
        error=PhaseError,
    )
    group = user_group(process_group)
    warn_of_lone_rank(process_group, _WHERE)
    reference = GroupRef.of(group)
    given = None if parameters is None else _listed(parameters, "parameters")
    pairs = _with_examples(_listed(gradients, "gradients"), given)
    # The index of a device may differ between ranks.
    described = [(tuple(it.shape), str(it.dtype), it.device.type) for _, it in pairs]
    fingerprint = hashlib.sha256(repr(described).encode()).hexdigest()[:6]
    by_kind: defaultdict[object, list[int]] = defaultdict(list)
    for index, (_, example) in enumerate(pairs):
        by_kind[example.dtype, example.device].append(index)
    flats = [
        _flat([pairs[index] for index in indices], fingerprint) for indices in by_kind.values()
    ]
    if group.size() > 1:
        for handle in [_started(flat, group, reference) for flat in flats]:
            handle.wait()
    averaged: list[Tensor | None] = [None] * len(pairs)
    for indices, flat in zip(by_kind.values(), flats, strict=True):
        results = _results(
            [pairs[index] for index in indices], flat, fingerprint, rank=reference.rank
        )
        for index, result in zip(indices, results, strict=True):
            averaged[index] = result
    return tuple(averaged)


def _flat(pairs: Sequence[_Pair], fingerprint: str) -> Tensor:
    """Returns gradients one after another, and flags: whether each is there, and `_bits`."""
    # In logical order, whatever the strides: those may differ from rank to rank, especially if one
    # has None.
    values = [
        torch.zeros_like(example) if gradient is None else gradient for gradient, example in pairs
    ]
    flags = [gradient is not None for gradient, _ in pairs] + _bits(fingerprint)
    told = device_of(values[0].device).to_device(flags, values[0].dtype)
    return torch.cat([*map(Tensor.flatten, values), told])


def _bits(fingerprint: str) -> list[bool]:
    """Returns bits and their complements: they come back with other zeros if ranks differ."""
    bits = [bit == "1" for bit in f"{int(fingerprint, 16):024b}"]
    return bits + [not bit for bit in bits]


def _started(flat: Tensor, group: dist.ProcessGroup, reference: GroupRef) -> Handle:
    can = reference.abilities_for(flat.device)
    may_overflow = flat.dtype is torch.float16 and not can.divide_first
    if can.average and not may_overflow:
        return all_reduce_over(flat, group, dist.ReduceOp.AVG)
    return all_reduce_over(flat.div_(group.size()), group)


def _results(
    pairs: Sequence[_Pair], mean: Tensor, fingerprint: str, *, rank: int
) -> list[Tensor | None]:
    """Returns the mean gradients, None for a gradient that no rank has."""
    sizes = [example.numel() for _, example in pairs]
    *parts, flags = torch.split(mean, [*sizes, mean.numel() - sum(sizes)])
    are_there = [gradient is not None for gradient, _ in pairs]
    # Reading makes the host wait for a device. A rank that has all gradients learns nothing.
    if device_of(mean.device).is_host or not all(are_there):
        read = (flags != 0).tolist()
        are_there = read[: len(pairs)]
        require(
            read[len(pairs) :] == _bits(fingerprint),
            "ranks gave gradients of different shapes or dtypes.",
            where=f"rank {rank}: fingerprint {fingerprint}",
            remedy="Give the gradients of the same parameters in the same order on every rank.",
            error=PlanMismatch,
        )
    found: list[Tensor | None] = []
    for (_, example), part, is_there in zip(pairs, parts, are_there, strict=True):
        # `.data` is a separate tensor. Views of one tensor share a version counter: changing
        # one gradient in place would make autograd refuse a graph that has saved another.
        result = part.view(example.shape).data
        if not example.is_contiguous():
            result = torch.empty_like(example).copy_(result)
        found.append(result if is_there else None)
    return found


def _listed(tensors: Iterable[Tensor | None], name: str) -> tuple[Tensor | None, ...]:
    require(
        isinstance(tensors, Iterable) and not isinstance(tensors, Tensor),
        f"{name} must be a sequence of tensors, got {type(tensors).__name__}.",
        where=_WHERE,
        remedy="Pass the tuple that torch.autograd.grad returned, and a tuple or list of the "
        "parameters that you gave it.",
        error=WrongType,
    )
    return tuple(tensors)


def _with_examples(
    gradients: Sequence[Tensor | None], parameters: Sequence[Tensor | None] | None
) -> list[_Pair]:
    """Returns each gradient, dense and without its graph, and itself or its parameter."""
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
            raise WrongType(
                f"parameter {index} must be a tensor, got {type(example).__name__}.",
                where=_WHERE,
                remedy=_ENTRIES,
            )
        like = example if gradient is None else gradient
        # Strides may differ, but not the shape: a rank whose gradient is None uses the parameter's.
        require(
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
