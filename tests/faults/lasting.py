"""A test that lasts, and is not collected: test_interrupted.py runs and kills it."""

from faults.places import PLACES
from support.faults import outcomes


def test_with_a_rank_that_is_stopped() -> None:
    outcomes(PLACES["in data"].fault("stopped", 2))
