"""Ranks of which one fails: real processes, at a point that a test chooses, and what the others say.

Before the faulty rank does anything it waits until all others have come to the same point of the same step, so that the step
that they name is known.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import itertools
import logging
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import undertow.sync
from support.processes import log_file, run_ranks, stop_here, wait_until_stopped
from undertow import DistributedDataParallel, ExpertGroup, PeerFailed, ShardedOptimizer, SyncConfig, save_checkpoint
from undertow.runtime import private, private_checkpoint
from undertow.runtime.reducer import Reducer
from undertow.runtime.trailer import TrailerCodec
from undertow.runtime.weights import Weighing

FAULTY_STEP = 3
_NUM_STEPS = 6
_PATIENCE_S = 60.0
_STAYS_S = 15.0  # longer than any rank may take to learn of a fault


class BadBatch(ValueError):
    """What the user's code raises."""


@dataclass(frozen=True)
class Fault:
    """What goes wrong, where, and on which rank."""

    kind: str  # a function of this module
    point: str  # the same
    rank: int = 1
    num_ranks: int = 2
    settings: dict[str, Any] = field(default_factory=dict)
    is_env: bool = False  # meets by env://, where rank 0 serves the store
    is_destroyed: bool = False  # the others destroy all groups as soon as they have learnt of it


@dataclass(frozen=True)
class Outcome:
    """How a rank ended."""

    kind: str = ""  # of the error; empty where there was none
    text: str = ""
    seconds: float = 0.0  # from the fault until the error was raised
    logged: tuple[str, ...] = ()
    exit_code: int | None = None
    stacks: str = ""  # where it had not ended, and had to be


