"""Six steps of every strategy and format on many ranks, beside a reference. By hand, with more ranks than tests have:

PYTHONPATH=tests torchrun --nproc-per-node=64 -m support.many
PYTHONPATH=tests torchrun --nproc-per-node=16 -m support.many save FOLDER
PYTHONPATH=tests torchrun --nproc-per-node=24 -m support.many load FOLDER
PYTHONPATH=tests torchrun --nproc-per-node=16 -m support.many files
PYTHONPATH=tests python -c "from support import many; many.kill_one_of(64, 'FOLDER')"
"""

import contextlib
import copy
import gc
import os
import signal
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from support.outer import NaiveOuter
from support.ranks import Ranks, RanksFailed
from undertow import (
    DistributedDataParallel,
    Outer,
    RankLost,
    ShardedOptimizer,
    SyncConfig,
    load_checkpoint,
    save_checkpoint,
)

NUM_STEPS = 6
OPEN_FILES = Path("/proc/self/fd")
ORDERED: dict[str, Any] = {"reduction": "ordered"}
# Settings, the optimizer, and the largest difference as a share of the movement: 0 asks for equal bits. Full width has another
# order of sums; bfloat16 has 8 bits, float16 has 11, and int8 half a unit of 127 of the largest value of a block, each rounded
# twice.
WAYS: dict[str, tuple[dict[str, Any], type[torch.optim.Optimizer], float]] = {
    "plain": ({}, torch.optim.SGD, 1e-5),
    "ordered": (ORDERED, torch.optim.SGD, 0.0),
    "int8": ({"wire": "int8"}, torch.optim.SGD, 0.05),
    "bfloat16": ({"wire": "bfloat16"}, torch.optim.SGD, 0.01),
    "float16": ({"wire": "float16"}, torch.optim.SGD, 0.00125),
    "zero1": ({"strategy": "zero1"}, torch.optim.SGD, 0.0),
    "zero1, AdamW": ({"strategy": "zero1"}, torch.optim.AdamW, 0.0),
    "zero2": ({"strategy": "zero2"}, torch.optim.SGD, 0.0),
    "zero1, int8": ({"strategy": "zero1", "wire": "int8", "param_wire": "int8"}, torch.optim.SGD, 0.1),
    "zero2, bfloat16": ({"strategy": "zero2", "wire": "bfloat16"}, torch.optim.SGD, 0.01),
    "Muon": ({"strategy": "zero1"}, torch.optim.Muon, 0.0),
    "hybrid": ({"strategy": "hybrid"}, torch.optim.SGD, 1e-5),
    # Muon amplifies last bits, and rows are added first.
    "hybrid, Muon": ({"strategy": "hybrid"}, torch.optim.Muon, 0.1),
    "hybrid, int8 across": ({"strategy": "hybrid", "wire": (None, "int8")}, torch.optim.SGD, 0.05),
    # The last step ends with an exchange. The reference encodes too.
    "outer": ({"outer": Outer(every=3, fragments=1, delay=0, wire=None)}, torch.optim.SGD, 0.0),
    "outer, int8": ({"outer": Outer(every=3, fragments=1, delay=0)}, torch.optim.SGD, 0.0),
}


def layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(3)))


def loss_of(model: nn.Module, step: int, rank: int) -> Tensor:
    return model(torch.randn(4, 32, generator=torch.Generator().manual_seed(1000 * step + rank))).square().mean()


def made(cls: type[torch.optim.Optimizer], target: Any = None) -> Any:
    settings = {"lr": 0.01} if cls is not torch.optim.SGD else {"lr": 0.05, "momentum": 0.9}
    if isinstance(target, DistributedDataParallel):
        return ShardedOptimizer(cls, target, **settings)
    return cls(target.parameters(), **settings)


def reference(bare: nn.Module, cls: type[torch.optim.Optimizer]) -> nn.Module:
    """Trained in one process on the batches of all ranks, with gradients added in rank order."""
    optimizer = made(cls, bare)
    for step in range(NUM_STEPS):
        of_ranks = []
        for rank in range(dist.get_world_size()):
            bare.zero_grad()
            loss_of(bare, step, rank).backward()
            of_ranks.append([param.grad for param in bare.parameters()])
        for param, first, *others in zip(bare.parameters(), *of_ranks, strict=True):
            assert first is not None
            param.grad = first.clone()
            for other in others:
                param.grad += other
            param.grad /= dist.get_world_size()
        optimizer.step()
    return bare


def reference_of_replicas(bare: nn.Module, cls: type[torch.optim.Optimizer], outer: Outer) -> nn.Module:
    """Trained as one replica for each rank, in one process."""
    replicas = [copy.deepcopy(bare) for _ in range(dist.get_world_size())]
    optimizers = [made(cls, replica) for replica in replicas]
    naive = NaiveOuter(replicas, [[name] for name, _ in bare.named_parameters()], outer)
    for step in range(NUM_STEPS):
        for rank, (replica, optimizer) in enumerate(zip(replicas, optimizers, strict=True)):
            loss_of(replica, step, rank).backward()
            optimizer.step()
            optimizer.zero_grad()
        naive.step(step + 1)
    return replicas[0]


