"""The trainings that something happens to, in several ways, and what an undisturbed one comes to in a single process."""

import contextlib
import os
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from support.errors import in_pieces
from support.faults import FACTORS, FAULTY_STEP, NAN_SKIPPED, NUM_STEPS, BadBatch, Fault, Points
from support.inside import before_calls, interrupt, own_group_of
from support.models import noise
from support.processes import stop_here, wait_until_stopped
from support.sharded import chain
from undertow import DistributedDataParallel, ExpertGroup, Outer, PeerFailed, ShardedOptimizer, SyncConfig, save_checkpoint

TIMEOUT = timedelta(seconds=1.0)  # of groups


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.middle, self.last = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, leaves_out: bool = False) -> Tensor:
        x = self.norm(self.first(x)).tanh()
        return self.last(x if leaves_out else self.middle(x))


def net() -> Net:
    torch.manual_seed(7)
    return Net()


def loss_of(model: nn.Module, step: int, rank: int, *, micro_batch: int = 0, leaves_out: bool = False) -> Tensor:
    return model(noise(4, 8, step=step + 100 * micro_batch, rank=rank), leaves_out).square().mean()


@dataclass
class Training:
    points: Points
    strategy: str = "ddp"

    def __post_init__(self) -> None:
        self.fault, self.rank = self.points.fault, self.points.rank
        self.config = SyncConfig(strategy=self.strategy, **self.fault.settings)

    def run(self) -> dict[str, Tensor]:
        points = self.points
        points.passes("start")
        with contextlib.ExitStack() as stack:
            self.model = self.wrapped()
            stack.callback(self.end)
            self.net: Net = self.model.module
            points.watch(self.model)
            self.optimizers = self.made_optimizers()
            self.optimizers[0].register_step_pre_hook(lambda *_: points.passes("optimizer"))
            self.net.norm.register_forward_pre_hook(lambda *_: points.passes("forward"))
            self.net.norm.weight.register_hook(lambda _: points.passes("backward"))
            self.net.norm.bias.register_hook(points.spoiled)
            self.train()
            self.model.wait()
            return {name: param.detach().clone() for name, param in self.net.named_parameters()}

    def wrapped(self) -> DistributedDataParallel:
        return DistributedDataParallel(net(), config=self.config)

    def made_optimizers(self) -> list[torch.optim.Optimizer]:
        if self.strategy == "ddp":
            return [torch.optim.AdamW(self.model.parameters(), lr=0.01)]
        passes = self.points.passes

        class Passing(torch.optim.AdamW):
            def step(self, *args: object) -> object:
                passes("update")
                return super().step(*args)

        with in_pieces():
            return [ShardedOptimizer(Passing, self.model, lr=0.01, whole=False)]

    def train(self, num_steps: int = NUM_STEPS) -> None:
        for step in range(num_steps):
            self.points.step = step
            self.begin_step()
            self.points.passes("data")
            if self.points.takes("freezes"):
                self.net.middle.weight.requires_grad_(False)
            self.step()
            self.end_step()
            self.points.passes("after step")

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        last = self.fault.num_micro_batches - 1
        for number in range(last + 1):
            with self.model.no_sync() if number < last else contextlib.nullcontext():
                loss_of(
                    self.model,
                    self.points.step,
                    self.rank.number,
                    micro_batch=number,
                    leaves_out=self.points.takes("other graph"),
                ).backward()
        for optimizer in self.optimizers:
            optimizer.step()

    def begin_step(self) -> None:
        """Does what a script does before it has data."""

    def end_step(self) -> None:
        """Does what a script does when the optimizers have stepped."""

    def end(self) -> None:
        """As the scripts of users do, one so, the other so."""
        match self.fault.ending:
            case "closed":
                self.model.close()
            case "destroyed":
                dist.destroy_process_group()


