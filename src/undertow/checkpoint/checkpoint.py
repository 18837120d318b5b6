"""Checkpoints of a model and its optimizer, for any number of ranks.

Reasons: docs/design/checkpoints.md.
"""

from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import Any, Literal, TypeAlias, overload

import torch
from torch import nn

from undertow.checkpoint import files, history
from undertow.checkpoint.background import LAST, BackgroundSave
from undertow.checkpoint.loading import Loading
from undertow.checkpoint.ranks import CheckpointRanks
from undertow.checkpoint.saving import Saving
from undertow.errors import require

Optimizers: TypeAlias = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None


@overload
def save_checkpoint(
    path: str | PathLike[str],
    model: nn.Module,
    optimizer: Optimizers = None,
    *,
    extra: Any = None,
    background: Literal[False] = False,
    keep: int | None = None,
) -> None: ...


@overload
def save_checkpoint(
    path: str | PathLike[str],
    model: nn.Module,
    optimizer: Optimizers = None,
    *,
    extra: Any = None,
    background: bool,
    keep: int | None = None,
) -> BackgroundSave | None: ...


def save_checkpoint(
    path: str | PathLike[str],
    model: nn.Module,
    optimizer: Optimizers = None,
    *,
    extra: Any = None,
    background: bool = False,
    keep: int | None = None,
) -> BackgroundSave | None:
    """Saves the model and its optimizers in the folder `path`; a collective call.

        undertow.save_checkpoint("run/step-100", model, optimizer, extra={"step": 100})

    The first rank writes the model and the state of a plain optimizer. Of the state of a sharded
    optimizer, each rank writes its part. An earlier checkpoint at `path` is replaced only after the
    new one is complete. With outer synchronization the model's file has the global parameters, and
    separate files have each replica's own parameters and optimizer state.

    All ranks that synchronize the model must call it; this includes a bare model under `attach`.
    Groups of ranks that train different models save to different paths. If nothing synchronizes the
    model, or only a group of one rank, or several different groups, the ranks of the default group
    must call it.

    With `background=True` it returns when each rank has copied its part, and threads write the
    copies. One save runs at a time: the next call that saves or loads waits for it.

    Args:
        path: A folder that all ranks can see.
        model: The model: wrapped, bare, or synchronized by `attach`.
        optimizer: A ShardedOptimizer or a plain optimizer, or several in a list; None saves the
            model only.
        extra: Any JSON value, such as counters or a scheduler's state. The first rank's is stored.
        background: True lets threads write, and training continue.
        keep: The number of checkpoints to keep in the folder around `path`. After the save, older
            complete ones are removed; None removes none. Use one folder per run.

    Returns:
        With `background=True` the save, to wait for; else None.

    Raises:
        CheckpointError: On every rank, if saving fails on one, if the previous background save has
            failed or hangs, or if the name of `path` ends in ".new".
        PlanMismatch: On every rank, if the ranks' optimizers have different settings.
        ConfigError: If `keep` is not a whole number of at least 1.
    """
    _require_keep(keep)
    optimizers = _listed(optimizer)
    target = Path(path)
    if target.name:  # else it is the working folder, which is refused: it would be replaced
        target = target.absolute()
    ranks = CheckpointRanks.meet(target, model, optimizers, to="save a checkpoint")
    saving = Saving(ranks, model, optimizers, keep=keep)
    folder = saving.prepare(extra)
    if background:
        return saving.write_in_background(folder)
    saving.write(folder)
    return None


def has_checkpoint(path: str | PathLike[str], which: Literal["latest"] | None = None) -> bool:
    """Returns True if `load_checkpoint` has something to load; never communicates.

    Call it on every rank, and `wait()` for a save in the background before. It waits for the one of
    this process, and its error is still raised by the next save or load.

    A save that was interrupted counts if it left a complete checkpoint. A damaged checkpoint counts
    too; loading it raises.

    Args:
        path: The folder of the checkpoint.
        which: "latest" looks for complete checkpoints in the folders in `path`.
    """
    _require_which(which)
    target = Path(path).absolute()
    LAST.wait()
    if which is None:
        return files.found_at(target) is not None
    return history.has_complete(target)


def load_checkpoint(
    path: str | PathLike[str],
    model: nn.Module,
    optimizer: Optimizers = None,
    *,
    which: Literal["latest"] | None = None,
) -> Any:
    """Loads a checkpoint of `save_checkpoint`, written by any number of ranks.

        step = 0
        if undertow.has_checkpoint("run/last"):
            step = undertow.load_checkpoint("run/last", model, optimizer)["step"]

    A collective call of the same ranks as for `save_checkpoint`. It reads no file outside of the
    folder and unpickles nothing. It waits for a save in the background of this process.

    Args:
        path: The folder of the checkpoint.
        model: The model to load into.
        optimizer: The optimizer to load into, or several, ordered as they were saved; None loads
            the model only.
        which: "latest" loads the newest complete checkpoint of the folders in `path`, by the time
            of the save.

    Returns:
        The `extra` of the checkpoint.

    Raises:
        CheckpointError: The same on every rank, if a file is missing, damaged or foreign, or if the
            model or the optimizer does not match the checkpoint. Nothing is changed then.
    """
    _require_which(which)
    target, optimizers = Path(path).absolute(), _listed(optimizer)
    ranks = CheckpointRanks.meet(target, model, optimizers, to="load a checkpoint")
    ranks.agree(ranks.settle_background)

    def find() -> Path:
        return files.folder_for_loading(target if which is None else history.latest_in(target))

    folder = ranks.agree_on_first(find)
    loading = Loading(ranks, model, optimizers, folder)
    loading.gather(ranks.texts_of(loading.read_shares))
    ranks.agree(loading.read)
    ranks.agree(loading.put)
    return loading.extra


def _require_which(which: object) -> None:
    require(
        which in (None, "latest"),
        f"which={which!r} is not known.",
        where="load_checkpoint, has_checkpoint",
        remedy='Give which="latest", or the folder of one checkpoint.',
    )


def _require_keep(keep: object) -> None:
    is_number = isinstance(keep, int) and not isinstance(keep, bool)
    require(
        keep is None or (is_number and keep >= 1),  # type: ignore[operator]  # it is a number
        f"keep={keep!r} is not a number of checkpoints.",
        where="save_checkpoint",
        remedy="Give a whole number of at least 1, or leave it out to remove none.",
    )


def _listed(optimizer: Optimizers) -> list[torch.optim.Optimizer]:
    if optimizer is None:
        return []
    return [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)
