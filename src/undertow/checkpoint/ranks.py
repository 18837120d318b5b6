"""The ranks that save or load a checkpoint together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from undertow.checkpoint.background import LAST
from undertow.config import SyncConfig, refused
from undertow.ddp.wrapper import DistributedDataParallel
from undertow.engine.engine import Engine
from undertow.engine.hooks import earlier_watchers
from undertow.errors import CheckpointError, require
from undertow.mesh.axes import MeshPlace, place_of
from undertow.mesh.local_tensors import distributed
from undertow.optim.sharded_optimizer import ShardedOptimizer
from undertow.outer.outer_sync import outer_of
from undertow.ranks.agreement import bytes_of, gather_bytes
from undertow.ranks.group import GroupRef
from undertow.ranks.transport import OwnGroup
from undertow.ranks.users_groups import all_gather_over, broadcast_over, over_users
from undertow.torch_private import fsdp, tables

_Result = TypeVar("_Result")
_HOST = torch.device("cpu")
_DONE, _FAILED = "+", "-"  # before the text of a rank


@dataclass(frozen=True, slots=True)
class CheckpointRanks:
    """The ranks that save or load together; `group` is None for a single process."""

    to: str  # what they do
    path: Path
    group: dist.ProcessGroup | None = None
    device: torch.device = _HOST  # of messages: the model's, unless the backend takes the host's
    engines: tuple[Engine, ...] = ()  # which synchronize the model
    # beside tensor parallelism: of the parts that this rank has
    place: MeshPlace = field(default_factory=MeshPlace)
    of_places: Sequence[Sequence[int]] = ((0,),)  # the ranks of each place
    axis: OwnGroup | None = None  # the data axis of a mesh, if the model is synchronized over one

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
        _require_unmanaged(model)
        if not dist.is_available() or not dist.is_initialized():
            return cls(to, path)
        engines = earlier_watchers(tables.named_parameters(model)).values()
        for engine in engines:
            engine.siblings.wait_for_parameters()
        axis = _axis_of(model, optimizers, engines)
        group = None if axis is None else axis.everyone.process_group
        group = group or _group_of(model, optimizers, engines) or dist.group.WORLD
        assert group is not None  # torch.distributed is initialized
        device = next((param.device for _, param in tables.named_parameters(model)), _HOST)
        can = GroupRef.of(group).abilities_for(device)
        place = place_of(param for _, param in tables.named_parameters(model))
        to_device = _HOST if can.send_from_host else device
        ranks = cls(to, path, group, to_device, tuple(engines), place, axis=axis)
        told = ranks.from_all(f"{place.number} {place.num_places}", waits_for=f"all ranks, to {to}")
        return replace(ranks, of_places=_shared(told, place))

    @property
    def rank(self) -> int:
        return 0 if self.group is None else dist.get_rank(self.group)

    @property
    def size(self) -> int:
        return 1 if self.group is None else dist.get_world_size(self.group)

    @property
    def own(self) -> Sequence[int]:
        """The ranks at the place of this one: of a mesh, else all."""
        return self.of_places[self.place.number]

    @property
    def rank_at_place(self) -> int:
        return self.own.index(self.rank)

    @property
    def is_first(self) -> bool:
        """True on the first rank of each place."""
        return self.rank == self.own[0]

    @property
    def limits(self) -> SyncConfig:
        """The settings of the model, by default the usual ones."""
        return next((own.limits for own in self._watched), SyncConfig())

    @property
    def _watched(self) -> list[OwnGroup]:
        return [engine.current_plan.group for engine in self.engines]

    def has_lost_one(self) -> bool:
        """Returns True if a rank is known to be gone."""
        return any(own.is_broken for own in self._watched)

    def settle_background(self) -> None:
        """Waits for the save in the background before, on this rank; raises its error."""
        waited_s, error = LAST.settled()
        for engine in self.engines[:1]:
            engine.save_waited_s += waited_s
        if error:
            raise CheckpointError(error)

    def agree(self, work: Callable[[], _Result]) -> _Result:
        """Returns the result of `work`; if it fails on a rank, every rank raises the same error."""
        results: list[_Result] = []

        def told() -> str:
            results.append(work())
            return ""

        self.texts_of(told)
        return results[0]

    def agree_on_first(self, work: Callable[[], Path]) -> Path:
        """Runs `work` on the first rank only, and returns its path on every rank."""
        return Path(self.texts_of(lambda: str(work()) if self.rank == 0 else "")[0])

    def texts_of(self, work: Callable[[], str]) -> list[str]:
        """Returns the text that `work` returns on each rank; if it fails on a rank, every rank
        raises the same error."""
        cause = None
        try:
            told = _DONE + work()
        except Exception as error:  # of any kind: other ranks are about to wait for this one
            cause = error
            failure = CheckpointError(
                f"it was not possible to {self.to} in {self.path}.",
                where=f"{type(error).__name__}: {error}",
                remedy="An earlier checkpoint is still there.",
            )
            told = _FAILED + str(error if isinstance(error, CheckpointError) else failure)
        of_ranks = self.from_all(told)
        failed = [text for text in of_ranks if text.startswith(_FAILED)]
        if failed:
            raise CheckpointError(failed[0].removeprefix(_FAILED)) from cause
        return [text.removeprefix(_DONE) for text in of_ranks]

    @property
    def gathers_at_place(self) -> bool:
        """True if a message reaches the ranks at this place and no others."""
        is_axis = self.axis is not None and list(self.axis.names) == list(self.own)
        return len(self.of_places) == 1 or is_axis

    def gathered(self, mine: Tensor) -> Tensor:
        """Returns the bytes of every rank at this place, as many of each, on the host; if ranks
        `gathers_at_place`.

        [number of ranks, bytes]
        """
        group = self.group
        if len(self.of_places) > 1:
            assert self.axis is not None  # see `gathers_at_place`
            group = self.axis.process_group
        assert group is not None  # there are several ranks
        with over_users(self.group):
            return all_gather_over(mine.to(self.device), group).cpu()

    def from_one(self, rank: int, text: str) -> str:
        """Returns the text of one rank on every rank; texts of other ranks are not sent."""
        if self.group is None:
            return text
        with over_users(self.group):
            broadcast = partial(broadcast_over, group=self.group, source=rank)
            return bytes_of(text.encode(), broadcast, self.device).decode()

    def from_all(self, text: str, *, waits_for: str = "") -> list[str]:
        """Returns the texts of all ranks."""
        if self.group is None:
            return [text]
        with over_users(self.group, waits_for):
            gather = partial(all_gather_over, group=self.group)
            texts = gather_bytes(text.encode(), gather, self.device)
        return [text.decode() for text in texts]


def _axis_of(
    model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], engines: Iterable[Any]
) -> OwnGroup | None:
    """Returns the data axis of a mesh over which this model is synchronized, or None."""
    outer = outer_of(model)
    # A single data-parallel rank has no engine that watches.
    syncs = [each._sync for each in optimizers if isinstance(each, ShardedOptimizer)]
    syncs += [model.sync] if isinstance(model, DistributedDataParallel) else []
    known: list[OwnGroup] = [sync._own.all_ranks for sync in syncs]
    known += [engine.current_plan.group for engine in engines]
    groups = known if outer is None else [outer.all_ranks]
    return next((own for own in groups if own.is_on_mesh), None)


def _group_of(
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    engines: Iterable[Any],
) -> dist.ProcessGroup | None:
    """Returns the group of the ranks that have this model, which is not on a mesh.

    Returns None, for the default group, if nothing synchronizes the model or different groups
    synchronize parts of it.
    """
    outer = outer_of(model)
    if distributed(param for _, param in tables.named_parameters(model)):
        return None
    if outer is not None:
        return outer.all_ranks.user.group or outer.all_ranks.process_group
    sharded = [each for each in optimizers if isinstance(each, ShardedOptimizer)]
    given = sharded[0] if sharded else model
    if isinstance(given, ShardedOptimizer | nn.parallel.DistributedDataParallel):
        return given.process_group
    # A bare model does not know its group. Two groups whose models have the same names would write
    # one mixed checkpoint.
    own_groups: list[OwnGroup] = [engine.current_plan.group for engine in engines]
    watching = [own for own in own_groups if own.num_ranks > 1]
    if len({own.user.ranks for own in watching}) != 1:
        return None
    return watching[0].user.group or watching[0].process_group


def _require_unmanaged(model: nn.Module) -> None:
    for name, part in tables.named_modules(model):
        require(
            not fsdp.is_managed(part),
            f"{f'module {name!r}' if name else 'the model'} is managed by torch's fully_shard or "
            "replicate.",
            where="save_checkpoint, load_checkpoint",
            remedy="Use torch.distributed.checkpoint, whose states have DTensors.",
            error=CheckpointError,
        )


def _shared(told: Sequence[str], place: MeshPlace) -> list[list[int]]:
    """Returns the ranks of each place by what all ranks have told, their number and how many there
    are. Raises CheckpointError, on every rank, unless each place has ranks."""
    of_places: list[list[int]] = [[] for _ in range(place.num_places)]
    numbers = [int(text.split()[0]) for text in told]
    is_whole = len({text.split()[1] for text in told}) == 1
    for rank, number in enumerate(numbers if is_whole else ()):
        of_places[number].append(rank)
    require(
        all(of_places),
        "these ranks do not have all parts of the model, whose parameters are cut over "
        f"{_text(place)}.",
        where=f"ranks at the places {', '.join(map(str, numbers))}",
        remedy='Wrap the model over device_mesh=mesh["dp"] of one mesh, and call this on all ranks '
        "of it.",
        error=CheckpointError,
    )
    return of_places


def _text(place: MeshPlace) -> str:
    return ", ".join(f"{name}={size}" for name, size in place.sizes) or "no axis"


def require_same_axes(saved: Sequence[Sequence[Any]], place: MeshPlace, *, folder: Path) -> None:
    """Raises CheckpointError if a checkpoint is of other sizes of the axes over which parameters
    are cut."""
    then = MeshPlace(tuple((name, size) for name, size in saved))
    require(
        then.sizes == place.sizes,
        f"the checkpoint was saved with parameters cut over {_text(then)}, and the model's are cut "
        f"over {_text(place)}.",
        where=str(folder),
        remedy="Make the mesh with the same sizes of these axes; the number of data-parallel ranks "
        "may be another one. torch.distributed.checkpoint cuts a state in another way.",
        error=CheckpointError,
    )


def _require_no_experts(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    is_of_experts = any(
        isinstance(each, ShardedOptimizer) and each._sync.config.experts for each in optimizers
    )
    if is_of_experts or (isinstance(model, DistributedDataParallel) and model.sync.config.experts):
        raise refused("experts", "checkpoint", where="save_checkpoint, load_checkpoint")
