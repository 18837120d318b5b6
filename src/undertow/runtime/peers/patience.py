"""How long ranks wait for each other before they look again, ask, or give up, in seconds.

Read where they are needed, as `patience.ANSWERS_S`, so that tests can shorten them for a whole process.
"""

from __future__ import annotations

# Two looks.
TICK_S = 2.0  # at most, between two looks at how long this rank has waited
LOOK_S = 0.25  # between two looks, while something is waited for, whether a rank is gone; the second one counts
PROBE_S = 2.0  # between two looks whether a rank that has not come to a meeting is there at all
EXIT_LOOK_S = 0.1  # between two looks, when the process ends, whether another rank is lost

# What a rank that waits does.
WAITS_S = 1.0  # from then on a rank that gathers an optimizer's state may be waiting for this one
ANSWERS_S = 1.0  # that ranks have to say what they are doing
VERDICT_S = 5.0  # from a broken connection until it is known who is gone
ENDS_S = 2.0  # that this rank has to raise the same after another one has ended with an error of ours
GRACE_S = 0.2  # for what a rank has sent before it ended: the step may be complete without it

# Connections that are made and ended.
CONNECT_S = 30.0  # when all ranks are there
GLOO_WAITS_S = 1800.0  # in a group that has no timeout of its own
FLUSH_S = 1.0  # that neighbors have to take our last words
HEARS_S = 2.0  # that a thread has to end that listens to a neighbor
EXIT_S = 1.0  # that a thread has to end when another rank is lost and the process ends
FREES_S = 0.5  # that gloo has to free broken groups when the process ends
LINK_S = 5.0  # that an emulated group which closes waits for what is in flight
