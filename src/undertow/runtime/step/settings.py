"""The settings of an optimizer, as ranks compare them."""

from collections.abc import Iterator, Mapping
from itertools import chain
from operator import itemgetter
from typing import Any

from torch import Tensor
from torch.optim.optimizer import Optimizer

from undertow.runtime.engine.round import Settings

_IMPLEMENTATION = {"foreach", "fused", "capturable", "differentiable"}  # settings of torch's optimizers
_PLAIN = {bool, int, float, str, type(None)}


def params_of(optimizer: Optimizer) -> Iterator[Any]:
    return chain.from_iterable(map(itemgetter("params"), optimizer.param_groups))


def settings_of(optimizer: Optimizer, names: Mapping[int, str], trained: frozenset[int] | set[int]) -> Settings:
    """Returns the settings of each group with `trained` parameters, by id; ranks that step alike have the same.

    A group is named by its number and by the first of its parameters in alphabetical order: another optimizer may have a group of
    the same number, and the ranks may step the two in another order.

    Left out are tensors on devices, for which the host would wait, and settings that only choose an implementation.
    """
    kind = getattr(optimizer, "optimizer_class", type(optimizer)).__name__
    settings: list[tuple[str, tuple[tuple[str, Any], ...]]] = []
    for group in optimizer.param_groups:
        here = trained.intersection(map(id, group["params"]))
        if not here:
            continue
        first = min(map(names.__getitem__, here))
        of_group = []
        for name in getattr(optimizer, "defaults", ()):
            value = group.get(name)
            if type(value) not in _PLAIN:
                value = _plain(value)
            if value is not None and name not in _IMPLEMENTATION:
                of_group.append((name, value))
        settings.append((f"group {len(settings)} of {kind} with {first!r}", tuple(of_group)))
    return tuple(settings)


def _plain(value: object) -> object:
    """Returns a number of numpy's or on the host, or a sequence of plain values, as Python has it; None for anything else."""
    if isinstance(value, Tensor):
        return value.item() if value.is_cpu and value.dim() == 0 else None
    if isinstance(value, tuple | list):
        return tuple(value) if _PLAIN.issuperset(map(type, value)) else None
    return float(value) if isinstance(value, float) else None
