"""The pace of a thread that writes while steps run.

Reasons: docs/design/checkpoints.md.
"""

import threading
import time

_SHARE = 0.25  # of one processor's time, that the thread uses at most
_LONGEST_REST_S = 0.25  # other ranks wait for progress


class Pace:
    """Makes a thread rest after each part that it writes, until somebody waits for it.

    Rests follow the processor time of a part. A part that waits for the disk uses little, so a slow
    disk is not made slower.
    """

    def __init__(self) -> None:
        self._is_awaited = threading.Event()
        self._began_s = self._used_s = 0.0  # of the part: the time, and the thread's processor time

    def hurry(self) -> None:
        """Ends the rest under way, and later ones. Called in any thread."""
        self._is_awaited.set()

    def begin(self) -> None:
        """Called in the thread before a part."""
        self._began_s = time.monotonic()
        self._used_s = time.thread_time()

    def rest(self) -> None:
        """Called in the thread after a part; begins the next one."""
        used_s = time.thread_time() - self._used_s
        passed_s = time.monotonic() - self._began_s
        rest_s = min(used_s / _SHARE - passed_s, _LONGEST_REST_S)
        # A process ends after its threads: when the main thread has ended, the process waits.
        if rest_s > 0 and threading.main_thread().is_alive():
            self._is_awaited.wait(rest_s)
        self.begin()
