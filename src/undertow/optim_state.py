"""The state of a sharded optimizer: in parts, whole, and from one to the other."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from undertow.errors import CheckpointError
from undertow.runtime.buckets import strides_of_gradient
from undertow.runtime.group import gather_bytes
from undertow.runtime.sharding import Sharding
from undertow.runtime.shards import ShardPart, in_memory_order

ParamState = dict[str, Any]  # by torch's name for it: tensors, numbers, and ShardedState
FullStates = dict[Tensor, ParamState]  # parameters are keys by identity

_TENSOR, _SCALAR, _VALUE = "tensor", "scalar tensor", "value"


class ShardedState:
    """A tensor like a parameter, of which this rank has `pieces`: flat, of the parameter as it lies in memory."""

    def __init__(self, param: Tensor, dtype: torch.dtype, pieces: Sequence[tuple[ShardPart, Tensor]]) -> None:
        self.shape = param.shape
        self.dtype = dtype
        self.strides = strides_of_gradient(param)
        self.pieces = tuple(pieces)

    def size(self) -> torch.Size:
        return self.shape

    def of_part(self, part: ShardPart) -> Tensor:
        """The elements of `part`, which must be among our pieces."""
        for own, values in self.pieces:
            if (own.start, own.stop) == (part.start, part.stop):
                return values
        raise CheckpointError(
            f"elements [{part.start}, {part.stop}) of a state of shape {tuple(self.shape)} are not on this rank.",
            where="ShardedOptimizer.load_state_dict",
            remedy="Load through torch.distributed.checkpoint, or from full_state_dict().",
        )

    def __repr__(self) -> str:
        parts = ", ".join(f"[{part.start}, {part.stop})" for part, _ in self.pieces)
        return f"ShardedState(shape={tuple(self.shape)}, dtype={self.dtype}, elements {parts or 'none'} here)"

    def __reduce__(self) -> Any:
        raise CheckpointError(
            "the state of a sharded optimizer cannot be pickled: this rank has a part of it.",
            where=repr(self),
            remedy="Save optimizer.full_state_dict(), called on every rank, or use torch.distributed.checkpoint.",
        )


def parts_of_state(state: Mapping[str, Any], part: ShardPart, param: Tensor) -> ParamState:
    """The state of `part` alone: of whole tensors, or of sharded ones that have it. Copies."""
    return {key: _part_of(value, part, param) for key, value in state.items()}


def full_states(sharding: Sharding, mine: Mapping[ShardPart, ParamState]) -> FullStates:
    """The whole state of every parameter that has one on some rank; a collective call. Tensors are new, of its shape."""
    described = _agreed_descriptions(sharding, mine)
    found: FullStates = {}
    for bucket in sharding.plan.buckets:
        tensors = {
            (key, what[1]) for index in bucket.params for key, what in described.get(index, {}).items() if what[0] == _TENSOR
        }
        for key, dtype in sorted(tensors):
            own = torch.zeros(bucket.shard_numel, dtype=getattr(torch, dtype), device=bucket.device)
            for part, state in mine.items():
                if part.bucket == bucket.index and key in state:
                    part.of_shard(own).copy_(state[key])
            flat = sharding.gathered(bucket.index, own)
            for slot in bucket.slots:
                if key in described.get(slot.param, {}):
                    param = sharding.params[slot.param]
                    whole = found.setdefault(param, {}).setdefault(key, _empty_like(param, own.dtype))
                    flat_of_param = in_memory_order(whole, like=param)
                    flat_of_param[slot.first : slot.first + slot.numel] = flat[slot.start : slot.stop]
    for index, of_param in described.items():
        state = found.setdefault(sharding.params[index], {})
        state |= {key: _scalar(what) for key, what in of_param.items() if what[0] != _TENSOR}
        found[sharding.params[index]] = {key: state[key] for key in of_param}
    return found


def _part_of(value: Any, part: ShardPart, param: Tensor) -> Any:
    if isinstance(value, ShardedState):
        return value.of_part(part).clone()
    if isinstance(value, Tensor) and value.shape == param.shape and value.dim() > 0:
        return in_memory_order(value.to(param.device), like=param)[part.start : part.stop].clone()
    if isinstance(value, Tensor) and value.dim() == 0 and param.dim() == 0 and value.is_floating_point():
        return value.clone()
    return value.clone() if isinstance(value, Tensor) else value


def _agreed_descriptions(sharding: Sharding, mine: Mapping[ShardPart, ParamState]) -> dict[int, dict[str, list[Any]]]:
    """What each parameter's state has, by the parameter's index and then by name, from all ranks together."""
    own = {part.param: {key: _description(value) for key, value in state.items()} for part, state in mine.items() if state}
    if sharding.group.num_ranks == 1:
        return own
    found: dict[int, dict[str, list[Any]]] = {}
    for text in gather_bytes(sharding.group, json.dumps(own).encode()):
        found |= {int(index): described for index, described in json.loads(text).items()}
    return dict(sorted(found.items()))


def _description(value: Any) -> list[Any]:
    if isinstance(value, Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        return [_TENSOR, dtype] if value.dim() else [_SCALAR, dtype, value.item(), str(value.device)]
    return [_VALUE, value]


def _scalar(description: list[Any]) -> Any:
    if description[0] == _VALUE:
        return description[1]
    _, dtype, value, device = description
    return torch.tensor(value, dtype=getattr(torch, dtype), device=device)


def _empty_like(param: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(param.shape, strides_of_gradient(param), dtype=dtype, device=param.device)
