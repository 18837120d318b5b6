"""Ranks of the benchmarks that start in a moment."""

import multiprocessing.spawn
import os
import sys

import pytest

from support.namespaces import needs_namespaces  # noqa: F401  # for the tests of this folder
from support.warm import python


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has ranks forked off a process that has torch, instead of new interpreters."""
    monkeypatch.setattr(sys, "executable", python())
    monkeypatch.setattr(multiprocessing.spawn, "_python_exe", os.fsencode(python()))
