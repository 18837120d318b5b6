"""How many cases of a test `make test` runs."""

from collections.abc import Iterable
from typing import Any

import pytest


def some(cases: Iterable[Any], *, most: int) -> list[Any]:
    """The cases for `parametrize`, of which all but `most`, evenly spread, are `deep`. A tuple has a value for each name."""
    listed = [it if hasattr(it, "marks") else pytest.param(*(it if isinstance(it, tuple) else (it,))) for it in cases]
    kept = {place * len(listed) // most for place in range(most)}
    return [it if place in kept else _deep(it) for place, it in enumerate(listed)]


def _deep(case: Any) -> Any:
    return pytest.param(*case.values, marks=(*case.marks, pytest.mark.deep), id=case.id)