def outcomes(fault: Fault) -> list[Outcome]:
    """Of every rank, in order; the faulty one's has an exit code and perhaps no more."""
    ended = run_ranks(partial(_rank, fault, _free_port()), fault.num_ranks, patience_s=_PATIENCE_S)
    began_s = min((float(rank.words["fault"]) for rank in ended if "fault" in rank.words), default=0.0)
    return [
        Outcome(
            kind=rank.words.get("kind", ""),
            text=rank.words.get("text", ""),
            seconds=rank.words.get("at", began_s) - began_s,
            logged=tuple(rank.words.get("logged", ())),
            exit_code=rank.exit_code,
            stacks=rank.log,
        )
        for rank in ended
    ]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class _Logged(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


class _Script:
    """What one rank does."""

    def __init__(self, rank: int, fault: Fault, directory: Path, connection: Connection) -> None:
        self.rank = rank
        self.fault = fault
        self.step = -1
        self.has_acted = False
        self.model: DistributedDataParallel | None = None
        self.directory = directory
        self._connection = connection

    def act(self, *_: Any) -> None:
        """The fault, where it is this rank's turn."""
        if self.step != FAULTY_STEP or self.has_acted:
            return
        self.has_acted = True
        (self.directory / f"here-{self.rank}").touch()
        if self.rank != self.fault.rank:
            return
        while any(not (self.directory / f"here-{rank}").exists() for rank in range(self.fault.num_ranks)):
            time.sleep(0.005)
        self._connection.send({"fault": time.monotonic()})
        globals()[self.fault.kind](self)

    def stays_for_others(self) -> None:
        """Keeps its connections until all others have learnt of the fault: when they break, it must not be for us."""
        if self.rank == self.fault.rank:
            return
        (self.directory / f"told-{self.rank}").touch()
        self.waits_for_others()

    def waits_for_others(self) -> None:
        """Returns when all ranks but the faulty one have learnt of the fault, or not in time."""
        others = [rank for rank in range(self.fault.num_ranks) if rank != self.fault.rank]
        until_s = time.monotonic() + _STAYS_S
        while time.monotonic() < until_s and any(not (self.directory / f"told-{rank}").exists() for rank in others):
            time.sleep(0.005)

    def say(self, **words: Any) -> None:
        self._connection.send(words)


# Kinds of faults.


def killed(_script: _Script) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def raises(_script: _Script) -> None:
    raise BadBatch("row 7 has no label")


def is_late(_script: _Script) -> None:
    time.sleep(4.0)


def is_late_for_long(_script: _Script) -> None:
    time.sleep(5.5)


def is_stopped(script: _Script) -> None:
    script.say(stopped=True)
    os.kill(os.getpid(), signal.SIGSTOP)


def closes(script: _Script) -> None:
    script.model.close()
    time.sleep(3.0)  # its process stays


def exits(_script: _Script) -> None:
    raise SystemExit(0)


def overflows(script: _Script) -> None:
    script.model.module.last.bias.register_hook(lambda grad: grad * torch.inf)


def writes(script: _Script) -> None:
    with torch.no_grad():
        script.model.module.last.weight.mul_(2.0)


# Points: each makes the model of a script, and has `act` called somewhere in its step.


class Net(nn.Module):
    """Layers with buffers between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x)))


def _optimizer(script: _Script) -> torch.optim.Optimizer:
    return torch.optim.SGD(script.model.parameters(), lr=0.01)


def in_data(script: _Script) -> torch.optim.Optimizer:
    script.before_forward = script.act
    return _optimizer(script)


def in_data_of_an_impatient_group(script: _Script) -> torch.optim.Optimizer:
    """Whose collectives may take two seconds."""
    config, module = script.model.sync.config, script.model.module
    script.model.close()
    group = dist.new_group(range(script.fault.num_ranks), timeout=timedelta(seconds=2))
    script.model = DistributedDataParallel(module, process_group=group, config=config)
    return in_data(script)


def in_data_of_a_group_that_closes(script: _Script) -> torch.optim.Optimizer:
    """Another collective than the one that is waited for is the first whose time is over, and gloo closes all connections."""
    group = script.model.sync.own_group.process_group
    closing = threading.Timer(2.0, private.interrupt, [group])

    def before_forward() -> None:
        if script.step == FAULTY_STEP and script.rank == 0:
            closing.start()
        script.act()

    script.before_forward = before_forward
    return _optimizer(script)


def before_another_construction(script: _Script) -> torch.optim.Optimizer:
    """Of a second model of the same ranks."""
    group = dist.new_group(range(script.fault.num_ranks), timeout=timedelta(seconds=2))
    script.act()
    script.other = DistributedDataParallel(nn.Linear(2, 2), process_group=group, config=script.model.sync.config)
    return in_data(script)


def in_evaluation(script: _Script) -> torch.optim.Optimizer:
    """Which a rank runs alone, at a place where the others go on training."""

    def evaluate() -> None:
        if script.step == FAULTY_STEP:
            hook = script.model.module.norm.register_forward_pre_hook(script.act)
            with torch.no_grad():
                script.model.eval()(torch.randn(4, 8))
            script.model.train()
            hook.remove()

    script.before_forward = evaluate
    return _optimizer(script)


def in_forward(script: _Script) -> torch.optim.Optimizer:
    script.model.module.norm.register_forward_pre_hook(script.act)
    return _optimizer(script)


def in_backward(script: _Script) -> torch.optim.Optimizer:
    """Some buckets have left, others have not."""
    script.model.module.norm.weight.register_hook(script.act)
    return _optimizer(script)


def in_optimizer(script: _Script) -> torch.optim.Optimizer:
    optimizer = _optimizer(script)
    optimizer.register_step_pre_hook(script.act)
    return optimizer


def in_gathers(script: _Script) -> torch.optim.Optimizer:
    """Behind the step of a sharded optimizer, whose parameters are on their way."""
    script.after_step = script.act
    return ShardedOptimizer(torch.optim.AdamW, script.model, lr=0.01)


def in_sharded_backward(script: _Script) -> torch.optim.Optimizer:
    """Reductions are sends and receives, in threads."""
    script.model.module.norm.weight.register_hook(script.act)
    return ShardedOptimizer(torch.optim.AdamW, script.model, lr=0.01)


class _All:
    """Optimizers of one model, stepped together."""

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        self._optimizers = optimizers

    def zero_grad(self) -> None:
        for optimizer in self._optimizers:
            optimizer.zero_grad()

    def step(self) -> None:
        for optimizer in self._optimizers:
            optimizer.step()


def in_expert_backward(script: _Script) -> _All:
    """Ranks wait in threads for all others, and for those that have the same experts."""
    script.model.module.norm.weight.register_hook(script.act)
    sync = script.model.sync
    parts = {part: [param for _, param in part.named_parameters()] for part in (sync, *sync.experts)}
    return _All(*(ShardedOptimizer(torch.optim.AdamW, part, params=params, lr=0.01) for part, params in parts.items()))


def in_hybrid_backward(script: _Script) -> torch.optim.Optimizer:
    """Ranks wait for others of their row, and of their column."""
    return in_sharded_backward(script)


def in_checkpoint(script: _Script) -> torch.optim.Optimizer:
    """Whose collectives are torch's, over the user's own group: this rank has come to them, and others wait there."""
    optimizer = ShardedOptimizer(torch.optim.AdamW, script.model, lr=0.01)

    def save() -> None:
        write = private_checkpoint.save_checkpoint

        def broken(*args: Any) -> None:
            script.act()
            write(*args)

        private_checkpoint.save_checkpoint = broken
        save_checkpoint(script.directory / "checkpoint", script.model, optimizer)
        private_checkpoint.save_checkpoint = write

    script.after_step = save
    return optimizer


def before_checkpoint(script: _Script) -> torch.optim.Optimizer:
    """The same, where a rank does not come to it."""
    optimizer = _optimizer(script)

    def save() -> None:
        script.act()
        save_checkpoint(script.directory / "checkpoint", script.model.module, optimizer)

    script.after_step = save
    return optimizer


def in_comm_hook(script: _Script) -> torch.optim.Optimizer:
    """Whose collectives go over the user's own group."""

    def hook(_, bucket):  # torch compares annotations, if there are any
        script.act()
        work = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
        return work.get_future().then(lambda done: done.value()[0])

    script.model.register_comm_hook(None, hook)
    return _optimizer(script)


def in_comm_hook_of_a_stopped_rank(script: _Script, *, is_sending: bool = True) -> torch.optim.Optimizer:
    """The other rank has sent, and stands still until this one has sent too, and is gone.

    It then finds all that it waits for, and of what it has to send one message that gloo still writes, and others that fail.
    """
    faulty, at = script.fault.rank, script.directory / "stands-still"

    def hook(_, bucket):
        is_now, is_ours = script.step == FAULTY_STEP and not script.has_acted, script.rank == faulty
        if is_now and is_ours:
            wait_until_stopped(at)
        if is_now and not is_ours:
            script.act()
        work = None
        if is_sending or not (is_now and is_ours):
            work = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
        if is_now:
            time.sleep(0.3)  # for what the thread that trains sends
        if is_now and is_ours:
            ends = f"grep -q 'State:.Z' /proc/{os.getpid()}/status 2>/dev/null || [ ! -d /proc/{os.getpid()} ]"
            goes_on = f"until {ends}; do sleep 0.05; done; kill -CONT {at.read_text()}"
            subprocess.Popen(["sh", "-c", goes_on], start_new_session=True)
            script.act()
        if is_now and not is_ours:
            stop_here(at)
        return work.get_future().then(lambda done: done.value()[0])

    reduce = Reducer.reduce

    def late(reducer: Reducer, *args: Any, **kwargs: Any) -> Any:
        if script.step == FAULTY_STEP and script.rank == faulty:
            wait_until_stopped(at)
        return reduce(reducer, *args, **kwargs)

    Reducer.reduce = late
    script.model.register_comm_hook(None, hook)
    return _optimizer(script)


def in_trailers_of_a_stopped_rank(script: _Script) -> torch.optim.Optimizer:
    """The same of what travels beside a hook, over our group, where nobody waits for it any more when the hook has failed."""
    return in_comm_hook_of_a_stopped_rank(script, is_sending=False)


def in_buffers(script: _Script) -> torch.optim.Optimizer:
    optimizer, broadcast = _optimizer(script), undertow.sync.broadcast_buffers

    def broken(*args: Any, **kwargs: Any) -> None:
        script.act()
        broadcast(*args, **kwargs)

    undertow.sync.broadcast_buffers = broken
    return optimizer


def in_join(script: _Script) -> torch.optim.Optimizer:
    """All others have run out of data, and wait for what this rank does next."""
    script.around = script.model.join
    if script.rank == script.fault.rank:
        script.before_forward = script.act
    else:
        script.num_steps, script.after_steps = FAULTY_STEP, script.act
    return ShardedOptimizer(torch.optim.AdamW, script.model, lr=0.01)


def in_launch(script: _Script) -> torch.optim.Optimizer:
    """In our own code, when the first bucket has left and the second has not."""
    write, buckets = TrailerCodec.write, itertools.count()

    def broken(trailer: TrailerCodec, **what: Any) -> None:
        if script.step == FAULTY_STEP and next(buckets) == 1:
            script.act()
        write(trailer, **what)

    @contextlib.contextmanager
    def stays() -> Iterator[None]:
        """A script that goes on: nobody learns of the failure from its end."""
        try:
            yield
        except BadBatch:
            script.waits_for_others()
            with pytest.raises(PeerFailed):
                script.model(torch.randn(4, 8))  # it would send what is left of the round
            raise

    TrailerCodec.write, script.around = broken, stays
    return _optimizer(script)


def in_weights(script: _Script) -> torch.optim.Optimizer:
    """When gradients are weighed for the first time their sum leaves behind all buckets."""
    send = Weighing.send

    def broken(weighing: Weighing) -> None:
        script.act()
        send(weighing)

    Weighing.send = broken
    script.before_forward = lambda: script.model.weight(4) if script.step >= FAULTY_STEP else None
    return _optimizer(script)


def in_construction(script: _Script) -> torch.optim.Optimizer:
    return _optimizer(script)  # it has happened before


def connecting_in_construction(script: _Script) -> torch.optim.Optimizer:
    """The others wait for a connection to this rank."""
    return _optimizer(script)


def before_construction(script: _Script) -> torch.optim.Optimizer:
    return _optimizer(script)


def _constructed(script: _Script) -> DistributedDataParallel:
    point = script.fault.point
    if point.endswith("construction"):
        script.step = FAULTY_STEP
    if point == "before_construction":
        script.act()
    if point == "in_construction":
        broadcast = undertow.sync.broadcast_in_place

        def broken(*args: Any, **kwargs: Any) -> None:
            script.act()
            broadcast(*args, **kwargs)

        undertow.sync.broadcast_in_place = broken
    if point == "connecting_in_construction":
        new_group = private.new_group

        def broken_group(*args: Any, **kwargs: Any) -> object:
            script.act()
            return new_group(*args, **kwargs)

        private.new_group = broken_group
    config = SyncConfig(bucket_cap_mb=1e-4, **script.fault.settings)
    if point == "in_hybrid_backward":
        mesh = init_device_mesh("cpu", (2, script.fault.num_ranks // 2), mesh_dim_names=("replicate", "shard"))
        return DistributedDataParallel(Net(), device_mesh=mesh, config=dataclasses.replace(config, strategy="hybrid"))
    if point == "in_expert_backward":
        groups = [dist.new_group(list(range(first, script.fault.num_ranks, 2))) for first in (0, 1)]
        experts = (ExpertGroup(match="last.*", process_group=groups[script.rank % 2]),)
        return DistributedDataParallel(Net(), config=dataclasses.replace(config, experts=experts))
    return DistributedDataParallel(Net(), config=config)


def _train(script: _Script) -> None:
    script.before_forward = script.after_step = script.after_steps = lambda: None
    script.around, script.num_steps = contextlib.nullcontext, _NUM_STEPS
    script.model = _constructed(script)
    optimizer = globals()[script.fault.point](script)
    with script.around():
        for step in range(script.num_steps):
            script.step = step
            script.before_forward()
            optimizer.zero_grad()
            script.model(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
            script.after_step()
        script.step += 1
        script.after_steps()


def _rank(fault: Fault, port: int, rank: int, directory: Path, connection: Connection) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    faulthandler.register(signal.SIGUSR1, file=log_file(directory, rank).open("w"))  # held by it
    logged = _Logged()
    logging.getLogger("undertow").addHandler(logged)
    meet: Callable[[], object] = partial(
        dist.init_process_group,
        "gloo",
        store=dist.FileStore(str(directory / "meeting-point"), fault.num_ranks),
        rank=rank,
        world_size=fault.num_ranks,
    )
    if fault.is_env:
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(fault.num_ranks)}
        meet = partial(dist.init_process_group, "gloo")
    meet()
    script = _Script(rank, fault, directory, connection)
    with _reported(script, logged):
        _train(script)
    # Not closed: a rank that learns of a fault may have nothing but its exit left.


class _Nobody:
    """Listens to no rank."""

    def send(self, words: object) -> None:
        """In place of a connection's."""


def be_rank(fault: Fault, rank: int, directory: str) -> None:
    """One rank in an interpreter of its own, which ends as those of scripts do: not as processes of multiprocessing."""
    _rank(fault, 0, rank, Path(directory), _Nobody())


@contextlib.contextmanager
def _reported(script: _Script, logged: _Logged) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        script.say(kind=type(error).__name__, text=str(error), at=time.monotonic(), logged=logged.texts)
        if script.fault.is_destroyed and script.rank != script.fault.rank:
            dist.destroy_process_group()
        script.stays_for_others()
        raise
    script.say(at=time.monotonic(), logged=logged.texts)
