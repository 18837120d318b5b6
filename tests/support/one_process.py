"""Ranks as threads of one process, over a group that connects nothing: Undertow without processes and networks.

    def trains(rank: Rank) -> Tensor:
        sync = rank.attach(module)
        ...

    results = ranks_of(2, trains)

Everything above the groups is the library's own: `attach`, DistributedDataParallel and ShardedOptimizer work as for users.
A test may also call the functions of torch.distributed that `_OF_USERS` lists.

A collective completes when every rank has started it. Until its wait, its tensor is NaN: a rank that reads too early computes
with NaN. A rank that starts another collective than the others at the same place of its order fails, with both names, and so do
ranks that wait for each other for ever. Nothing is found out by time, except that a rank whose threads wait longer than
`PATIENCE_S` for the others says what it waits for.
"""

import contextlib
import copy
import threading
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import reduce
from types import SimpleNamespace
from typing import Any, TypeVar
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules import module
from torch.optim import optimizer

from support.inside import NUM_STEPS_UNTIL_A_MOVE as NUM_STEPS_UNTIL_A_MOVE
from support.scripted import scripted
from undertow import GradientSync, SyncConfig, attach
from undertow.buckets import comm_hook, transfer
from undertow.buckets.facts import Reading
from undertow.device import device_of
from undertow.engine import current_plan, step_events
from undertow.engine.round import Round, Terms
from undertow.engine.step_settings import Settings
from undertow.plan import Plan
from undertow.plan.layout import equal_parts
from undertow.ranks.answers import Alike, alike
from undertow.ranks.exchanges import accumulation_dtype
from undertow.ranks.group import Abilities, GroupRef
from undertow.ranks.handle import Handle, Waiter
from undertow.ranks.parcels import Encoded, FullWidth, Parcel
from undertow.ranks.threads import Worker
from undertow.ranks.watch import NullWatch
from undertow.schedule import Op
from undertow.sharded import shard_exchanges
from undertow.sync import gradient_sync, group_sync

PATIENCE_S = 20.0
_LEFT = "another rank has failed"
T = TypeVar("T")
_thread = threading.local()  # `rank`, in a rank's thread


class Snapshots(OrderedDict[int, Any]):
    """Hooks that a thread may go through while another one adds or removes some; torch expects one thread."""

    def values(self) -> Any:
        return list(super().values())


for _place, _name in (
    (module, "_global_module_registration_hooks"),
    (module, "_global_parameter_registration_hooks"),
    (optimizer, "_global_optimizer_pre_hooks"),
):
    setattr(_place, _name, Snapshots(getattr(_place, _name)))


@dataclass(eq=False)
class Collective:
    """One collective of all ranks, and what each has brought."""

    name: str
    num_ranks: int
    brought: dict[int, Any] = field(default_factory=dict)
    end: Future[None] = field(default_factory=Future)

    def bring(self, rank: int, value: Any) -> None:
        self.brought[rank] = value
        if len(self.brought) == self.num_ranks:
            self.end.set_result(None)


