"""The state of a sharded optimizer: cut to this rank's elements, gathered whole, and placed on a
mesh."""

import copy
import json
import math
import warnings
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from undertow.buckets.fingerprints import fingerprints
from undertow.buckets.gradients import strides_of_gradient
from undertow.device import device_of
from undertow.errors import require
from undertow.mesh.local_tensors import (
    distributed,
    local_tensor,
    local_tensors,
    part_like,
    placed_like,
)
from undertow.plan import Bucket, Plan
from undertow.ranks.agreement import gather_json
from undertow.ranks.exchanges import accumulation_dtype
from undertow.sharded.params import ShardPart, in_memory_order
from undertow.sharded.sharding import Sharding

# torch's names for the entries; values are tensors and numbers
ParamState = dict[str, Any]

MASTER = "master"  # the fp32 values of a 16-bit parameter, stored next to the optimizer's own state
# The fingerprint of the parameter's values that `MASTER` belongs to: if the parameter has other
# values, they were written since, and count.
MASTER_OF = "master_of"
OF_EXACT = frozenset([MASTER, MASTER_OF])
_STEP = frozenset(["step"])
# Keys of torch's classes that belong to a whole parameter, not to its elements.
_OF_THE_WHOLE: dict[type[torch.optim.Optimizer], frozenset[str]] = {
    torch.optim.ASGD: _STEP | {"eta", "mu"},
    torch.optim.NAdam: _STEP | {"mu_product"},
}

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


# Their updates depend on other elements: of rows and columns, or of the whole matrix.
NEED_WHOLE = (torch.optim.Adafactor, torch.optim.Muon)
# The first needs all parameters at once, the second rows of sparse gradients.
_REFUSED = (torch.optim.LBFGS, torch.optim.SparseAdam)


def is_known(cls: type[torch.optim.Optimizer]) -> bool:
    """Returns True if each parameter is updated on its own, and all that a step changes is in
    `state[param]`."""
    return cls in ELEMENTWISE or cls in NEED_WHOLE


def updates_whole_parameters(cls: type[torch.optim.Optimizer], whole: bool | None) -> bool:
    """Returns True if one rank is to update all of a parameter, as the user says or as a known
    class needs it.

    Raises ConfigError if the class cannot be sharded so, or if it is not known and `whole` is None:
    it may combine parameters, or keep state outside of `state[param]`. A class that is derived from
    a known one is not known: its constructor alone may add hooks.
    """
    where = f"ShardedOptimizer({cls.__name__}, ..., whole={whole!r})"
    require(
        not issubclass(cls, _REFUSED),
        f"{cls.__name__} cannot be sharded: it needs all parameters at once, or sparse gradients.",
        where=where,
        remedy="Use this optimizer without sharding.",
    )
    if whole is None:
        require(
            is_known(cls),
            f"{cls.__name__} cannot be sharded: Undertow does not know that it updates each "
            "parameter on its own.",
            where=where,
            remedy="Pass whole=True if the update of a parameter depends on no other parameter and "
            "all that a step changes is in state[param]. If not, or if you are not sure, use this "
            "optimizer without sharding.",
        )
        return cls in NEED_WHOLE
    require(
        type(whole) is bool,
        f"whole must be True, False or None, got {whole!r}.",
        where=where,
        remedy="Leave it out: Undertow knows the classes of torch.",
    )
    require(
        whole or cls not in NEED_WHOLE,
        f"{cls.__name__} needs whole matrices: an element's update depends on the others.",
        where=where,
        remedy="Leave whole=False out: one rank then updates all of a parameter.",
    )
    if not whole and cls not in ELEMENTWISE:
        warnings.warn(
            f"{cls.__name__} will see flat pieces of parameters: a norm, statistics of rows or "
            f"columns, quantization in blocks or a projection would use pieces.\n  {where}\n"
            "  Leave whole=False out unless the update of an element depends on that element "
            "alone, or filter this warning.",
            stacklevel=3,
        )
    return whole


