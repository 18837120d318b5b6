"""One save: the files that this rank writes, and how all ranks complete the folder.

Reasons: docs/design/checkpoints.md.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import secrets
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from undertow.checkpoint import contents, files, history
from undertow.checkpoint.background import LAST, BackgroundSave, Task
from undertow.checkpoint.copies import Copies, memory_for
from undertow.checkpoint.ranks import CheckpointRanks
from undertow.checkpoint.statuses import Statuses
from undertow.checkpoint.tensors import require_stored
from undertow.engine.step_settings import settings_differ, settings_of, text_of
from undertow.optim.sharded_optimizer import ShardedOptimizer
from undertow.outer.outer_sync import outer_of
from undertow.ranks import faults
from undertow.ranks.answers import Alike, alike
from undertow.torch_private import private, tables


class Saving:
    """A save of all ranks. They call its methods in this order:

    prepare ──> write | write_in_background
    """

    def __init__(
        self,
        ranks: CheckpointRanks,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        *,
        keep: int | None,
    ) -> None:
        self._ranks, self._model, self._optimizers, self._keep = ranks, model, optimizers, keep
        self._outer = outer_of(model)
        # The ranks at this place that have each replica, as positions in `ranks.own`. Without outer
        # synchronization there is one replica.
        self._of_replicas: list[list[int]] = []
        self._names: contents.Names
        self._of_model: contents.Contents = ({}, {})
        self._of_state: contents.Contents = ({}, {})  # of the optimizers
        self._of_outer: dict[str, Tensor] = {}
        self._index: dict[str, Any] = {}
        self._own: list[str] = []  # the entries of the optimizers' state that this rank may write
        self._entries: dict[int, list[str]] = {}  # of the optimizers' files, by rank
        self._token = self._text = ""  # of this save, and of its index

    def prepare(self, extra: object) -> Path:
        """Waits for the save in the background before, and returns the new folder.

        Raises the same error on every rank.
        """

        def begin() -> None:
            self._ranks.settle_background()
            self._collect_model(extra)

        outer = self._outer
        if outer is not None:
            # Its state is a collective call on a mesh: all ranks enter it, or none.
            self._ranks.agree(begin)

        def told() -> str:
            if outer is None:
                begin()
            self._collect_state()
            replica = 0 if outer is None else outer.replica
            self._own = self._own_entries()
            # A single writer needs no others, and each row would be as long as its own.
            own = self._own if self._is_sharded or outer is not None else []
            digest = hashlib.sha256(self._settings().encode()).hexdigest()
            return json.dumps([digest, secrets.token_hex(8), replica, own])

        # In one message, because steps wait for it.
        of_ranks = list(map(json.loads, self._ranks.texts_of(told)))
        digests, tokens, replicas, told_entries = zip(*of_ranks, strict=True)
        entries = list(told_entries)
        entries[self._ranks.rank] = self._own
        self._require_same_settings(digests, replicas)
        self._token = tokens[0]
        self._of_replicas = _by_replica([replicas[rank] for rank in self._ranks.own])
        self._keep_what_this_rank_stores(entries)
        self._share_indexes()
        return self._ranks.agree_on_first(self._open_folder)

    def _settings(self) -> str:
        names_of = {
            id(param): name
            for name, param in tables.named_parameters(private.unwrapped(self._model))
        }
        of_each = [settings_of(each, names_of, names_of) for each in self._optimizers]
        return text_of(tuple(chain.from_iterable(of_each)))

    def _require_same_settings(self, digests: Sequence[str], replicas: Sequence[int]) -> None:
        """Raises PlanMismatch if the settings of a replica's ranks have different digests.

        Replicas may differ, because their scalers skip different steps.
        """
        of_replicas: dict[int, dict[int, str]] = defaultdict(dict)
        for rank, (replica, digest) in enumerate(zip(replicas, digests, strict=True)):
            of_replicas[replica][rank] = digest
        differing = [found for found in map(alike, of_replicas.values()) if len(found) > 1]
        if not differing:
            return
        found, mine = differing[0], self._settings()
        told = [Alike(one.ranks, self._ranks.from_one(one.ranks[0], mine)) for one in found[:2]]
        others = [Alike(one.ranks, None) for one in found[2:]]
        raise settings_differ([*told, *others], where="save_checkpoint")

    def _collect_model(self, extra: object) -> None:
        """Takes references to the model's tensors, and the values that the caller gives."""
        names = self._names = contents.Names(self._model)
        files.require_json(extra, "extra")
        files.require_json(names.extra_states, "state_dict")
        self._index = {"extra": extra, "extra_states": names.extra_states}
        self._of_model = contents.contents_of_model(names)

    def _collect_state(self) -> None:
        """Takes references to the states of outer synchronization and of the optimizers."""
        if self._outer is not None:
            self._of_outer, self._index["outer"] = contents.contents_of_outer(self._outer)
        self._index["optimizers"] = [
            contents.add_contents_of_optimizer(self._names, each, *self._of_state)
            for each in self._optimizers
        ]
        for tensors in (self._of_model[0], self._of_state[0], self._of_outer):
            require_stored(tensors)

    def _own_entries(self) -> list[str]:
        """Returns the entries of the optimizers' state on this rank, if it may write any."""
        tensors, texts = self._of_state
        if self._outer is None:
            is_first = self._ranks.is_first
        else:
            is_first = self._outer.all_ranks.rank == self._outer.places[self._outer.replica][0]
        return [*tensors, *texts] if is_first or self._is_sharded else []

    @property
    def _is_sharded(self) -> bool:
        return any(isinstance(each, ShardedOptimizer) for each in self._optimizers)

    def _keep_what_this_rank_stores(self, of_ranks: Sequence[list[str]]) -> None:
        tensors, texts = self._of_state
        of_place = [of_ranks[rank] for rank in self._ranks.own]
        writers = self._of_replicas
        if not self._is_sharded:
            most = 1 if self._optimizers else 0
            writers = [of_replica[:most] for of_replica in writers]
        self._entries = _without_repeats(of_place, writers)
        for entry in {*tensors, *texts} - {*self._entries.get(self._ranks.rank_at_place, ())}:
            tensors.pop(entry, None)
            texts.pop(entry, None)

        self._index["files"] = {
            files.optimizer_file(rank): entries for rank, entries in self._entries.items()
        }
        if self._outer is not None:
            self._index |= {"writers": writers, "num_replicas": len(writers)}

    def _share_indexes(self) -> None:
        """Brings the indexes of all places of a mesh into one."""
        ranks = self._ranks
        if not ranks.place.sizes:
            return
        extra = self._index.pop("extra")
        # A setting of an optimizer that JSON cannot store may be on some ranks only.
        text = ranks.agree(lambda: files.json_text(self._index) if ranks.is_first else "")
        # A text of each place, not of each rank.
        of_places = [json.loads(ranks.from_one(first, text)) for first, *_ in ranks.of_places]
        self._index = {"extra": extra, "axes": ranks.place.sizes, "places": of_places}

    def _open_folder(self) -> Path:
        """Called on the first rank."""
        saved_ns = history.saved_ns(self._ranks.path, time.time_ns())
        self._text = files.index_text(self._token, saved_ns, self._index)
        return files.folder_for_saving(
            self._ranks.path, num_places=len(self._index.get("places", ()))
        )

    def _each_own_file(self, put: Callable[[str, contents.Contents], object]) -> None:
        """Calls `put` with each file of this rank, while the model has the values to save."""
        rank, outer, put = self._ranks.rank_at_place, self._outer, self._at_place(put)
        with contextlib.nullcontext() if outer is None else outer.synchronized():
            if rank == 0:
                put(files.MODEL, self._of_model)
        if outer is not None and rank == self._of_replicas[outer.replica][0]:
            put(files.replica_file(outer.replica), self._of_model)
        if outer is not None and rank == 0:
            put(files.OUTER, (self._of_outer, {}))
        if rank in self._entries:
            put(files.optimizer_file(rank), self._of_state)

    def _at_place(
        self, put: Callable[[str, contents.Contents], object]
    ) -> Callable[[str, contents.Contents], object]:
        """Returns `put` for files of this rank's place, on a mesh."""
        place = self._ranks.place
        if not place.sizes:
            return put
        return lambda name, of: put(files.at_place(place.number, name), of)

    def write(self, folder: Path) -> None:
        """Writes and completes the checkpoint. Raises the same error on every rank."""

        def put(name: str, of_file: contents.Contents) -> None:
            files.write_tensors(folder / name, *of_file)

        def finish() -> None:
            if self._ranks.rank == 0:
                _finish(self._ranks.path, self._text, self._keep)

        self._ranks.agree(lambda: self._each_own_file(put))
        self._ranks.agree(finish)

    def write_in_background(self, folder: Path) -> BackgroundSave:
        """Copies the files of this rank; a thread writes them."""
        ranks = self._ranks
        statuses = Statuses(folder, self._token, rank=ranks.rank)
        copies = Copies(memory_for(self._model))

        def copy() -> None:
            statuses.begin()
            self._each_own_file(copies.add)

        ranks.agree(copy)
        task = Task(
            path=files.path_of(folder),  # the first rank's, whatever this one's is
            token=self._token,
            rank=ranks.rank,
            num_ranks=ranks.size,
            statuses=statuses,
            # Not a method: the thread needs no model.
            finish=partial(_finish, ranks.path, self._text, self._keep),
            limit_s=ranks.limits.stall_timeout_s,
            is_hopeless=ranks.has_lost_one,
        )
        save = BackgroundSave(task, copies)
        LAST.set(save)
        return save


