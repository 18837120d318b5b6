"""A replica group of torchft, of one process: python torchft_job.py GROUP LIGHTHOUSE FOLDER [STEP to be killed in].

After its first step without another group it writes the file `alone` and waits for the group that comes back. It ends with
GROUP.pt: parameters, and the number of groups in each step.
"""

import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchft import DistributedDataParallel as FaultTolerantDDP
from torchft import Manager, Optimizer, ProcessGroupGloo

from undertow import DistributedDataParallel, SyncConfig

NUM_STEPS = 60


class Net(nn.Module):
    """Uses its layers in another order than it registers them."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.first, self.middle = nn.Linear(8, 1), nn.Linear(6, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.middle(self.first(x).relu()).relu())


def wait_for(*paths: Path) -> None:
    while not all(path.exists() for path in paths):
        time.sleep(0.02)


def main(group: int, lighthouse: str, folder: Path, killed_in: int | None) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    torch.manual_seed(0)
    net = Net()

    def load(state: dict[str, Any]) -> None:
        net.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=20)),
        min_replica_size=1,
        load_state_dict=load,
        state_dict=lambda: {"model": net.state_dict(), "optimizer": inner.state_dict()},
        replica_id=f"group{group}",
        store_addr="127.0.0.1",
        store_port=store.port,
        rank=0,
        world_size=1,
        lighthouse_addr=lighthouse,
        timeout=timedelta(seconds=30),
    )
    dist.init_process_group("gloo", store=dist.PrefixStore("group", store), rank=0, world_size=1)
    # From here on the lighthouse knows of this group, and waits for it before it starts a step.
    (folder / ("again" if (folder / "alone").exists() else f"met-{group}")).touch()
    wait_for(folder / "met-0", folder / "met-1")
    model = DistributedDataParallel(net, config=SyncConfig(order="reverse", bucket_cap_mb=2e-4))
    assert len(model.plan.buckets) > 1
    model.register_comm_hook(manager, FaultTolerantDDP._comm_hook)
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
    optimizer = Optimizer(manager, inner)
    num_participants = []
    while (step := manager.current_step()) < NUM_STEPS:
        optimizer.zero_grad()
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * step + group))
        model(x).square().mean().backward()
        if step == killed_in:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()
        num_participants.append(manager.num_participants())
        if killed_in is None and num_participants[-1] == 1:
            (folder / "alone").touch()
            wait_for(folder / "again")  # all steps might be over before the other group is back
            time.sleep(0.1)  # a group alone does not wait for one that is about to join
    torch.save({"parameters": net.state_dict(), "participants": num_participants}, folder / f"{group}.pt")
    os._exit(0)  # the other group may still be in its last step, in which it needs nothing of this one


if __name__ == "__main__":
    number, address, path, *killed = sys.argv[1:]
    main(int(number), address, Path(path), int(killed[0]) if killed else None)