def _why_not_sent(own: Mapping[int, Mapping[str, list[Any]]], plan: Plan) -> str:
    """Names the described state that cannot go to another rank, or returns ""."""
    for index, entries in own.items():
        for key, entry in entries.items():
            try:
                json.dumps({key: entry})
            except (TypeError, ValueError):
                return (
                    f"state[{plan.params[index].name!r}][{key!r}] is of type "
                    f"{type(entry[1]).__name__}"
                )
    return ""


def is_of_the_whole(
    key: str, value: Tensor, param: Tensor, cls: type[torch.optim.Optimizer]
) -> bool:
    """Returns True if an entry of a state belongs to the whole parameter, such as a count of steps,
    and not to its elements.

    The key tells it for torch's classes. For any other class it tells only if neither the entry nor
    the parameter has a dimension.
    """
    if value.dim() == 0 and param.dim() > 0:
        return True
    if cls in ELEMENTWISE:
        return key in _OF_THE_WHOLE.get(cls, _STEP)
    return value.dim() == 0 and key in _STEP


def part_of_state(
    state: Mapping[str, Any],
    param: Tensor,
    part: ShardPart,
    group: Mapping[str, Any],
    *,
    cls: type[torch.optim.Optimizer],
) -> ParamState:
    """Returns a copy of a parameter's state for the elements of `part`, in Undertow's dtypes.

    Tensors of the parameter's shape are cut, unless one rank owns all of it. Other tensors of one
    dimension have the elements of the part already. `cls` is the class of the optimizer.
    """
    is_cut = part.owner is None
    found: ParamState = {}
    for key, value in state.items():
        if not isinstance(value, Tensor):
            found[key] = copy.deepcopy(value)
            continue
        if is_of_the_whole(key, value, param, cls):
            # As torch's optimizers do: a checkpoint does not record the device.
            is_on_device = group.get("capturable") or group.get("fused")
            found[key] = value.to(param.device if is_on_device else value.device, copy=True)
            continue
        if is_cut and value.shape == param.shape:
            flat = in_memory_order(value, strides_of_gradient(param))
            value = flat[part.start : part.stop]
        dtype = value.dtype
        if dtype == param.dtype:
            # A plain optimizer keeps the state of a 16-bit parameter in 16 bits.
            dtype = accumulation_dtype(dtype)
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
    mine = {param: flattened(state) for param, state in mine.items()}
    described = _agreed_descriptions(sharding, mine)
    whole: dict[int, ParamState] = {}
    for index, entries in described.items() if keeps else ():
        param, strides = sharding.params[index], sharding.strides[index]
        whole[index] = {key: _room(what, param, strides, device) for key, what in entries.items()}
    for bucket in sharding.plan.buckets:
        if bucket.owners is not None:
            _gather_owned(sharding, bucket, mine, described, whole)
        else:
            _gather_parts(sharding, bucket, mine, described, whole)
    return {sharding.held[index]: nested(state) for index, state in whole.items()}


def flattened(state: Mapping[str, Any]) -> ParamState:
    """Returns a state with an entry for each tensor of a list, `key#0`, `key#1` and so on."""
    found: ParamState = {}
    for key, value in state.items():
        if isinstance(value, list | tuple) and any(isinstance(each, Tensor) for each in value):
            found.update((f"{key}#{place}", each) for place, each in enumerate(value))
        else:
            found[key] = value
    return found


def nested(state: Mapping[str, Any]) -> ParamState:
    """Returns the state that `flattened` was given, with lists for tuples."""
    found: ParamState = {}
    lists: defaultdict[str, dict[int, Any]] = defaultdict(dict)
    for key, value in state.items():
        name, mark, place = key.rpartition("#")
        if mark and place.isdecimal():
            lists[name][int(place)] = value
        else:
            found[key] = value
    for name, values in lists.items():
        found[name] = [values[place] for place in sorted(values)]
    return found


