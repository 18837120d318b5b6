"""The user's optimizer over this rank's parts of the parameters, and its state: as shards, as whole tensors."""

import copy
import json
from collections import UserDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from operator import attrgetter, itemgetter
from typing import Any, Self

import torch
from torch import Tensor

from undertow.boxes import Box, boxes_of_range
from undertow.errors import CheckpointError, require
from undertow.runtime.comm.agreement import gather_json
from undertow.runtime.comm.collectives import accumulation_dtype
from undertow.runtime.gradients.storage import strides_of_gradient
from undertow.runtime.peers.faults import STATE
from undertow.runtime.sharded.layout import Sharding
from undertow.runtime.sharded.shards import ShardPart, in_memory_order
from undertow.runtime.torch_private import checkpoint as private_checkpoint
from undertow.runtime.torch_private import private

ParamState = dict[str, Any]  # torch's names for the entries; values are tensors, numbers, and ShardedState
FullStates = dict[Tensor, ParamState]  # parameters are keys by identity

MASTER = "master"  # the fp32 values of a 16-bit parameter, stored next to the optimizer's own state
# Keys of torch's optimizers that belong to a whole parameter, not to its elements.
OF_THE_WHOLE = {"step", "eta", "mu", "mu_product"}
_COPYING = (torch.ops.aten.clone.default, torch.ops.aten._to_copy.default)
_OF_A_COPY = {"device", "non_blocking", "memory_format"}

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
_shard_part = attrgetter("part")


@dataclass(frozen=True, slots=True)
class Owned:
    """This rank's part of one parameter."""

    part: ShardPart
    param: Tensor
    values: Tensor  # [part.numel] in place, of the parameter's dtype
    target: Tensor  # the tensor that the inner optimizer updates: `values`, or an fp32 copy of 16-bit values


@dataclass(frozen=True, slots=True, eq=False)
class InnerOptimizer:
    """An optimizer of the user's class over some of this rank's parts."""

    owned: Sequence[Owned]
    optimizer: torch.optim.Optimizer

    def step(
        self, settings: Sequence[dict[str, Any]], gradients_of: Callable[[Iterable[ShardPart]], Sequence[Tensor | None]]
    ) -> None:
        """Steps with these hyper-parameters, one dict for each group."""
        for group, setting in zip(self.optimizer.param_groups, settings, strict=True):
            group.update(setting)
        for owned, grad in zip(self.owned, gradients_of(map(_shard_part, self.owned)), strict=True):
            target = owned.target
            target.grad = None if grad is None else grad.to(target.dtype)
            if target is not owned.values:  # follow values that were written into the parameter, for example by `load_state_dict`
                is_written = owned.values != target.to(owned.values.dtype)
                target.copy_(torch.where(is_written, owned.values.to(target.dtype), target))
        try:
            private.step_unwatched(self.optimizer)  # hooks of the user's optimizer run around the whole step, not here
        finally:  # also if interrupted: a stale copy would look like an outside write to the parameter
            for owned in self.owned:
                owned.target.grad = None
                if owned.target is not owned.values:
                    owned.values.copy_(owned.target)

    def take(self, owned: Owned, state: ParamState) -> None:
        """Takes over the state of a part and its fp32 values."""
        master = state.pop(MASTER, None)
        if master is not None and owned.target is not owned.values:
            owned.target.copy_(master)
        self.optimizer.state.pop(owned.target, None)
        if state:
            self.optimizer.state[owned.target] = state


def owned_part(sharding: Sharding, param: Tensor, part: ShardPart) -> Owned:
    """Returns this rank's part of `param`, with an fp32 copy if its dtype has 16 bits."""
    values = part.of_bucket(sharding.flats[part.bucket].flat)
    return Owned(part, param, values, values.to(accumulation_dtype(values.dtype)))


def hyper_parameters(group: dict[str, Any]) -> dict[str, Any]:
    """Returns the settings of a parameter group, without its parameters."""
    return {name: value for name, value in group.items() if name not in ("params", "param_names")}


def settings_as_text(group: dict[str, Any]) -> dict[str, str]:
    """Returns the settings of a parameter group as text, because a function or NaN among them does not equal its own copy."""
    return {name: repr(value) for name, value in hyper_parameters(group).items()}


