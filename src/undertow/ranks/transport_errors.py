"""What the errors of transports say: gloo, NCCL, and the stores that groups are made through."""

import re

# Timeouts of a collective (also of one whose connections another collective's timeout has closed:
# of several in flight, either may report first), of the stores that groups are made through, and of
# connecting. The kernel's messages about a connection are worded differently.
_TIME_IS_OVER = re.compile(
    r"time(d )?out waiting|operation timed out!|application timeout caused|(wait|socket|connect) "
    r"timeout",
    re.IGNORECASE,
)
# Words of transports (gloo, NCCL, the store) when a connection breaks.
_OF_TRANSPORTS = re.compile(
    r"connection|closed|reset|broken pipe|time.?out|timed "
    r"out|socket|gloo|nccl|peer|abort",
    re.IGNORECASE,
)


def is_timeout(error: BaseException) -> bool:
    """Returns True if a wait has lasted too long, for another rank or for the store."""
    return _TIME_IS_OVER.search(str(error)) is not None


def is_of_transport(error: BaseException) -> bool:
    """Returns True if a connection may have broken; other errors have no reason to wait for."""
    return _OF_TRANSPORTS.search(str(error)) is not None