def fingerprints_of(params: Iterable[Tensor]) -> list[int]:
    """Returns a number for the values of each parameter, which rounding alone does not change."""
    values = [param.detach().to(accumulation_dtype(param.dtype)) for param in local_tensors(params)]
    found: list[int] = fingerprints(values, device=torch.device("cpu")).tolist()
    return found


def placed_on_mesh(
    states: Mapping[Tensor, ParamState], cls: type[torch.optim.Optimizer]
) -> Mapping[Tensor, ParamState]:
    """Returns the states with DTensors, on a mesh: tensors with the elements of a parameter are
    placed as it is.

    A fingerprint is of the part of one place, and torch.distributed.checkpoint has one entry for
    all places: so the values that `MASTER` belongs to take its place.
    """
    placed = dict(states)
    for param in distributed(states):
        local = local_tensor(param)
        found = flattened(states[param])
        of = found.pop(MASTER_OF, None)
        if of is not None and [of] == fingerprints_of([param]):
            found[MASTER_OF] = local.detach().to(found[MASTER].device, copy=True)
        else:
            found.pop(MASTER, None)  # loaded, and of values that the parameter does not have yet
        for key, value in found.items():
            is_tensor = isinstance(value, Tensor)
            if is_tensor and not is_of_the_whole(key, value, local, cls):
                found[key] = placed_like(param, value)
        placed[param] = nested(found)
    return placed


def on_this_rank(param: Tensor, state: Mapping[str, Any]) -> ParamState:
    """Returns a loaded state with this rank's part of each DTensor, the reverse of
    `placed_on_mesh`."""
    if not distributed([param]):
        return dict(state)
    found = {key: part_like(param, value) for key, value in flattened(state).items()}
    if isinstance(found.get(MASTER_OF), Tensor):
        (found[MASTER_OF],) = fingerprints_of([found[MASTER_OF]])
    return nested(found)


def _gather_parts(
    sharding: Sharding,
    bucket: Bucket,
    mine: Mapping[Tensor, ParamState],
    described: Mapping[int, Mapping[str, list[Any]]],
    whole: Mapping[int, ParamState],
) -> None:
    """Brings the ranks' parts of states into `whole`. A collective call."""
    indices: dict[tuple[str, str], list[int]] = {}  # by the key and dtype of a tensor
    for index in bucket.params:
        for key, (kind, dtype, *_) in described.get(index, {}).items():
            if kind == _TENSOR:
                indices.setdefault((key, dtype), []).append(index)
    for key, dtype in sorted(indices):
        own = torch.zeros(
            sharding.shard_exchanges.shard_numel(bucket),
            dtype=getattr(torch, dtype),
            device=bucket.device,
        )
        into: dict[int, Tensor] = {}
        for index in indices[key, dtype]:
            param = sharding.held[index]
            if param in mine:
                sharding.parts[param].of_shard(own).copy_(_kept(mine[param][key]))
            if index in whole:
                into[index] = in_memory_order(whole[index][key], sharding.strides[index])
        sharding.gather_whole(bucket, own, into)


def _kept(state: Tensor) -> Tensor:
    """Returns a state that is not read again, perhaps not on the stream that made it."""
    return device_of(state.device).keep(state)


def _gather_owned(
    sharding: Sharding,
    bucket: Bucket,
    mine: Mapping[Tensor, ParamState],
    described: Mapping[int, Mapping[str, list[Any]]],
    whole: Mapping[int, ParamState],
) -> None:
    """Brings states of whole parameters from their owners into `whole`. A collective call."""
    assert bucket.owners is not None
    group = sharding.group
    for index, owner in zip(bucket.params, bucket.owners, strict=True):
        param = sharding.held[index]
        for key, (kind, dtype, *form) in sorted(described.get(index, {}).items()):
            if kind != _TENSOR:
                continue
            values = torch.empty(
                math.prod(form[0]), dtype=getattr(torch, dtype), device=bucket.device
            )
            if group.rank == owner:
                values.copy_(_elements(_kept(mine[param][key])))
            if group.num_ranks > 1:
                name = sharding.plan.params[index].name
                group.broadcast(values, f"the state of {name!r}", source=owner).wait()
            if index in whole:
                _elements(whole[index][key]).copy_(values)


