"""Training that continues after a rank dies, also with more or fewer ranks than before, on CPU.

Run with:

    torchrun --standalone --nproc-per-node=4 --max-restarts=3 examples/elastic_train.py \\
        --kill-rank 2 --kill-step 17

torchrun starts all ranks again, and they continue from the last checkpoint. The others' errors name
the killed rank. Interrupt it and start it with --nproc-per-node=3, and three ranks train the rest.
After SIGTERM, as a scheduler sends it, the ranks save and leave after the same step.
"""

import argparse
import json
import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from undertow import (
    DistributedDataParallel,
    ShardedOptimizer,
    SyncConfig,
    has_checkpoint,
    load_checkpoint,
    save_checkpoint,
    stop_on_signal,
)

NUM_SAMPLES = 480


def sample_order(num_epochs: int) -> list[int]:
    """Every sample of the run, epoch after epoch.

    The same on every rank, for any number of ranks, and after every restart.
    """
    epochs = [
        torch.randperm(NUM_SAMPLES, generator=torch.Generator().manual_seed(epoch))
        for epoch in range(num_epochs)
    ]
    return torch.cat(epochs).tolist()


def train(options: argparse.Namespace) -> None:
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    inputs = torch.randn(NUM_SAMPLES, 32, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(0)
    layers = nn.Sequential(
        nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1)
    )
    # Sums in rank order give the same bits after a restart, with any buckets.
    model = DistributedDataParallel(
        layers, config=SyncConfig(strategy="zero1", reduction="ordered")
    )
    stop_on_signal(model)  # early: a signal before this call ends the process
    optimizer = ShardedOptimizer(torch.optim.AdamW, model, lr=1e-2)
    order = sample_order(options.epochs)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(
        optimizer, T_max=-(-len(order) // options.batch)
    )

    position = 0  # in `order`, of samples that all ranks have trained on; the same for 3 ranks or 4
    if has_checkpoint(options.checkpoint):
        extra = load_checkpoint(options.checkpoint, model, optimizer)
        position = extra["position"]
        schedule.load_state_dict(extra["schedule"])
        if rank == 0:
            print(
                f"{num_ranks} ranks continue after sample {position}, from {options.checkpoint}",
                flush=True,
            )

    is_stopping = False
    while position < len(order) and not is_stopping:
        step = position // options.batch + 1
        batch = order[position : position + options.batch]  # of all ranks, for any number of them
        mine = batch[rank::num_ranks]
        log(options, rank=rank, num_ranks=num_ranks, step=step, samples=mine)
        mean = model.mean_over_ranks(len(mine))
        optimizer.zero_grad()
        if mine:
            losses = losses_of(model, inputs[mine])
            kill_if_asked(options, rank=rank, step=step)
            # The mean over the batch of all ranks, whose shares need not be equal.
            (losses.sum() / mean.wait()).backward()
            if rank == 0 and step % 10 == 0:
                show(step=step, position=position + len(batch), losses=losses)
        else:
            model.finish()  # the last batch may be smaller than the number of ranks
        optimizer.step()
        schedule.step()
        position += len(batch)
        is_stopping = model.stop_requested  # the same on every rank
        if is_stopping or step % options.checkpoint_every == 0 or position == len(order):
            save_checkpoint(
                options.checkpoint,
                model,
                optimizer,
                extra={"position": position, "schedule": schedule.state_dict()},
            )

    if rank == 0:
        print(f"trained on {position} samples", flush=True)
    if options.save_model is not None and position == len(order):
        state = model.module.state_dict()  # every rank waits for the updates of the others
        if rank == 0:
            torch.save(state, options.save_model)
    model.close()


def losses_of(model: nn.Module, inputs: Tensor) -> Tensor:
    """One for each sample."""
    errors: Tensor = model(inputs) - inputs[:, :4].sum(dim=1, keepdim=True)
    return errors.square().flatten()


def show(*, step: int, position: int, losses: Tensor) -> None:
    loss = losses.mean().item()
    print(f"step {step:3d}  samples {position:5d}  loss {loss:.4f}", flush=True)


def kill_if_asked(options: argparse.Namespace, *, rank: int, step: int) -> None:
    if attempt() == 0 and (rank, step) == (options.kill_rank, options.kill_step):
        print(f"rank {rank} is killed in step {step}", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)


def log(options: argparse.Namespace, **what: object) -> None:
    """Adds a line to this rank's file, if files are asked for."""
    if options.sample_log is not None:
        options.sample_log.mkdir(parents=True, exist_ok=True)
        with (options.sample_log / f"rank{what['rank']}.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps({"attempt": attempt(), **what}) + "\n")


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "--checkpoint",
        type=Path,
        default=Path("elastic_checkpoint"),
        help="folder that all ranks see; never removed",
    )
    add(
        "--checkpoint-every",
        type=int,
        default=5,
        metavar="STEPS",
        help="steps between checkpoints (5)",
    )
    add("--epochs", type=int, default=2, help=f"of {NUM_SAMPLES} samples (2)")
    add(
        "--batch",
        type=int,
        default=24,
        metavar="SAMPLES",
        help="samples in a step, over all ranks (24)",
    )
    add(
        "--kill-rank",
        type=int,
        metavar="RANK",
        help="have this rank killed, in the first attempt only",
    )
    add("--kill-step", type=int, metavar="STEP", help="in this step, counted from 1")
    add(
        "--sample-log",
        type=Path,
        metavar="FOLDER",
        help="write which samples each rank has taken in which step",
    )
    add("--save-model", type=Path, metavar="FILE", help="write the parameters at the end")
    return parser.parse_args()


def attempt() -> int:
    """Returns how often torchrun has started all ranks again."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def meet() -> None:
    """Makes the default process group.

    The store of torchrun's own process outlives restarts (torch 2.13) and has the addresses of
    processes that are gone, so each attempt uses its own names there. Nodes may count attempts
    differently, and would then wait for each other's names forever: on several nodes set
    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, which gives every attempt a new store.
    """
    store, rank, num_ranks = next(rendezvous("env://"))
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        store = PrefixStore(f"attempt {attempt()}", store)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)


def main() -> None:
    options = parsed()  # before anything connects: --help and wrong options end here
    meet()
    train(options)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
