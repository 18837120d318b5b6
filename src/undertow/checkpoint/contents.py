"""The contents of a checkpoint: a model and optimizers.

Files hold tensors, and texts in their metadata. A state of an optimizer is named  <parameter>/<key>
or, if it has elements of the parameter,  <parameter>/<key>[start:stop].  These are positions in the
parameter's memory: the index has the order of the axes there, unless it is row-major. If the axes
of a whole state have another order in memory, it is the text  <parameter>/<key>[axes].  States that
are not tensors are texts, in JSON. The index lists the entries of each file, so a rank opens only
the files that have a part of its state.
"""

import contextlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from undertow.buckets.gradients import strides_of_gradient
from undertow.checkpoint import files
from undertow.checkpoint.opened import Opened
from undertow.engine.progress import params_of
from undertow.errors import CheckpointError, require
from undertow.mesh.local_tensors import distributed, local_tensor, placed_like, placement_of
from undertow.optim.inner_optimizer import hyper_parameters
from undertow.optim.sharded_optimizer import ShardedOptimizer
from undertow.optim.state import (
    axes_in_memory,
    flattened,
    is_of_the_whole,
)
from undertow.outer.outer_sync import OuterSync, outer_of
from undertow.sharded.params import ShardPart, in_memory_order
from undertow.torch_private import private, tables

ENTRY = re.compile(r"(.*)/([^/\[]+)(?:\[(?:(axes)|([0-9]{1,18}):([0-9]{1,18}))\])?", re.DOTALL)
_EXTRA_STATE = "_extra_state"  # the end of torch's names for the results of get_extra_state()
_OF_OUTER = ("global", "momentum", "mean")  # tensors of OuterSync.state_dict()
Contents = tuple[dict[str, Tensor], dict[str, str]]  # tensors and texts of one file


