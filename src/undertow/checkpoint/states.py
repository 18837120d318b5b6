"""Reads the state of an optimizer.

Each rank reads the entries of its part, from the files that have them.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from reprlib import repr as brief
from typing import Any

import torch
from torch import Tensor

from undertow.checkpoint import files
from undertow.checkpoint.contents import (
    ENTRY,
    Names,
    are_of_one_kind,
    class_name,
    class_of,
    described,
    require_same,
)
from undertow.checkpoint.index import is_setting_like
from undertow.checkpoint.opened import Opened
from undertow.errors import CheckpointError, require
from undertow.foreign import parsed_json
from undertow.mesh.local_tensors import local_tensor, placed_like
from undertow.optim.state import MASTER, OF_EXACT, axes_in_memory, nested, room_in_order
from undertow.ranks.exchanges import accumulation_dtype
from undertow.sharded.params import ShardPart
from undertow.torch_private import private


def state_for_optimizer(  # noqa: PLR0913  # of one optimizer of a replica
    opened: Opened,
    index: Mapping[str, Any],
    names: Names,
    optimizer: torch.optim.Optimizer,
    parts: Mapping[Tensor, ShardPart] | None,
    *,
    number: int,
    replica: int = 0,
) -> tuple[dict[str, Any], list[str]]:
    """Returns the state dict to load, and the states in words that lose bits: the optimizer keeps
    them in a narrower dtype.

    It has this rank's `parts` of a sharded state; None if the optimizer is not sharded. `number` is
    its place among the saved optimizers.
    """
    present, folder = index["optimizers"], opened.folder
    about = present[number]
    saved, given = about["optimizer"], class_name(optimizer)
    require(
        saved == given,
        f"the checkpoint holds the state of {saved}, and the optimizer is {given}.",
        where=str(folder),
        remedy="Load it into the same kind of optimizer, or load the model alone: "
        "load_checkpoint(path, model).",
        error=CheckpointError,
    )
    held = names.params_of(optimizer)
    params = {name: local_tensor(param) for name, param in held.items()}
    parts_of = None if parts is None else {name: parts.get(held[name]) for name in held}
    others = {
        name
        for other in present
        for group in other["param_groups"]
        for name in group["params"]
        if name not in params
    }
    needs = _Needs(folder, params, parts_of, others, about["axes"])
    state: dict[str, dict[str, Any]] = {}
    rounded: list[str] = []
    found, orders = _read(opened, entries_by_file(index, replica), needs)
    for (name, key), value in found.items():
        param = params[name]
        part = None if parts_of is None else parts_of[name]
        if part is not None and part.owner is not None:
            part = None  # all of it is this rank's
        if isinstance(value, _Elements):
            value = value.read(param, needs.axes_of(name), part)
            is_torchs = class_of(optimizer).__module__.startswith("torch.optim")
            text = f"has {key!r} of {name!r} {described(value)}, for a parameter of {param.dtype}"
            require_same(not is_torchs or are_of_one_kind(value, param), folder, text)
            if is_torchs and key not in OF_EXACT:
                kept = param.dtype if parts is None else accumulation_dtype(param.dtype)
                # A plain optimizer's state is in the parameter's dtype after torch's own load too.
                is_usual = parts is None and value.dtype == private.gradient_dtype(param)
                if torch.promote_types(value.dtype, kept) != kept and not is_usual:
                    rounded.append(f"{key!r} of {name!r} from {value.dtype} to {kept}")
                value = value.to(kept)
            if parts is None:
                value = placed_like(held[name], value)
        elif part is not None:
            is_scalar = not isinstance(value, Tensor) or value.dim() == 0
            text = f"has {key!r} of {name!r}, but not for each element"
            require_same(is_scalar and key != MASTER, folder, text)
        if part is None and (name, key) in orders:
            value = _in_order(value, orders[name, key], folder, f"{key!r} of {name!r}")
        if parts is not None or key not in OF_EXACT:  # a plain optimizer has no fp32 values
            state.setdefault(name, {})[key] = value
    state = {name: nested(of_param) for name, of_param in state.items()}
    groups = _groups(about["param_groups"], names, optimizer, folder)
    return {"state": state, "param_groups": groups}, rounded


@dataclass(frozen=True, slots=True)
class _Elements:
    """The elements of one state of a parameter, in pieces that ranks have written."""

    folder: Path
    what: str  # for errors
    pieces: list[tuple[int, int, Any]]  # start, stop, and the elements or a slice of safetensors

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
        first, last, values = self.pieces[0]
        is_all = (first, last) == (start, stop) and len(self.pieces) == 1
        if is_all and isinstance(values, Tensor) and values.shape == (stop - start,):
            return values  # gathered: the memory is new already
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


@dataclass(frozen=True, slots=True)
class _Needs:
    """The entries that one rank reads, of all files."""

    folder: Path
    params: Mapping[str, Tensor]
    parts: Mapping[str, ShardPart | None] | None  # None: all of each
    others: Collection[str]  # parameters of other optimizers
    axes: Mapping[str, list[int]]  # orders that are not row-major, as they were saved

    def include(self, name: str, start: int | None, stop: int) -> bool:
        """Returns True for an entry of this rank's state: a range of elements, or another value."""
        if name in self.others:
            return False
        text = f"has a state of {name!r}, which is not one of the optimizer's parameters"
        require_same(name in self.params, self.folder, text)
        param = self.params[name]
        part = None if self.parts is None else self.parts[name]
        if part is None or param.numel() == 0:
            return True
        if part.owner is not None or part.numel == 0:
            return part.numel == param.numel()  # else it is another rank's
        if start is None or self.axes_of(name) != axes_in_memory(param):
            return True
        return start < part.stop and part.start < stop

    def axes_of(self, name: str) -> list[int]:
        """Returns the order of the parameter's axes in the files, the outermost first."""
        dim = self.params[name].dim()
        found = self.axes.get(name, list(range(dim)))
        require_same(len(found) == dim, self.folder, f"has other axes of {name!r}")
        return found

    def of(self, path: Path, entries: Sequence[str]) -> list[re.Match[str]]:
        """Returns the entries of a file that this rank reads."""
        needed = []
        for entry in entries:
            match = ENTRY.fullmatch(entry)
            if match is None:
                raise files.broken(path, f"has {entry!r}, which is not a state of a parameter")
            name, _, _, start, stop = match.groups()
            if self.include(name, None if start is None else int(start), int(stop or 0)):
                needed.append(match)
        return needed