class World:
    """The collectives of all ranks: one order in each lane."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self._lanes: dict[str, list[Collective]] = defaultdict(list)
        self._num_started: dict[tuple[str, int], int] = defaultdict(int)
        self._why = ""  # nobody can go on
        self._num_ended = 0
        self._waiting: list[Collective] = []
        self._changed = threading.Condition()

    def start(self, lane: str, rank: int, name: str, value: Any) -> Collective:
        with self._changed:
            place = self._num_started[lane, rank]
            self._num_started[lane, rank] += 1
            if place == len(self._lanes[lane]):
                self._lanes[lane].append(Collective(name, self.num_ranks))
            collective = self._lanes[lane][place]
            if collective.name != name:
                raise AssertionError(f"{lane} {place}: {name} on rank {rank}, {collective.name} on another one")
            collective.bring(rank, value)
            self._changed.notify_all()
        return collective

    def wait(self, collective: Collective) -> list[Any]:
        """Returns what the ranks have brought, in their order."""
        waiting = [collective] if _is_ranks_own() else []  # a worker's waits keep no rank from going on
        with self._changed:
            self._waiting += waiting
            self._look()
            is_over = self._changed.wait_for(lambda: collective.end.done() or self._why, PATIENCE_S)
            for each in waiting:
                self._waiting.remove(each)
        if not is_over:
            raise AssertionError(f"not every rank has started: {collective.name}")
        if not collective.end.done():
            raise RuntimeError(_LEFT) if self._why == _LEFT else AssertionError(self._why)
        return [collective.brought[rank] for rank in range(self.num_ranks)]

    def ends(self) -> None:
        """Called when a rank is done."""
        with self._changed:
            self._num_ended += 1
            self._look()

    def leave(self) -> None:
        """Called when a rank has failed: no other waits for it."""
        with self._changed:
            self._why = self._why or _LEFT
            self._changed.notify_all()

    @property
    def is_broken(self) -> bool:
        return bool(self._why)

    def _look(self) -> None:
        names = [each.name for each in self._waiting if not each.end.done()]
        if len(names) == self.num_ranks - self._num_ended > 0 and not self._why:
            self._why = f"ranks wait for ever: {', '.join(names)}"
            self._changed.notify_all()


class FakeWork:
    """One rank's part of a collective; `take` gets what all ranks have brought."""

    def __init__(self, world: World, collective: Collective, take: Callable[[list[Any]], object]) -> None:
        self._world, self._collective, self._take = world, collective, take

    def wait(self, _limit: object = None) -> None:
        with torch.no_grad():
            self._take(self._world.wait(self._collective))

    def is_completed(self) -> bool:
        return self._collective.end.done()

    def get_future(self) -> Future[None]:
        return self._collective.end


class FakeWatch(NullWatch):
    def __init__(self, world: World, rank: int) -> None:
        super().__init__()
        self._world, self._rank = world, rank

    def check(self) -> None:
        if self._world.is_broken:
            raise RuntimeError(_LEFT)

    def fail(self, reason: object) -> None:
        self._world.leave()

    def ask(self, text: str, of: Sequence[int] = (), *, most: int = 2) -> list[Alike]:
        texts = self._world.wait(self._world.start("texts", self._rank, "", text))
        found = [one for one in alike(dict(enumerate(texts))) if one.text]
        return [*found[:most], *(Alike(one.ranks, None) for one in found[most:])]


class FakeRef(GroupRef):
    """What GradientSync takes for the user's group."""

    @property
    def rank(self) -> int:
        return _thread.rank.number  # type: ignore[no-any-return]


class FakeGroup:
    """Has the methods of OwnGroup that are called above it. Every group has a lane of its own."""

    backend = "fake"
    can = Abilities(send_from_host=True)
    is_open, is_broken, is_left, is_alive = False, False, False, True
    waiter = Waiter(NullWatch(), is_host=False)  # works wait by themselves

    def __init__(
        self, user: GroupRef, *, device: Any = None, limits: Any = None, within: Any = None, is_axis: bool = False
    ) -> None:
        rank = _thread.rank
        self.world: World = rank.world
        self.lane = f"group {rank.num_groups}"
        rank.num_groups += 1
        self.thread = rank.thread
        self.user, self.rank, self.num_ranks = user, rank.number, rank.world.num_ranks
        self.names, self.name = range(self.num_ranks), self.rank
        self.device = torch.device("cpu")
        self.hardware = device_of(self.device)
        self.watch = FakeWatch(rank.world, rank.number)
        self.here = SimpleNamespace(progress=None, thread=None, module=None)
        self.borrowers: set[str] = set()
        self.everyone, self.deciding, self.is_on_mesh = self, self, False

    def tell_places(self, _error: Exception) -> None:
        pass

    def open(self) -> None:
        assert self.num_ranks > 1, "one rank needs no group"
        self.is_open = True

    def close(self) -> None:
        self.is_alive = False

    def existing(self) -> object:
        return self if self.is_alive else None

    @contextmanager
    def waiting(self, _what: str = "") -> Iterator[None]:
        yield

    def makes_call(self, _name: str) -> None:
        pass

    def all_reduce(self, tensor: Tensor, _name: str, op: Any = None, **how: Any) -> Handle:
        return self.all_reduce_unnamed(tensor, op, **how)

    def all_reduce_unnamed(self, tensor: Tensor, op: Any = None, *, finish: Callable[[], object] | None = None) -> Handle:
        def take(brought: list[Tensor]) -> None:
            tensor.copy_(reduce(torch.maximum if op == dist.ReduceOp.MAX else torch.add, brought))

        work = self.start(f"all-reduce of {tensor.numel()} {tensor.dtype}", tensor.detach().clone(), take)
        hide(tensor)
        return Handle(work, finish=finish, result=tensor)

    def all_gather(self, tensor: Tensor, name: str) -> Handle:
        received = tensor.new_empty(self.num_ranks, *tensor.shape)

        def take(brought: list[Tensor]) -> None:
            received.copy_(torch.stack(brought))

        work = self.start(f"all-gather for {name}", tensor.clone(), take)
        return Handle(work, result=received)

    def broadcast(self, tensor: Tensor, name: str, *, source: int = 0) -> Handle:
        def take(brought: list[Tensor]) -> None:
            tensor.copy_(brought[source])

        work = self.start(f"broadcast for {name}", tensor.detach().clone(), take)
        return Handle(work, result=tensor)

    def start(self, name: str, value: Any, take: Callable[[list[Any]], object], lane: str = "") -> FakeWork:
        assert self.is_open, f"{name}, before the group is open"
        _thread.rank.at_start(name)
        return FakeWork(self.world, self.world.start(self.lane + lane, self.rank, name, value), take)


