"""One load: ranks read everything into new memory, and put it in place when all have read."""

from __future__ import annotations

import json
import warnings
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from reprlib import repr as brief
from typing import Any

from torch import nn
from torch.optim import Optimizer

from undertow.checkpoint import contents, files, states
from undertow.checkpoint.opened import Opened
from undertow.checkpoint.ranks import CheckpointRanks, require_same_axes
from undertow.checkpoint.replicated import Replicated
from undertow.errors import CheckpointError, listed, require
from undertow.optim.sharded_optimizer import ShardedOptimizer
from undertow.outer.outer_sync import outer_of
from undertow.ranks.answers import named


class Loading:
    """A load of all ranks from `folder`. Making one is a collective call. Then ranks call:

    read_shares ──> gather ──> read ──> put
    """

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
        # of the folder of this rank's place; `read_shares` makes them
        self._opened: Opened
        self._replicated: Replicated
        self._of_model: dict[str, Any] = {}
        self._of_optimizers: list[dict[str, Any]] = []
        self._of_outer: dict[str, Any] = {}
        self._rounded: list[str] = []  # states of optimizers, in words

    def read_shares(self) -> str:
        """Reads this rank's share of the tensors that every rank at its place needs. Returns which
        save this rank has found, and a text that is the same on ranks of a place that load the
        same, as JSON."""
        self._open()
        return json.dumps([self._of_all["save"], self._of_all["saved_ns"], self._read_shares()])

    def _read_shares(self) -> str:
        index = self.index
        num_saved = len(index["optimizers"])
        require(
            len(self._optimizers) in (0, num_saved),
            f"optimizers in the checkpoint: {num_saved}; given: {len(self._optimizers)}.",
            where=str(self._folder),
            remedy="Give all of them, in the order of the save, or load the model alone: "
            "load_checkpoint(path, model).",
            error=CheckpointError,
        )
        if not self._ranks.gathers_at_place:
            return ""  # a message would bring the bytes of all places to each rank
        opened, shared = self._opened, self._replicated
        if self._has_replicas:  # each has its own model, and state of the optimizer
            shared.add(files.OUTER, opened.file(files.OUTER).names())
            return shared.read()
        contents.state_for_model(opened, index, self._names)  # another model's is not even read
        shared.add(files.MODEL, opened.file(files.MODEL).names())
        plain = [each for each in self._optimizers if not isinstance(each, ShardedOptimizer)]
        params = {name for each in plain for name in self._names.params_of(each)}
        for file_name, names in states.tensors_of(opened, index, params):
            shared.add(file_name, names)
        return shared.read()

    def gather(self, of_ranks: Sequence[str]) -> None:
        """Gathers the shares, a collective call; `of_ranks` are the texts of `read_shares`.

        If ranks load different things, each reads for itself. Raises CheckpointError, on every
        rank, if they have found different saves.
        """
        saves: defaultdict[tuple[int, str], list[int]] = defaultdict(list)
        texts: list[str] = []
        for rank, (token, saved_ns, text) in enumerate(map(json.loads, of_ranks)):
            saves[saved_ns, token].append(rank)
            texts.append(text)
        if len(saves) > 1:
            raise _other_saves(saves, self._folder)
        at_place = [texts[rank] for rank in self._ranks.own]
        if len(at_place) > 1 and at_place[0] and len({*at_place}) == 1:
            self._replicated.gather()

    def read(self) -> None:
        """Reads and compares; raises CheckpointError before anything is changed."""
        index, names, opened = self.index, self._names, self._opened
        name, replica = files.MODEL, 0
        if self._outer is not None and self._has_replicas:
            replica = self._outer.replica % index["num_replicas"]
            name = files.replica_file(replica)
            self._of_outer = contents.state_for_outer(opened, index)
        self._of_model = contents.state_for_model(opened, index, names, name=name)
        for number, each in enumerate(self._optimizers):
            state, rounded = states.state_for_optimizer(
                opened, index, names, each, self._parts[number], number=number, replica=replica
            )
            self._of_optimizers.append(state)
            self._rounded += rounded
        self._require_whole()

    @property
    def _has_replicas(self) -> bool:
        """True if each replica has its own state in the checkpoint, and loads it."""
        return self._outer is not None and "outer" in self.index

    def _open(self) -> None:
        """Reads the index, and finds the folder of this rank's files: on a mesh that of its
        place."""
        folder, place = self._folder, self._ranks.place
        index = self.index = self._of_all = files.read_index(folder)
        self.extra = index["extra"]
        require_same_axes(index.get("axes", ()), place, folder=folder)
        if "places" in index:
            self.index = index["places"][place.number]
            folder = folder / files.at_place(place.number)
            files.require_folder(folder)
        self._opened = Opened(folder)
        self._replicated = Replicated(self._ranks, self._opened)

    def _require_whole(self) -> None:
        """Raises CheckpointError if a file is missing, damaged or too many.

        Some rank looks at each file, even if no rank needs it.
        """
        index, ranks = self.index, self._ranks
        for number, (name, entries) in enumerate(index["files"].items()):
            if number % len(ranks.own) == ranks.rank_at_place and name not in self._opened:
                # Not with the files that stay open: there may be very many.
                states.require_listed(Opened(self._opened.folder), name, entries)
        if ranks.rank == 0:
            files.require_no_others(self._folder, self._of_all)
        if "outer" in index:
            if ranks.is_first:
                self._require_files_of_outer()
            replicas = range(ranks.rank_at_place, index["num_replicas"], len(ranks.own))
            for name in map(files.replica_file, replicas):
                self._opened.file(name)

    def _require_files_of_outer(self) -> None:
        """Compares files of outer synchronization whose values no rank loads."""
        if self._has_replicas:
            contents.state_for_model(self._opened, self.index, self._names)
        else:
            contents.state_for_outer(self._opened, self.index)

    def put(self) -> None:
        """Puts everything in place."""
        of_other_dtypes = contents.converted(self._names, self._of_model) + self._rounded
        # The model comes first: an optimizer derives missing fp32 values from 16-bit parameters.
        self._names.module.load_state_dict(self._of_model)
        for each, state in zip(self._optimizers, self._of_optimizers, strict=True):
            each.load_state_dict(state)
        if self._outer is not None and self._of_outer:
            self._outer.load_state_dict(self._of_outer)
        if of_other_dtypes and self._ranks.rank == 0:
            warnings.warn(
                "the checkpoint has other dtypes than the model or its optimizer: "
                f"{listed(of_other_dtypes)}.\n"
                f"  {self._folder}\n"
                "  Values are converted. Make the model and the optimizer as they were saved to "
                "keep all of their bits.",
                stacklevel=4,
            )


def _other_saves(saves: Mapping[tuple[int, str], Sequence[int]], folder: Path) -> CheckpointError:
    """Returns the error of ranks that have found different saves, by time and token."""
    lines = [f"{named(ranks)}: save {brief(token)}" for (_, token), ranks in sorted(saves.items())]
    return CheckpointError(
        "ranks have found different saves under the same path.",
        where="\n  ".join((str(folder), *lines[:-1], f"{lines[-1]}, the newest")),
        remedy="Every rank must see the same files. Save to a disk that all nodes share, or copy "
        "the newest save to every node.",
    )