def params_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Returns the parameters of all groups, in their order."""
    return list(chain.from_iterable(map(itemgetter("params"), optimizer.param_groups)))


def require_elementwise(cls: type[torch.optim.Optimizer], *, is_vouched_for: bool) -> None:
    """Raises ConfigError unless shards of parameters can be stepped by this class.

    A class that is derived from a known one is not known: its constructor alone may add hooks.
    """
    require(
        cls in ELEMENTWISE or is_vouched_for,
        f"{cls.__name__} cannot be sharded: Undertow does not know that it updates each element on its own.",
        where="ShardedOptimizer, which gives each rank a part of a parameter as a flat piece",
        remedy="Pass elementwise=True if the update of an element depends on no other element. If it does, or if you are "
        "not sure, use this optimizer without sharding.",
    )


def state_of_one_element(
    make: partial[torch.optim.Optimizer], group: dict[str, Any], dtype: torch.dtype, device: torch.device
) -> ParamState:
    """Returns the state of a parameter with one element, after one step with the settings of `group`."""
    like = torch.nn.Parameter(torch.zeros(1, dtype=accumulation_dtype(dtype), device=device))
    like.grad = torch.ones_like(like)
    optimizer = make([{"params": [like], **copy.deepcopy(hyper_parameters(group))}])
    private.step_unwatched(optimizer)
    state = dict(optimizer.state.get(like, {}))
    return state if like.dtype == dtype else {**state, MASTER: like.detach()}


class Written(UserDict[Any, Any]):
    """A dict that calls `changed` with each key that is set or deleted, also further inside."""

    def __init__(self, data: Mapping[Any, Any], changed: Callable[[Any], object]) -> None:
        self._changed = changed
        self.data = {key: self._followed(key, item) for key, item in data.items()}

    def _followed(self, key: Any, item: Any) -> Any:
        return Written(item, lambda _: self._changed(key)) if isinstance(item, Mapping) else item

    def __setitem__(self, key: Any, item: Any) -> None:
        self.data[key] = self._followed(key, item)
        self._changed(key)

    def __delitem__(self, key: Any) -> None:
        del self.data[key]
        self._changed(key)


class WrittenStates(Written):
    """The same for the states of parameters; the state of any other parameter is empty."""

    def __missing__(self, param: Tensor) -> Any:
        self.data[param] = self._followed(param, {})
        return self.data[param]

    def get(self, param: Tensor, default: Any = None) -> Any:  # adds nothing
        return self.data.get(param, default)


def with_copied_scalars(state: Mapping[str, Any]) -> ParamState:
    """Returns `state` with copies of its scalars, which each part of a parameter has.

    They cannot be changed in place: torch refuses that for tensors of inference mode.
    """
    with torch.inference_mode():
        return {key: value.clone() if isinstance(value, Tensor) and value.dim() == 0 else value for key, value in state.items()}


class ShardedState(Tensor):
    """A state tensor of a parameter's shape. This rank holds `pieces` of it, flat ranges of the parameter in memory order.

    It is a tensor because torch.distributed.checkpoint looks for shards only in tensors, and it has the methods that
    torch.distributed.checkpoint saves and loads boxes by. The pieces of all ranks are stored as one tensor of this shape. It can
    be moved and copied; every other use raises, because it has no values itself.
    """

    pieces: tuple[tuple[ShardPart, Tensor], ...]

    @staticmethod
    def __new__(
        cls,
        like: Tensor,
        dtype: torch.dtype,
        pieces: Sequence[tuple[ShardPart, Tensor]],
        *,
        device: torch.device | None = None,
    ) -> Self:
        dense = like if isinstance(like, ShardedState) else torch.empty_like(like, device="meta")  # also of an expanded parameter
        made = private.wrapper_tensor(cls, dense, dtype=dtype, device=device or like.device)
        made.pieces = tuple(pieces)
        return made

    def of_part(self, part: ShardPart) -> Tensor:
        """Returns the elements of `part`, which must lie within one piece."""
        for own, values in self.pieces:
            if own.start <= part.start and part.stop <= own.stop:
                return values[part.start - own.start : part.stop - own.start]
        raise CheckpointError(
            f"elements [{part.start}, {part.stop}) of a state of shape {tuple(self.shape)} are not on this rank.",
            where="ShardedOptimizer.load_state_dict",
            remedy="Load through torch.distributed.checkpoint, or from full_state_dict().",
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # torch's method is untyped
        parts = ", ".join(f"[{part.start}, {part.stop})" for part, _ in self.pieces)
        return f"ShardedState(shape={tuple(self.shape)}, dtype={self.dtype}, elements {parts or 'none'} here)"

    def __reduce_ex__(self, _protocol: Any) -> Any:
        raise CheckpointError(
            "the state of a sharded optimizer cannot be pickled: this rank has a part of it.",
            where=repr(self),
            remedy='Leave state_dict="sharded" out of ShardedOptimizer(...), or save by torch.distributed.checkpoint.',
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        copied = memo[id(self)] = type(self)(self, self.dtype, [(part, values.clone()) for part, values in self.pieces])
        return copied

    def __create_write_items__(self, fqn: str, _object: object) -> list[Any]:
        return private_checkpoint.write_items(fqn, self, [box for box, _ in self.boxes()])

    def __create_chunk_list__(self) -> list[Any]:
        return private_checkpoint.chunks([box for box, _ in self.boxes()])

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        for box, view in self.boxes():
            if index.offset is None or tuple(index.offset) == box.offsets:
                return view
        raise ValueError(f"{index.fqn!r} has nothing at {index.offset} on this rank")  # torch reports it to the other ranks

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # the signature that torch documents
        cls, op: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given, first = {name: value for name, value in (kwargs or {}).items() if value is not None}, args[0] if args else None
        if isinstance(first, ShardedState):
            if op is torch.ops.aten.detach.default:
                return first
            if op in _COPYING and given.keys() <= _OF_A_COPY:
                pieces = [(part, op(values, **given)) for part, values in first.pieces]
                return ShardedState(first, first.dtype, pieces, device=given.get("device"))
            if op is torch.ops.aten.new_empty.default and tuple(args[1]) == tuple(first.shape):
                # torch's staging of a checkpoint fills the pieces in
                return ShardedState(first, first.dtype, (), device=given.get("device"))
        raise CheckpointError(
            "the state of a sharded optimizer has no values here: this rank has a part of it.",
            where=f"{op}, of a state of shape {next((tuple(arg.shape) for arg in args if isinstance(arg, cls)), '?')}",
            remedy="Ask for all of it with optimizer.full_state_dict(), on every rank.",
        )

    def boxes(self) -> list[tuple[Box, Tensor]]:
        """Returns the pieces as boxes, each with an in-place view of its values."""
        if self.numel() == 0:  # no rank owns it, but the checkpoint must record that it exists
            box = Box(offsets=(0,) * self.dim(), sizes=tuple(self.shape), start=0)
            return [(box, torch.empty(self.shape, dtype=self.dtype, device=self.device))]
        return [
            (box, values.as_strided(box.sizes, self.stride(), values.storage_offset() + box.start - part.start))
            for part, values in self.pieces
            for box in boxes_of_range(self.shape, self.stride(), part.start, part.stop)
        ]


def with_scalars_in_place(state: Mapping[str, Any], param: Tensor, group: Mapping[str, Any]) -> ParamState:
    """Returns `state` with scalars on the device that the optimizer expects, as torch's optimizers do when they load.

    A checkpoint does not record that device.
    """
    is_on_device = group.get("capturable") or group.get("fused")
    return {
        key: value.to(param.device) if is_on_device and key in OF_THE_WHOLE and isinstance(value, Tensor) else value
        for key, value in state.items()
    }


def parts_of_state(state: Mapping[str, Any], part: ShardPart, param: Tensor) -> ParamState:
    """Returns copies of the state of `part`, cut from whole tensors or from shards that contain it, in Undertow's dtypes.

    A `master` that is not wider than the parameter is left out. It went through a plain optimizer, which narrows it and then does
    not update it along with the parameter.
    """
    return {
        key: _part_of(key, value, part, param)
        for key, value in state.items()
        if key != MASTER or value.dtype == accumulation_dtype(param.dtype)
    }


def sharded_state(
    param: Tensor, parts: Sequence[tuple[ShardPart, ParamState]], of_one_element: Callable[[], ParamState]
) -> ParamState:
    """Returns a parameter's scalars and shards, from the states of its `parts` on this rank; without parts, empty shards.

    A parameter without elements has its scalars on every rank.
    """
    state = parts[0][1] if parts else of_one_element()
    return {
        key: ShardedState(param, value.dtype, [(part, of_part[key]) for part, of_part in parts]) if _is_flat(value) else value
        for key, value in state.items()
        if _is_flat(value) or parts or param.numel() == 0
    }


def whole_state_without_elements(param: Tensor, of_one_element: ParamState) -> ParamState:
    """Returns the state of a parameter without elements: no rank owns it, but plain optimizers keep state for it too."""
    return {
        key: torch.empty_like(param, dtype=value.dtype) if _is_flat(value) else value for key, value in of_one_element.items()
    }


def full_states(
    sharding: Sharding, mine: Mapping[ShardPart, ParamState], *, keeps: bool = True, device: torch.device | None = None
) -> FullStates:
    """Gathers the whole state of every parameter that has state on some rank, as new tensors of its shape; a collective call.

    They are on `device`, or on the parameters' devices if None. A rank with `keeps=False` contributes and returns nothing.
    """
    described = _agreed_descriptions(sharding, mine)
    found = {
        index: {key: _room(what, sharding.params[index], sharding.strides[index], device) for key, what in state.items()}
        for index, state in described.items()
        if keeps
    }
    for bucket in sharding.plan.buckets:
        states = [described.get(index, {}) for index in bucket.params]
        for key, dtype in sorted({(key, what[1]) for state in states for key, what in state.items() if what[0] == _TENSOR}):
            own = torch.zeros(sharding.shard_numel(bucket), dtype=getattr(torch, dtype), device=bucket.device)
            for part, state in mine.items():
                if part.bucket == bucket.index and key in state and state[key].dtype == own.dtype:
                    part.of_shard(own).copy_(state[key])
            flat = sharding.gathered(bucket.index, own)
            for slot in bucket.slots:
                if slot.param in found and described[slot.param].get(key) == [_TENSOR, dtype]:
                    whole = in_memory_order(found[slot.param][key], sharding.strides[slot.param])
                    whole.copy_(flat[slot.start : slot.stop])
    return {sharding.params[index]: state for index, state in found.items()}


def _is_flat(value: object) -> bool:
    """Returns True for one value per element of a part, and False for values of the whole parameter."""
    return isinstance(value, Tensor) and value.dim() > 0


def _part_of(key: str, value: Any, part: ShardPart, param: Tensor) -> Any:
    if not isinstance(value, Tensor):
        return value
    if isinstance(value, ShardedState):
        mine = value.of_part(part)
    elif value.shape == param.shape and key not in OF_THE_WHOLE:
        mine = in_memory_order(value, strides_of_gradient(param))[part.start : part.stop]
    else:
        return value.clone()
    # A plain optimizer keeps the state of a 16-bit parameter in 16 bits.
    is_narrow = mine.is_floating_point() and param.is_floating_point()
    return mine.to(param.device, accumulation_dtype(param.dtype) if is_narrow else mine.dtype, copy=True)


def _agreed_descriptions(sharding: Sharding, mine: Mapping[ShardPart, ParamState]) -> dict[int, dict[str, list[Any]]]:
    """Describes each parameter's state entries, by parameter index and then by key, combined from all ranks."""
    own = {part.param: {key: description(value) for key, value in state.items()} for part, state in mine.items() if state}
    if sharding.group.num_ranks == 1:
        return own
    with sharding.group.waiting(STATE):
        of_ranks = gather_json(sharding.group, json.dumps(own).encode(), waits_for="")  # the wait is named inside
    return dict(sorted({int(index): state for of_rank in of_ranks for index, state in of_rank.items()}.items()))


def description(value: Any) -> list[Any]:
    """Returns an entry of a state as JSON, without the elements of tensors."""
    if not isinstance(value, Tensor):
        return [_VALUE, value]
    dtype = str(value.dtype).removeprefix("torch.")
    return [_TENSOR, dtype] if value.dim() else [_SCALAR, dtype, value.item(), value.device.type]


def _room(description: list[Any], param: Tensor, strides: tuple[int, ...], device: torch.device | None) -> Any:
    """Returns a new tensor for elements, and the value itself of anything else."""
    kind, value, *of_scalar = description
    if kind == _VALUE:
        return value
    dtype = getattr(torch, value)
    if kind == _TENSOR:
        return torch.empty_strided(param.shape, strides, dtype=dtype, device=device or param.device)
    number, place = of_scalar
    # A tensor on another rank's GPU belongs on this rank's GPU here.
    return torch.tensor(number, dtype=dtype, device=param.device if param.device.type == place else place)
