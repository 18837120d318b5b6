"""Tests over networks of namespaces, where this machine lets us make some."""

import pytest
from benchmarks.links import remove_abandoned, what_is_missing


@pytest.fixture
def needs_namespaces() -> None:
    missing = what_is_missing()
    if missing is not None:
        pytest.skip(f"shaped links cannot be made here: {missing}")
    remove_abandoned()
