"""Fewer items of tests with several parameters: every value of each, not every product.

The id of a parameter may name several values, as "an infinity, zero1" does.
"""

from collections import defaultdict
from collections.abc import Iterable

import pytest


def without_products(items: Iterable[pytest.Item]) -> set[pytest.Item]:
    """Those with which every value of every parameter is there; first those whose values are all new."""
    functions: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        functions[item.nodeid.split("[")[0]].append(item)
    return {item for of_one in functions.values() for item in _covering(of_one)}


def _covering(items: list[pytest.Item]) -> list[pytest.Item]:
    seen: set[tuple[int, int, str]] = set()
    chosen = []
    for wanted in (all, any):
        for item in items:
            values = _values(item)
            if not values or wanted(value not in seen for value in values):
                chosen.append(item)
                seen.update(values)
    return chosen


def _values(item: pytest.Item) -> set[tuple[int, int, str]]:
    """The values that each parametrize mark has named: `callspec.indices` has the number of the product instead."""
    ids = [] if (callspec := getattr(item, "callspec", None)) is None else callspec._idlist
    return {(number, place, value) for number, named in enumerate(ids) for place, value in enumerate(named.split(", "))}
