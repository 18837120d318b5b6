"""The limit of open files."""

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from undertow import ConfigError, SyncConfig
from undertow.ranks import descriptors
from undertow.ranks.descriptors import require_descriptors
from undertow.ranks.transport import OwnGroup


def limited(monkeypatch: pytest.MonkeyPatch, limit: int | None, num_open: int) -> None:
    monkeypatch.setattr(descriptors, "limit_of_descriptors", lambda: limit)
    monkeypatch.setattr(descriptors, "num_open_descriptors", lambda: num_open)


def test_too_many_ranks_for_the_limit_are_an_error_with_the_number(monkeypatch: pytest.MonkeyPatch) -> None:
    limited(monkeypatch, 1024, 12)
    with pytest.raises(ConfigError) as caught:
        require_descriptors(1024, rank=3)
    assert str(caught.value) == (
        "a process group of 1024 ranks needs 1023 connections in each process, and this process may open 1024 files, "
        "of which 12 are open.\n"
        "  the making of a process group, rank 3\n"
        "  Raise the limit in the shell that starts the ranks, on every node: `ulimit -n 8192`."
    )


@pytest.mark.parametrize("backend", ["gloo", "gloo-next"])
def test_every_backend_of_gloos_family_is_asked_for_its_connections(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    limited(monkeypatch, 1024, 12)
    user: Any = SimpleNamespace(rank=0, ranks=tuple(range(1024)), timeout=None, backend_for=lambda _: backend)
    with pytest.raises(ConfigError, match="a process group of 1024 ranks needs 1023 connections"):
        OwnGroup(user, device=torch.device("cpu"), limits=SyncConfig()).open()


@pytest.mark.parametrize(("limit", "num_open"), [(1024, 512), (16_384, 12), (None, 10**6)])
def test_a_limit_that_is_high_enough_is_no_error(limit: Any, num_open: int, monkeypatch: pytest.MonkeyPatch) -> None:
    limited(monkeypatch, limit, num_open)
    require_descriptors(497, rank=0)


def test_connections_that_are_open_count(monkeypatch: pytest.MonkeyPatch) -> None:
    limited(monkeypatch, 1024, 512)
    with pytest.raises(ConfigError):
        require_descriptors(498, rank=0)


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="the system does not tell")
def test_open_files_are_counted() -> None:
    before = descriptors.num_open_descriptors()
    read, write = os.pipe()
    assert descriptors.num_open_descriptors() == before + 2
    os.close(read)
    os.close(write)
