"""The user's optimizer over this rank's parts of the parameters, and its state.

As shards, as whole tensors.
"""

from collections import UserDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import itemgetter
from typing import Any, Self

import torch
from torch import Tensor

from undertow.boxes import Box, boxes_of_range
from undertow.buckets.bucket import strides_of_gradient
from undertow.errors import CheckpointError
from undertow.ranks.collectives import accumulation_dtype
from undertow.ranks.facts import gather_json
from undertow.sharded.layout import Sharding
from undertow.sharded.shards import ShardPart, in_memory_order
from undertow.torch_private import checkpoint as private_checkpoint
from undertow.torch_private import private

# torch's names for the entries; values are tensors, numbers, and ShardedState
ParamState = dict[str, Any]
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


@dataclass(frozen=True, slots=True, eq=False)
class Owned:
    """This rank's part of one parameter."""

    part: ShardPart
    param: Tensor
    group: dict[str, Any]  # of the parameter, in the ShardedOptimizer
    values: Tensor  # [part.numel] in place, of the parameter's dtype
    # the tensor that the inner optimizer updates: `values`, or an fp32 copy of 16-bit values
    target: Tensor


class InnerOptimizer:
    """An optimizer of the user's class over this rank's parts of the parameters in `groups`.

    `sharding` lays the parameters out.
    """

    def __init__(
        self,
        make: Callable[[list[dict[str, Any]]], torch.optim.Optimizer],
        groups: Sequence[dict[str, Any]],
        sharding: Sharding,
    ) -> None:
        self.sharding = sharding
        self.owned: list[Owned] = []
        inner_groups = []
        for group in groups:
            mine = []
            for param in group["params"]:
                for part in sharding.parts.get(param, ()):
                    values = part.of_bucket(sharding.flats[part.bucket].flat)
                    target = values.to(accumulation_dtype(values.dtype))
                    mine.append(Owned(part, param, group, values, target))
            targets = [owned.target for owned in mine]
            inner_groups.append({**hyper_parameters(group), "params": targets})
            self.owned += mine
        self.optimizer = make(inner_groups)

    def step(self, groups: Sequence[dict[str, Any]]) -> None:
        """Steps with the hyper-parameters of these groups, as schedulers and users left them."""
        for group, settings in zip(self.optimizer.param_groups, groups, strict=True):
            for name, value in hyper_parameters(settings).items():
                group[name] = value.clone() if isinstance(value, Tensor) else value
        grads = self.sharding.gradients([owned.part for owned in self.owned])
        for owned, grad in zip(self.owned, grads, strict=True):
            target = owned.target
            target.grad = None if grad is None else grad.to(target.dtype)
            if target is not owned.values:  # follow writes into the parameter, such as a load
                is_written = owned.values != target.to(owned.values.dtype)
                target.copy_(torch.where(is_written, owned.values.to(target.dtype), target))
        try:
            # hooks of the user's optimizer run around the whole step, not here
            private.step_unwatched(self.optimizer)
        finally:
            # After an interruption too: a stale copy would look like a write from outside.
            for owned in self.owned:
                owned.target.grad = None
                if owned.target is not owned.values:
                    owned.values.copy_(owned.target)

    def take(self, states: Mapping[Tensor, Mapping[str, Any]]) -> None:
        """Takes over this rank's parts of these parameters' states, and of their fp32 values."""
        for owned in self.owned:
            state = states.get(owned.param)
            if state is None:
                continue
            mine = {key: _part_of(key, value, owned) for key, value in state.items()}
            master = mine.pop(MASTER, None)
            # A `master` that is not wider than the parameter went through a plain optimizer, which
            # narrows it and then does not update it along with the parameter.
            has_copy = owned.target is not owned.values
            if has_copy and master is not None and state[MASTER].dtype == master.dtype:
                owned.target.copy_(master)
            self.optimizer.state.pop(owned.target, None)
            if mine:
                self.optimizer.state[owned.target] = mine

    def states(self, *, is_moved: bool = False) -> dict[ShardPart, ParamState]:
        """Returns the state of each part with its fp32 values.

        An empty state stays empty, except when state moves.
        """
        found: dict[ShardPart, ParamState] = {}
        for owned in self.owned:
            state = dict(self.optimizer.state.get(owned.target, {}))
            if owned.target is not owned.values and (is_moved or state):
                state[MASTER] = owned.target
            found[owned.part] = state
        return found

    def whole_states(
        self,
        *,
        is_moved: bool = False,
        keeps: bool = True,
        device: torch.device | None = None,
    ) -> FullStates:
        """Gathers the whole state of every parameter that has one on some rank, as new tensors.

        A collective call. The tensors are on `device`, or on the parameters' devices if None. A
        rank with `keeps=False` contributes and returns nothing.
        """
        sharding = self.sharding
        mine = self.states(is_moved=is_moved)
        described = _agreed_descriptions(sharding, mine)
        found: dict[int, ParamState] = {}
        for index, entries in described.items() if keeps else ():
            param, strides = sharding.params[index], sharding.strides[index]
            room = {key: _room(what, param, strides, device) for key, what in entries.items()}
            found[index] = room
        for bucket in sharding.plan.buckets:
            entries_of = {index: described.get(index, {}) for index in bucket.params}
            every = chain.from_iterable(entries.items() for entries in entries_of.values())
            for key, dtype in sorted({(key, what[1]) for key, what in every if what[0] == _TENSOR}):
                own = torch.zeros(
                    sharding.shard_numel(bucket),
                    dtype=getattr(torch, dtype),
                    device=bucket.device,
                )
                indices = {
                    index
                    for index, entries in entries_of.items()
                    if entries.get(key) == [_TENSOR, dtype]
                }
                for part, state in mine.items():
                    if part.bucket == bucket.index and part.param in indices and state:
                        part.of_shard(own).copy_(state[key])
                into: dict[int, Tensor] = {}
                for index in indices & found.keys():
                    into[index] = in_memory_order(found[index][key], sharding.strides[index])
                sharding.gather_whole(bucket, own, into)
        return {sharding.params[index]: state for index, state in found.items()}


