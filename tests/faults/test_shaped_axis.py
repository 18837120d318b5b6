"""With root and iproute2: FSDP2 within each of two nodes, namespaces joined by 1 Gb/s, and gradients across them in int8."""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from benchmarks.links import Network, shaped_network

from support.project import ROOT
from support.warm import python

pytestmark = [pytest.mark.usefixtures("needs_namespaces"), pytest.mark.root, pytest.mark.slow]
NUM_NODES, PER_NODE, PATIENCE_S = 2, 2, 300.0
SCRIPT = """
import json, os, sys, time
from pathlib import Path

import torch, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from undertow import outer_axis

WIDTH, STEPS = 512, 6
interface = Path("/sys/class/net/eth0/statistics")  # of this node: its ranks talk to each other over lo
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
found = {}
for wire in (None, "int8"):
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    for part in (*net, net):
        fully_shard(part, mesh=mesh)
    axis = outer_axis(net, wire=wire)
    dist.barrier()
    before, begun_s = int((interface / "tx_bytes").read_text()), time.perf_counter()
    for step in range(STEPS):
        net(torch.ones(2, WIDTH)).square().mean().backward()
    took_s = time.perf_counter() - begun_s
    dist.barrier(group=mesh.get_group("dp_shard"))
    sent = int((interface / "tx_bytes").read_text()) - before
    found[str(wire)] = {"counted": axis.num_bytes, "on the link": sent, "step_ms": took_s / STEPS * 1e3}
    dist.barrier()
    axis.close()
Path(sys.argv[1], f"rank{dist.get_rank()}.json").write_text(json.dumps(found))
dist.barrier()
dist.destroy_process_group()
"""


@pytest.fixture
def network() -> Iterator[Network]:
    with shaped_network("1gbit", NUM_NODES) as network:
        yield network


@pytest.mark.timeout(PATIENCE_S + 60)
def test_int8_sends_a_quarter_of_the_bytes_over_a_slow_axis(network: Network, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    ranks = []
    for rank in range(NUM_NODES * PER_NODE):
        variables = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(str(path) for path in (ROOT / "src", ROOT / "tests")),
            "MASTER_ADDR": network.address(0),
            "MASTER_PORT": "29555",
            "WORLD_SIZE": str(NUM_NODES * PER_NODE),
            "RANK": str(rank),
            "GLOO_SOCKET_IFNAME": network.interface,
            "OMP_NUM_THREADS": "1",
        }
        command = network.command(rank // PER_NODE, [python(), str(tmp_path / "script.py"), str(tmp_path)])
        ranks.append(subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
    logs = [process.communicate(timeout=PATIENCE_S)[0] for process in ranks]
    assert [process.returncode for process in ranks] == [0] * len(ranks), "\n".join(logs)
    of_ranks = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(len(ranks))]
    print(json.dumps(of_ranks[0]))
    for found in of_ranks:
        # A quarter, one scale of 4 bytes for each 512 values, and headers of packets, which small messages have more of.
        for what in ("counted", "on the link"):
            assert found["int8"][what] <= 0.27 * found["None"][what], f"{what}: {found}"
