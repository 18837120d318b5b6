"""Checkpoints of a model and its optimizer, for any number of ranks.

Reasons: docs/design/checkpoints.md.
"""

import contextlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from os import PathLike
from pathlib import Path
from typing import Any, Self, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from undertow.checkpoint import contents, files
from undertow.config import refused
from undertow.ddp.wrapper import DistributedDataParallel
from undertow.engine.hooks import earlier_watchers
from undertow.engine.step_settings import require_same_settings, settings_of, text_of
from undertow.errors import CheckpointError, require
from undertow.optim.sharded_optimizer import ShardedOptimizer
from undertow.outer.outer_sync import OuterSync, outer_of
from undertow.ranks.agreement import gather_bytes
from undertow.ranks.group import GroupRef
from undertow.ranks.guard import over_users
from undertow.ranks.transport import OwnGroup, all_gather_over
from undertow.torch_private import private, tables

_Result = TypeVar("_Result")
Optimizers: TypeAlias = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None


def save_checkpoint(
    path: str | PathLike[str],
    model: nn.Module,
    optimizer: Optimizers = None,
    *,
    extra: Any = None,
) -> None:
    """Saves the model and its optimizers in the folder `path`; a collective call.

        undertow.save_checkpoint("run/step-100", model, optimizer, extra={"step": 100})

    The first rank writes the model and the state of a plain optimizer. Of the state of a sharded
    optimizer, each rank writes its part. An earlier checkpoint at `path` is replaced only after the
    new one is complete. With outer synchronization the model's file has the global parameters, and
    each replica's own ones, and its optimizer's state, are in separate files.

    All ranks that synchronize the model must call it; this includes a bare model under `attach`.
    Groups of ranks that train different models save to different paths. If nothing synchronizes the
    model, or only a group of one rank, or several different groups, the ranks of the default group
    must call it.

    Args:
        path: A folder that all ranks can see.
        model: The model: wrapped, bare, or synchronized by `attach`.
        optimizer: A ShardedOptimizer or a plain optimizer, or several in a list; None saves the
            model only.
        extra: Any JSON value, such as counters or a scheduler's state. The first rank's is stored.

    Raises:
        CheckpointError: On every rank, if saving fails on one.
        PlanMismatch: On every rank, if the ranks' optimizers have different settings.
    """
    target, optimizers = Path(path), _listed(optimizer)
    ranks = _Ranks.meet(target, model, optimizers, to="save a checkpoint")
    names_of = {
        id(param): name for name, param in tables.named_parameters(private.unwrapped(model))
    }
    of_each = [settings_of(each, names_of, names_of) for each in optimizers]
    settings = tuple(chain.from_iterable(of_each))
    require_same_settings(ranks.from_all(text_of(settings)), where="save_checkpoint")
    is_sharded = any(isinstance(each, ShardedOptimizer) for each in optimizers)
    outer = outer_of(model)
    num_files = ranks.size if is_sharded else int(bool(optimizers))
    writers = _writers(outer, num_files, is_sharded=is_sharded)
    of_replica = writers[0 if outer is None else outer.replica]

    def collected() -> tuple[contents.Contents, contents.Contents, dict[str, Tensor], str]:
        names = contents.Names(model)
        files.require_json(extra, "extra")
        files.require_json(names.extra_states, "state_dict")
        index: dict[str, Any] = {"extra": extra, "extra_states": names.extra_states}
        tensors: dict[str, Tensor] = {}
        texts: dict[str, str] = {}
        of_outer: dict[str, Tensor] = {}
        if outer is not None:
            of_outer, about = contents.contents_of_outer(outer)
            index |= {"outer": about, "writers": writers, "num_replicas": len(outer.places)}
        described = [
            contents.add_contents_of_optimizer(names, each, tensors, texts) for each in optimizers
        ]
        index |= {"num_files": num_files, "optimizers": described}
        text = files.index_text(index)
        return contents.contents_of_model(names), (tensors, texts), of_outer, text

    of_model, (tensors, texts), of_outer, index = ranks.agree(collected)
    # If several ranks have an entry (a scalar, a replica of a mesh), the first of them writes it.
    entries = [*tensors, *texts] if is_sharded else []
    of_ranks = ranks.from_all(json.dumps(entries))
    of_earlier = [of_ranks[rank] for rank in of_replica if rank < ranks.rank]
    for entry in chain.from_iterable(map(json.loads, of_earlier)):
        tensors.pop(entry, None)
        texts.pop(entry, None)
    folder = ranks.agree_on_first(lambda: files.folder_for_saving(target))

    def write() -> None:
        with contextlib.nullcontext() if outer is None else outer.synchronized():
            if ranks.rank == 0:
                files.write_tensors(folder / files.MODEL, *of_model)
        if outer is not None and ranks.rank == outer.places[outer.replica][0]:
            files.write_tensors(folder / files.replica_file(outer.replica), *of_model)
        if outer is not None and ranks.rank == 0:
            files.write_tensors(folder / files.OUTER, of_outer, {})
        if ranks.rank in of_replica:
            files.write_tensors(files.optimizer_file(folder, ranks.rank), tensors, texts)

    ranks.agree(write)
    ranks.agree_on_first(lambda: files.put_in_place(target, index))


