"""The contents of a checkpoint: a model and optimizers.

Files hold tensors, and texts in their metadata. A state of an optimizer is named  <parameter>/<key>
or, if it has elements of the parameter,  <parameter>/<key>[start:stop].  These are positions in the
parameter's memory: the index has the order of the axes there, unless it is row-major. If the axes
of a whole state have another order in memory, it is the text  <parameter>/<key>[axes].  States that
are not tensors are texts, in JSON.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from undertow.buckets.memory import strides_of_gradient
from undertow.checkpoint import files
from undertow.engine.progress import params_of
from undertow.errors import CheckpointError, require
from undertow.foreign import parsed_json
from undertow.optim.inner_optimizer import hyper_parameters
from undertow.optim.sharded_optimizer import ShardedOptimizer
from undertow.optim.state import (
    MASTER,
    OF_EXACT,
    axes_in_memory,
    flattened,
    is_of_the_whole,
    nested,
    room_in_order,
)
from undertow.outer.outer_sync import OuterSync
from undertow.sharded.params import ShardPart, in_memory_order
from undertow.torch_private import private, tables

_ENTRY = re.compile(r"(.*)/([^/\[]+)(?:\[(?:(axes)|([0-9]{1,18}):([0-9]{1,18}))\])?", re.DOTALL)
_EXTRA_STATE = "_extra_state"  # the end of torch's names for the results of get_extra_state()
_OF_OUTER = ("global", "momentum", "mean")  # tensors of OuterSync.state_dict()
Contents = tuple[dict[str, Tensor], dict[str, str]]  # tensors and texts of one file


class Names:
    """The names of a model's tensors, without the prefixes that wrapping and compiling add."""

    def __init__(self, model: nn.Module) -> None:
        self.module = private.unwrapped(model)
        self.state = {_plain(key): value for key, value in self.module.state_dict().items()}
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
        name, param = params[number]
        for key, value in flattened(state).items():
            require(
                isinstance(key, str) and not {*"/["} & {*key},
                f"the state of {name!r} has the key {key!r}, which is not a name.",
                where="save_checkpoint",
                remedy="Save model.state_dict() and optimizer.state_dict() by torch.save().",
                error=CheckpointError,
            )
            if isinstance(value, Tensor):
                is_whole = is_of_the_whole(key, value, param, _class_of(optimizer))
                entry = f"{name}/{key}"
                stored = _stored(value, param, parts.get(param), is_whole=is_whole)
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
    orders = {name: axes_in_memory(param) for name, param in params}
    axes = {name: order for name, order in orders.items() if order != sorted(order)}
    return {"optimizer": _class_name(optimizer), "param_groups": groups, "axes": axes}


def contents_of_outer(outer: OuterSync) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Returns tensors of a file, and values for the index."""
    state = outer.state_dict()
    tensors = {
        f"{kind}/{name}": value for kind in _OF_OUTER for name, value in state.pop(kind).items()
    }
    return tensors, state


def state_for_outer(folder: Path, index: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the state for `OuterSync.load_state_dict`."""
    file = files.open_tensors(folder / files.OUTER)
    state: dict[str, Any] = {**index["outer"], **{kind: {} for kind in _OF_OUTER}}
    for entry in [*file.keys()]:
        kind, _, name = entry.partition("/")
        if kind not in _OF_OUTER:
            raise files.broken(folder / files.OUTER, f"has {entry!r}, which is not a state")
        state[kind][name] = file.get_tensor(entry)
    return state


def state_for_model(
    folder: Path, index: Mapping[str, Any], names: Names, *, name: str = files.MODEL
) -> dict[str, Any]:
    """Returns the state dict to load; tensors are read from the file when they are copied."""
    file = files.open_tensors(folder / name)
    tensors = {name: file.get_tensor(name) for name in [*file.keys()]}
    texts = file.metadata() or {}
    ties = {name: tensors[kept] for name, kept in texts.items() if kept in tensors}
    stored = {**ties, **tensors, **index["extra_states"]}
    for name in {**names.state, **stored}:
        _require_same(name in stored, folder, f"has no {name!r}, which the model has")
        _require_same(name in names.state, folder, f"has {name!r}, which the model does not have")
    for name, value in names.state.items():
        found = stored[name]
        is_tensor = isinstance(found, Tensor)
        if name.endswith(_EXTRA_STATE):
            stored[name] = found.clone() if is_tensor else found
            continue
        is_same = is_tensor and found.shape == value.shape
        text = f"has {name!r} {_described(found)}, and the model's is {_described(value)}"
        _require_same(is_same and torch.can_cast(found.dtype, value.dtype), folder, text)
    return {key: stored[_plain(key)] for key in names.module.state_dict()}


