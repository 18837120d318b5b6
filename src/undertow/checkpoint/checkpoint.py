"""Checkpoints of a model and its optimizer, in the format of torch.distributed.checkpoint, for any number of ranks.

Entries are stored under the parameters' names:  model.<name>,  optimizer.state.<name>.<key>,  optimizer.param_groups.<n>.<key>
"""

import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from undertow.checkpoint import files
from undertow.checkpoint.files import Stored, Target
from undertow.checkpoint.metadata import Entry
from undertow.ddp.wrapper import DistributedDataParallel
from undertow.errors import CheckpointError, UndertowError
from undertow.model_sync import settings_of
from undertow.optim.sharded_optimizer import ShardedOptimizer
from undertow.optim.state import MASTER, OF_THE_WHOLE, ShardedState, params_of
from undertow.runtime.comm.group import GroupRef, OwnGroup
from undertow.runtime.execute.agreed_errors import require_same_settings, text_of
from undertow.runtime.execute.hooks import earlier_watchers
from undertow.runtime.peers.waiting import over_users
from undertow.runtime.torch_private import checkpoint as private_checkpoint
from undertow.runtime.torch_private import private, tables

_Result = TypeVar("_Result")
_MODEL, _OPTIMIZER, _STATE, _GROUPS = "model", "optimizer", "state", "param_groups"


def save_checkpoint(
    path: str | PathLike[str], model: nn.Module, optimizer: torch.optim.Optimizer | None = None, *, extra: Any = None
) -> None:
    """Saves the model and the optimizer in the folder `path`; a collective call.

    Each rank writes its part. An earlier checkpoint at `path` is replaced only after the new one is
    complete.

    All ranks that synchronize the model must call it; this includes a bare model under `attach`.
    Groups of ranks that train different models save to different paths. If nothing synchronizes the
    model, or only a group of one rank, or several different groups, the ranks of the default group
    must call it.

    Args:
        path: A folder that all ranks can see.
        model: The model: wrapped, bare, or synchronized by `attach`.
        optimizer: A ShardedOptimizer or a plain optimizer; None saves the model only.
        extra: Any JSON value, such as counters or a scheduler's state. The first rank's is stored.

    Raises:
        CheckpointError: On every rank, if saving fails on one.
        PlanMismatch: On every rank, if the ranks' optimizers have different settings.
    """
    target, ranks = Path(path), _Ranks.meet(model, optimizer, to="save a checkpoint")
    settings = () if optimizer is None else settings_of(optimizer, set(map(id, params_of(optimizer))))
    require_same_settings(ranks._from_all(text_of(settings)), where="save_checkpoint")
    cls = None if optimizer is None else _class_of(optimizer).__name__
    header = ranks.agree(lambda: files.header_text(optimizer=cls, extra=extra))
    state = ranks.agree(lambda: _state_of(_Names(model), optimizer, is_first=ranks.is_first))
    folder = ranks.agree_on_first(lambda: files.folder_for_saving(target, header=header))
    try:  # torch agrees on errors across ranks itself
        with warnings.catch_warnings(), over_users(ranks.group):
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            private_checkpoint.save_checkpoint(state, folder, ranks.group)
    except (UndertowError, KeyboardInterrupt):
        raise
    except BaseException as error:  # torch's CheckpointException is not a subclass of Exception
        raise private.first_failure(error, CheckpointError) or _failed(f"save {target}", error) from error
    ranks.agree_on_first(lambda: files.put_in_place(target))


def has_checkpoint(path: str | PathLike[str]) -> bool:
    """Returns True if `load_checkpoint` has something to load; looks at files and never communicates.

    A save that was interrupted counts if it left a complete checkpoint. A damaged checkpoint counts
    too; loading it raises.

    Args:
        path: The folder of the checkpoint.
    """
    return files.found_at(Path(path)) is not None


