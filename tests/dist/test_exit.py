"""Scripts of users end with exit code 0, whatever they do about their process group."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

PATIENCE_S = 120.0

SCRIPT = """
    import sys, torch, torch.distributed as dist
    import undertow

    rank, meeting_point = int(sys.argv[1]), sys.argv[2]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(meeting_point, 2), rank=rank, world_size=2)
    model = undertow.DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
"""
ENDINGS = {
    "destroyed with the model alive": "    dist.destroy_process_group()\n",
    "not destroyed": "",
    "closed": "    model.close()\n",
}


def exit_codes(script: str, meeting_point: Path, **variables: str) -> list[tuple[int, str]]:
    """Of both ranks, with what they wrote to stderr."""
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(script)]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", **variables}
    ranks = [
        subprocess.Popen([*command, str(rank), str(meeting_point)], env=environment, stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        return [(rank.wait(PATIENCE_S), rank.stderr.read() if rank.stderr else "") for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()


SHARDED = SCRIPT.replace("torch.optim.SGD(model.parameters(), ", "undertow.ShardedOptimizer(torch.optim.SGD, model, ")


@pytest.mark.parametrize("script", [SCRIPT, SHARDED], ids=["plain", "gathers in flight"])
@pytest.mark.parametrize("ending", ENDINGS)
def test_a_script_ends_with_exit_code_0(ending: str, script: str, tmp_path: Path) -> None:
    assert exit_codes(script + ENDINGS[ending], tmp_path / "meeting-point") == [(0, ""), (0, "")]


# Gloo then connects two ranks when they first send to each other: whoever asked by a receive of its own whether the other one
# is there would wait for it.
ALONE = """
    from undertow.runtime import private
    if rank == 0:
        assert not private.is_gone(1)
        private.default_store().set("asked", "")
    private.default_store().wait(["asked"])
    model ="""


@pytest.mark.parametrize("script", [SCRIPT, SHARDED], ids=["plain", "gathers in flight"])
def test_a_script_ends_with_exit_code_0_where_gloo_connects_lazily(script: str, tmp_path: Path) -> None:
    watched = script.replace("\n    model =", ALONE) + "    assert model.sync.own_group.member is not None\n"
    assert exit_codes(watched, tmp_path / "meeting-point", TORCH_GLOO_LAZY_INIT="1") == [(0, ""), (0, "")]


# Imported before there is a group, which a module of torch's would keep.
IMPORTED = SCRIPT.replace("import undertow", "import threading, undertow, undertow.runtime")
AFTERWARDS = """
    dist.destroy_process_group()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("undertow-hears")]
"""


def test_pairs_and_their_store_are_let_go_when_the_process_groups_are_destroyed(tmp_path: Path) -> None:
    """Or a script could not start again at the same address."""
    assert exit_codes(IMPORTED + AFTERWARDS, tmp_path / "meeting-point") == [(0, ""), (0, "")]


# As where something that is never freed refers to them: modules lose their names, ours before the default group is gone.
HELD = """
    import ctypes
    for module in list(sys.modules.values()):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(module))
"""


def test_nothing_is_said_when_the_interpreter_takes_modules_apart(tmp_path: Path) -> None:
    assert exit_codes(SCRIPT + HELD, tmp_path / "meeting-point") == [(0, ""), (0, "")]


ENDS = {
    "exit code": ("    sys.exit(3)\n", 3),
    "exception": ("    raise KeyError(rank)\n", 1),
    "exception, groups destroyed": (
        "    try:\n        raise KeyError(rank)\n    finally:\n        dist.destroy_process_group()\n",
        1,
    ),
}


@pytest.mark.parametrize("end", ENDS)
def test_a_script_ends_with_its_own_exit_code(end: str, tmp_path: Path) -> None:
    """Both ranks at once, each while it hears of the other."""
    ending, code = ENDS[end]
    assert [found for found, _ in exit_codes(SCRIPT + ending, tmp_path / "meeting-point")] == [code, code]
