"""How far the ranks are with a save in the background, told by files in its folder.

Reasons: docs/design/checkpoints.md.
"""

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from undertow.checkpoint import files


class Statuses:
    """How far each rank is with a save in the background, as names of files in its folder.

        save-<token>-<rank>.writing ──> .written   its files are on the disk
                                   └──> .failed    with a text; of rank 0: the save has failed

    A rank renames its own file, which needs no room on a full disk. The file's time moves whenever
    a part of the rank's files is on the disk.
    """

    def __init__(self, folder: Path, token: str, *, rank: int) -> None:
        self.folder = folder
        self._token, self._rank = token, rank

    def begin(self) -> None:
        """Creates this rank's file. Raises OSError if the rank does not see the folder, or has no
        right to write there."""
        self._of(self._rank, "writing").touch(exist_ok=False)

    def note_progress(self) -> None:
        os.utime(self._of(self._rank, "writing"))

    def end(self, text: str = "") -> None:
        """Tells that this rank's files are written, or have failed with this text."""
        writing = self._of(self._rank, "writing")
        if text:
            with suppress(OSError):  # such as a full disk: the name tells it
                writing.write_text(text, encoding="utf-8")
        os.rename(writing, self._of(self._rank, "failed" if text else "written"))

    def fail_all(self, text: str) -> None:
        """Called on rank 0 when the save has failed on some rank, or at the end.

        A complete folder stays as it is: with one file more, no load would take it.
        """
        written, failed = self._of(0, "written"), self._of(0, "failed")
        if not failed.exists() and not files.is_complete(self.folder):
            with suppress(OSError):  # such as a full disk: the name tells it
                written.write_text(text, encoding="utf-8")
            os.rename(written, failed)

    def remove(self) -> None:
        """Called on rank 0 after all have written."""
        for file in self._present("*.written"):
            file.unlink()

    def texts(self, ranks: Iterable[int]) -> dict[int, str]:
        """Returns the errors of the ranks that have failed."""
        found = {}
        for rank in ranks:
            with suppress(FileNotFoundError):
                text = self._of(rank, "failed").read_text(encoding="utf-8", errors="replace")
                found[rank] = text
        return found

    def number_written(self) -> int:
        return len(self._present("*.written"))

    def times(self) -> dict[str, int]:
        """Returns the last change of each rank's file; another result is progress."""
        found = {}
        for file in self._present("*"):
            with suppress(FileNotFoundError):  # it has just got its other name
                found[file.name] = file.stat().st_mtime_ns
        return found

    def _present(self, pattern: str) -> list[Path]:
        """Returns the files of this save; none when rank 0 has just renamed the folder."""
        try:
            return list(self.folder.glob(f"save-{self._token}-{pattern}"))
        except FileNotFoundError:
            return []

    def _of(self, rank: int, state: str) -> Path:
        return self.folder / f"save-{self._token}-{rank}.{state}"
