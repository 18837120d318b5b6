"""Tests over networks of namespaces, where this machine lets us make some."""

import ctypes
import os

import pytest
from benchmarks.matrix.links import NAMESPACES, remove_abandoned, what_is_missing


@pytest.fixture
def needs_namespaces() -> None:
    missing = what_is_missing()
    if missing is not None:
        pytest.skip(f"shaped links cannot be made here: {missing}")
    remove_abandoned()


def enter(namespace: str) -> None:
    descriptor = os.open(NAMESPACES / namespace, os.O_RDONLY)
    if ctypes.CDLL(None, use_errno=True).setns(descriptor, 0) != 0:
        raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")
    os.close(descriptor)
