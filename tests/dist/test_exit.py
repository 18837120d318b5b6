"""Scripts of users end with exit code 0, whatever they do about their process group."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from support.processes import Rank, run_ranks, script

PATIENCE_S = 120.0
SCRIPT = """
import sys, torch, torch.distributed as dist
import undertow

torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{at}", rank=number, world_size=2)
model = undertow.DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
"""
SHARDED = SCRIPT.replace("torch.optim.SGD(model.parameters(), ", "undertow.ShardedOptimizer(torch.optim.SGD, model, ")
SCRIPTS = pytest.mark.parametrize("source", [SCRIPT, SHARDED], ids=["plain", "gathers in flight"])
WELL = [(0, ""), (0, "")]  # both exit codes, and what is on stderr


@pytest.mark.slow
@SCRIPTS
@pytest.mark.parametrize(
    "ending", ["dist.destroy_process_group()", "", "model.close()"], ids=["destroyed with the model alive", "left open", "closed"]
)
def test_a_script_ends_with_exit_code_0(ending: str, source: str, tmp_path: Path) -> None:
    """In new interpreters: a module that is imported when there is a group may keep it, where forked ranks have it before."""
    texts = [f"at, number = {str(tmp_path / 'meeting-point')!r}, {number}\n{source}{ending}" for number in range(2)]
    how = {"env": {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}, "stderr": subprocess.PIPE, "text": True}
    ranks = [subprocess.Popen([sys.executable, "-W", "error", "-c", text], **how) for text in texts]
    try:
        complaints = [rank.communicate(timeout=PATIENCE_S)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert list(zip([rank.returncode for rank in ranks], complaints, strict=True)) == WELL


class Forked:
    """A script in a forked rank, with a warning as an error."""

    def __init__(self, source: str, **variables: str) -> None:
        self.source, self.variables = source, variables

    def __call__(self, rank: Rank) -> None:
        warnings.simplefilter("error")
        os.environ |= self.variables
        script(self.source, rank, at=rank.directory / "meeting-point", number=rank.number)

    @property
    def ends(self) -> list[tuple[int | None, str]]:
        return [(rank.exit_code, rank.log) for rank in run_ranks(self, 2, is_script=True)]


# Gloo then connects two ranks when they first send to each other: whoever asked by a receive of its own whether the other one
# is there would wait for it.
ASKS = """
from support.inside import is_gone, member_of
if number == 0:
    assert not is_gone(1)
    rank.tell("asked")
rank.waits_for("asked", [0])
model ="""


@SCRIPTS
def test_a_script_ends_with_exit_code_0_where_gloo_connects_lazily(source: str) -> None:
    watched = source.replace("\nmodel =", ASKS) + "member_of(model)\n"
    assert Forked(watched, TORCH_GLOO_LAZY_INIT="1").ends == WELL


AFTERWARDS = """
import threading
dist.destroy_process_group()
assert not [thread for thread in threading.enumerate() if thread.name.startswith("undertow-hears")]
"""
# As where something that is never freed refers to them: modules lose their names, ours before the default group is gone.
HELD = """
import ctypes
for module in list(sys.modules.values()):
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(module))
"""


@pytest.mark.parametrize("ending", [AFTERWARDS, HELD], ids=["pairs are let go with the groups", "modules are taken apart"])
def test_nothing_is_left_and_nothing_is_said_at_the_end(ending: str) -> None:
    """Or a script could not start again at the same address."""
    assert Forked(SCRIPT + ending).ends == WELL


@pytest.mark.parametrize(
    ("ending", "code"),
    [
        ("sys.exit(3)", 3),
        ("raise KeyError(number)", 1),
        ("try:\n    raise KeyError(number)\nfinally:\n    dist.destroy_process_group()", 1),
    ],
    ids=["exit code", "exception", "exception, groups destroyed"],
)
def test_a_script_ends_with_its_own_exit_code(ending: str, code: int) -> None:
    """Both ranks at once, each while it hears of the other."""
    assert [found for found, _ in Forked(SCRIPT + ending).ends] == [code, code]