_Entries = dict[tuple[str, str], Any]  # by parameter and key


def entries_by_file(index: Mapping[str, Any], replica: int) -> dict[str, list[str]]:
    """Returns the entries of each file of the optimizer's state; with outer synchronization, of the
    state of one replica."""
    entries: dict[str, list[str]] = index["files"]
    if "outer" not in index:
        return entries
    writers = index["writers"]
    own = map(files.optimizer_file, writers[replica % len(writers)])
    return {name: entries.get(name, []) for name in own}


def require_listed(opened: Opened, name: str, entries: Collection[str]) -> None:
    """Raises CheckpointError unless a file of the optimizer's state has exactly these entries."""
    file = opened.file(name)
    for entry in sorted({*file.names(), *file.texts()} ^ {*entries}):
        how = f"and undertow.json differ: only one of them has {entry!r}"
        raise files.broken(opened.folder / name, how)


def tensors_of(
    opened: Opened, index: Mapping[str, Any], params: Collection[str]
) -> Iterator[tuple[str, list[str]]]:
    """Returns the files with states of these parameters, and the names of their tensors there."""
    for file_name, entries in entries_by_file(index, 0).items():
        matches = [match for match in map(ENTRY.fullmatch, entries) if match is not None]
        listed = {match.group() for match in matches if match[1] in params}
        if listed:
            yield file_name, [name for name in opened.file(file_name).names() if name in listed]


def _read(
    opened: Opened, entries_of: Mapping[str, Sequence[str]], needs: _Needs
) -> tuple[_Entries, _Entries]:
    """Returns the states that this rank needs, and the orders of axes that they have in memory.

    `_Elements` are read when they are used.
    """
    found: _Entries = {}
    orders: _Entries = {}
    folder = opened.folder
    for file_name, entries in entries_of.items():
        needed = needs.of(folder / file_name, entries)
        if not needed:
            continue
        require_listed(opened, file_name, entries)
        file = opened.file(file_name)
        texts = file.texts()
        for match in needed:
            entry = match.group()
            name, key, axes, start, stop = match.groups()
            if axes is not None:
                orders[name, key] = parsed_json(texts.get(entry, "null"))
            elif entry in texts:
                found[name, key] = parsed_json(texts[entry])
            elif start is None:
                found[name, key] = file.tensor(entry).clone()
            else:
                what = f"{key!r} of {name!r}"
                elements = found.setdefault((name, key), _Elements(folder, what, []))
                elements.pieces.append((int(start), int(stop), file.elements(entry)))
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


def _groups(
    saved: Sequence[Mapping[str, Any]],
    names: Names,
    optimizer: torch.optim.Optimizer,
    folder: Path,
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
        for key, setting in settings.items():
            if key != "params" and not is_setting_like(group.get(key), setting, name=key):
                how = f"has {brief(setting)} for {key!r}, and the optimizer {brief(group.get(key))}"
                raise files.broken(folder / files.INDEX, how)
        known = {key: _like(group.get(key), setting) for key, setting in settings.items()}
        groups.append({**group, **known, "params": params})
    return groups


def _like(present: object, setting: Any) -> object:
    """Returns a setting as a tensor or a tuple again, which the index has as a number or a list."""
    if isinstance(present, Tensor):
        return torch.full_like(present, setting)
    return tuple(setting) if isinstance(present, tuple) else setting
