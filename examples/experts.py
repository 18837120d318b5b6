"""A mixture of experts.

Run with:

    torchrun --nproc-per-node=4 examples/experts.py

Ranks 0 and 1 hold two of four experts each, and so do ranks 2 and 3. Tokens travel between 0 and 1,
or 2 and 3. Dense gradients are averaged over all ranks. An expert's gradients are summed over the
two ranks that hold it and divided by four, because they contain tokens of all ranks.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import mse_loss

from undertow import ExpertGroup, SyncConfig, attach, clip_grad_norm_

WIDTH, NUM_EXPERTS = 8, 4


class Exchange(torch.autograd.Function):
    """Sends rows to the ranks of a group, `sent[i]` to rank i, which sends `received[i]`.

    Gradients travel back.
    """

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
    ) -> Tensor:
        ctx.back = received, sent, group
        result = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(result, rows.contiguous(), received, sent, group=group)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (grad,) = grads
        return exchange(grad, *ctx.back), None, None, None


def exchange(
    rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
) -> Tensor:
    result: Tensor = Exchange.apply(rows, sent, received, group)  # type: ignore[no-untyped-call]
    return result


class ExpertLayer(nn.Module):
    """Sends every token to the expert with the highest router score."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group, self.num_here = group, NUM_EXPERTS // group.size()
        self.router = nn.Linear(WIDTH, NUM_EXPERTS)
        layers = (
            nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))
            for _ in range(self.num_here)
        )
        self.experts = nn.ModuleList(layers)

    def forward(self, tokens: Tensor) -> Tensor:  # [token, WIDTH]
        gate, chosen = self.router(tokens).softmax(dim=1).max(dim=1)
        order = chosen.argsort()
        counts, each = (
            (chosen // self.num_here).bincount(minlength=self.group.size()),
            [1] * self.group.size(),
        )
        sent, received = counts.tolist(), exchange(counts, each, each, self.group).tolist()
        kind, here = (
            exchange(it[order], sent, received, self.group)
            for it in (chosen % self.num_here, tokens)
        )
        done = torch.zeros_like(here)
        for index, expert in enumerate(self.experts):  # even one without tokens
            done = done.index_put((kind == index,), expert(here[kind == index]))
        back = exchange(done, received, sent, self.group)
        result: Tensor = tokens + gate[:, None] * torch.zeros_like(back).index_put((order,), back)
        return result


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(
        rank := dist.get_rank()
    )  # other experts on other ranks; ranks with the same experts take the first one's values
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("experts", "tokens"))
    sharing_tokens = mesh.get_group("tokens")  # ranks 0 and 1, or 2 and 3
    sharing_experts = mesh.get_group("experts")  # ranks 0 and 2, or 1 and 3
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), ExpertLayer(sharing_tokens), nn.Linear(WIDTH, 1))
    experts = (ExpertGroup(match="*.experts.*", process_group=sharing_experts, divisor=4),)
    sync = attach(model, config=SyncConfig(experts=experts))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(1, 121):
        tokens = torch.randn(64, WIDTH)
        wanted = tokens.gather(
            1, 1 + tokens[:, :3].argmax(dim=1, keepdim=True)
        ).abs()  # one rule for each kind of token
        optimizer.zero_grad()
        (loss := mse_loss(model(tokens), wanted)).backward()
        norm = clip_grad_norm_(sync, max_norm=1.0)  # of all experts, on any rank
        optimizer.step()
        if rank == 0 and step % 20 == 0:
            print(f"step {step:3d}  loss {loss.item():.3f}  gradient norm {norm.item():.3f}")
    if rank == 0:
        print(sync.report())
    sync.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
