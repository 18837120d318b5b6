"""Limits on how long ranks wait for each other before they check again, ask, or give up, in
seconds.

They are read at their use, as `patience.ANSWERS_S`, so that tests can shorten them for a whole
process.
"""

_RANKS_PER_ANSWERS = 500  # at 2 ms for a rank to handle a message, on a busy machine

# Checks.
LOOK_S = 0.25  # between two looks: of the guard at its rings, and of a wait at the fault

# Actions of a waiting rank.
ANSWERS_S = 1.0  # for few ranks to report their activity: see `answers_s`
VERDICT_S = 5.0  # at most, from a transport's error until the ring tells the reason
# grace period after another rank ended with an error: this rank may be about to raise the same
ENDS_S = 2.0
GRACE_S = 0.2  # for data of collectives that a rank sent before it ended: it may complete the step

# Connecting and closing.
CONNECT_S = 10.0  # when all ranks are there
PROOF_S = 2.0  # for a connection to send its whole proof, which a rank does at once
GROUP_S = 1800.0  # in a group without a timeout
FLUSH_S = 1.0  # for neighbors to take the last messages
EXIT_S = 1.0  # for a thread to end when another rank is lost and the process ends
LINK_S = 5.0  # for an emulated group to finish its messages in flight when it closes


def answers_s(num_ranks: int) -> float:
    """Returns the time for ranks to report their activity, which goes round their ring."""
    return ANSWERS_S * (1.0 + num_ranks / _RANKS_PER_ANSWERS)
