"""What is said of namespaces that a runner has left, without making any."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from benchmarks.matrix import links

NOBODY = 2**22 + 1  # above every process id of Linux
LEFT = [f"{links.PREFIX}{NOBODY}-0-{end}" for end in ("0", "1", "hub")]


@pytest.fixture
def namespaces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Those of a runner that is no more, one of this process, and somebody else's."""
    monkeypatch.setattr(links, "NAMESPACES", tmp_path)
    for name in (*LEFT, f"{links.PREFIX}{os.getpid()}-0-hub", "mine"):
        (tmp_path / name).touch()
    return tmp_path


def test_the_emulated_link_has_the_bucket_of_the_shaped_one_in_payload() -> None:
    assert links.SHAPES["5gbit"].burst_bytes == 655_360
    assert links.emulated_network("5gbit").burst_bytes == 626_524  # 95.6 %


def test_what_is_gone_is_named(namespaces: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def delete(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        (namespaces / command[-1]).unlink()
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(links.subprocess, "run", delete)
    assert links.remove_abandoned() == (LEFT, None)
    assert sorted(path.name for path in namespaces.iterdir()) == ["mine", f"{links.PREFIX}{os.getpid()}-0-hub"]
    assert links.remove_abandoned() == ([], None)


def refuse(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
    why = f'Cannot remove namespace file "{command[-1]}": Operation not permitted\n'
    return subprocess.CompletedProcess(command, 1, "", why)


def absent(*_: Any, **__: Any) -> None:
    raise FileNotFoundError(2, "No such file or directory", "ip")


@pytest.mark.usefixtures("namespaces")
@pytest.mark.parametrize(
    ("run", "why"),
    [
        (refuse, f'ip netns del {LEFT[-1]}: Cannot remove namespace file "{LEFT[-1]}": Operation not permitted'),
        (absent, "[Errno 2] No such file or directory: 'ip'"),
    ],
    ids=["refused", "without iproute2"],
)
def test_what_could_not_be_removed_is_said_once_and_why(run: Any, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links.subprocess, "run", run)
    told = f"a runner that was killed has left {', '.join(LEFT)}, not to be removed now: {why}"
    assert links.remove_abandoned() == ([], told)