def hide(tensor: Tensor) -> None:
    """Nobody may read it before the wait."""
    if tensor.is_floating_point() and not tensor.is_sparse:
        with torch.no_grad():
            tensor.fill_(torch.nan)


class FakeCollectives:
    """Exchanges of parts: the results of Exchanges. `number` identifies a gather, which ranks start in any order."""

    def __init__(self, group: FakeGroup, config: SyncConfig, *, divisor: float, is_second: bool = False) -> None:
        self.group, self._divisor = group, divisor
        self._in_flight = 0
        _thread.rank.exchanges.add(self)

    def reduce_scatter(
        self,
        storage: Tensor,
        shard: Tensor,
        parcel: Parcel,
        *,
        trailer: Tensor,
        parts: Sequence[range] | None = None,
        fill: Callable[[], object] | None = None,
    ) -> Handle:
        if fill is not None:
            with torch.no_grad():
                fill()
        own = (parcel.parts if parts is None else parts)[self.group.rank]

        def take(brought: list[tuple[list[Tensor], Tensor]]) -> None:
            messages, trailers = zip(*brought, strict=True)
            total = torch.zeros(max(part.stop for part in parcel.parts), dtype=shard.dtype)
            for index, part in enumerate(parcel.parts):
                if parts is not None or index == self.group.rank:
                    parcel.add_up([of_rank[index] for of_rank in messages], index, into=total[part.start : part.stop])
            shard.zero_()
            shard[: len(own)].copy_(total[own.start : own.stop]).div_(self._divisor)
            trailer.copy_(sum(trailers))

        sent = _messages(parcel, storage)
        work = self.group.start(f"reduce-scatter of {shard.numel()}", (sent, trailer.clone()), take)
        hide(shard)
        return Handle(work)

    def all_reduce(self, tensor: Tensor, parcel: Parcel | None = None, *, trailer: Tensor | None = None) -> Handle:
        everything = parcel or FullWidth(equal_parts(1, tensor.numel(), stop=tensor.numel()))
        facts = tensor[:0] if trailer is None else trailer

        def take(brought: list[tuple[list[Tensor], Tensor]]) -> None:
            messages, trailers = zip(*brought, strict=True)
            means = []
            for index, part in enumerate(everything.parts):
                total = torch.empty(len(part), dtype=accumulation_dtype(tensor.dtype))
                everything.add_up([of_rank[index] for of_rank in messages], index, into=total)
                mean = messages[0][index].clone()
                everything.write(total.div_(self._divisor), index, mean)
                means.append(mean)
            everything.open(means, tensor)
            facts.copy_(sum(trailers))

        name = f"ordered all-reduce of {tensor.numel()} {tensor.dtype}"
        work = self.group.start(name, (_messages(everything, tensor), facts.clone()), take)
        hide(tensor)
        return Handle(work)

    def all_gather(
        self, flat: Tensor, parts: Sequence[range], *, number: int, then: Callable[[], object] | None = None
    ) -> Handle:
        def take(arrived: Sequence[Tensor]) -> None:
            flat[: parts[-1].stop].copy_(torch.cat(tuple(arrived)))
            self._in_flight -= 1

        self._in_flight += 1
        own = flat[parts[self.group.rank].start : parts[self.group.rank].stop].clone()
        work = self.group.start(f"all-gather of {flat.numel()}", own, take, lane=f", gather {number}")
        return Handle(work, finish=then)

    def all_gather_differences(
        self,
        write_difference: Callable[[Tensor], None],
        flat: Tensor,
        parcel: Encoded,
        *,
        number: int,
        then: Callable[[], object],
    ) -> Handle:
        def take(messages: Sequence[Tensor]) -> None:
            parcel.add_to(messages, flat)
            self._in_flight -= 1

        self._in_flight += 1
        message = torch.empty(parcel.sizes[self.group.rank], dtype=torch.uint8)
        difference = torch.empty(len(parcel.parts[self.group.rank]), dtype=parcel.dtype)
        write_difference(difference)
        parcel.write(difference, self.group.rank, message)
        work = self.group.start(f"gather of {flat.numel()} differences", message, take, lane=f", gather {number}")
        return Handle(work, finish=then)

    def release(self) -> None:
        pass

    def close(self) -> None:
        _thread.rank.exchanges.discard(self)
        assert not self._in_flight or self.group.world.is_broken, "closed with parameters on their way"


