"""More ranks than other tests have: ten steps of every strategy and format; by hand with still more (`support/many.py`)."""

import pytest

from support.many import WAYS, train
from support.ranks import in_ranks


@pytest.mark.slow
@in_ranks(16, is_fresh=True, timeout_s=300.0)
def test_sixteen_ranks_train_as_the_reference_does() -> None:
    for name in WAYS:
        train(name)


# A number of ranks that is prime: no part is equal, and no mesh has rows.
@pytest.mark.slow
@in_ranks(13, is_fresh=True, timeout_s=300.0)
def test_a_prime_number_of_ranks_trains_as_the_reference_does() -> None:
    for name in WAYS:
        if "hybrid" not in name:
            train(name)