def has_checkpoint(path: str | PathLike[str]) -> bool:
    """Returns True if `load_checkpoint` has something to load; never communicates.

    A save that was interrupted counts if it left a complete checkpoint. A damaged checkpoint counts
    too; loading it raises.

    Args:
        path: The folder of the checkpoint.
    """
    return files.found_at(Path(path)) is not None


def load_checkpoint(
    path: str | PathLike[str],
    model: nn.Module,
    optimizer: Optimizers = None,
) -> Any:
    """Loads a checkpoint of `save_checkpoint`, written by any number of ranks.

        step = 0
        if undertow.has_checkpoint("run/last"):
            step = undertow.load_checkpoint("run/last", model, optimizer)["step"]

    A collective call of the same ranks as for `save_checkpoint`. It reads no file outside of the
    folder and unpickles nothing.

    Args:
        path: The folder of the checkpoint.
        model: The model to load into.
        optimizer: The optimizer to load into, or several, ordered as they were saved; None loads
            the model only.

    Returns:
        The `extra` of the checkpoint.

    Raises:
        CheckpointError: The same on every rank, if a file is missing, damaged or foreign, or if the
            model or the optimizer does not match the checkpoint. Nothing is changed then.
    """
    target, optimizers = Path(path), _listed(optimizer)
    ranks = _Ranks.meet(target, model, optimizers, to="load a checkpoint")
    folder = ranks.agree_on_first(lambda: files.folder_for_loading(target))
    # A collective call: not where one rank may fail alone.
    parts = [
        each.owned_parts() if isinstance(each, ShardedOptimizer) else None for each in optimizers
    ]
    names = contents.Names(model)
    outer = outer_of(model)

    def read() -> tuple[dict[str, Any], dict[str, Any], list[dict[str, Any]], dict[str, Any]]:
        index = files.read_index(folder)
        num_saved = len(index["optimizers"])
        require(
            len(optimizers) in (0, num_saved),
            f"the number of optimizers is {len(optimizers)}, and {num_saved} in the checkpoint.",
            where=str(folder),
            remedy="Give all of them, ordered as they were saved, or load the model alone: "
            "load_checkpoint(path, model).",
            error=CheckpointError,
        )
        name, of_outer, replica = files.MODEL, {}, 0
        if outer is not None and "outer" in index:
            # A checkpoint is whole, or it is refused, also where another file is loaded instead.
            contents.state_for_model(folder, index, names)
            for number in range(index["num_replicas"] if ranks.rank == 0 else 0):
                files.open_tensors(folder / files.replica_file(number))
            replica = outer.replica % index["num_replicas"]
            name, of_outer = files.replica_file(replica), contents.state_for_outer(folder, index)
        of_model = contents.state_for_model(folder, index, names, name=name)
        of_optimizers = [
            contents.state_for_optimizer(
                folder, index, names, each, parts[number], number=number, replica=replica
            )
            for number, each in enumerate(optimizers)
        ]
        return index, of_model, of_optimizers, of_outer

    index, of_model, of_optimizers, of_outer = ranks.agree(read)

    def put() -> None:
        # The model comes first: an optimizer derives missing fp32 values from 16-bit parameters.
        names.module.load_state_dict(of_model)
        for each, state in zip(optimizers, of_optimizers, strict=True):
            each.load_state_dict(state)
        if outer is not None and of_outer:
            outer.load_state_dict(of_outer)

    ranks.agree(put)
    return index["extra"]