def load_checkpoint(path: str | PathLike[str], model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Any:
    """Loads a checkpoint of `save_checkpoint`, written by any number of ranks.

    A collective call of the same ranks as for `save_checkpoint`. It reads no file outside of the
    folder and unpickles only tensors and plain values.

    Args:
        path: The folder of the checkpoint.
        model: The model to load into.
        optimizer: The optimizer to load into; None loads the model only.

    Returns:
        The `extra` of the checkpoint.

    Raises:
        CheckpointError: The same on every rank, if a file is missing, truncated or foreign, or if
            the model or the optimizer does not match the checkpoint. Nothing is changed then.
    """
    target, ranks = Path(path), _Ranks.meet(model, optimizer, to="load a checkpoint")
    folder = ranks.agree_on_first(lambda: files.folder_for_loading(target))
    stored = ranks.agree(lambda: files.read_stored(folder))
    names = _Names(model)
    room = ranks.agree(
        lambda: _room_for_model(stored, names) | ({} if optimizer is None else _room_for_optimizer(stored, names, optimizer))
    )
    found = ranks.agree(lambda: _read(stored, room))
    of_optimizer = ranks.agree(lambda: None if optimizer is None else _for_optimizer(found[_OPTIMIZER], names, optimizer))

    def put() -> None:
        # Load the model first: an optimizer derives its fp32 values from 16-bit parameters if none were saved.
        names.module.load_state_dict({key: found[_MODEL][_plain(key)] for key in names.keys})
        if optimizer is not None and of_optimizer is not None:
            optimizer.load_state_dict(of_optimizer)

    ranks.agree(put)
    return stored.extra


_HOST = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class _Ranks:
    """The ranks that save and load together; `group` is None for a single process."""

    group: dist.ProcessGroup | None = None
    device: torch.device = _HOST  # of messages: the model's if the backend is NCCL

    @classmethod
    def meet(cls, model: nn.Module, optimizer: torch.optim.Optimizer | None, *, to: str) -> Self:
        """Waits for all ranks, without a time limit for the work that follows: files may be large, and disks slow.

        It first ends a backward that has failed here: other ranks are still in theirs and arrive only after that.
        """
        _require_no_experts(model, optimizer)
        if not dist.is_available() or not dist.is_initialized():
            return cls()
        engines = earlier_watchers(tables.named_parameters(model)).values()
        for engine in engines:
            engine.siblings.wait_for_parameters()
        group = _group_of(model, optimizer, engines) or dist.group.WORLD
        assert group is not None  # torch.distributed is initialized
        device = next((param.device for _, param in tables.named_parameters(model)), _HOST)
        ranks = cls(group, device if GroupRef.of(group).backend_for(device) == "nccl" else _HOST)
        ranks._from_all("", waits_for=f"all ranks, to {to}")
        return ranks

    @property
    def is_first(self) -> bool:
        return self.group is None or dist.get_rank(self.group) == 0

    def agree(self, work: Callable[[], _Result]) -> _Result:
        """Returns the result of `work`; if it fails on a rank, raises the same CheckpointError on every rank."""
        result, text, cause = None, "", None
        try:
            result = work()
        except Exception as error:  # of any kind, because the other ranks are about to wait for this one
            failure = error if isinstance(error, CheckpointError) else _failed("use the files of a checkpoint", error)
            text, cause = str(failure), error
        failed = [text for text in self._from_all(text) if text]
        if failed:
            raise CheckpointError(failed[0]) from cause
        return result  # type: ignore[return-value]  # it has not failed

    def agree_on_first(self, work: Callable[[], Path | None]) -> Path:
        """Runs `work` on the first rank only, and returns its path on every rank."""
        return Path(self._from_all(str(self.agree(work if self.is_first else lambda: None)))[0])

    def _from_all(self, text: str, *, waits_for: str = "") -> list[str]:
        """Returns the texts of all ranks. They are sent as bytes, because unpickling an object would run the sender's code."""
        if self.group is None:
            return [text]
        mine = text.encode()
        sizes = [torch.zeros(1, dtype=torch.int64, device=self.device) for _ in range(dist.get_world_size(self.group))]
        with over_users(self.group, waits_for):
            dist.all_gather(sizes, torch.tensor([len(mine)], device=self.device), group=self.group)
            padded = mine.ljust(max(1, *map(int, sizes)), b"\0")
            sent = torch.frombuffer(bytearray(padded), dtype=torch.uint8).to(self.device)
            rows = [torch.empty_like(sent) for _ in sizes]
            dist.all_gather(rows, sent, group=self.group)
        return [bytes(row.tolist()).decode().rstrip("\0") for row in rows]


def _group_of(model: nn.Module, optimizer: torch.optim.Optimizer | None, engines: Iterable[Any]) -> dist.ProcessGroup | None:
    """Returns the group of the ranks that have this model.

    Returns None, for the default group, if nothing synchronizes the model or different groups synchronize parts of it.
    """
    given = optimizer if isinstance(optimizer, ShardedOptimizer) else model
    if isinstance(given, ShardedOptimizer | nn.parallel.DistributedDataParallel):
        return given.process_group
    # A bare model does not know its group. Two groups whose models have the same names would write one mixed checkpoint.
    watching: list[OwnGroup] = [engine.current_plan.group for engine in engines if engine.current_plan.group.num_ranks > 1]
    if len({own.user.ranks for own in watching}) != 1:
        return None
    return watching[0].user.group or watching[0].process_group


def _require_no_experts(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    is_of_experts = isinstance(optimizer, ShardedOptimizer) and optimizer.has_experts
    if is_of_experts or (isinstance(model, DistributedDataParallel) and model.sync.config.experts):
        raise CheckpointError(
            "this model has experts: ranks have different tensors under one name, and a checkpoint stores one per name.",
            where="save_checkpoint, load_checkpoint",
            remedy="Save model.state_dict() and optimizer.full_state_dict() on each rank, in separate files.",
        )


class _Names:
    """The names of a model's tensors, without the prefixes that wrapping and compiling add."""

    def __init__(self, model: nn.Module) -> None:
        self.module = private.unwrapped(model)
        state = self.module.state_dict()
        self.keys = tuple(state)
        self.values = {_plain(key): value for key, value in state.items()}
        self.of_param = {id(param): _plain(name) for name, param in tables.named_parameters(self.module)}

    def of_group(self, params: Sequence[Tensor]) -> list[str]:
        for index, param in enumerate(params):
            if id(param) not in self.of_param:
                raise CheckpointError(
                    f"parameter {index} of a group of the optimizer, of shape {tuple(param.shape)}, is not one of the model's.",
                    where="the optimizer",
                    remedy="Give the model and the optimizer that belong together.",
                )
        return [self.of_param[id(param)] for param in params]


def _plain(key: str) -> str:
    return key.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")


def _class_of(optimizer: torch.optim.Optimizer) -> type:
    return optimizer.optimizer_class if isinstance(optimizer, ShardedOptimizer) else type(optimizer)


def _failed(doing: str, error: BaseException) -> CheckpointError:
    return CheckpointError(
        f"it was not possible to {doing}.",
        where=f"{type(error).__name__}: {error}",
        remedy="A checkpoint that was there before is still there.",
    )


def _state_of(names: _Names, optimizer: torch.optim.Optimizer | None, *, is_first: bool) -> dict[str, Any]:
    """Returns this rank's entries of the checkpoint."""
    # For tensors that all ranks have, torch picks any rank: that spreads the work for parameters, but buffers may differ.
    params = set(names.of_param.values())
    mine = {name: value for name, value in names.values.items() if is_first or name in params}
    if optimizer is None:
        return {_MODEL: mine}
    packed = optimizer.sharded_state_dict() if isinstance(optimizer, ShardedOptimizer) else optimizer.state_dict()
    of_groups = [names.of_group(group["params"]) for group in optimizer.param_groups]
    name_of = {
        number: name
        for group, of_group in zip(packed[_GROUPS], of_groups, strict=True)
        for number, name in zip(group["params"], of_group, strict=True)
    }
    state = {name_of[number]: of_param for number, of_param in packed[_STATE].items()}
    groups = [{**group, "params": params} for group, params in zip(packed[_GROUPS], of_groups, strict=True)]
    return {_MODEL: mine, _OPTIMIZER: {_STATE: state, _GROUPS: groups}}


def _below(stored: Stored, *begin: str) -> list[tuple[tuple[Any, ...], Entry]]:
    """Returns every entry below `begin` with the rest of its path."""
    return [(entry.path[len(begin) :], entry) for entry in stored.entries.values() if entry.path[: len(begin)] == begin]


def _room_for_model(stored: Stored, names: _Names) -> dict[str, Tensor | None]:
    """Allocates tensors to read the model into, so that it is never left half loaded; None for other values."""
    saved: dict[str, list[Entry]] = defaultdict(list)
    for (of, *_), entry in _below(stored, _MODEL):
        saved[of].append(entry)
    for name in (*names.values, *saved):
        if name not in saved:
            raise _other_model(stored, f"has no {name!r}, which the model has")
        if name not in names.values:
            raise _other_model(stored, f"has {name!r}, which the model does not have")
    for name, value in names.values.items():
        shape, dtype = saved[name][0].shape, saved[name][0].dtype
        if isinstance(value, Tensor) and shape != value.shape:
            text = "no tensor" if shape is None else f"of shape {shape}"
            raise _other_model(stored, f"has {name!r} {text}, and the model's is of shape {tuple(value.shape)}")
        if isinstance(value, Tensor) and dtype is not None and not torch.can_cast(dtype, value.dtype):
            raise _other_model(stored, f"has {name!r} of {dtype}, and the model's is of {value.dtype}")
    return {
        entry.name: torch.empty_like(value, device="cpu") if isinstance(value, Tensor) else _whole(entry)
        for name, value in names.values.items()
        for entry in saved[name]
    }


def _room_for_optimizer(stored: Stored, names: _Names, optimizer: torch.optim.Optimizer) -> dict[str, Tensor | None]:
    """Allocates tensors for this rank's parts of a sharded optimizer, or for the whole state of a plain one."""
    given = _class_of(optimizer).__name__
    if stored.optimizer != given:
        has = "no optimizer" if stored.optimizer is None else f"the state of {stored.optimizer}"
        raise CheckpointError(
            f"the checkpoint holds {has}, and the optimizer is {given}.",
            where=str(stored.folder),
            remedy="Load it into the same kind of optimizer, or load the model alone: load_checkpoint(path, model).",
        )
    params = {
        name: param
        for group in optimizer.param_groups
        for name, param in zip(names.of_group(group["params"]), group["params"], strict=True)
    }
    parts = optimizer.owned_parts() if isinstance(optimizer, ShardedOptimizer) else None
    room: dict[str, Tensor | None] = {entry.name: _whole(entry) for _, entry in _below(stored, _OPTIMIZER, _GROUPS)}
    for (of, *keys), entry in _below(stored, _OPTIMIZER, _STATE):
        if of not in params:
            raise _other_model(stored, f"has a state of {of!r}, which is not one of the optimizer's parameters")
        param, dtype = params[of], entry.dtype
        is_of_elements = entry.shape == param.shape and keys[-1] not in OF_THE_WHOLE
        if (parts is not None and entry.shape and not is_of_elements) or (keys == [MASTER] and entry.shape != param.shape):
            raise _other_model(
                stored,
                f"has {'.'.join(map(str, keys))!r} of shape {entry.shape} in the state of {of!r}, "
                f"and the parameter is of shape {tuple(param.shape)}",
            )
        if parts is not None and dtype is not None and is_of_elements and param in parts:
            pieces = [(part, torch.zeros(part.numel, dtype=dtype, device=param.device)) for part in parts[param]]
            room[entry.name] = ShardedState(param, dtype, pieces)
        elif parts is not None or keys != [MASTER]:  # the fp32 values of a sharded optimizer, which a plain one does not have
            room[entry.name] = _whole(entry)
    return room


def _whole(entry: Entry) -> Tensor | None:
    return None if entry.shape is None else torch.empty(entry.shape, dtype=entry.dtype)


def _targets(tensor: Tensor | None) -> list[Target]:
    if isinstance(tensor, ShardedState):
        return [(box.offsets, values) for box, values in tensor.boxes()]
    return [] if tensor is None else [((0,) * tensor.dim(), tensor)]


def _read(stored: Stored, room: Mapping[str, Tensor | None]) -> dict[str, Any]:
    """Reads the requested entries and restores their nesting: torch numbers the items of lists, and nothing else."""
    values = files.read_entries(stored.folder, stored.entries, {name: _targets(tensor) for name, tensor in room.items()})
    found: dict[str | int, Any] = {_MODEL: {}, _OPTIMIZER: {_STATE: {}, _GROUPS: {}}}
    for name, tensor in room.items():
        *path, last = stored.entries[name].path
        place = found
        for step in path:
            place = place.setdefault(step, {})
        place[last] = values.get(name, tensor)
    return _with_lists(found)  # type: ignore[no-any-return]  # the top level has string keys


def _with_lists(found: Any) -> Any:
    if not isinstance(found, dict):
        return found
    parts = {step: _with_lists(part) for step, part in found.items()}
    is_list = bool(parts) and all(isinstance(step, int) for step in parts)
    return [parts[number] for number in range(len(parts))] if is_list else parts


def _for_optimizer(found: Mapping[str, Any], names: _Names, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Returns a state dict with the parameters in this optimizer's order, matched by name."""
    groups, saved = [], list(found[_GROUPS])
    saved_group_of = {name: group for group in saved for name in group["params"]}
    for number, group in enumerate(optimizer.param_groups):
        params = names.of_group(group["params"])
        same = saved_group_of.get(params[0]) if params else saved[number] if number < len(saved) else None
        other = next((name for name in params if same is None or saved_group_of.get(name) is not same), None)
        if other is not None or same is None or len(saved) != len(optimizer.param_groups):
            raise CheckpointError(
                f"the checkpoint's {len(saved)} parameter groups differ from the optimizer's {len(optimizer.param_groups)}.",
                where=f"group {number}" + (f", parameter {other!r}" if other is not None else ""),
                remedy="Make the optimizer with the same parameter groups as the saved one.",
            )
        groups.append({**same, "params": params})
    return {_STATE: found[_STATE], _GROUPS: groups}


def _other_model(stored: Stored, how: str) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint {how}.", where=str(stored.folder), remedy="Build the model as it was when the checkpoint was saved."
    )
