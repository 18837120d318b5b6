"""Branches that each rank uses depending on its data.

Run with:

    torchrun --nproc-per-node=2 examples/branches.py

Which parameters get a gradient differs from rank to rank and from step to step; no flag announces
it. A gradient is the mean over all ranks; ranks that did not use the parameter count as zeros.
"""

import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from undertow import DistributedDataParallel

NUM_BRANCHES, WIDTH = 3, 8
NUM_STEPS = 60


class Routed(nn.Module):
    """Sends every row through the branch of its kind.

    The place of the largest among its first columns.
    """

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(WIDTH, 1) for _ in range(NUM_BRANCHES))

    def forward(self, rows: Tensor) -> Tensor:  # [row, WIDTH]
        kinds = rows[:, :NUM_BRANCHES].argmax(dim=1)
        result = rows.new_zeros(len(rows), 1)
        for kind in kinds.unique().tolist():  # a branch without rows does not run
            result = result.index_put((kinds == kind,), self.branches[kind](rows[kinds == kind]))
        return result


def batch(num_rows: int, kinds: Tensor, random: torch.Generator) -> tuple[Tensor, Tensor]:
    """Returns rows of these kinds, and their targets: another column for each kind."""
    rows = torch.randn(num_rows, WIDTH, generator=random)
    kind = kinds[torch.randint(len(kinds), (num_rows, 1), generator=random)]  # [row, 1]
    wanted = rows.gather(1, NUM_BRANCHES + kind)
    return rows.scatter(1, kind, 4.0), wanted


def main() -> None:
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    dist.init_process_group("nccl" if on_gpu else "gloo")

    torch.manual_seed(0)
    model = DistributedDataParallel(Routed().to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    random = torch.Generator().manual_seed(dist.get_rank())  # every rank has its own rows
    for step in range(1, NUM_STEPS + 1):
        # One or two kinds are in a rank's batch; every tenth step one of the ranks has no rows at
        # all.
        kinds = torch.randperm(NUM_BRANCHES, generator=random)[: 1 + step % 2]
        has_rows = step % 10 != 0 or step // 10 % dist.get_world_size() != dist.get_rank()
        rows, wanted = batch(16 if has_rows else 0, kinds, random)
        optimizer.zero_grad()
        predicted = model(rows.to(device))  # without rows too, because the forward begins a step
        if has_rows:
            mse_loss(predicted, wanted.to(device)).backward()
        else:
            model.finish()  # joins the other ranks' reduction, before code reads a gradient
        optimizer.step()
        if dist.get_rank() == 0 and step % 10 in (0, 9):
            rows, wanted = batch(
                64, torch.arange(NUM_BRANCHES), torch.Generator().manual_seed(1000)
            )
            with torch.no_grad():  # sends nothing, so one rank may evaluate alone
                loss = mse_loss(model(rows.to(device)), wanted.to(device))
            print(
                f"step {step:3d}  loss {loss.item():.3f}  unused here: "
                f"{', '.join(model.unused_parameters)}"
            )

    if dist.get_rank() == 0:
        print(model.report())
    model.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
