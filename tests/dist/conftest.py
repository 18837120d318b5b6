"""Ranks for every test of this folder; they are started once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.ranks import Ranks


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[Ranks]:
    with Ranks(2) as ranks:
        yield ranks


@pytest.fixture(scope="session")
def three_ranks() -> Iterator[Ranks]:
    with Ranks(3) as ranks:
        yield ranks


@pytest.fixture(scope="session")
def four_ranks() -> Iterator[Ranks]:
    with Ranks(4) as ranks:
        yield ranks


@pytest.fixture
def fresh_pair() -> Iterator[Ranks]:
    """Two ranks of the test's own, which may be left in any state."""
    with Ranks(2) as ranks:
        yield ranks


@pytest.fixture
def fresh_ranks() -> Iterator[Ranks]:
    """Three ranks of the test's own."""
    with Ranks(3) as ranks:
        yield ranks


@pytest.fixture
def fresh_four() -> Iterator[Ranks]:
    """Four ranks of the test's own."""
    with Ranks(4) as ranks:
        yield ranks


@pytest.fixture(params=["two_ranks", "three_ranks"])
def ranks(request: pytest.FixtureRequest) -> Ranks:
    return request.getfixturevalue(request.param)
