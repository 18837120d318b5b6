"""Torch's own asynchronous checkpoints of a sharded optimizer, and a run that resumes from them.

Run with:

    torchrun --nproc-per-node=2 examples/train_async_save.py
    torchrun --nproc-per-node=3 examples/train_async_save.py --steps 60

The second command continues where the first one ended, with any number of ranks. Here
`get_state_dict` gathers the whole state of the optimizer on every rank, as a plain optimizer has
it. `save_checkpoint(..., background=True)` gathers nothing: each rank writes its part.
"""

import argparse
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save

from undertow import DistributedDataParallel, ShardedOptimizer, stop_on_signal


def loss_of(model: nn.Module, inputs: Tensor) -> Tensor:
    return nn.functional.mse_loss(model(inputs), inputs[:, :8].sum(dim=1, keepdim=True))


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> dict[str, Any]:
    """Gathers the whole state; a collective call."""
    of_model, of_optimizer = get_state_dict(model, optimizer)
    return {"model": of_model, "optimizer": of_optimizer, "step": torch.tensor(step)}


def resumed(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Loads the newest complete checkpoint, if any; returns the number of the next step."""
    complete = [path.parent for path in folder.glob("step-*/.metadata")]  # torch writes it last
    if not complete:
        return 0
    state = state_of(model, optimizer, 0)
    newest = max(complete, key=lambda path: int(path.name.removeprefix("step-")))
    load(state, checkpoint_id=newest)
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    return int(state["step"]) + 1


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--folder", type=Path, default=Path("async_checkpoints"))
    options = parser.parse_args()
    dist.init_process_group("gloo")
    # The thread that saves communicates while training does: each needs a separate group.
    group_of_saves = dist.new_group(backend="gloo")
    assert isinstance(group_of_saves, dist.ProcessGroup)  # this rank belongs to it
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 1)))
    optimizer = ShardedOptimizer(torch.optim.AdamW, model, lr=3e-3)
    stop_on_signal(model)
    first = resumed(options.folder, model, optimizer)
    saving: Future[None] | None = None
    for step in range(first, options.steps):
        inputs = torch.randn(
            64, 64, generator=torch.Generator().manual_seed(1000 * step + dist.get_rank())
        )
        optimizer.zero_grad()
        loss = loss_of(model, inputs)
        loss.backward()
        optimizer.step()
        is_last = step + 1 == options.steps or model.stop_requested
        if is_last or (step + 1) % 10 == 0:
            if saving is not None:
                saving.result()  # one at a time; an error of the save is raised here
            started = async_save(
                state_of(model, optimizer, step),
                checkpoint_id=options.folder / f"step-{step}",
                process_group=group_of_saves,
            )
            assert isinstance(started, Future)  # another class with async_stager=... only
            saving = started
            if dist.get_rank() == 0:
                print(f"step {step:3d}  loss {loss.item():.3f}")
        if is_last:
            break
    if saving is not None:
        saving.result()
    if dist.get_rank() == 0:
        print(f"steps {first} to {options.steps - 1} are saved")
    model.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