def _messages(parcel: Parcel, values: Tensor) -> list[Tensor]:
    return [message.clone() for message in parcel.messages(values, lambda numel, dtype: torch.empty(numel, dtype=dtype))]


class Rank:
    """What a rank of these tests has."""

    def __init__(self, number: int, world: World) -> None:
        self.number, self.world = number, world
        self.thread = threading.get_ident()
        self.num_groups = 0
        self.exchanges: set[FakeCollectives] = set()  # that are open
        self.at_start: Callable[[str], object] = str  # called with the name of each collective

    def attach(self, model: nn.Module, **settings: Any) -> GradientSync:
        return attach(model, config=SyncConfig(**settings))

    def unopened(self, model: nn.Module, **settings: Any) -> GradientSync:
        """As of a copied model, whose ranks open the group when they first use it."""
        ref = FakeRef(tuple(range(self.world.num_ranks)), "fake", None)
        return GradientSync(model, process_group=ref, config=SyncConfig(**settings))

    def gather(self, value: T) -> list[T]:
        """A value of each rank, in rank order."""
        lane = "values" if _is_ranks_own() else "values of workers"
        return self.world.wait(self.world.start(lane, self.number, "a value", copy.deepcopy(value)))


def _is_ranks_own() -> bool:
    if not hasattr(_thread, "rank"):  # the garbage collector has found a model after its test
        raise RuntimeError("this thread is no rank's.")
    return _thread.rank.thread == threading.get_ident()  # type: ignore[no-any-return]


def _all_gather_object(everyone: list[Any], value: Any, **_: Any) -> None:
    everyone[:] = _thread.rank.gather(value)


def _all_reduce(tensor: Tensor, **_: Any) -> None:
    with torch.no_grad():
        tensor.copy_(reduce(torch.add, _thread.rank.gather(tensor)))


def _broadcast(tensor: Tensor, src: int, **_: Any) -> None:
    with torch.no_grad():
        tensor.copy_(_thread.rank.gather(tensor)[src])


_OF_USERS: dict[str, Callable[..., Any]] = {
    "get_rank": lambda *_: _thread.rank.number,
    "get_world_size": lambda *_: _thread.rank.world.num_ranks,
    "all_gather_object": _all_gather_object,
    "all_reduce": _all_reduce,
    "broadcast": _broadcast,
}


class FakeWorker(Worker):
    """A thread of the rank that submits to it."""

    def submit(self, call: Callable[..., object], *args: Any) -> None:
        rank = _thread.rank

        def as_rank() -> None:
            _thread.rank = rank
            call(*args)

        super().submit(as_rank)


def _only_here(then: Callable[..., Any]) -> Callable[..., Any]:
    """Calls `then` in this thread: hooks that torch calls for all modules and optimizers are other ranks' as well."""
    thread = threading.get_ident()
    return lambda *args, **kwargs: then(*args, **kwargs) if threading.get_ident() == thread else None