def _elements(value: Tensor) -> Tensor:
    """Returns the elements of a state in the order of its memory; a view if it has no gaps."""
    return in_memory_order(value, strides_of_gradient(value))


def axes_in_memory(value: Tensor) -> list[int]:
    """Returns the axes of a tensor in the order of its memory, the outermost first."""
    if value.layout is not torch.strided:
        return list(range(value.dim()))
    strides = strides_of_gradient(value)
    return sorted(range(value.dim()), key=lambda axis: -strides[axis])


def room_in_order(
    shape: Sequence[int], axes: Sequence[int], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Returns a new tensor without gaps whose axes have this order in memory."""
    outermost_first = torch.empty([shape[axis] for axis in axes], dtype=dtype, device=device)
    return outermost_first.permute([axes.index(axis) for axis in range(len(axes))])


def _agreed_descriptions(
    sharding: Sharding, mine: Mapping[Tensor, ParamState]
) -> dict[int, dict[str, list[Any]]]:
    """Describes each parameter's state entries, by parameter index and then by key, combined from
    all ranks."""
    own = {
        sharding.parts[param].param: {
            key: description(value, is_part=sharding.parts[param].owner is None)
            for key, value in state.items()
        }
        for param, state in mine.items()
    }
    if sharding.group.num_ranks == 1:
        return own
    waits_for = "the state of a ShardedOptimizer, for which every rank must call state_dict()"
    why_not = _why_not_sent(own, sharding.plan)
    gathered = gather_json(sharding.group, why_not or own, waits_for=waits_for)
    reason = next((each for each in gathered if isinstance(each, str)), "")
    require(
        not reason,
        f"{reason}, which cannot go to another rank.",
        where="ShardedOptimizer",
        remedy="Keep tensors, lists of tensors, numbers and texts in the state, or use this "
        "optimizer without sharding.",
    )
    found: dict[int, dict[str, list[Any]]] = {}
    for of_rank in gathered:
        found.update({int(index): entries for index, entries in of_rank.items()})
    return dict(sorted(found.items()))


def description(value: Any, *, is_part: bool = False) -> list[Any]:
    """Returns an entry of a state as JSON, without the elements of tensors.

    Leaves out shape and order of axes of a part, whose length differs from rank to rank.
    """
    if not isinstance(value, Tensor):
        return [_VALUE, value]
    dtype = str(value.dtype).removeprefix("torch.")
    if value.dim():
        form = [] if is_part else [[*value.shape], axes_in_memory(value)]
        return [_TENSOR, dtype, *form]
    return [_SCALAR, dtype, value.item(), value.device.type]


def _room(
    description: list[Any], param: Tensor, strides: tuple[int, ...], device: torch.device | None
) -> Any:
    """Returns a new tensor for elements, and the value itself of anything else."""
    kind, value, *rest = description
    if kind == _VALUE:
        return value
    dtype = getattr(torch, value)
    if kind == _TENSOR and rest not in ([], [[*param.shape], axes_in_memory(param)]):
        shape, axes = rest
        return room_in_order(shape, axes, dtype, device or param.device)
    if kind == _TENSOR:
        return torch.empty_strided(param.shape, strides, dtype=dtype, device=device or param.device)
    number, place = rest
    # A tensor on another rank's GPU belongs on this rank's GPU here.
    return torch.tensor(
        number, dtype=dtype, device=param.device if param.device.type == place else place
    )