@contextlib.contextmanager
def model_of(module: nn.Module, settings: dict[str, Any]) -> Iterator[DistributedDataParallel]:
    """On a mesh of four columns, if the strategy needs one."""
    how: dict[str, Any] = {}
    if settings.get("strategy") == "hybrid":
        how["device_mesh"] = init_device_mesh("cpu", (dist.get_world_size() // 4, 4), mesh_dim_names=("replicate", "shard"))
    model = DistributedDataParallel(module, config=SyncConfig(bucket_cap_mb=0.004, **settings), **how)
    with contextlib.closing(model):
        yield model
    for group in how["device_mesh"].get_all_groups() if how else ():
        dist.destroy_process_group(group)


def train(name: str) -> None:
    """Trains in one way, and compares with the reference and with the other ranks."""
    settings, cls, tolerance = WAYS[name]
    first, wanted = layers(), layers()
    outer = settings.get("outer")
    if dist.get_rank() == 0:  # it trains on the batches of all ranks: on every rank that would take as many times as long
        wanted = reference(wanted, cls) if outer is None else reference_of_replicas(wanted, cls, outer)
    for param in wanted.parameters():
        dist.broadcast(param.data, src=0)
    with model_of(copy.deepcopy(first), settings) as model:
        optimizer = made(cls, model if "strategy" in settings else model.module)
        for step in range(NUM_STEPS):
            loss_of(model, step, dist.get_rank()).backward()
            optimizer.step()
            optimizer.zero_grad()
        model.wait()
        for param, other, start in zip(model.module.parameters(), wanted.parameters(), first.parameters(), strict=True):
            found = param.detach().clone()
            if tolerance == 0:
                assert torch.equal(found, other), name
            difference, movement = (found - other).norm(), (other - start).norm()
            assert difference <= tolerance * movement, f"{name}: {difference / movement:.2g}"
            of_rank_0 = found.clone()
            dist.broadcast(of_rank_0, src=0)
            assert torch.equal(found, of_rank_0), f"{name}: rank {dist.get_rank()} has other values than rank 0"


def save_or_load(verb: str, folder: Path) -> None:
    """Saves a model and its optimizer in shards; or loads them, and requires the values and the state that were saved."""
    with model_of(layers(), {"strategy": "zero1"}) as model:
        optimizer = made(torch.optim.AdamW, model)
        if verb == "load":
            load_checkpoint(folder / "checkpoint", model=model, optimizer=optimizer)
        else:
            loss_of(model, 0, dist.get_rank()).backward()
            optimizer.step()
            save_checkpoint(folder / "checkpoint", model=model, optimizer=optimizer)
        model.wait()
        found = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()["state"]}
        if verb == "save" and dist.get_rank() == 0:
            torch.save(found, folder / "saved.pt")
        dist.barrier()
        torch.testing.assert_close(found, torch.load(folder / "saved.pt"), rtol=0.0, atol=0.0)


def num_open_files(name: str) -> int:
    """Returns the files that this process has open when it has trained a step in one way."""
    settings, cls, _ = WAYS[name]
    with model_of(layers(), settings) as model:
        optimizer = made(cls, model if "strategy" in settings else model.module)
        loss_of(model, 0, dist.get_rank()).backward()
        optimizer.step()
        model.wait()
        return len(os.listdir(OPEN_FILES))


def print_open_files() -> None:
    """Prints how many files rank 0 has open. Torch's class makes no group, so the others come after it."""
    loss_of(nn.parallel.DistributedDataParallel(layers()), 0, dist.get_rank()).backward()
    counts = {"torch DDP": len(os.listdir(OPEN_FILES))}
    for name in ("plain", "zero1"):
        counts[name] = num_open_files(name)
        gc.collect()  # which frees the group
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} ranks, open files: {counts}", flush=True)


def kill_one_of(num_ranks: int, folder: str) -> None:
    """Starts ranks, one of which is killed. Not under torchrun, which would end the other ones."""
    with Ranks(num_ranks) as ranks, contextlib.suppress(RanksFailed):  # of the killed one
        ranks.run(kill, Path(folder), timeout_s=300.0)


def kill(folder: Path) -> None:
    """Kills one rank before its backward. Rank 0 prints how long it takes until the last one of the others raises."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    victim, killed = num_ranks // 2, folder / "killed"
    folder.mkdir(exist_ok=True)
    with model_of(layers(), {}) as model:
        for step in range(3):
            loss_of(model, step, rank).backward()
        loss = loss_of(model, 3, rank)
        dist.barrier()
        if rank == victim:
            killed.write_text(repr(time.monotonic()))  # of one machine
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            loss.backward()
            model.wait()
        except RankLost as error:
            if not str(error).startswith(f"rank {victim} is gone"):
                raise
            _write(folder / f"named-{rank}", repr(time.monotonic()))
    if rank == 0:
        others = [folder / f"named-{other}" for other in range(num_ranks) if other != victim]
        until_s = time.monotonic() + 60.0
        while not all(file.exists() for file in others) and time.monotonic() < until_s:
            time.sleep(0.05)
        took_s = sorted(float(file.read_text()) - float(killed.read_text()) for file in others)
        print(
            f"{num_ranks} ranks: the first names rank {victim} after {took_s[0]:.2f} s, the last after {took_s[-1]:.2f} s",
            flush=True,
        )


def _write(file: Path, text: str) -> None:
    """Writes a file that another rank reads as soon as it exists."""
    part = file.with_suffix(".part")
    part.write_text(text)
    part.replace(file)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(minutes=20))
    match sys.argv[1:]:
        case []:
            for name in WAYS:
                train(name)
                if dist.get_rank() == 0:
                    print(f"{dist.get_world_size()} ranks, {name}: right", flush=True)
        case ["files"]:
            print_open_files()
        case [verb, folder]:
            save_or_load(verb, Path(folder))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
