"""Runs that are ended by signals: what each drew, what its ranks did, and what its checkpoints hold.

SIGTERM at a drawn moment, to one or all ranks: all stop after the same step, and their last checkpoint is of that step.
SIGKILL while a save runs in the background: the checkpoint before is there, or the new one, never a mixture.
"""

import os
import random
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn

from support.inside import before_gathers_are_waited_for
from support.processes import Ended, Rank, run_ranks
from support.saves import inputs, made, net
from undertow import (
    DistributedDataParallel,
    ShardedOptimizer,
    SyncConfig,
    has_checkpoint,
    load_checkpoint,
    save_checkpoint,
    stop_on_signal,
)

MOMENTS = ("forward", "backward", "gather", "step", "evaluation", "save", "compile", "between", "any time")
STRATEGIES = ("ddp", "zero1", "outer")
_MOST_STEPS = 60
_LAST_DRAWN = 12  # step in which the signal arrives


@dataclass(frozen=True)
class Preemption:
    """What one run has drawn."""

    seed: int
    num_ranks: int
    strategy: str
    moment: str
    step: int
    signaled: tuple[int, ...]  # ranks

    def __str__(self) -> str:
        ranks = ", ".join(map(str, self.signaled))
        return f"{self.strategy}, {self.num_ranks} ranks: SIGTERM to rank {ranks} in step {self.step}, {self.moment}"


def preemption(seed: int) -> Preemption:
    chance = random.Random(seed)
    num_ranks = chance.choice([2, 3])
    strategy = chance.choice(STRATEGIES)
    moments = [moment for moment in MOMENTS if moment != "gather" or strategy == "zero1"]
    signaled = chance.choice([(chance.randrange(num_ranks),), tuple(range(num_ranks))])
    return Preemption(seed, num_ranks, strategy, chance.choice(moments), chance.randrange(_LAST_DRAWN), signaled)


class Signals:
    """Sends SIGTERM to this process once, at the drawn moment."""

    def __init__(self, drawn: Preemption, rank: int) -> None:
        self._drawn, self._rank = drawn, rank
        self._number, self._is_sent = -1, False

    def step_begins(self, number: int) -> None:
        self._number = number
        if self._drawn.moment == "any time" and self._is_due("any time"):
            delay_s = random.Random(self._drawn.seed + self._rank).random() * 0.05
            self._is_sent = True
            threading.Timer(delay_s, os.kill, (os.getpid(), signal.SIGTERM)).start()

    def at(self, moment: str, *_arguments: Any) -> None:
        if self._is_due(moment):
            self._is_sent = True
            os.kill(os.getpid(), signal.SIGTERM)

    def _is_due(self, moment: str) -> bool:
        drawn = self._drawn
        is_drawn = moment == drawn.moment and self._number >= drawn.step
        return is_drawn and not self._is_sent and self._rank in drawn.signaled