def hyper_parameters(group: dict[str, Any]) -> dict[str, Any]:
    """Returns the settings of a parameter group, without its parameters."""
    return {name: value for name, value in group.items() if name not in ("params", "param_names")}


def params_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Returns the parameters of all groups, in their order."""
    return list(chain.from_iterable(map(itemgetter("params"), optimizer.param_groups)))


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
        return {
            key: value.clone() if isinstance(value, Tensor) and value.dim() == 0 else value
            for key, value in state.items()
        }


class ShardedState(Tensor):
    """A state tensor of a parameter's shape. This rank holds `pieces` of it, flat ranges of the
    parameter in memory order.

    It is a tensor because torch.distributed.checkpoint looks for shards only in tensors, and it has
    the methods that torch.distributed.checkpoint saves and loads boxes by. The pieces of all ranks
    are stored as one tensor of this shape. It can be moved and copied; every other use raises,
    because it has no values itself.
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
        # On meta, so that an expanded parameter has a dense one too.
        dense = like if isinstance(like, ShardedState) else torch.empty_like(like, device="meta")
        made = private.wrapper_tensor(cls, dense, dtype=dtype, device=device or like.device)
        made.pieces = tuple(pieces)
        return made

    def of_part(self, part: ShardPart) -> Tensor:
        """Returns the elements of `part`, which must lie within one piece."""
        for own, values in self.pieces:
            if own.start <= part.start and part.stop <= own.stop:
                return values[part.start - own.start : part.stop - own.start]
        raise CheckpointError(
            f"elements [{part.start}, {part.stop}) of a state of shape {tuple(self.shape)} are "
            "not on this rank.",
            where="ShardedOptimizer.load_state_dict",
            remedy="Load through torch.distributed.checkpoint, or from full_state_dict().",
        )

    # torch's method is untyped
    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        parts = ", ".join(f"[{part.start}, {part.stop})" for part, _ in self.pieces)
        return (
            f"ShardedState(shape={tuple(self.shape)}, dtype={self.dtype}, elements "
            f"{parts or 'none'} here)"
        )

    def __reduce_ex__(self, _protocol: Any) -> Any:
        raise CheckpointError(
            "the state of a sharded optimizer cannot be pickled: this rank has a part of it.",
            where=repr(self),
            remedy='Leave state_dict="sharded" out of ShardedOptimizer(...), or save by '
            "torch.distributed.checkpoint.",
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        copied = memo[id(self)] = type(self)(
            self, self.dtype, [(part, values.clone()) for part, values in self.pieces]
        )
        return copied

    def __create_write_items__(self, fqn: str, _object: object) -> list[Any]:
        return private_checkpoint.write_items(fqn, self, [box for box, _ in self.boxes()])

    def __create_chunk_list__(self) -> list[Any]:
        return private_checkpoint.chunks([box for box, _ in self.boxes()])

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        for box, view in self.boxes():
            if index.offset is None or tuple(index.offset) == box.offsets:
                return view
        # torch reports it to the other ranks
        raise ValueError(f"{index.fqn!r} has nothing at {index.offset} on this rank")

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # the signature that torch documents
        cls,
        op: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given, first = (
            {name: value for name, value in (kwargs or {}).items() if value is not None},
            args[0] if args else None,
        )
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
            where=f"{op}, of a state of shape "
            f"{next((tuple(arg.shape) for arg in args if isinstance(arg, cls)), '?')}",
            remedy="Ask for all of it with optimizer.full_state_dict(), on every rank.",
        )

    def boxes(self) -> list[tuple[Box, Tensor]]:
        """Returns the pieces as boxes, each with an in-place view of its values."""
        return [
            (
                box,
                values.as_strided(
                    box.sizes, self.stride(), values.storage_offset() + box.start - part.start
                ),
            )
            for part, values in self.pieces
            for box in boxes_of_range(self.shape, self.stride(), part.start, part.stop)
        ]