def state_for_optimizer(  # noqa: PLR0913  # of one optimizer of a replica
    folder: Path,
    index: Mapping[str, Any],
    names: Names,
    optimizer: torch.optim.Optimizer,
    parts: Mapping[Tensor, ShardPart] | None,
    *,
    number: int,
    replica: int = 0,
) -> dict[str, Any]:
    """Returns the state dict to load, with this rank's `parts` of a sharded state; None if the
    optimizer is not sharded.

    `number` is its place among the saved optimizers.
    """
    present = index["optimizers"]
    about = present[number]
    saved, given = about["optimizer"], _class_name(optimizer)
    require(
        saved == given,
        f"the checkpoint holds the state of {saved}, and the optimizer is {given}.",
        where=str(folder),
        remedy="Load it into the same kind of optimizer, or load the model alone: "
        "load_checkpoint(path, model).",
        error=CheckpointError,
    )
    params = names.params_of(optimizer)
    numbers: Sequence[int] = range(index["num_files"])
    if "outer" in index:  # each replica has its own state
        writers = index["writers"]
        numbers = writers[replica % len(writers)]
    state: dict[str, dict[str, Any]] = {}
    others = {
        name
        for other in present
        for group in other["param_groups"]
        for name in group["params"]
        if name not in params
    }
    found, orders = _read(folder, numbers)
    for (name, key), value in found.items():
        if name in others:
            continue
        text = f"has a state of {name!r}, which is not one of the optimizer's parameters"
        _require_same(name in params, folder, text)
        param = params[name]
        axes = about["axes"].get(name, list(range(param.dim())))
        part = None if parts is None else parts.get(param)
        if part is not None and part.owner is not None:
            if part.numel < param.numel():  # another rank owns it
                continue
            part = None
        if isinstance(value, _Elements):
            value = value.read(param, axes, part)
        elif part is not None:
            is_scalar = not isinstance(value, Tensor) or value.dim() == 0
            text = f"has {key!r} of {name!r}, but not for each element"
            _require_same(is_scalar and key != MASTER, folder, text)
        if part is None and (name, key) in orders:
            value = _in_order(value, orders[name, key], folder, f"{key!r} of {name!r}")
        if parts is not None or key not in OF_EXACT:  # a plain optimizer has no fp32 values
            state.setdefault(name, {})[key] = value
    state = {name: nested(of_param) for name, of_param in state.items()}
    return {"state": state, "param_groups": _groups(about["param_groups"], names, optimizer)}


@dataclass(frozen=True, slots=True)
class _Elements:
    """The elements of one state of a parameter, in pieces that ranks have written."""

    folder: Path
    what: str  # for errors
    pieces: list[tuple[int, int, Any]]  # start, stop, and a slice of safetensors

    def read(self, param: Tensor, axes: Sequence[int], part: ShardPart | None) -> Tensor:
        """Reads the elements of `part`, or all of them in the parameter's shape.

        `axes` is the order of the axes in the files, the outermost first.
        """
        if part is not None and axes == axes_in_memory(param):
            return self._between(part.start, part.stop)
        outermost_first = self._between(0, param.numel()).view([param.shape[axis] for axis in axes])
        return outermost_first.permute([axes.index(axis) for axis in range(param.dim())])

    def _between(self, start: int, stop: int) -> Tensor:
        """Reads the elements from `start` to `stop` into new memory."""
        found = [self.pieces[0][2][:0]]
        at = start
        for first, last, values in sorted(self.pieces, key=itemgetter(0, 1)):
            if first <= at < min(last, stop):
                found.append(values[at - first : min(last, stop) - first])
                at = min(last, stop)
        elements = torch.cat(found)
        if elements.shape != (stop - start,):
            path = self.folder / "optimizer-*.safetensors"
            raise files.broken(path, f"do not hold every element of {self.what}")
        return elements


