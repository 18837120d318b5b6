"""How many cases of a test `make test` runs."""

from collections.abc import Iterable
from typing import Any

import pytest


def some(cases: Iterable[Any], *, most: int) -> list[Any]:
    """The cases for `parametrize`, of which all but `most`, evenly spread, are `deep`. A tuple has a value for each name."""
    listed = list(cases)
    kept = {place * len(listed) // most for place in range(most)}
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=() if place in kept else pytest.mark.deep)
        for place, case in enumerate(listed)
    ]