def sharded_state(param: Tensor, parts: Sequence[tuple[ShardPart, ParamState]]) -> ParamState:
    """Returns a parameter's scalars and shards, from the states of its `parts` on this rank."""
    found = dict(parts[0][1]) if parts else {}
    for key, value in found.items():
        if isinstance(value, Tensor) and value.dim() > 0:
            pieces = [(part, state[key]) for part, state in parts]
            found[key] = ShardedState(param, value.dtype, pieces)
    return found


def _part_of(key: str, value: Any, owned: Owned) -> Any:
    """Returns a copy of a state's entry for a part, in Undertow's dtype.

    It is cut from a whole tensor or from a shard.
    """
    param, part = owned.param, owned.part
    if not isinstance(value, Tensor):
        return value
    if isinstance(value, ShardedState):
        mine = value.of_part(part)
    elif value.shape == param.shape and key not in OF_THE_WHOLE:
        mine = in_memory_order(value, strides_of_gradient(param))[part.start : part.stop]
    elif owned.group.get("capturable") or owned.group.get("fused"):
        # As torch's optimizers do: a checkpoint does not record the device.
        return value.to(param.device, copy=True)
    else:
        return value.clone()
    # A plain optimizer keeps the state of a 16-bit parameter in 16 bits.
    is_narrow = mine.is_floating_point() and param.is_floating_point()
    return mine.to(
        param.device, accumulation_dtype(param.dtype) if is_narrow else mine.dtype, copy=True
    )


def _agreed_descriptions(
    sharding: Sharding, mine: Mapping[ShardPart, ParamState]
) -> dict[int, dict[str, list[Any]]]:
    """Describes each parameter's state entries, by parameter index and then by key, combined from
    all ranks."""
    own = {
        part.param: {key: description(value) for key, value in state.items()}
        for part, state in mine.items()
        if state
    }
    if sharding.group.num_ranks == 1:
        return own
    waits_for = "the state of a ShardedOptimizer, for which every rank must call state_dict()"
    of_ranks = gather_json(sharding.group, own, waits_for=waits_for)
    return dict(
        sorted(
            {int(index): state for of_rank in of_ranks for index, state in of_rank.items()}.items()
        )
    )


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