def _finish(path: Path, index: str, keep: int | None) -> None:
    """Completes the folder, on the first rank."""
    files.put_in_place(path, index)
    if keep is None:
        return
    try:
        history.remove_older(path, keep)
    except Exception as error:  # the checkpoint is saved, whatever is left next to it
        faults.tell(
            f"the checkpoint of {path} is saved, but older ones could not be removed.\n"
            f"  {type(error).__name__}: {error}\n"
            f"  Remove them yourself; the next save with keep={keep} tries it again."
        )


def _without_repeats(
    of_ranks: Sequence[list[str]], writers: Sequence[Sequence[int]]
) -> dict[int, list[str]]:
    """Returns the entries that each writer stores: if several ranks of a replica have an entry (a
    scalar, a replica of a mesh), the first of them writes it."""
    found: dict[int, list[str]] = {}
    for of_replica in writers:
        earlier: set[str] = set()
        for rank in of_replica:
            found[rank] = [entry for entry in of_ranks[rank] if entry not in earlier]
            earlier.update(found[rank])
    return found


def _by_replica(replicas: Sequence[int]) -> list[list[int]]:
    """Returns the positions of each replica's ranks, by the replicas of all of them."""
    found: list[list[int]] = [[] for _ in range(1 + max(replicas))]
    for position, replica in enumerate(replicas):
        found[replica].append(position)
    return found
