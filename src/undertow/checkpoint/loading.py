"""One load: a rank reads everything into new memory, and puts it in place when all have read."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from undertow.checkpoint import contents, files, states
from undertow.checkpoint.ranks import CheckpointRanks, require_same_axes
from undertow.errors import CheckpointError, require
from undertow.optim.sharded_optimizer import ShardedOptimizer
from undertow.outer.outer_sync import outer_of


class Loading:
    """A load of all ranks from `folder`: `read`, then `put`. Making one is a collective call."""

    def __init__(
        self,
        ranks: CheckpointRanks,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        folder: Path,
    ) -> None:
        self.index: dict[str, Any] = {}  # of this rank's place, on a mesh
        self._of_all: dict[str, Any] = {}  # the whole index
        self._ranks, self._optimizers, self._folder = ranks, optimizers, folder
        self.extra: Any = None  # of the checkpoint
        # A collective call: not where one rank may fail alone.
        self._parts = [
            each.owned_parts() if isinstance(each, ShardedOptimizer) else None
            for each in optimizers
        ]
        self._names = contents.Names(model)
        self._outer = outer_of(model)
        self._of_model: dict[str, Any] = {}
        self._of_optimizers: list[dict[str, Any]] = []
        self._of_outer: dict[str, Any] = {}

    def read(self) -> None:
        """Reads and compares; raises CheckpointError before anything is changed."""
        folder, names, outer = self._open(), self._names, self._outer
        index = self.index
        self._require_whole(folder)
        num_saved = len(index["optimizers"])
        require(
            len(self._optimizers) in (0, num_saved),
            f"the number of optimizers is {len(self._optimizers)}, and {num_saved} in the "
            "checkpoint.",
            where=str(folder),
            remedy="Give all of them, ordered as they were saved, or load the model alone: "
            "load_checkpoint(path, model).",
            error=CheckpointError,
        )
        name, replica = files.MODEL, 0
        if outer is not None and "outer" in index:
            # The model's file is compared too: the checkpoint is whole, or it is refused.
            contents.state_for_model(folder, index, names)
            replica = outer.replica % index["num_replicas"]
            name, self._of_outer = (
                files.replica_file(replica),
                contents.state_for_outer(folder, index),
            )
        self._of_model = contents.state_for_model(folder, index, names, name=name)
        self._of_optimizers = [
            states.state_for_optimizer(
                folder, index, names, each, self._parts[number], number=number, replica=replica
            )
            for number, each in enumerate(self._optimizers)
        ]

    def _open(self) -> Path:
        """Reads the index; returns the folder of this rank's files: on a mesh that of its place."""
        folder, place = self._folder, self._ranks.place
        index = self.index = self._of_all = files.read_index(folder)
        self.extra = index["extra"]
        require_same_axes(index.get("axes", ()), place, folder=folder)
        if "places" not in index:
            return folder
        self.index = index["places"][place.number]
        return folder / files.at_place(place.number)

    def _require_whole(self, folder: Path) -> None:
        """Raises CheckpointError if a file is missing, damaged or too many, whoever needs it.

        Some rank looks at each file.
        """
        index, ranks = self.index, self._ranks
        for number, (name, entries) in enumerate(index["files"].items()):
            if number % len(ranks.own) == ranks.rank_at_place:
                states.open_as_listed(folder, name, entries)
        if ranks.rank == 0:
            files.require_no_others(self._folder, self._of_all)
        if not ranks.is_first:
            return
        if "outer" in index:
            contents.state_for_outer(folder, index)
            for number in range(index["num_replicas"]):
                files.open_tensors(folder / files.replica_file(number))

    def put(self) -> None:
        """Puts everything in place."""
        of_other_dtypes = contents.converted(self._names, self._of_model)
        # The model comes first: an optimizer derives missing fp32 values from 16-bit parameters.
        self._names.module.load_state_dict(self._of_model)
        for each, state in zip(self._optimizers, self._of_optimizers, strict=True):
            each.load_state_dict(state)
        if self._outer is not None and self._of_outer:
            self._outer.load_state_dict(self._of_outer)
        if of_other_dtypes and self._ranks.rank == 0:
            warnings.warn(
                f"the checkpoint has other dtypes than the model: {of_other_dtypes}.\n"
                f"  {self._folder}\n"
                "  Values are converted. Make the model as it was saved to keep all of their bits.",
                stacklevel=4,
            )
