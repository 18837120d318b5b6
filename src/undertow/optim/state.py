"""The state of a sharded optimizer: cut to this rank's elements, and gathered whole."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from undertow.buckets.bucket import strides_of_gradient
from undertow.ranks.agreement import gather_json
from undertow.ranks.exchanges import accumulation_dtype
from undertow.sharded.shards import ShardPart, in_memory_order
from undertow.sharded.steps import Sharding

# torch's names for the entries; values are tensors and numbers
ParamState = dict[str, Any]

MASTER = "master"  # the fp32 values of a 16-bit parameter, stored next to the optimizer's own state
# Keys of torch's optimizers that belong to a whole parameter, not to its elements.
OF_THE_WHOLE = {"step", "eta", "mu", "mu_product"}

_TENSOR, _SCALAR, _VALUE = "tensor", "scalar tensor", "value"

# In these classes, the update of an element depends on its own value, gradient and state, on
# settings, and on the number of steps of its parameter.
ELEMENTWISE: frozenset[type[torch.optim.Optimizer]] = frozenset(
    [
        torch.optim.Adadelta,
        torch.optim.Adagrad,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.Adamax,
        torch.optim.ASGD,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.RMSprop,
        torch.optim.Rprop,
        torch.optim.SGD,
    ]
)


def part_of_state(
    state: Mapping[str, Any], param: Tensor, part: ShardPart, group: Mapping[str, Any]
) -> ParamState:
    """Returns a copy of a parameter's state for the elements of `part`, in Undertow's dtypes.

    Tensors of the parameter's shape are cut. Other tensors of one dimension have the elements of
    the part already.
    """
    found: ParamState = {}
    for key, value in state.items():
        if not isinstance(value, Tensor):
            found[key] = value
            continue
        if value.shape == param.shape and key not in OF_THE_WHOLE:
            flat = in_memory_order(value, strides_of_gradient(param))
            value = flat[part.start : part.stop]
        elif value.dim() == 0 or key in OF_THE_WHOLE:
            # As torch's optimizers do: a checkpoint does not record the device.
            is_on_device = group.get("capturable") or group.get("fused")
            found[key] = value.to(param.device if is_on_device else value.device, copy=True)
            continue
        dtype = value.dtype
        if dtype.is_floating_point and param.is_floating_point():
            # A plain optimizer keeps the state of a 16-bit parameter in 16 bits.
            dtype = accumulation_dtype(param.dtype)
        found[key] = value.to(param.device, dtype, copy=True)
    return found


def gather_states(
    sharding: Sharding,
    mine: Mapping[Tensor, ParamState],
    *,
    keeps: bool = True,
    device: torch.device | None = None,
) -> dict[Tensor, ParamState]:
    """Gathers the whole state of every parameter that has one on some rank, as new tensors.

    A collective call. `mine` has this rank's parts, and no empty states. The tensors are on
    `device`, or on the parameters' devices if None. A rank with `keeps=False` contributes and
    returns nothing.
    """
    described = _agreed_descriptions(sharding, mine)
    whole: dict[int, ParamState] = {}
    for index, entries in described.items() if keeps else ():
        param, strides = sharding.params[index], sharding.strides[index]
        whole[index] = {key: _room(what, param, strides, device) for key, what in entries.items()}
    for bucket in sharding.plan.buckets:
        indices: dict[tuple[str, str], list[int]] = {}  # by the key and dtype of a tensor
        for index in bucket.params:
            for key, (kind, dtype, *_) in described.get(index, {}).items():
                if kind == _TENSOR:
                    indices.setdefault((key, dtype), []).append(index)
        for key, dtype in sorted(indices):
            own = torch.zeros(
                sharding.shard_numel(bucket), dtype=getattr(torch, dtype), device=bucket.device
            )
            into: dict[int, Tensor] = {}
            for index in indices[key, dtype]:
                param = sharding.params[index]
                if param in mine:
                    sharding.parts[param].of_shard(own).copy_(mine[param][key])
                if keeps:
                    into[index] = in_memory_order(whole[index][key], sharding.strides[index])
            sharding.gather_whole(bucket, own, into)
    return {sharding.params[index]: state for index, state in whole.items()}


def _agreed_descriptions(
    sharding: Sharding, mine: Mapping[Tensor, ParamState]
) -> dict[int, dict[str, list[Any]]]:
    """Describes each parameter's state entries, by parameter index and then by key, combined from
    all ranks."""
    own = {
        sharding.parts[param].param: {key: description(value) for key, value in state.items()}
        for param, state in mine.items()
    }
    if sharding.group.num_ranks == 1:
        return own
    waits_for = "the state of a ShardedOptimizer, for which every rank must call state_dict()"
    found: dict[int, dict[str, list[Any]]] = {}
    for of_rank in gather_json(sharding.group, own, waits_for=waits_for):
        found.update({int(index): entries for index, entries in of_rank.items()})
    return dict(sorted(found.items()))


def description(value: Any) -> list[Any]:
    """Returns an entry of a state as JSON, without the elements of tensors."""
    if not isinstance(value, Tensor):
        return [_VALUE, value]
    dtype = str(value.dtype).removeprefix("torch.")
    return [_TENSOR, dtype] if value.dim() else [_SCALAR, dtype, value.item(), value.device.type]


def _room(
    description: list[Any], param: Tensor, strides: tuple[int, ...], device: torch.device | None
) -> Any:
    """Returns a new tensor for elements, and the value itself of anything else."""
    kind, value, *of_scalar = description
    if kind == _VALUE:
        return value
    dtype = getattr(torch, value)
    if kind == _TENSOR:
        return torch.empty_strided(param.shape, strides, dtype=dtype, device=device or param.device)
    number, place = of_scalar
    # A tensor on another rank's GPU belongs on this rank's GPU here.
    return torch.tensor(
        number, dtype=dtype, device=param.device if param.device.type == place else place
    )