_HOST = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class _Ranks:
    """The ranks that save or load together; `group` is None for a single process."""

    to: str  # what they do
    path: Path
    group: dist.ProcessGroup | None = None
    device: torch.device = _HOST  # of messages: the model's, unless the backend takes the host's

    @classmethod
    def meet(
        cls,
        path: Path,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        *,
        to: str,
    ) -> Self:
        """Waits for all ranks. The work that follows has no time limit: disks may be slow.

        It first ends a backward that has failed here: other ranks are still in theirs and arrive
        only after that.
        """
        _require_no_experts(model, optimizers)
        if not dist.is_available() or not dist.is_initialized():
            return cls(to, path)
        engines = earlier_watchers(tables.named_parameters(model)).values()
        for engine in engines:
            engine.siblings.wait_for_parameters()
        group = _group_of(model, optimizers, engines) or dist.group.WORLD
        assert group is not None  # torch.distributed is initialized
        device = next((param.device for _, param in tables.named_parameters(model)), _HOST)
        can = GroupRef.of(group).abilities_for(device)
        ranks = cls(to, path, group, _HOST if can.send_from_host else device)
        ranks.from_all("", waits_for=f"all ranks, to {to}")
        return ranks

    @property
    def rank(self) -> int:
        return 0 if self.group is None else dist.get_rank(self.group)

    @property
    def size(self) -> int:
        return 1 if self.group is None else dist.get_world_size(self.group)

    def agree(self, work: Callable[[], _Result]) -> _Result:
        """Returns the result of `work`; if it fails on a rank, every rank raises the same error."""
        result = cause = None
        text = ""
        try:
            result = work()
        except Exception as error:  # of any kind: other ranks are about to wait for this one
            cause = error
            failure = CheckpointError(
                f"it was not possible to {self.to} in {self.path}.",
                where=f"{type(error).__name__}: {error}",
                remedy="A checkpoint that was there before is still there.",
            )
            text = str(error if isinstance(error, CheckpointError) else failure)
        failed = [text for text in self.from_all(text) if text]
        if failed:
            raise CheckpointError(failed[0]) from cause
        return result  # type: ignore[return-value]  # it has not failed

    def agree_on_first(self, work: Callable[[], Path | None]) -> Path:
        """Runs `work` on the first rank only, and returns its path on every rank."""
        path = self.agree(lambda: work() if self.rank == 0 else None)
        return Path(self.from_all(str(path))[0])

    def from_all(self, text: str, *, waits_for: str = "") -> list[str]:
        """Returns the texts of all ranks."""
        if self.group is None:
            return [text]
        gather = partial(all_gather_over, group=self.group)
        with over_users(self.group, waits_for):
            texts = gather_bytes(text.encode(), gather, self.device)
        return [text.decode() for text in texts]


def _group_of(
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    engines: Iterable[Any],
) -> dist.ProcessGroup | None:
    """Returns the group of the ranks that have this model.

    Returns None, for the default group, if nothing synchronizes the model or different groups
    synchronize parts of it.
    """
    outer = outer_of(model)
    if outer is not None:
        return outer.all_ranks.user.group or outer.all_ranks.process_group
    sharded = [each for each in optimizers if isinstance(each, ShardedOptimizer)]
    given = sharded[0] if sharded else model
    if isinstance(given, ShardedOptimizer | nn.parallel.DistributedDataParallel):
        return given.process_group
    # A bare model does not know its group. Two groups whose models have the same names would write
    # one mixed checkpoint.
    groups: list[OwnGroup] = [engine.current_plan.group for engine in engines]
    watching = [own for own in groups if own.num_ranks > 1]
    if len({own.user.ranks for own in watching}) != 1:
        return None
    return watching[0].user.group or watching[0].process_group


def _writers(outer: OuterSync | None, num_files: int, *, is_sharded: bool) -> list[list[int]]:
    """Returns the ranks that write the state of the optimizer, by replica.

    Without outer synchronization there is one replica.
    """
    if outer is None or num_files == 0:
        return [list(range(num_files))] * (1 if outer is None else len(outer.places))
    return [row if is_sharded else row[:1] for row in outer.places]


def _listed(optimizer: Optimizers) -> list[torch.optim.Optimizer]:
    if optimizer is None:
        return []
    return [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)


def _require_no_experts(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    is_of_experts = any(
        isinstance(each, ShardedOptimizer) and each._sync.config.experts for each in optimizers
    )
    if is_of_experts or (isinstance(model, DistributedDataParallel) and model.sync.config.experts):
        raise refused("experts", "checkpoint", where="save_checkpoint, load_checkpoint")
