"""A GPT with tied embeddings, accumulation, bf16 and clipping.

Run with:

    torchrun --nproc-per-node=2 examples/gpt.py

It learns to repeat its input: the second half of every sequence equals the first half.
"""

import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from undertow import DistributedDataParallel

NUM_TOKENS, HALF, WIDTH, NUM_HEADS = 16, 8, 64, 4
NUM_STEPS, NUM_MICRO_BATCHES = 50, 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.query_key_value = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.attention_out = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        heads = self.query_key_value(self.attention_norm(x)).unflatten(-1, (3, NUM_HEADS, -1))
        query, key, value = heads.permute(
            2, 0, 3, 1, 4
        )  # each [batch, head, position, width of a head]
        mixed = scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_out(mixed.transpose(1, 2).flatten(2))
        result: Tensor = x + self.mlp(x)
        return result


class Gpt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(NUM_TOKENS, WIDTH), nn.Embedding(2 * HALF, WIDTH)
        self.blocks = nn.Sequential(Block(), Block())
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, NUM_TOKENS, bias=False)
        for table in (self.tokens, self.positions):
            nn.init.normal_(table.weight, std=0.02)
        self.head.weight = (
            self.tokens.weight
        )  # tied: one parameter, one gradient, the sum of both uses

    def forward(self, text: Tensor) -> Tensor:
        x = self.tokens(text) + self.positions(torch.arange(text.shape[1], device=text.device))
        scores: Tensor = self.head(self.norm(self.blocks(x)))
        return scores


def repeated(random: torch.Generator) -> Tensor:
    half = torch.randint(NUM_TOKENS, (32, HALF), generator=random)
    return torch.cat([half, half], dim=1)  # [sequence, position]


def loss_of(model: nn.Module, text: Tensor) -> Tensor:
    """Returns the loss on the second half: each token is predicted from the tokens before it."""
    with torch.autocast(text.device.type, dtype=torch.bfloat16):
        scores = model(text[:, :-1])[:, HALF - 1 :]
    return cross_entropy(scores.float().flatten(0, 1), text[:, HALF:].flatten())


def main() -> None:
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    dist.init_process_group("nccl" if on_gpu else "gloo")

    torch.manual_seed(0)
    model = DistributedDataParallel(Gpt().to(device))
    optimizer = torch.optim.AdamW(model.parameters())
    # A warm-up, then a cosine down to zero.
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=4e-3, total_steps=NUM_STEPS, cycle_momentum=False
    )
    random = torch.Generator().manual_seed(dist.get_rank())  # every rank reads its own texts
    for step in range(1, NUM_STEPS + 1):
        optimizer.zero_grad()
        with model.no_sync():  # only the last micro-batch sends: the sum of all
            for _ in range(NUM_MICRO_BATCHES - 1):
                (loss_of(model, repeated(random).to(device)) / NUM_MICRO_BATCHES).backward()
        loss = loss_of(model, repeated(random).to(device))
        (loss / NUM_MICRO_BATCHES).backward()
        norm = nn.utils.clip_grad_norm_(
            model.parameters(), 1.0
        )  # of the mean over ranks: the same on every rank
        optimizer.step()
        schedule.step()
        if dist.get_rank() == 0 and step % 10 == 0:
            print(f"step {step:3d}  gradient norm {norm.item():.2f}  loss {loss.item():.3f}")

    if dist.get_rank() == 0:
        print(model.report())
    model.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
