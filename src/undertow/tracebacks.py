"""Shows the error that ends a program: without Undertow's own frames, and in torchrun's summary.

An UndertowError explains itself: its reader needs the line of the script, and not the way through
the library. UNDERTOW_TRACEBACK=full shows all frames, for a report of a bug.

torchrun prints a summary after the texts of all ranks. It takes each rank's error from a file, if
the rank has written one, so the cause is the last text on the screen. There it is short: the lines
of the script, without the lines of installed packages.
"""

import contextlib
import json
import os
import sys
import sysconfig
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from undertow.errors import PeerFailed, RankLost, UndertowError

VARIABLE = "UNDERTOW_TRACEBACK"
_FULL = "full"
_HINT = f"Frames of Undertow are left out: {VARIABLE}={_FULL} shows them."
_PACKAGE = __name__.partition(".")[0]
_FOLDER = str(Path(__file__).parent) + os.sep
_INSTALLED = tuple(
    {sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")}
)
_FOR_TORCHRUN = "TORCHELASTIC_ERROR_FILE"
# For processes that the script starts: they inherit the path of the file, and leave it alone.
_FILE_OF = "_UNDERTOW_ERROR_FILE_OF"
# torchrun takes the earliest failure for the cause. For a rank that was killed it takes the time at
# which it looks, every few seconds.
_LATER_S = 3600
_ITS_TIME = "  (The time above is an hour ahead: so torchrun takes the other rank for the cause.)"


def shorten_tracebacks() -> None:
    """Replaces `sys.excepthook` by a function that shortens and tells torchrun, and leaves printing
    to the previous one.

    The first process that calls this with an error file of torchrun's is the rank itself.
    """
    previous = sys.excepthook
    path = os.environ.get(_FOR_TORCHRUN)
    if path:
        _has_claimed(path)

    def shortened(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> object:
        _tell_torchrun(error)
        if isinstance(error, UndertowError) and os.environ.get(VARIABLE) != _FULL:
            trace = _shorten(error, trace)
        return previous(kind, error, trace)

    sys.excepthook = shortened


def _has_claimed(path: str) -> bool:
    """Returns True on the first process that asks for this file, which claims it, and False on
    those that it starts."""
    mine = f"{os.getpid()} {path}"
    owner = os.environ.get(_FILE_OF, "")
    if not owner.endswith(f" {path}"):
        owner = os.environ[_FILE_OF] = mine
    return owner == mine


def _tell_torchrun(error: BaseException) -> None:
    """Writes the error as torch's `record` does, unless that has written it.

    If the cause is on another rank, writes no traceback, and a time one hour ahead: the time of the
    cause is earlier, also if torchrun finds it later.
    """
    path = os.environ.get(_FOR_TORCHRUN)
    if not path or not _has_claimed(path):  # the variable may have come after the import
        return
    if os.path.exists(path) or not isinstance(error, Exception):
        return
    message = f"{type(error).__name__}: {error}"
    if isinstance(error, PeerFailed | RankLost):
        text, later_s = f"{message}\n{_ITS_TIME}", _LATER_S
    else:
        trace = _without(error.__traceback__, _is_of_a_package)
        text = "".join(traceback.format_exception(type(error), error, trace, chain=False)).rstrip()
        later_s = 0
    details = {"py_callstack": text, "timestamp": str(int(time.time()) + later_s)}
    # torchrun may read at any time, and fails if the file is not whole.
    written = Path(f"{path}.{os.getpid()}")
    with contextlib.suppress(OSError):
        try:
            written.write_text(
                json.dumps({"message": {"message": message, "extraInfo": details}}),
                encoding="utf-8",
            )
            written.replace(path)
        finally:
            written.unlink(missing_ok=True)


def _shorten(error: UndertowError, trace: TracebackType | None) -> TracebackType | None:
    """Shortens the traceback of `error` and those of the errors before it; returns its own."""
    seen: list[BaseException] = [error]  # errors may be each other's reason
    before = _before(error)
    while before is not None and all(before is not it for it in seen):
        seen.append(before)
        before.__traceback__ = without_frames_of_undertow(before.__traceback__)
        before = _before(before)
    shortened = without_frames_of_undertow(trace)
    if shortened is not trace:
        error.__traceback__ = shortened
        error.add_note(_HINT)
    return shortened


def _before(error: BaseException) -> BaseException | None:
    """Returns the error that Python prints above this one."""
    context = None if error.__suppress_context__ else error.__context__
    return error.__cause__ or context


def without_frames_of_undertow(trace: TracebackType | None) -> TracebackType | None:
    """Returns a traceback of the frames outside of the package; the same one if it has none inside
    of it, or only such."""
    return _without(trace, _is_ours)


def _without(
    trace: TracebackType | None, is_left_out: Callable[[TracebackType], bool]
) -> TracebackType | None:
    entries = []
    entry = trace
    while entry is not None:
        entries.append(entry)
        entry = entry.tb_next
    kept = [it for it in entries if not is_left_out(it)]
    if not kept or len(kept) == len(entries):
        return trace
    shortened = None
    for entry in reversed(kept):
        shortened = TracebackType(shortened, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return shortened


def _is_ours(entry: TracebackType) -> bool:
    """By the file and by the module: code that `dataclass` generates has no file, and the module
    that `undertow run` starts in each process is called `sitecustomize`."""
    module = str(entry.tb_frame.f_globals.get("__name__"))
    is_inside = entry.tb_frame.f_code.co_filename.startswith(_FOLDER)
    return is_inside or module.partition(".")[0] == _PACKAGE


def _is_of_a_package(entry: TracebackType) -> bool:
    """True for Undertow, other installed packages and Python's own library."""
    path = entry.tb_frame.f_code.co_filename
    return _is_ours(entry) or path.startswith((*_INSTALLED, "<frozen "))
