"""Muon for hidden matrices and AdamW for the rest, in shards, compared with AdamW alone.

Run with:

    torchrun --nproc-per-node=2 examples/train_muon.py

Trains the demo's GPT, prints the losses and saves them as muon.png in the present folder. For a
first look give --steps 40.
"""

import argparse
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from undertow import DistributedDataParallel, ShardedOptimizer, hidden_matrices
from undertow.lab.demo.model import CONTEXT, Gpt
from undertow.lab.demo.settings import load_corpus

EVERY = 20  # steps whose mean loss is printed
BATCH = 8  # pieces of text on each rank


@dataclass(frozen=True, kw_only=True)
class Run:
    label: str
    losses: list[float]  # by step, the mean over ranks
    step_ms: float


def adamw(model: DistributedDataParallel) -> list[ShardedOptimizer]:
    return [ShardedOptimizer(torch.optim.AdamW, model, lr=3e-3)]


def muon_and_adamw(model: DistributedDataParallel) -> list[ShardedOptimizer]:
    hidden = hidden_matrices(model)
    ids = set(map(id, hidden))
    rest = [param for param in model.parameters() if id(param) not in ids]
    # AdamW steps first, because it updates the embedding, where the next forward begins.
    return [
        ShardedOptimizer(torch.optim.AdamW, model, params=rest, lr=1e-3),
        ShardedOptimizer(torch.optim.Muon, model, params=hidden, lr=0.02),
    ]


OPTIMIZERS = {"AdamW": adamw, "Muon and AdamW": muon_and_adamw}


def batch(text: Tensor, random: torch.Generator) -> Tensor:
    """Returns random pieces of `text`, [BATCH, CONTEXT + 1] bytes."""
    starts = torch.randint(len(text) - CONTEXT - 1, (BATCH,), generator=random)
    return torch.stack([text[start : start + CONTEXT + 1] for start in starts])


def train(label: str, text: Tensor, num_steps: int) -> Run:
    torch.manual_seed(0)
    model = DistributedDataParallel(Gpt(num_layers=2))
    optimizers = OPTIMIZERS[label](model)
    random = torch.Generator().manual_seed(dist.get_rank())  # every rank sees its own data
    losses = torch.zeros(num_steps)
    began_s = time.perf_counter()
    for step in range(num_steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = model(batch(text, random))
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        losses[step] = loss.detach()
    step_ms = (time.perf_counter() - began_s) / num_steps * 1e3
    model.close()
    dist.all_reduce(losses)
    return Run(label=label, losses=(losses / dist.get_world_size()).tolist(), step_ms=step_ms)


def means(losses: list[float]) -> list[float]:
    """Returns the mean loss of every EVERY steps."""
    return torch.tensor(losses).view(-1, EVERY).mean(dim=1).tolist()


def print_table(runs: list[Run]) -> None:
    print(f"{'loss until step':18}" + "".join(f"{run.label:>18}" for run in runs))
    rows = zip(*(means(run.losses) for run in runs), strict=True)
    for number, row in enumerate(rows, 1):
        print(f"{number * EVERY:<18}" + "".join(f"{loss:18.3f}" for loss in row))
    print(f"{'ms per step':18}" + "".join(f"{run.step_ms:18.1f}" for run in runs))


def save_picture(runs: list[Run], path: str) -> None:
    from matplotlib.figure import Figure  # on rank 0 only

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    for run in runs:
        steps = range(EVERY, len(run.losses) + 1, EVERY)
        axes.plot(steps, means(run.losses), marker="o", label=run.label)
    axes.set(xlabel="step", ylabel=f"mean loss of {EVERY} steps, nats per byte")
    axes.set_title("The demo's GPT, optimizers in shards")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200, help=f"a multiple of {EVERY}")
    num_steps = parser.parse_args().steps
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    text = torch.tensor(list(load_corpus()))
    runs = [train(label, text, num_steps) for label in OPTIMIZERS]
    if dist.get_rank() == 0:
        print_table(runs)
        save_picture(runs, "muon.png")
        print("picture: muon.png")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
