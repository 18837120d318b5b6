"""Saves in the background: a thread writes copies of this rank's tensors while training continues.

Threads of ranks use no process group. They tell each other by files in the folder (`Statuses`).

Reasons: docs/design/checkpoints.md.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from undertow.checkpoint import files
from undertow.checkpoint.copies import Copies
from undertow.checkpoint.statuses import Statuses
from undertow.errors import CheckpointError
from undertow.ranks import faults

_LOOK_S = (0.005, 0.25)  # between two looks at the other ranks' files: the first, and the longest
_GRACE_S = 5.0  # for the other ranks, when one of them is known to be gone
_MOST_STILL_S = 300.0  # without progress of any rank, for threads that wait for other ranks
_NICER = 15  # of Linux's 40 degrees; a degree is a fourth more time of a processor
_RENAME_S = 1.0  # for rank 0, to give a complete folder its name
_ENDS_LATER = (
    "Training may continue. If the disk is only slow, wait again. If not, look for the reason "
    "there, and start again from the previous checkpoint."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """The facts of a background save that a rank needs."""

    path: Path
    token: str  # tells it from all other saves
    rank: int
    num_ranks: int
    statuses: Statuses
    finish: Callable[[], object]  # completes the checkpoint, on rank 0
    limit_s: float  # without progress, after which it counts as hanging
    is_hopeless: Callable[[], bool]  # another rank is gone


class BackgroundSave:
    """A save that a thread writes: `save_checkpoint(..., background=True)` returns it.

    The folder has the new checkpoint when the save is done, and the one before until then. The
    process does not end before the thread does.

    Args:
        task: The work of the thread.
        copies: The copies of this rank's files.
    """

    def __init__(self, task: Task, copies: Copies) -> None:
        self.path = task.path
        self._task, self._copies = task, copies
        self._names = tuple(copies.files)
        self._process = os.getpid()
        self._does = "begins"
        self._progress_s = time.monotonic()
        self._num_bytes = 0  # that are on the disk
        self._error: str | None = None  # None: not known yet; else the text, empty after success
        self._is_told = False  # `wait` has raised the error
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="undertow-save")
        self._thread.start()

    @property
    def is_done(self) -> bool:
        """True when the checkpoint is complete on the disk, and when the save has failed."""
        return self._has_ended.is_set()

    def wait(self) -> None:
        """Waits until the checkpoint is complete on the disk. Never communicates: a single rank may
        call it.

        Raises:
            CheckpointError: If the save has failed on any rank, or if nothing has been written for
                `stall_timeout_s`. The checkpoint before is still there.
        """
        error = self.ended()
        if error:
            self._is_told = True
            raise CheckpointError(error)

    def ended(self) -> str:
        """Waits for the end; returns the error, or nothing."""
        while not self._has_ended.wait(_LOOK_S[1]):
            still_s = time.monotonic() - self._progress_s
            if still_s > self._task.limit_s:
                return _text(
                    f"the background save of {self.path} has not ended: nothing was written "
                    f"for {still_s:.0f} s.",
                    where=f"rank {self._task.rank} {self._does}",
                    remedy=_ENDS_LATER,
                )
        self._thread.join()
        return self._error or ""

    def untold(self) -> str:
        """Waits for the end; returns the error if `wait` has not raised it, or nothing.

        While it hangs, no other save may begin.
        """
        error = self.ended()
        return "" if self._is_told and self.is_done else error

    @property
    def is_of_this_process(self) -> bool:
        """False in a child process, which does not have the thread."""
        return self._process == os.getpid()

    def __repr__(self) -> str:
        text = f"{self._does}, {self._num_bytes / 1e6:.1f} MB written"
        if self.is_done:
            text = "failed" if self._error else "complete"
        elif (still_s := time.monotonic() - self._progress_s) > 1:
            text += f", nothing for {still_s:.0f} s"
        return f"<BackgroundSave of {self.path}, rank {self._task.rank}: {text}>"

    # In the thread.

    def _run(self) -> None:
        _yield_the_processor()
        try:
            error = self._saved()
        except BaseException as raised:  # whatever it is: somebody waits for the end
            error = self._described(raised)
        # A user may keep this object for long: it must not hold the model.
        self._copies.end()
        self._task = replace(self._task, finish=_nothing, is_hopeless=_nothing)
        self._error = error
        self._has_ended.set()
        if error and self._task.rank == 0:
            faults.tell(error)

    def _saved(self) -> str:
        """Does the work of this rank; returns the error of any rank, or nothing."""
        error = ""
        is_told = True
        try:
            self._write()
            self._task.statuses.end()
        except Exception as raised:
            error = self._described(raised)
            self._drop()
            is_told = self._tells(error)
        if self._task.rank:
            return self._outcome() if is_told else error
        try:
            error = error or self._of_others() or self._finished()
        except Exception as raised:  # the other ranks wait
            error = self._described(raised)
        if error:
            with suppress(OSError):
                self._task.statuses.fail_all(error)
            self._drop()
        return error

    def _tells(self, error: str) -> bool:
        """Tells the other ranks; returns False if the disk cannot, and the next save does."""
        try:
            self._task.statuses.end(error)
        except OSError:
            faults.tell(error)
            return False
        return True

    def _finished(self) -> str:
        """Completes the checkpoint, on rank 0; returns no error."""
        self._does = "completes the folder"
        self._task.statuses.remove()
        self._task.finish()
        return ""

    def _write(self) -> None:
        for name, (tensors, texts) in self._copies.files.items():
            self._does = f"writes {name}"
            files.write_tensors(self._task.statuses.folder / name, tensors, texts, note=self._note)

    def _note(self, num_bytes: int) -> None:
        self._num_bytes += num_bytes
        self._progress_s = time.monotonic()
        with suppress(OSError):
            self._task.statuses.note_progress()

    def _drop(self) -> None:
        """Removes this rank's files, unless the checkpoint is complete: on a full disk the other
        ranks, and the error, need room."""
        folder = self._task.statuses.folder
        for name in () if files.is_of_save(folder, self._task.token) else self._names:
            with suppress(OSError):
                (folder / name).unlink()

    def _of_others(self) -> str:
        """Waits, on rank 0, for the files of the other ranks; returns the first error."""
        self._does = "waits for the files of the other ranks"

        def look() -> str | None:
            failed = self._task.statuses.texts(range(1, self._task.num_ranks))
            if len(failed) + self._task.statuses.number_written() < self._task.num_ranks:
                return None
            return next((text or self._silent(rank) for rank, text in failed.items()), "")

        return self._looked(look)

    def _outcome(self) -> str:
        """Waits, on another rank than rank 0, until the checkpoint is complete or has failed."""
        self._does = "waits for rank 0, which completes the folder"
        folder, token = self._task.statuses.folder, self._task.token
        complete_s: float | None = None  # since when it is complete under its first name

        def look() -> str | None:
            nonlocal complete_s
            if files.is_of_save(self.path, token):
                return ""
            if files.found_at(self.path) == folder and files.is_of_save(folder, token):
                complete_s = complete_s or time.monotonic()
                # Later than usual: rank 0 could not put it in place, and a load finds it.
                return "" if time.monotonic() - complete_s > _RENAME_S else None
            failed = self._task.statuses.texts([0])
            if not failed:
                return None
            self._drop()
            return failed[0] or self._silent(0)

        return self._looked(look)

    def _looked(self, look: Callable[[], str | None]) -> str:
        """Looks again and again, until there is an answer, or no progress of any rank."""
        pause_s, before = _LOOK_S[0], self._task.statuses.times()
        self._progress_s = time.monotonic()
        while True:
            answer = look()
            if answer is not None:
                return answer
            now = self._task.statuses.times()
            if now != before:
                self._progress_s, before = time.monotonic(), now
            most_s = _GRACE_S if self._task.is_hopeless() else _MOST_STILL_S
            limit_s = min(self._task.limit_s, most_s)
            still_s = time.monotonic() - self._progress_s
            if still_s > limit_s:
                return _text(
                    f"the background save of {self.path} has not ended: no rank has written "
                    f"anything for {still_s:.0f} s.",
                    where=f"rank {self._task.rank} {self._does}",
                    remedy=_ENDS_LATER,
                )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LOOK_S[1])

    def _silent(self, rank: int) -> str:
        return _text(
            f"the background save of {self.path} has failed on rank {rank}.",
            where=f"rank {self._task.rank}",
            remedy="Its log has the reason. An earlier checkpoint is still there.",
        )

    def _described(self, raised: BaseException) -> str:
        if isinstance(raised, CheckpointError):
            return str(raised)
        return _text(
            f"the background save of {self.path} has failed on rank {self._task.rank}.",
            where=f"{type(raised).__name__}: {raised}",
            remedy="An earlier checkpoint is still there.",
        )


def _yield_the_processor() -> None:
    """Lets steps run first: where they need all processors, this thread gets a thirtieth of one."""
    if sys.platform != "linux":  # elsewhere it would be the whole process
        return
    thread = threading.get_native_id()
    with suppress(OSError):
        before = os.getpriority(os.PRIO_PROCESS, thread)
        os.setpriority(os.PRIO_PROCESS, thread, min(before + _NICER, 19))


def _nothing() -> bool:
    return False


def _text(what: str, *, where: str, remedy: str) -> str:
    return str(CheckpointError(what, where=where, remedy=remedy))


class LastSave:
    """The last save in the background of this process: one runs at a time."""

    def __init__(self) -> None:
        self._saves: list[BackgroundSave] = []

    def set(self, save: BackgroundSave) -> None:
        self._saves = [save]

    def wait(self) -> None:
        """Waits for it; its error is still to be told."""
        for save in self._saves:
            if save.is_of_this_process:
                save.ended()

    def settled(self) -> tuple[float, str]:
        """Waits for it. Returns the seconds of the wait, and its error if no `wait` has raised it.

        The error comes once. A save that hangs stays the last one.
        """
        saves = [save for save in self._saves if save.is_of_this_process]
        start_s = time.monotonic()
        error = next((text for text in (save.untold() for save in saves) if text), "")
        waited_s = time.monotonic() - start_s if saves else 0.0
        self._saves = [save for save in saves if not save.is_done]
        return waited_s, error


LAST = LastSave()  # one for the process, as there is one disk
