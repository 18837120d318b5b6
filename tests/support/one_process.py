"""Ranks as threads of one process, over a group that connects nothing: the engine without processes and networks.

    def trains(rank: Rank) -> Tensor:
        engine = rank.engine(module)
        ...

    results = ranks_of(2, trains)

A collective completes when every rank has started it. Until its wait, its tensor is NaN: a rank that reads too early computes
with NaN. A rank that starts another collective than the others at the same place of its order fails, with both names. Nothing is
found out by time, except that a rank that waits longer than `PATIENCE_S` for the others says what it waits for.
"""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, TypeVar
from weakref import WeakMethod

import torch
from torch import Tensor, nn

from undertow.buckets.recorder import Recorder
from undertow.config import SyncConfig
from undertow.engine.engine import Engine, SiblingEngines
from undertow.engine.params import ModuleParams
from undertow.ranks.transport import Handle
from undertow.ranks.watch import NullWatch

PATIENCE_S = 20.0
T = TypeVar("T")


@dataclass
class Collective:
    """One collective of all ranks, and what each has brought."""

    name: str
    brought: dict[int, Tensor] = field(default_factory=dict)
    are_there: threading.Event = field(default_factory=threading.Event)


class World:
    """The collectives of all ranks, in one order."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.collectives: list[Collective] = []
        self.is_broken = False
        self._lock = threading.Lock()

    def start(self, rank: int, place: int, name: str, tensor: Tensor) -> Collective:
        with self._lock:
            if place == len(self.collectives):
                self.collectives.append(Collective(name))
            collective = self.collectives[place]
            if collective.name != name:
                raise AssertionError(f"collective {place}: {name} on rank {rank}, {collective.name} on another one")
            collective.brought[rank] = tensor.detach().clone()
            if len(collective.brought) == self.num_ranks:
                collective.are_there.set()
        return collective

    def leave(self) -> None:
        """Called when a rank has failed: no other waits for it."""
        self.is_broken = True
        for collective in self.collectives:
            collective.are_there.set()


class FakeWork:
    """One rank's part of a collective; `take` gets what all ranks have brought."""

    def __init__(self, world: World, collective: Collective, take: Callable[[list[Tensor]], object]) -> None:
        self._world, self._collective, self._take = world, collective, take

    def wait(self, _limit: object = None) -> None:
        if not self._collective.are_there.wait(PATIENCE_S):
            raise AssertionError(f"not every rank has started: {self._collective.name}")
        brought = self._collective.brought
        if len(brought) < self._world.num_ranks:
            raise RuntimeError("another rank has failed")
        self._take([brought[rank] for rank in range(self._world.num_ranks)])

    def is_completed(self) -> bool:
        return self._collective.are_there.is_set()


class FakeGroup:
    """Has the methods of OwnGroup that the engine calls."""

    backend = "fake"
    is_over_gloo, is_open, is_broken, is_alive = True, False, False, True

    def __init__(self, world: World, rank: int) -> None:
        self._world = world
        self._num_started = 0
        self.rank, self.num_ranks = rank, world.num_ranks
        self.device = torch.device("cpu")
        self.user = SimpleNamespace(ranks=tuple(range(world.num_ranks)), can_average=False, rows=())
        self.watch = NullWatch()
        self.here = SimpleNamespace(progress=None, thread=None, module=None)
        self.borrowers: set[str] = set()

    def open(self) -> None:
        self.is_open = True

    @contextmanager
    def waiting(self, _what: str = "") -> Iterator[None]:
        yield

    def all_reduce(self, tensor: Tensor, _name: str, op: Any = None) -> Handle:
        return self.all_reduce_async(tensor, op)

    def all_reduce_async(self, tensor: Tensor, op: Any = None, *, finish: Callable[[], object] | None = None) -> Handle:
        def take(brought: list[Tensor]) -> None:
            stacked = torch.stack(brought)
            is_largest = op == torch.distributed.ReduceOp.MAX
            tensor.copy_(stacked.amax(dim=0) if is_largest else stacked.sum(dim=0))

        work = self._start(f"all-reduce of {tensor.numel()} {tensor.dtype}", tensor, take)
        if tensor.is_floating_point():
            tensor.fill_(torch.nan)  # nobody may read it before the wait
        return Handle(work, complete=self.complete, finish=finish)

    def all_gather(self, tensor: Tensor, name: str) -> Handle:
        received = tensor.new_empty(self.num_ranks, *tensor.shape)
        work = self._start(f"all-gather for {name}", tensor, lambda brought: received.copy_(torch.stack(brought)))
        return Handle(work, complete=self.complete, result=received)

    def broadcast(self, tensor: Tensor, name: str, *, source: int = 0) -> Handle:
        work = self._start(f"broadcast for {name}", tensor, lambda brought: tensor.copy_(brought[source]))
        return Handle(work, complete=self.complete, result=tensor)

    def complete(self, work: FakeWork) -> None:
        with torch.no_grad():
            work.wait()

    def _start(self, name: str, tensor: Tensor, take: Callable[[list[Tensor]], object]) -> FakeWork:
        place, self._num_started = self._num_started, self._num_started + 1
        return FakeWork(self._world, self._world.start(self.rank, place, name, tensor), take)


@dataclass
class Rank:
    """What a rank of these tests has."""

    number: int
    group: FakeGroup

    def engine(self, module: nn.Module, **settings: Any) -> "Trained":
        return Trained(module, self.group, SyncConfig(**settings))


class Trained:
    """A module and its engine, as GradientSync has them."""

    def __init__(self, module: nn.Module, group: FakeGroup, config: SyncConfig) -> None:
        self.module = module
        members = ModuleParams(module, frozenset())
        self.engine = Engine(members, group, config, Recorder(group, level="off"))  # type: ignore[arg-type]
        self.engine.siblings = SiblingEngines([self.engine], close=WeakMethod(self.close))
        self.engine.current_plan.open()

    def __call__(self, *inputs: Tensor) -> Tensor:
        self.engine.forward_begins(is_training=True)
        self.engine.meet_before_forward(has_buffers=False)
        output: Tensor = self.module(*inputs)
        self.engine.forward_ends()
        return output

    def before_step(self) -> None:
        """As an optimizer of all parameters does."""
        params = {id(param) for param in self.module.parameters()}
        self.engine.finish_before_step(params)
        self.engine.require_sound_gradients(params, reader="a step")
        self.engine.progress.optimizer_steps(params, (), of=self.engine.current_plan.hooks.ids, has_closure=False)

    def close(self) -> None:
        self.engine.close()


def ranks_of(num_ranks: int, work: Callable[[Rank], T]) -> list[T]:
    """Runs `work` on every rank, and returns the results in rank order; raises the first error that is not another's."""
    world = World(num_ranks)

    def of_rank(number: int) -> T:
        try:
            return work(Rank(number, FakeGroup(world, number)))
        except BaseException:
            world.leave()
            raise

    with ThreadPoolExecutor(num_ranks) as threads:
        futures = [threads.submit(of_rank, number) for number in range(num_ranks)]
    errors = [error for future in futures if (error := future.exception()) is not None]
    own = [error for error in errors if str(error) != "another rank has failed"]
    if errors:
        raise (own or errors)[0]
    return [future.result() for future in futures]
