from __future__ import annotations

import pytest

from support.strategies import spec, specs_of_sizes
from undertow.plan import largest_first, observed, reverse_registration


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        (reverse_registration(0), ()),
        (reverse_registration(1), (0,)),
        (reverse_registration(4), (3, 2, 1, 0)),
        (observed(4, [2, 0, 3, 1]), (2, 0, 3, 1)),
        (observed(4, []), (3, 2, 1, 0)),
        (observed(4, [1]), (1, 3, 2, 0)),
        (observed(4, [0, 2]), (0, 2, 3, 1)),
        (observed(4, [2, 2, 0, 2, 0]), (2, 0, 3, 1)),
        (largest_first(specs_of_sizes(20, 50, 20, 100, 50)), (3, 1, 4, 0, 2)),
        (largest_first([spec("short", 30, dtype="uint8"), spec("wide", 10, dtype="float64")]), (1, 0)),
    ],
    ids=[
        *("no parameters", "one parameter", "the last one registered is ready first"),
        *("all observed", "none observed", "one observed", "some observed", "observed repeatedly"),
        *("equal sizes keep the order of registration", "size is in bytes"),
    ],
)
def test_an_order(order: tuple[int, ...], expected: tuple[int, ...]) -> None:
    assert order == expected
