"""A rank that is killed is missed at once although a child process of it lives on, with copies of its connections."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

SCRIPT = """
    import os, signal, sys, time, torch, torch.distributed as dist
    import undertow

    rank, here = int(sys.argv[1]), sys.argv[2]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(here + "/meeting-point", 2), rank=rank, world_size=2)
    model = undertow.DistributedDataParallel(torch.nn.Linear(4, 4))
    for step in range(3):
        if (rank, step) == (1, 2):
            if os.fork() == 0:
                os.close(2)
                while os.path.exists(here):
                    time.sleep(0.05)
                os._exit(0)
            os.kill(os.getpid(), signal.SIGKILL)
        model(torch.ones(2, 4)).sum().backward()
"""


def test_a_child_that_lives_on_keeps_no_connection_open(tmp_path: Path) -> None:
    here = tmp_path / "here"
    here.mkdir()
    command = [sys.executable, "-c", textwrap.dedent(SCRIPT)]
    how = {"env": {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}, "stderr": subprocess.PIPE, "text": True}
    ranks = [subprocess.Popen([*command, str(rank), str(here)], **how) for rank in range(2)]
    try:
        said = ranks[0].communicate(timeout=60)[1]
    finally:
        here.rename(tmp_path / "over")
        for rank in ranks:
            rank.kill()
            rank.communicate()
    assert "RankLost: rank 1 is gone: its process has ended without a word, or was killed." in said