class Names:
    """The names of a model's tensors, without the prefixes that wrapping and compiling add."""

    def __init__(self, model: nn.Module) -> None:
        self.module = private.unwrapped(model)
        outer = outer_of(model)
        with contextlib.nullcontext() if outer is None else outer.own_state_dicts():
            state = self.module.state_dict()
        # beside tensor parallelism, this rank's parts
        self.state = {_plain(key): _part(value) for key, value in state.items()}
        values = self.state.items()
        self.extra_states = {name: value for name, value in values if not isinstance(value, Tensor)}
        self.of_param = {
            id(param): _plain(name) for name, param in tables.named_parameters(self.module)
        }

    def params_of(self, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
        """Returns the parameters of the optimizer by name, in the order of torch's numbers."""
        found = {}
        for number, param in enumerate(params_of(optimizer)):
            require(
                id(param) in self.of_param,
                f"parameter {number} of the optimizer, of shape {tuple(param.shape)}, is not one "
                "of the model's.",
                where="the optimizer",
                remedy="Give the model and the optimizer that belong together.",
                error=CheckpointError,
            )
            found[self.of_param[id(param)]] = param
        return found


def contents_of_model(names: Names) -> Contents:
    """Returns each tensor once, and tied names as safetensors.torch.save_model writes them."""
    tensors: dict[str, Tensor] = {}
    ties: dict[str, str] = {}
    first: dict[object, str] = {}
    for name, value in names.state.items():
        if isinstance(value, Tensor):
            memory = (value.data_ptr() or name, value.dtype, value.shape, value.stride())
            kept = first.setdefault(memory, name)
            tensors[kept] = value
            if kept != name:
                ties[name] = kept
    return tensors, ties


def add_contents_of_optimizer(
    names: Names,
    optimizer: torch.optim.Optimizer,
    tensors: dict[str, Tensor],
    texts: dict[str, str],
) -> dict[str, Any]:
    """Adds the state on this rank to tensors and texts; returns values for the index, the same on
    every rank."""
    parts: dict[Tensor, ShardPart] = {}
    if isinstance(optimizer, ShardedOptimizer):
        packed, parts = optimizer._own_state_dict()
    else:
        packed = optimizer.state_dict()
    params = list(names.params_of(optimizer).items())
    for number, state in packed["state"].items():
        name, held = params[number]
        param = local_tensor(held)
        for key, value in flattened(state).items():
            require(
                isinstance(key, str) and not {*"/["} & {*key},
                f"the state of {name!r} has the key {key!r}, which is not a name.",
                where="save_checkpoint",
                remedy="Save model.state_dict() and optimizer.state_dict() by torch.save().",
                error=CheckpointError,
            )
            if isinstance(value, Tensor):
                is_whole = is_of_the_whole(key, value, param, class_of(optimizer))
                entry = f"{name}/{key}"
                value = _placed_part(value, held, f"{key!r} of {name!r}")
                stored = _stored(value, param, parts.get(held), is_whole=is_whole)
                tensors[entry + stored.place] = stored.elements
                if stored.axes is not None:
                    texts[f"{entry}[axes]"] = json.dumps(stored.axes)
            else:
                files.require_json(value, f"state[{name!r}][{key!r}]")
                texts[f"{name}/{key}"] = json.dumps(value)
    groups = [
        {**hyper_parameters(group), "params": [params[number][0] for number in group["params"]]}
        for group in packed["param_groups"]
    ]
    orders = {name: axes_in_memory(local_tensor(param)) for name, param in params}
    axes = {name: order for name, order in orders.items() if order != sorted(order)}
    return {"optimizer": class_name(optimizer), "param_groups": groups, "axes": axes}


def contents_of_outer(outer: OuterSync) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Returns tensors of a file, and values for the index."""
    state = outer.state_dict()
    del state["skips"]  # every replica continues with the settings of the first one
    tensors = {
        f"{kind}/{name}": local_tensor(value)
        for kind in _OF_OUTER
        for name, value in state.pop(kind).items()
    }
    return tensors, state


def state_for_outer(opened: Opened, index: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the state for `OuterSync.load_state_dict`."""
    file = opened.file(files.OUTER)
    state: dict[str, Any] = {**index["outer"], **{kind: {} for kind in _OF_OUTER}}
    for entry in file.names():
        kind, _, name = entry.partition("/")
        if kind not in _OF_OUTER:
            raise files.broken(opened.folder / files.OUTER, f"has {entry!r}, which is not a state")
        state[kind][name] = file.tensor(entry)
    return state


def state_for_model(
    opened: Opened, index: Mapping[str, Any], names: Names, *, name: str = files.MODEL
) -> dict[str, Any]:
    """Returns the state dict to load; tensors that are still in the file are read when they are
    copied."""
    file, folder = opened.file(name), opened.folder
    tensors = {name: file.tensor(name) for name in file.names()}
    ties = {name: tensors[kept] for name, kept in file.texts().items() if kept in tensors}
    stored = {**ties, **tensors, **index["extra_states"]}
    for name in {**names.state, **stored}:
        require_same(name in stored, folder, f"has no {name!r}, which the model has")
        require_same(name in names.state, folder, f"has {name!r}, which the model does not have")
    for name, value in names.state.items():
        found = stored[name]
        is_tensor = isinstance(found, Tensor)
        if name.endswith(_EXTRA_STATE):
            stored[name] = found.clone() if is_tensor else found
            continue
        is_same = is_tensor and found.shape == value.shape and are_of_one_kind(found, value)
        text = f"has {name!r} {described(found)}, and the model's is {described(value)}"
        require_same(is_same, folder, text)
    present = names.module.state_dict().items()
    return {key: placed_like(value, stored[_plain(key)]) for key, value in present}


def converted(names: Names, state: Mapping[str, Any]) -> list[str]:
    """Returns the tensors of the model that a load converts to another dtype, in words."""
    found = []
    for key, value in state.items():
        present = names.state[_plain(key)]
        are_tensors = isinstance(value, Tensor) and isinstance(present, Tensor)
        if are_tensors and value.dtype != present.dtype and not key.endswith(_EXTRA_STATE):
            found.append(f"{_plain(key)!r} from {value.dtype} to {present.dtype}")
    return found


def are_of_one_kind(saved: Tensor, present: Tensor) -> bool:
    """Returns True if both are real, or complex, or of the same integers: values mean the same."""
    if present.is_floating_point() or present.is_complex():
        is_real = saved.is_floating_point() and present.is_floating_point()
        return is_real or (saved.is_complex() and present.is_complex())
    return saved.dtype == present.dtype


def _part(value: Any) -> Any:
    return local_tensor(value) if isinstance(value, Tensor) else value


def _placed_part(value: Tensor, param: Tensor, what: str) -> Tensor:
    """Returns this rank's part of a state. Raises CheckpointError for a DTensor that is not placed
    like the parameter: a load could not place it."""
    require(
        not distributed([value]) or placement_of(value) == placement_of(param),
        f"{what} is a DTensor of other placements, or of another shape, than the parameter.",
        where="save_checkpoint",
        remedy="Use torch.distributed.checkpoint.",
        error=CheckpointError,
    )
    return local_tensor(value)


@dataclass(frozen=True, slots=True)
class _Stored:
    """One state of a parameter as a file holds it."""

    elements: Tensor
    place: str = ""  # of these elements in the parameter
    axes: list[int] | None = None  # their order in memory, if nothing else in the checkpoint has it


def _stored(value: Tensor, param: Tensor, part: ShardPart | None, *, is_whole: bool) -> _Stored:
    if value.dim() > 0 and part is not None and part.owner is None:
        return _Stored(value, f"[{part.start}:{part.stop}]")
    axes, usual, place = axes_in_memory(value), list(range(value.dim())), ""
    if value.shape == param.shape and not is_whole:
        usual, place = axes_in_memory(param), f"[0:{param.numel()}]"
        value = in_memory_order(value, strides_of_gradient(param))
    return _Stored(value, place, None if axes == usual else axes)


def described(value: object) -> str:
    if isinstance(value, Tensor):
        return f"of {value.dtype} and shape {tuple(value.shape)}"
    return "as a value"


def class_of(optimizer: torch.optim.Optimizer) -> type[torch.optim.Optimizer]:
    """Returns the class that updates the parameters, whole or in shards."""
    found: type[torch.optim.Optimizer] = getattr(optimizer, "optimizer_class", type(optimizer))
    return found


def class_name(optimizer: torch.optim.Optimizer) -> str:
    return class_of(optimizer).__name__


def _plain(key: str) -> str:
    return key.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")


def require_same(holds: bool, folder: Path, has: str) -> None:
    require(
        holds,
        f"the checkpoint {has}.",
        where=str(folder),
        remedy="Build the model as it was when the checkpoint was saved.",
        error=CheckpointError,
    )