class OnMesh(Training):
    def wrapped(self) -> DistributedDataParallel:
        return DistributedDataParallel(
            net(),
            device_mesh=init_device_mesh("cpu", (2, self.fault.num_ranks // 2), mesh_dim_names=("replicate", "shard")),
            config=self.config,
        )


class WithExperts(Training):
    def wrapped(self) -> DistributedDataParallel:
        groups = [dist.new_group(list(range(first, self.fault.num_ranks, 2))) for first in (0, 1)]
        return DistributedDataParallel(
            net(), config=replace(self.config, experts=(ExpertGroup(match="last.*", process_group=groups[self.rank.number % 2]),))
        )

    def made_optimizers(self) -> list[torch.optim.Optimizer]:
        sync = self.model.sync
        parts = {part: [param for _, param in part.named_parameters()] for part in (sync, *sync.experts)}
        return [ShardedOptimizer(torch.optim.AdamW, part, params=params, lr=0.01) for part, params in parts.items()]


class WithOuter(Training):
    """Each rank trains alone, and a fragment is on its way in every step."""

    def wrapped(self) -> DistributedDataParallel:
        outer = Outer(every=2, fragments=2, delay=1, wire=None)
        return DistributedDataParallel(net(), config=replace(self.config, outer=outer))


class WithGroup(Training):
    def wrapped(self) -> DistributedDataParallel:
        return DistributedDataParallel(
            net(), process_group=dist.new_group(range(self.fault.num_ranks), timeout=TIMEOUT), config=self.config
        )


class WithGroupThatCloses(Training):
    def begin_step(self) -> None:
        if (self.points.step, self.rank.number) == (FAULTY_STEP, 0):
            threading.Timer(TIMEOUT.total_seconds(), interrupt, [own_group_of(self.model).process_group]).start()


class WithSecondModel(Training):
    def train(self, num_steps: int = 0) -> None:
        group = dist.new_group(range(self.fault.num_ranks), timeout=TIMEOUT)
        self.points.passes("second model")
        self.other = DistributedDataParallel(nn.Linear(2, 2), process_group=group, config=self.config)


class WithEvaluation(Training):
    def begin_step(self) -> None:
        if self.points.step == FAULTY_STEP:
            with torch.no_grad():
                self.model.eval()(noise(4, 8, rank=0))
            self.model.train()


class WithMean(Training):
    def begin_step(self) -> None:
        self.model.mean_over_ranks(4).wait()


class WithCheckpoints(Training):
    def end_step(self) -> None:
        self.points.passes("save")
        save_checkpoint(
            self.rank.directory / "checkpoint", self.net if self.strategy == "ddp" else self.model, self.optimizers[0]
        )


class WithJoin(Training):
    def train(self, num_steps: int = NUM_STEPS) -> None:
        with self.model.join():
            super().train(NUM_STEPS if self.points.is_faulty else FAULTY_STEP)
            self.points.step = FAULTY_STEP
            self.points.passes("data")


class GoesOn(Training):
    def train(self, num_steps: int = NUM_STEPS) -> None:
        try:
            super().train()
        except BadBatch:
            self.rank.waits_for("knows", self.fault.others)
            with pytest.raises(PeerFailed):
                self.model(noise(4, 8, rank=0))  # it would send what is left of the synchronization
            raise


class WithHook(Training):
    def wrapped(self) -> DistributedDataParallel:
        model = super().wrapped()
        model.register_comm_hook(None, self.hook)
        return model

    def hook(self, _, bucket):  # torch compares annotations, if there are any
        self.points.passes("hook")
        return self.reduced(bucket)

    def reduced(self, bucket: Any) -> Any:
        work = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
        return work.get_future().then(lambda done: done.value()[0])


@dataclass
class WithHookOfAStoppedRank(WithHook):
    """The other rank has sent, and stands still until the faulty one has sent too, and is gone.

    It then finds all that it waits for, and of what it has to send one message that gloo still writes, and others that fail.
    Without `sends_last` it is so with what travels beside a hook, over our group, where nobody waits for it any more when the
    hook has failed.
    """

    sends_last: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.at = self.rank.directory / "stands-still"
        before_calls(["reduce"], lambda _: wait_until_stopped(self.at) if self.is_now and self.points.is_faulty else None)

    @property
    def is_now(self) -> bool:
        return self.points.step == FAULTY_STEP

    def hook(self, _, bucket):
        if not self.is_now or (self.at.exists() and not self.points.is_faulty):
            return self.reduced(bucket)
        if self.points.is_faulty:
            process = wait_until_stopped(self.at)
            if self.sends_last:
                self.reduced(bucket)
            time.sleep(0.3)  # for what the thread that trains sends
            ends = f"grep -q 'State:.Z' /proc/{os.getpid()}/status 2>/dev/null || [ ! -d /proc/{os.getpid()} ]"
            subprocess.Popen(["sh", "-c", f"until {ends}; do sleep 0.05; done; kill -CONT {process}"], start_new_session=True)
        self.points.passes("hook")
        reduced = self.reduced(bucket)
        time.sleep(0.3)
        stop_here(self.at)
        return reduced


WAYS: dict[str, Callable[[Points], Training]] = {
    "ddp": Training,
    "zero1": partial(Training, strategy="zero1"),
    "zero2": partial(Training, strategy="zero2"),
    # Ranks wait for others of their row, and of their column.
    "hybrid": partial(OnMesh, strategy="hybrid"),
    # Ranks wait in threads for all others, and for those that have the same experts.
    "experts": partial(WithExperts, strategy="zero1"),
    # Ranks wait for fragments only, which began a step before.
    "outer": WithOuter,
    # Its collectives may take a second.
    "an impatient group": WithGroup,
    # Another collective than the one that is waited for is the first whose time is over, and gloo closes all connections.
    "a group that closes": WithGroupThatCloses,
    "a second model": WithSecondModel,
    # Each rank runs it alone, at a place where the others may go on training.
    "an evaluation": WithEvaluation,
    # A number of every rank, before the forward.
    "a mean": WithMean,
    # Their collectives are torch's, over the user's own group; and so are those of a hook.
    "checkpoints": WithCheckpoints,
    "sharded checkpoints": partial(WithCheckpoints, strategy="zero1"),
    "a hook": WithHook,
    "a hook of a stopped rank": WithHookOfAStoppedRank,
    "trailers of a stopped rank": partial(WithHookOfAStoppedRank, sends_last=False),
    # All others have run out of data, and wait for what the faulty rank does next.
    "join": WithJoin,
    # The script is not ended by an exception: nobody learns of the failure from its end.
    "goes on": GoesOn,
}


def expected(fault: Fault) -> dict[str, Tensor]:
    """The parameters that every rank has to end with: one process does what all ranks do, one after the other."""
    model, rows = net(), ((0, 1), (2, 3)) if fault.way == "hybrid" else (tuple(range(fault.num_ranks)),)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(NUM_STEPS):
        gradients = [_gradients(model, fault, step, rank) for rank in range(fault.num_ranks)]
        for name, param in model.named_parameters():
            of_ranks = [gradient.get(name) for gradient in gradients]
            param.grad = _mean(of_ranks, rows) if any(one is not None for one in of_ranks) else None
        if fault.kind != NAN_SKIPPED or step != fault.step:
            optimizer.step()
    return {name: param.detach() for name, param in model.named_parameters()}


def _gradients(model: nn.Module, fault: Fault, step: int, rank: int) -> dict[str, Tensor]:
    acts = (rank, step) == (fault.rank, fault.step)
    model.zero_grad()
    for micro_batch in range(fault.num_micro_batches):
        leaves_out = acts and fault.kind == "other graph" and micro_batch == 0
        loss_of(model, step, rank, micro_batch=micro_batch, leaves_out=leaves_out).backward()
    gradients = {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
    if acts:
        gradients["norm.bias"] = gradients["norm.bias"] * FACTORS.get(fault.kind, 1.0)
    return gradients


def _mean(of_ranks: Sequence[Tensor | None], rows: Sequence[Sequence[int]]) -> Tensor:
    like = next(one for one in of_ranks if one is not None)
    parts = [torch.zeros_like(like) if one is None else one for one in of_ranks]
    return chain([chain([parts[rank] for rank in row]) for row in rows]) / len(parts)


def different(first: dict[str, Tensor], second: dict[str, Tensor]) -> list[str]:
    names = sorted(first.keys() | second.keys())
    return [name for name in names if name not in first or name not in second or not _is_same(first[name], second[name])]


def _is_same(first: Tensor, second: Tensor) -> bool:
    return torch.equal(first.isnan(), second.isnan()) and torch.equal(first.nan_to_num(), second.nan_to_num())
