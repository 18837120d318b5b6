"""Averages gradients over ranks that no hook has seen."""

import math
import zlib
from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from undertow.buckets.facts import FactCodec, Facts, differing, indices
from undertow.by_hand.buckets import GradientBucketManager
from undertow.device import device_of
from undertow.engine.agreed_errors import require_outside_of_backward
from undertow.errors import ConfigError, PlanMismatch, WrongType, require
from undertow.plan.facts import FactKind
from undertow.ranks.group import GroupRef, user_group, warn_of_lone_rank
from undertow.ranks.users_groups import all_reduce_over
from undertow.torch_private import private

_WHERE = "average_gradients(gradients, parameters)"
_SAME_ORDER = "Pass the parameters that torch.autograd.grad was given, in the same order."
_ENTRIES = (
    "Pass the gradients that torch.autograd.grad returned, and the parameters that you gave it."
)


@private.untraced
def average_gradients(
    gradients: Iterable[Tensor | None],
    parameters: Iterable[Tensor] | None = None,
    *,
    process_group: dist.ProcessGroup | None = None,
) -> tuple[Tensor | None, ...]:
    """Returns the mean over ranks of each gradient, as from torch.autograd.grad; a collective call.

    The results cannot be differentiated. They are new contiguous tensors, also with one rank.
    Results of one dtype share their memory. It runs one all-reduce for each dtype and device, and
    one or two small ones to compare the ranks.

    Args:
        gradients: The gradients, in the same order and with the same shapes and dtypes on all
            ranks. A None (`allow_unused=True`) counts as zeros and needs `parameters`; the result
            is None only if every rank has None. A sparse gradient becomes a dense one.
        parameters: The parameters of the gradients, in the same order; on all ranks or none.
            With them the host waits for an accelerator.
        process_group: The ranks to average over; the default group if None.

    Returns:
        A mean for each gradient, in their order, of the gradient's shape, dtype and device.

    Raises:
        ConfigError: If tensors cannot be averaged.
        PhaseError: Inside a backward.
        PlanMismatch: If gradients differ between ranks; every rank raises it before it sends
            gradients. On an accelerator ranks are compared only with `parameters`, because the
            host has to wait.

    ```python
    gradients = torch.autograd.grad(loss, parameters)
    averaged = undertow.average_gradients(gradients, parameters)
    ```
    """
    require_outside_of_backward(
        "average_gradients()",
        where=_WHERE,
        remedy="Call it after torch.autograd.grad has returned: during a backward, ranks may run "
        "in different orders.",
    )
    group = user_group(process_group)
    warn_of_lone_rank(process_group, _WHERE)
    reference = GroupRef.of(group)
    given = _listed(gradients, "gradients")
    examples = given if parameters is None else _listed(parameters, "parameters")
    require(
        len(examples) == len(given),
        f"there are {len(given)} gradients and {len(examples)} parameters.",
        where=_WHERE,
        remedy=_SAME_ORDER,
    )
    values = [
        _value(index, gradient, example)
        for index, (gradient, example) in enumerate(zip(given, examples, strict=True))
    ]
    are_there = [gradient is not None for gradient in given]
    place = values[0].device if values else torch.device("cpu")
    if group.size() > 1 and (device_of(place).is_host or parameters is not None):
        _require_alike(values, group, place, has_parameters=parameters is not None)
    if group.size() > 1 and parameters is not None:
        are_there = _are_anywhere(are_there, group, place)
    means = _means(values, group, reference)
    return tuple(
        mean if is_there else None for mean, is_there in zip(means, are_there, strict=True)
    )