def _watched(signals: Signals, moment: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        signals.at(moment)
        return function(*args, **kwargs)

    return call


def trains_until_stopped(drawn: Preemption, folder: Path, rank: Rank) -> None:
    """Trains on one rank; writes the step after which it has stopped and saved."""
    rank.meet()
    signals = Signals(drawn, rank.number)
    model, optimizer = made(drawn.strategy)
    stop_on_signal(model)

    def backend(graph: Any, _inputs: Any) -> Any:
        signals.at("compile")
        return graph

    called = torch.compile(model, backend=backend) if drawn.moment == "compile" else model
    model.module[0].register_forward_hook(partial(signals.at, "forward"))
    patches = [
        mock.patch.object(os, "fsync", _watched(signals, "save", os.fsync)),
        before_gathers_are_waited_for(partial(signals.at, "gather")),
    ]
    optimizer.register_step_post_hook(partial(signals.at, "step"))
    save = None
    with patches[0], patches[1]:
        for number in range(_MOST_STEPS):
            signals.step_begins(number)
            if drawn.moment == "compile" and number >= drawn.step:
                torch.compiler.reset()  # compiles again
            optimizer.zero_grad()
            outputs = called(inputs(number))
            if outputs.requires_grad:
                outputs.register_hook(partial(signals.at, "backward"))
            outputs.square().mean().backward()
            optimizer.step()
            signals.at("between")
            if number % 5 == 4:
                model.eval()
                with torch.no_grad():
                    model(inputs(number))
                signals.at("evaluation")
                model.train()
            if model.stop_requested:
                save_checkpoint(folder / f"step-{number}", model, optimizer, extra=number)
                break
            if number % 3 == 2:
                save = save_checkpoint(folder / f"step-{number}", model, optimizer, extra=number, background=True, keep=2)
    if save is not None:
        save.wait()
    with model.outer.synchronized() if model.outer is not None else model.accumulate():
        torch.save(model.module.state_dict(), folder / f"rank-{rank.number}.pt")
    model.close()
    dist.destroy_process_group()
    (folder / f"stopped-{rank.number}").write_text(str(number))


def problems_of_preemption(drawn: Preemption) -> list[str]:
    """Runs it; returns everything that is wrong."""
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        ended = run_ranks(partial(trains_until_stopped, drawn, folder), drawn.num_ranks, is_script=True, patience_s=90)
        found = [
            f"rank {rank} ended with {each.exit_code}: {each.log[-600:]}" for rank, each in enumerate(ended) if each.exit_code
        ]
        if found:
            return found
        stopped = [int((folder / f"stopped-{rank}").read_text()) for rank in range(drawn.num_ranks)]
        if len(set(stopped)) > 1 or stopped[0] == _MOST_STEPS - 1:
            return [f"ranks stopped after steps {stopped}"]
        model, optimizer = net(), None
        if drawn.strategy != "outer":
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        step = load_checkpoint(folder, model, optimizer, which="latest")
        if step != stopped[0]:
            found.append(f"the newest checkpoint is of step {step}, and the ranks stopped after {stopped[0]}")
        for rank in range(drawn.num_ranks):
            of_rank = torch.load(folder / f"rank-{rank}.pt")
            found += [
                f"{name} differs from rank {rank}'s"
                for name, value in model.state_dict().items()
                if not torch.equal(value, of_rank[name])
            ]
        return found


# SIGKILL in a save in the background.


@dataclass(frozen=True)
class Kill:
    """What one run has drawn: when which ranks are killed, and if checkpoints have one path or several."""

    seed: int
    killed: tuple[int, ...]
    save: int  # the number of the save in which they are
    delay_s: float  # from its begin
    has_one_path: bool

    def __str__(self) -> str:
        where = "at one path" if self.has_one_path else "with keep=2"
        return f"SIGKILL to rank {', '.join(map(str, self.killed))}, {1000 * self.delay_s:.1f} ms into save {self.save} {where}"


def kill(seed: int) -> Kill:
    chance = random.Random(seed)
    killed = chance.choice([(0,), (1,), (0, 1)])
    return Kill(seed, killed, chance.randrange(1, 4), chance.random() * 0.06, chance.random() < 0.5)


_SIZE = 300  # a file of a rank takes some milliseconds to write


def saves_until_killed(drawn: Kill, folder: Path, rank: Rank) -> None:
    """Saves again and again; in the save with number n, every value is n."""
    rank.meet()
    model = DistributedDataParallel(nn.Linear(_SIZE, _SIZE), config=SyncConfig(strategy="zero1"))
    optimizer = ShardedOptimizer(torch.optim.AdamW, model, lr=0.0)
    model(torch.ones(1, _SIZE)).sum().backward()
    optimizer.step()
    model.wait()
    for number in range(6):
        state = optimizer.state_dict()
        for of_param in state["state"].values():
            for value in of_param.values():
                value.fill_(number)
        optimizer.load_state_dict(state)
        with torch.no_grad():
            for param in model.parameters():
                param.fill_(number)
        path = folder / ("saved" if drawn.has_one_path else f"save-{number}")
        save = save_checkpoint(path, model, optimizer, extra=number, background=True, keep=None if drawn.has_one_path else 2)
        if number == drawn.save and rank.number in drawn.killed:
            threading.Timer(drawn.delay_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
        assert save is not None
        save.wait()
        (folder / f"complete-{rank.number}").write_text(str(number))
        time.sleep(0.03)


def problems_of_kill(drawn: Kill) -> list[str]:
    """Runs it; returns everything that is wrong."""
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        stays = [rank for rank in range(2) if rank not in drawn.killed]
        ended: list[Ended] = run_ranks(partial(saves_until_killed, drawn, folder), 2, is_script=True, patience_s=60, stays=stays)
        found = [f"rank {rank} was not killed: {ended[rank].exit_code}" for rank in drawn.killed if ended[rank].exit_code != -9]
        path, which = (folder / "saved", None) if drawn.has_one_path else (folder, "latest")
        known = [int(file.read_text() or -1) for file in folder.glob("complete-*")]
        if not has_checkpoint(path, which):  # type: ignore[arg-type]
            return [*found, f"no checkpoint, and save {max(known, default=None)} was complete"]
        model = nn.Linear(_SIZE, _SIZE)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
        number = load_checkpoint(path, model, optimizer, which=which)  # type: ignore[arg-type]
        if number < max(known, default=0):
            found.append(f"save {number} is there, and {max(known)} was complete")
        values = {*torch.cat([param.detach().flatten() for param in model.parameters()]).tolist()}
        for of_param in optimizer.state_dict()["state"].values():
            for value in of_param.values():
                values |= {*value.flatten().tolist()}
        if values != {float(number)}:
            found.append(f"save {number} has the values {sorted(values)}")
        whole = [file for file in folder.rglob("*.safetensors") if has_checkpoint(file.parent) and file.parent.suffix != ".new"]
        found += [f"{file} cannot be read" for file in whole if not load_file(file)]
        return found
