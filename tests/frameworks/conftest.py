"""Ranks for the recipes of frameworks: a pool of its own, since frameworks leave traces in a process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.ranks import Ranks


@pytest.fixture(scope="session")
def framework_ranks() -> Iterator[Ranks]:
    with Ranks(2) as ranks:
        yield ranks