def _means(values: Sequence[Tensor], group: dist.ProcessGroup, reference: GroupRef) -> list[Tensor]:
    """Returns the mean over ranks of each tensor, as views of the buckets that were reduced."""
    manager = GradientBucketManager(group, values, bucket_size_in_bytes=math.inf)
    found: dict[int, Tensor] = {}  # by id
    for bucket in manager.buckets:
        bucket.prepare()
        if group.size() > 1:
            op = dist.ReduceOp.AVG
            can = reference.abilities_for(bucket.bucket_tensor.device)
            may_overflow = bucket.bucket_tensor.dtype is torch.float16 and not can.divide_first
            if may_overflow or not can.average:
                op = dist.ReduceOp.SUM
                bucket.bucket_tensor.div_(group.size())
            bucket.reduce_async(group, op)
        parts = torch.split(bucket.bucket_tensor, [value.numel() for value in bucket.gradients])
        for value, part in zip(bucket.gradients, parts, strict=True):
            # `.data` is a separate tensor. Views of one tensor share a version counter: changing
            # one gradient in place would make autograd refuse a graph that has saved another.
            found[id(value)] = part.view(value.shape).data
    manager.wait_for_all()
    return [found[id(value)] for value in values]


def _require_alike(
    values: Sequence[Tensor],
    group: dist.ProcessGroup,
    place: torch.device,
    *,
    has_parameters: bool,
) -> None:
    """Raises PlanMismatch on every rank if ranks have different shapes or dtypes, or if only some
    have passed parameters."""
    described = [(tuple(value.shape), str(value.dtype)) for value in values]
    digest = zlib.crc32(repr((has_parameters, described)).encode())
    codec = _codec({"digest": FactKind.NUMBERS}, group)
    told = _told(codec, Facts(numbers={"digest": digest}), group, place)
    others = differing(dict(enumerate(codec.numbers(told, "digest"))))
    require(
        not others,
        "ranks gave gradients of different shapes or dtypes, or only some gave parameters.",
        where=f"rank {', '.join(map(str, others))} differs; rank {group.rank()}: {len(values)} "
        f"gradients, digest {digest:08x}",
        remedy="Give the gradients of the same parameters in the same order on every rank.",
        error=PlanMismatch,
    )


def _are_anywhere(
    are_there: Sequence[bool], group: dist.ProcessGroup, place: torch.device
) -> list[bool]:
    """Returns which gradients some rank has."""
    codec = _codec({"present": FactKind.ITEM_FLAGS}, group, num_items=len(are_there))
    told = _told(codec, Facts(flags={"present": indices(are_there)}), group, place)
    return codec.of(told, "present").bool().tolist()


def _codec(
    kinds: Mapping[str, FactKind], group: dist.ProcessGroup, *, num_items: int = 0
) -> FactCodec:
    return FactCodec.alone(kinds, rank=group.rank(), num_ranks=group.size(), num_items=num_items)


def _told(codec: FactCodec, facts: Facts, group: dist.ProcessGroup, place: torch.device) -> Tensor:
    """Returns the sum of all ranks' facts."""
    said = torch.zeros(codec.numel, dtype=torch.int64, device=place)
    codec.write(said, facts)
    all_reduce_over(said, group).wait()
    return said


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


def _value(index: int, gradient: Tensor | None, example: Tensor | None) -> Tensor:
    """Returns the gradient, dense and without its graph; zeros like `example` if it is None."""
    require(
        gradient is None or isinstance(gradient, Tensor),
        f"gradient {index} must be a tensor or None, got {type(gradient).__name__}.",
        where=_WHERE,
        remedy=_ENTRIES,
        error=WrongType,
    )
    if not isinstance(example, Tensor):
        raise ConfigError(
            f"gradient {index} has no parameter that tells its shape.",
            where=_WHERE,
            remedy="If a gradient is None, pass parameters too: the tensors that you gave to "
            "torch.autograd.grad.",
        )
    if gradient is None:
        return torch.zeros_like(example)
    require(
        gradient.is_floating_point() or gradient.is_complex(),
        f"gradient {index} must be floating-point or complex, got {gradient.dtype}.",
        where=_WHERE,
        remedy=_ENTRIES,
        error=WrongType,
    )
    require(
        _text(gradient) == _text(example),
        f"gradient {index} must be like its parameter, {_text(example)}, got {_text(gradient)}.",
        where=_WHERE,
        remedy=_SAME_ORDER,
    )
    return gradient.detach() if gradient.layout is torch.strided else gradient.detach().to_dense()


def _text(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {tensor.dtype} on {tensor.device}"
