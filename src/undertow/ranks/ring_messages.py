"""The kinds of messages that ranks send each other alongside the collectives.

`watch` and `inquiry` have a table each: who sends a message, when, and what a rank does with it.
"""

from enum import StrEnum


class MessageKind(StrEnum):
    """The `kind` of a message, as it is sent."""

    # to all ranks
    FAILS = "fails"
    LEAVES = "leaves"
    TELLS = "tells"
    ANSWERS = "answers"
    # to one neighbor
    ASKS = "asks"
    DOES = "does"


DIRECTED = (MessageKind.ASKS, MessageKind.DOES)
