"""The state of a sharded optimizer: as shards, as whole tensors, and conversions between them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from undertow.boxes import Box, boxes_of_range
from undertow.errors import CheckpointError, PhaseError
from undertow.runtime.comm.agreement import gather_json
from undertow.runtime.comm.collectives import accumulation_dtype
from undertow.runtime.gradients.storage import strides_of_gradient
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


class ShardedState(Tensor):
    """A state tensor of a parameter's shape of which this rank holds `pieces`, flat ranges of the parameter in memory order.

    It is a tensor because torch.distributed.checkpoint looks for shards only in tensors, and it has the methods that
    torch.distributed.checkpoint saves and loads boxes by. The pieces of all ranks are stored as one tensor of this shape. It can
    be moved and copied; every other use raises, because it has no values itself.
    """

    pieces: tuple[tuple[ShardPart, Tensor], ...]

    @staticmethod
    def __new__(cls, param: Tensor, dtype: torch.dtype, pieces: Sequence[tuple[ShardPart, Tensor]]) -> ShardedState:
        like = torch.empty_strided(param.shape, strides_of_gradient(param), dtype=dtype, device="meta")
        made = private.wrapper_tensor(cls, like, device=param.device)
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

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedState:
        copied = memo[id(self)] = self._with_pieces([(part, values.clone()) for part, values in self.pieces])
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
                return first._with_pieces([(part, op(values, **given)) for part, values in first.pieces], **given)
            if op is torch.ops.aten.new_empty.default and tuple(args[1]) == tuple(first.shape):
                return first._with_pieces((), **given)  # torch's staging of a checkpoint fills the pieces in
        raise CheckpointError(
            "the state of a sharded optimizer has no values of its own: this rank has a part of it.",
            where=f"{op}, of a state of shape {next((tuple(it.shape) for it in args if isinstance(it, cls)), '?')}",
            remedy="Ask for all of it with optimizer.full_state_dict(), on every rank.",
        )

    def _with_pieces(
        self, pieces: Sequence[tuple[ShardPart, Tensor]], *, device: torch.device | None = None, **_given: Any
    ) -> ShardedState:
        like = torch.empty_strided(self.shape, self.stride(), dtype=self.dtype, device="meta")
        made = private.wrapper_tensor(ShardedState, like, device=device or self.device)
        made.pieces = tuple(pieces)
        return made

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


@dataclass(frozen=True, slots=True, eq=False)
class Consolidated:
    """The whole state of an optimizer on one rank; `mine` is None on the others."""

    rank: int  # the rank that holds it
    mine: FullStates | None

    def states(self) -> FullStates:
        """Returns the state; raises PhaseError on a rank that does not hold it."""
        if self.mine is None:
            raise PhaseError(
                f"the state was brought to rank {self.rank} by consolidate_state_dict(), and is asked for on another rank.",
                where="ShardedOptimizer.state_dict",
                remedy=f"Call state_dict() on rank {self.rank} only, or full_state_dict() on every rank.",
            )
        return self.mine


def has_shards(states: Iterable[Mapping[str, Any]]) -> bool:
    return any(isinstance(value, ShardedState) for state in states for value in state.values())


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

    A `master` that is no wider than the parameter is left out. It went through a plain optimizer, which narrows it and then does
    not update it along with the parameter.
    """
    return {
        key: _part_of(key, value, part, param)
        for key, value in state.items()
        if key != MASTER or value.dtype == accumulation_dtype(param.dtype)
    }


def states_without_elements(params: Iterable[Tensor], state_of: Callable[[Tensor], ParamState]) -> FullStates:
    """Returns the state of parameters without elements: no rank owns them, but plain optimizers keep state for them too."""
    return {
        param: {
            key: _empty_like(param, value.dtype) if isinstance(value, Tensor) and value.dim() else value
            for key, value in state_of(param).items()
        }
        for param in params
        if param.numel() == 0
    }


def full_states(
    sharding: Sharding, mine: Mapping[ShardPart, ParamState], *, keeps: bool = True, device: torch.device | None = None
) -> FullStates:
    """Gathers the whole state of every parameter that has state on some rank, as new tensors of its shape; a collective call.

    They are on `device`, or on the parameters' devices if None. A rank with `keeps=False` contributes and returns nothing.
    """
    described = _agreed_descriptions(sharding, mine)
    found: FullStates = {}
    for bucket in sharding.plan.buckets:
        tensors = {
            (key, what[1]) for index in bucket.params for key, what in described.get(index, {}).items() if what[0] == _TENSOR
        }
        for key, dtype in sorted(tensors):
            own = torch.zeros(sharding.shard_numel(bucket), dtype=getattr(torch, dtype), device=bucket.device)
            for part, state in mine.items():
                if part.bucket == bucket.index and key in state and state[key].dtype == own.dtype:
                    part.of_shard(own).copy_(state[key])
            flat = sharding.gathered(bucket.index, own)
            for slot in bucket.slots if keeps else ():
                if described.get(slot.param, {}).get(key) == [_TENSOR, dtype]:
                    param = sharding.params[slot.param]
                    strides = sharding.strides[slot.param]
                    empty = torch.empty_strided(param.shape, strides, dtype=own.dtype, device=device or param.device)
                    whole = found.setdefault(param, {}).setdefault(key, empty)
                    flat_of_param = in_memory_order(whole, strides)
                    flat_of_param[slot.first : slot.first + slot.numel] = flat[slot.start : slot.stop]
    for index, of_param in described.items() if keeps else ():
        param = sharding.params[index]
        state = found.setdefault(param, {})
        state |= {key: _scalar(what, param) for key, what in of_param.items() if what[0] != _TENSOR}
        found[param] = {key: state[key] for key in of_param}
    return found


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
    own = {part.param: {key: _description(value) for key, value in state.items()} for part, state in mine.items() if state}
    if sharding.group.num_ranks == 1:
        return own
    found: dict[int, dict[str, list[Any]]] = {}
    with sharding.group.gathering_state():
        of_ranks = gather_json(sharding.group, json.dumps(own).encode(), waits_for="")  # the wait is named inside
    for of_rank in of_ranks:
        found |= {int(index): described for index, described in of_rank.items()}
    return dict(sorted(found.items()))


def _description(value: Any) -> list[Any]:
    if isinstance(value, Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        return [_TENSOR, dtype] if value.dim() else [_SCALAR, dtype, value.item(), value.device.type]
    return [_VALUE, value]


def _scalar(description: list[Any], param: Tensor) -> Any:
    if description[0] == _VALUE:
        return description[1]
    _, dtype, value, device = description
    # A tensor on another rank's GPU belongs on this rank's GPU here.
    return torch.tensor(value, dtype=getattr(torch, dtype), device=param.device if param.device.type == device else device)


def _empty_like(param: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(param.shape, strides_of_gradient(param), dtype=dtype, device=param.device)