_Entries = dict[tuple[str, str], Any]  # by parameter and key


def _read(folder: Path, numbers: Iterable[int]) -> tuple[_Entries, _Entries]:
    """Returns the states, and the orders of axes that they have in memory.

    `_Elements` are read when they are used.
    """
    found: _Entries = {}
    orders: _Entries = {}
    for number in numbers:
        path = files.optimizer_file(folder, number)
        file = files.open_tensors(path)
        texts = file.metadata() or {}
        texts.pop("format", None)
        for entry in (*file.keys(), *texts):
            match = _ENTRY.fullmatch(entry)
            if match is None:
                raise files.broken(path, f"has {entry!r}, which is not a state of a parameter")
            name, key, axes, start, stop = match.groups()
            if axes is not None:
                orders[name, key] = parsed_json(texts.get(entry, "null"))
            elif entry in texts:
                found[name, key] = parsed_json(texts[entry])
            elif start is None:
                found[name, key] = file.get_tensor(entry).clone()
            else:
                what = f"{key!r} of {name!r}"
                elements = found.setdefault((name, key), _Elements(folder, what, []))
                elements.pieces.append((int(start), int(stop), file.get_slice(entry)))
    for name, key in orders.keys() - found.keys():
        path = folder / "optimizer-*.safetensors"
        raise files.broken(path, f"have an order of axes, but no {key!r} of {name!r}")
    return found, orders


def _in_order(value: Any, axes: Any, folder: Path, what: str) -> Tensor:
    """Returns a state with this order of axes in memory, the outermost first."""
    is_list = isinstance(axes, list) and all(type(axis) is int for axis in axes)
    if not is_list or not isinstance(value, Tensor) or sorted(axes) != list(range(value.dim())):
        path = folder / "optimizer-*.safetensors"
        raise files.broken(path, f"do not have the order of axes of {what}")
    return room_in_order(value.shape, axes, value.dtype, value.device).copy_(value)


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


def _groups(
    saved: Sequence[Mapping[str, Any]],
    names: Names,
    optimizer: torch.optim.Optimizer,
) -> list[dict[str, Any]]:
    """Returns the groups of the optimizer with the saved settings."""
    groups = []
    present = optimizer.param_groups
    members = [[names.of_param[id(param)] for param in group["params"]] for group in present]
    require(
        list(map(sorted, members)) == [sorted(group["params"]) for group in saved],
        f"the checkpoint's {len(saved)} parameter groups differ from the optimizer's "
        f"{len(members)}.",
        where="their number, or the parameters of one of them",
        remedy="Make the optimizer with the same parameter groups as the saved one.",
        error=CheckpointError,
    )
    for group, params, settings in zip(present, members, saved, strict=True):
        known = {key: _like(group.get(key), setting) for key, setting in settings.items()}
        groups.append({**group, **known, "params": params})
    return groups


def _like(present: object, setting: Any) -> object:
    """Returns a setting as a tensor or a tuple again, which the index has as a number or a list."""
    if isinstance(present, Tensor):
        return torch.full_like(present, setting)
    return tuple(setting) if isinstance(present, tuple) else setting


def _described(value: object) -> str:
    if isinstance(value, Tensor):
        return f"of {value.dtype} and shape {tuple(value.shape)}"
    return "as a value"


def _class_of(optimizer: torch.optim.Optimizer) -> type[torch.optim.Optimizer]:
    """Returns the class that updates the parameters, whole or in shards."""
    found: type[torch.optim.Optimizer] = getattr(optimizer, "optimizer_class", type(optimizer))
    return found


def _class_name(optimizer: torch.optim.Optimizer) -> str:
    return _class_of(optimizer).__name__


def _plain(key: str) -> str:
    return key.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")


def _require_same(holds: bool, folder: Path, has: str) -> None:
    require(
        holds,
        f"the checkpoint {has}.",
        where=str(folder),
        remedy="Build the model as it was when the checkpoint was saved.",
        error=CheckpointError,
    )