@contextmanager
def _one_process() -> Iterator[None]:
    """The library's ways to other ranks lead to threads."""
    at_registration, before_step = current_plan.call_at_registration, step_events.register_optimizer_step_pre_hook

    with ExitStack() as patches:
        for name, function in _OF_USERS.items():
            patches.enter_context(mock.patch.object(dist, name, function))
        for place, name, ours in (
            (gradient_sync, "chosen_group", lambda *_, **_how: FakeRef(tuple(range(_thread.rank.world.num_ranks)), "fake", None)),
            (group_sync, "OwnGroup", FakeGroup),
            (shard_exchanges, "OwnGroup", FakeGroup),
            (shard_exchanges, "exchanges_over", FakeCollectives),
            (transfer, "exchanges_over", FakeCollectives),
            (comm_hook, "Worker", FakeWorker),
            (current_plan, "call_at_registration", lambda then: at_registration(_only_here(then))),
            (step_events, "register_optimizer_step_pre_hook", lambda hook: before_step(_only_here(hook))),
        ):
            patches.enter_context(mock.patch.object(place, name, ours))
        yield


def ranks_of(num_ranks: int, work: Callable[[Rank], T]) -> list[T]:
    """Runs `work` on every rank, and returns the results in rank order; raises the first error that is not another's."""
    world = World(num_ranks)

    def of_rank(number: int) -> T:
        _thread.rank = Rank(number, world)
        try:
            return work(_thread.rank)
        except BaseException:
            world.leave()
            raise
        finally:
            world.ends()

    with _one_process(), ThreadPoolExecutor(num_ranks) as threads:
        futures = [threads.submit(of_rank, number) for number in range(num_ranks)]
    errors = [error for future in futures if (error := future.exception()) is not None]
    own = [error for error in errors if str(error) != _LEFT]
    if errors:
        raise (own or errors)[0]
    return [future.result() for future in futures]


# What a test does to an engine that users cannot.


def forward_begins(sync: GradientSync) -> None:
    """As a wrapper tells that leaves buffers alone."""
    sync._whole.forward_begins(buffers_follow=None)


def shadow(sync: GradientSync) -> None:
    """As a rank does in join that has no data, while others run a synchronization."""
    sync._own.shadow()


def join_ends(sync: GradientSync) -> None:
    sync._engine.progress.join_ends()


def reads_late(sync: GradientSync, reading: Reading, settings: Settings = ()) -> None:
    """The trailer of an earlier step, which compares these settings, reaches the host late, as one on a device does."""
    snapshot: Any = SimpleNamespace(is_there=lambda: True, read=lambda: reading)
    sync._engine.current_plan.compiled.snapshots.append((snapshot, settings))


def at_each_op(sync: GradientSync, call: Callable[[Op], object]) -> None:
    """Calls this before every op that the model's plans issue."""

    @contextmanager
    def observer(op: Op) -> Iterator[None]:
        call(op)
        yield

    sync._engine.recorder.observer = observer


def decides(
    groups: Sequence[Sequence[int]] | None, wires: Sequence[str | None] = ()
) -> contextlib.AbstractContextManager[list[Plan]]:
    """Whatever is measured, the ranks move to these groups, once; in full width if there are no `wires`.

    Yields the plans that were in force when trials began.
    """
    fixed = None if groups is None else tuple(map(tuple, groups))
    return scripted(None if fixed is None else lambda _plan: fixed, wires=wires)


def fails_to_start(sync: GradientSync) -> None:
    """The next round fails before it has a plan, as one that runs out of memory there."""
    engine = sync._engine
    terms = engine.rounds._terms

    def fail_once(_begun: Round) -> Terms:
        engine.rounds._terms = terms  # type: ignore[method-assign]
        raise ZeroDivisionError

    engine.rounds._terms = fail_once  # type: ignore[method-assign, assignment]


def num_in_flight(exchanges: Iterable[FakeCollectives]) -> int:
    """Gathers of parameters that a rank has not waited for."""
    return sum(each._in_flight for each in exchanges)


def cut_bytes(sync: GradientSync) -> int:
    """The size of buckets at which torch.compile cuts graphs."""
    return sync._whole.cut_bytes()


def num_hooks_of_torch() -> int:
    """Of those that torch calls for all modules and all optimizers."""
    of_modules = module._global_module_registration_hooks, module._global_parameter_registration_hooks
    return sum(map(len, (*of_modules, optimizer._global_optimizer_pre_hooks)))


def is_timed(sync: GradientSync) -> bool:
    """True if something is called with every gradient."""
    return sync._engine.current_plan.hooks.arrivals.at_each is not None
