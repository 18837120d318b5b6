"""The one way into the library: what a test needs to know of a model's engine, and to do to it, that users cannot.

Outside of tests/unit only this file and one_process.py import inner rooms or touch private attributes: a change inside of the
library changes this file and no test. Every function takes a wrapped model, or what `attach` has returned.
"""

import contextlib
import copy
import dataclasses
import inspect
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from types import FrameType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

import undertow.lab.demo.rank
import undertow.sync.group_sync
from undertow import GradientSync, ShardedOptimizer, SyncConfig
from undertow import device as device_layer  # noqa: F401  # for tests
from undertow.buckets.bucket import BucketLayout
from undertow.buckets.comm_hook import HookedBucket as HookedBucket
from undertow.buckets.transfer import Reducer
from undertow.checkpoint import files as checkpoint_files
from undertow.checkpoint import ranks as checkpoint_ranks
from undertow.checkpoint import replicated as checkpoint_replicated
from undertow.ddp.outer_axis import OuterAxis
from undertow.device import MAKERS, Accelerator, Host  # noqa: F401  # for tests
from undertow.engine import params as module_params
from undertow.engine import tuning
from undertow.engine.compiled import CompiledPlan
from undertow.engine.engine import Engine
from undertow.engine.measuring import NUM_STEPS_BEFORE, NUM_STEPS_MEASURED
from undertow.engine.round import Round
from undertow.engine.trying import NUM_STEPS_COUNTED, Trying
from undertow.lab.emulation.link import BACKEND, EmulatedLink, emulated_backend  # noqa: F401  # for tests
from undertow.plan import ParamSpec, Plan
from undertow.plan.layout import equal_parts
from undertow.ranks import agreement, connections, handshake, patience
from undertow.ranks.dither import Rounding as Rounding
from undertow.ranks.dither import Turn as Turn
from undertow.ranks.exchanges import Exchanges
from undertow.ranks.group import BACKENDS, Abilities, GroupRef
from undertow.ranks.handle import ThreadWork
from undertow.ranks.parcels import FullWidth
from undertow.ranks.posted_messages import PostedMessages
from undertow.ranks.transport import OwnGroup
from undertow.ranks.watch import NullWatch, Ring, Waiting, Watch
from undertow.schedule import Op, OpKind
from undertow.sharded.gathers import Gathers
from undertow.sharded.sharding import Sharding
from undertow.sync.handles import MeanOverRanks
from undertow.torch_private import private, process_groups
from undertow.torch_private.process_groups import interrupt, timeout_of  # noqa: F401  # for tests

NUM_STEPS_UNTIL_A_PROFILE = NUM_STEPS_BEFORE + NUM_STEPS_MEASURED + 2
# The next one takes another plan, if the first window decides.
NUM_STEPS_UNTIL_A_MOVE = NUM_STEPS_UNTIL_A_PROFILE + NUM_STEPS_COUNTED + 1
Model, OpCall = nn.Module | GradientSync, Callable[[Op], object]


class _CountedFile:
    """A safetensors file that counts the elements of states that are read, by the states' keys."""

    def __init__(self, file: Any, read: Counter[str]) -> None:
        self._file, self._read = file, read

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def get_slice(self, entry: str) -> Any:
        values, key = self._file.get_slice(entry), entry.partition("/")[2].partition("[")[0]
        counted = mock.MagicMock(wraps=values)
        counted.__getitem__.side_effect = lambda part: self._counted(key, values[part])
        return counted

    def _counted(self, key: str, part: torch.Tensor) -> torch.Tensor:
        self._read[key] += part.numel()
        return part


@contextlib.contextmanager
def elements_read() -> Iterator[Counter[str]]:
    """Counts the elements of an optimizer's state that this rank reads from a checkpoint."""
    read, opened = Counter[str](), checkpoint_files.open_tensors
    with mock.patch.object(checkpoint_files, "open_tensors", lambda path: _CountedFile(opened(path), read)):
        yield read


def messages_of_a_load_have(num_bytes: int) -> AbstractContextManager[object]:
    """What all ranks read together is gathered in messages of this size, of all ranks."""
    return mock.patch.object(checkpoint_replicated, "_MOST_BYTES", num_bytes)


def own_tensors(optimizer: ShardedOptimizer) -> list[torch.Tensor]:
    """The state on this rank, which a checkpoint copies."""
    states, _ = optimizer._own_state_dict()
    return [value for state in states["state"].values() for value in state.values()]


class _Device(Accelerator):
    """The host, as an axis across replicas sees a device: its copies have arrived if that `has_arrived`."""

    def __init__(self, has_arrived: Callable[[], bool]) -> None:
        self._has_arrived = has_arrived

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def to_device(self, values: Any, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype)

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone()

    def record(self, *, timed: bool = False) -> Any:
        return SimpleNamespace(query=self._has_arrived)


@contextlib.contextmanager
def as_on_a_device(axis: OuterAxis, has_arrived: Callable[[], bool]) -> Iterator[None]:
    """The axis compares replicas as on a device: the numbers travel with the gradients, and are read when they have arrived."""
    group = copy.copy(axis._group)
    group.hardware = _Device(has_arrived)
    carrier = axis._exchanges.carrier
    with mock.patch.object(axis, "_group", group), mock.patch.object(carrier, "reads_trailers", False):
        yield


def before_gathers_are_waited_for(call: Callable[[], object]) -> AbstractContextManager[object]:
    """Calls it on this rank whenever a module, or a read, waits for parameters on their way."""
    wait = Gathers.wait

    def waits(gathers: Gathers, *args: Any, **kwargs: Any) -> Any:
        call()
        return wait(gathers, *args, **kwargs)

    return mock.patch.object(Gathers, "wait", waits)


@contextlib.contextmanager
def rounds_with_late_gradients() -> Iterator[list[int]]:
    """Lists the numbers of this rank's rounds in which a gradient has arrived after its bucket has left."""
    found, add = list[int](), Round.add_late

    def add_late(adding: Round) -> None:
        found.append(adding.terms.number)
        add(adding)

    with mock.patch.object(Round, "add_late", add_late):
        yield found


def every_step_takes(step_us: Callable[[], float]) -> AbstractContextManager[object]:
    """Trials of this rank measure what `step_us` says, whatever a step takes."""

    def send(trying: Trying) -> None:
        with mock.patch.object(trying._recorder, "us_between", return_value=step_us()):
            sends(trying)

    sends = Trying._send
    return mock.patch.object(Trying, "_send", send)


@contextlib.contextmanager
def refusing_plans(least: int | None) -> Iterator[None]:
    """This rank has no memory for plans of `least` buckets or more; None refuses none."""
    make = BucketLayout.live_buckets

    def live_buckets(layout: BucketLayout, plan: Plan, *rest: Any) -> Any:
        if least is not None and len(plan.buckets) >= least:
            raise MemoryError("none is left")
        return make(layout, plan, *rest)

    with mock.patch.object(BucketLayout, "live_buckets", live_buckets):
        yield


def trials_are(make: Callable[..., object]) -> AbstractContextManager[object]:
    """Trials that begin are made by `make`."""
    return mock.patch.object(tuning, "Trials", make)


def sync_of(model: Model) -> GradientSync:
    return model if isinstance(model, GradientSync) else model.sync


def engine_of(model: Model) -> Engine:
    return sync_of(model)._engine


def generation_of(model: Model) -> int:
    return engine_of(model).current_plan.compiled.generation


def assembly_of(model: Model) -> CompiledPlan:
    return engine_of(model).current_plan.compiled


def carriers_of(model: Model) -> list[PostedMessages]:
    """What sends messages of whole gradients, and of shards."""
    compiled = assembly_of(model)
    found = [each.carrier for each in (compiled.reducer.exchanges, *compiled.layout.exchanges) if each is not None]
    return [each for each in found if isinstance(each, PostedMessages)]


def turn_of(model: Model) -> Turn:
    """The offsets that the last synchronization added before it rounded."""
    return assembly_of(model).turns.now


def turn_of_experts(model: Model) -> Turn:
    """The same, of a model's only group of experts."""
    (experts,) = sync_of(model).experts
    return turn_of(experts)


def storage_of(model: Model, bucket: int = 0) -> Any:
    gradients: Any = assembly_of(model).buckets[bucket].gradients  # whole on every rank
    return gradients.flat


def sharding_of(model: Model) -> Sharding | None:
    """Not while ranks have still to meet about a change: then gradients of a backward stay whole."""
    layout = assembly_of(model).layout
    is_changing = engine_of(model).current_plan.change is not None
    return layout if isinstance(layout, Sharding) and not is_changing else None


def gathers_of(model: Model) -> Gathers:
    return _sharding_after_a_step(model).gathers


def _sharding_after_a_step(model: Model) -> Sharding:
    sharding = sharding_of(model)
    assert sharding is not None, "no sharded optimizer has stepped"
    return sharding


def own_group_of(model: Model) -> OwnGroup:
    return sync_of(model)._group


def ranks_that_choose(model: Model) -> tuple[int, ...]:
    """The ranks that measure steps and choose plans together."""
    return tuple(own_group_of(model).deciding.user.ranks)


def watch_of(model: Model) -> Watch:
    watch = own_group_of(model).watch
    assert isinstance(watch, Watch), "one rank alone watches nobody"
    return watch


def is_watched(model: Model) -> bool:
    return type(own_group_of(model).watch) is not NullWatch


def skip_a_round(model: Model) -> None:
    """Has this rank believe that it has finished a synchronization more than it has."""
    engine_of(model).progress.num_rounds += 1


def nothing(_op: Op) -> None:
    """Does nothing before or after an op."""


def demo_ranks(target: Callable[..., None]) -> AbstractContextManager[object]:
    return mock.patch.object(undertow.lab.demo.rank, "run_rank", target)


# Calls inside of the library between which tests need a point, with the name that they have in tests.
_STAGES = ((PostedMessages, "_advance"), (ThreadWork, "run"))
INNER_CALLS: dict[str, tuple[tuple[Any, str], ...]] = {
    "connection": ((process_groups, "new_group"),),
    "construction": ((undertow.sync.group_sync, "broadcast_in_place"),),
    "buffers": ((undertow.sync.group_sync, "synchronize_buffers"),),
    "mean": ((MeanOverRanks, "_start"),),
    "reduce": ((Reducer, "reduce"),),
    "checkpoint": ((checkpoint_files, "write_tensors"),),
    "post": _STAGES,  # in threads, of exchanges that are made of sends and receives
    "complete": _STAGES,
}


def before_calls(names: Iterable[str], passes: Callable[[str], object]) -> None:
    """Has `passes` called with the name before each of these calls, for as long as this process lives."""
    for name in names:
        for owner, attribute in INNER_CALLS[name]:
            setattr(owner, attribute, _after(partial(_passes, passes, name), getattr(owner, attribute)))


def _passes(passes: Callable[[str], object], name: str) -> None:
    """Calls `passes`; a stage of an exchange is named by its thread, and the thread that connects a group runs none."""
    is_posting = name == "post"
    threads = ("undertow-posts",) if is_posting else ("undertow-completes", "undertow-gathers", "undertow-hooks")
    if name not in ("post", "complete") or threading.current_thread().name in threads:
        passes(name)


def _after(first: Callable[[], object], then: Callable[..., Any]) -> Callable[..., Any]:
    def both(*args: Any, **kwargs: Any) -> Any:
        first()
        return then(*args, **kwargs)

    return both


def around_waits(passes: Callable[[str], object]) -> None:
    """Has `passes` called with "before wait" and "after wait" around each wait that has a name."""
    enter, leave = Waiting.__enter__, Waiting.__exit__

    def enters(waiting: Waiting) -> None:
        enter(waiting)
        if waiting._name:
            passes("before wait")

    def leaves(waiting: Waiting, *error: Any) -> None:
        leave(waiting, *error)
        if waiting._name:
            passes("after wait")

    Waiting.__enter__, Waiting.__exit__ = enters, leaves  # type: ignore[method-assign]


def opened_group() -> OwnGroup:
    group = OwnGroup(GroupRef.of(dist.group.WORLD), device=torch.device("cpu"), limits=SyncConfig())
    group.open()
    return group


def cloned_group() -> dist.ProcessGroup:
    world = GroupRef.of(dist.group.WORLD)
    names = [process_groups.new_name() if world.rank == 0 else ""]
    dist.broadcast_object_list(names)
    return process_groups.new_group(world.ranks, world.backend, world.timeout, *names)


@contextlib.contextmanager
def gathers_of_checkpoints() -> Iterator[list[int]]:
    """The bytes that each rank gives to each gather of a save or a load."""
    sizes, gather = list[int](), checkpoint_ranks.all_gather_over

    def counted(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        sizes.append(tensor.nbytes)
        return gather(tensor, group)

    with mock.patch.object(checkpoint_ranks, "all_gather_over", counted):
        yield sizes


@contextlib.contextmanager
def bytes_given_to_gloo() -> Iterator[Counter[tuple[int, ...]]]:
    """Counts the bytes of gradients that this rank sends to others by itself, by the ranks that exchange them."""
    sent, send = Counter[tuple[int, ...]](), OwnGroup.send

    def counted(group: OwnGroup, message: torch.Tensor, peer: int, tag: int, over: dist.ProcessGroup) -> Any:
        if tag < 1 << 24:  # no gather
            sent[group.user.ranks] += message.nbytes
        return send(group, message, peer, tag, over)

    with mock.patch.object(OwnGroup, "send", counted):
        yield sent


def gather_alone(num_bytes: int, stops: Callable[[], object] | None) -> None:
    """Gathers that many bytes of two ranks; the one that `stops` has sent its part before, and takes none."""
    group = opened_group()
    if stops is not None:
        part, tag = torch.zeros(num_bytes, dtype=torch.uint8), (1 << 24) + 2
        dist.isend(part, group=group.process_group, group_dst=0, tag=tag).wait()
        dist.irecv(part, group=group.process_group, group_src=0, tag=tag)
        stops()
    with group.waiting("the other part"):
        parts = equal_shards(2, num_bytes).parts
        _exchanges_over(group).all_gather(torch.zeros(2 * num_bytes, dtype=torch.uint8), parts, number=1).wait()


def equal_shards(num_ranks: int, part_numel: int) -> FullWidth:
    """How a bucket of equal parts travels in full width."""
    return FullWidth(equal_parts(num_ranks, part_numel, stop=num_ranks * part_numel))


def _exchanges_over(group: OwnGroup) -> Exchanges:
    return Exchanges(PostedMessages(group), divisor=group.num_ranks)


def observe(model: Model, *, before: OpCall = nothing, after: OpCall = nothing) -> None:
    """Has both called around every op of the model from now on, under later plans too."""
    recorder = engine_of(model).recorder
    earlier: Any = recorder.observer or contextlib.nullcontext

    @contextlib.contextmanager
    def around(op: Op) -> Iterator[None]:
        with earlier(op):
            before(op)
            yield
        after(op)

    recorder.observer = around


def issued_ops(model: Model) -> list[str]:
    ops: list[str] = []
    observe(model, before=lambda op: ops.append(op.label))
    return ops


def late_ops(model: Model, kind: OpKind, rank: int, *, seconds: float, late: list[OpKind] | None = None) -> list[OpKind]:
    """Delays every op of that kind on one rank from now on. The list that it returns, or was given, has the late ops."""
    delayed = [] if late is None else late

    def before(op: Op) -> None:
        if op.kind is kind and dist.get_rank() == rank:
            delayed.append(kind)
            time.sleep(seconds)

    observe(model, before=before)
    return delayed


def late_calls(owner: Any, name: str, *, seconds: float, rank: int | None = None) -> None:
    """Delays every call of that method of an object from now on, on one rank or all: also below the ops, in threads."""
    setattr(owner, name, _after(lambda: rank in (None, dist.get_rank()) and time.sleep(seconds), getattr(owner, name)))


def slow_gathers(model: Model, *, seconds: float = 0.02) -> list[int]:
    """Has rank 0 send late, so that gathers take long. The list that it returns has the buckets that were waited for."""
    group, waited = gathers_of(model)._exchanges.group, list[int]()
    waiting = group.waiting

    def noted(name: str = "") -> contextlib.AbstractContextManager[object]:
        if name.startswith("the parameters of bucket "):
            waited.append(int(name.split()[-1]))
        return waiting(name)

    group.waiting = noted  # type: ignore[method-assign]
    late_calls(_sharding_after_a_step(model).shard_exchanges.inside.group, "send_each", seconds=seconds, rank=0)
    return waited


def without_a_ring() -> contextlib.AbstractContextManager[object]:
    """Inside, no rank can listen for the others."""
    return mock.patch.object(handshake, "own_address", side_effect=OSError("no such interface"))


def of_version(version: str) -> contextlib.AbstractContextManager[object]:
    return mock.patch.object(agreement, "__version__", version)


def on_device(name: str) -> contextlib.AbstractContextManager[object]:
    described = module_params.spec_of

    def named(*args: Any, **kwargs: Any) -> ParamSpec:
        return dataclasses.replace(described(*args, **kwargs), device=name)

    return mock.patch.object(module_params, "spec_of", named)


def hearing_rank() -> Callable[[bytes], None]:
    """A rank that has heard nothing: what is called receives these bytes of its neighbor, and answers what they ask."""
    ring = Ring([], rank=1, num_ranks=2)
    watch = ring.join(SyncConfig(stall_warning_s=0.001))
    source = mock.Mock(spec=connections.Connection)

    def hear(message: bytes) -> None:
        ring.hear(source, [message], is_connected=True)
        watch.inquiry.report(watch.left)

    return hear


def shorten_patience(factor: float) -> None:
    """Shortens what this process waits for on purpose, where a rank is lost or late: not what others have to end or connect."""
    for name in ("LOOK_S", "ANSWERS_S", "VERDICT_S", "EXIT_S"):
        setattr(patience, name, factor * getattr(patience, name))


CODE_OF_GATHERS, CODE_OF_ROUNDS = Gathers, Engine
# Where the exchanges of a sharded model can be held up in their threads: inside a row of a mesh, or across its rows.
_PLACES = {
    "sends": ("inside", "send_each"),
    "gathers": ("inside", "prepare"),
    "reductions": ("inside", "exchange"),
    "sends across": ("across", "send_each"),
    "reductions across": ("across", "exchange"),
}


def call_before(model: Model, place: str, call: Callable[[], object]) -> None:
    """Has `call` made first, in the thread that does it, at every one of these under the present plan."""
    axis, name = _PLACES[place]
    exchanges = getattr(sharding_of(model).shard_exchanges, axis)
    owner = exchanges.group if name == "send_each" else exchanges.carrier
    setattr(owner, name, _after(call, getattr(owner, name)))


@contextlib.contextmanager
def before_lines(code: Any, call: Callable[[], object], *, number: int | None = None) -> Iterator[list[str]]:
    """Has `call` made as a signal handler is: before each line of that file that runs, or before number `number`.

    The list that it yields has the functions of the lines that have run.
    """
    path, ran, before = inspect.getfile(code), list[str](), sys.gettrace()

    def trace(frame: FrameType, event: str, _argument: object) -> Any:
        if frame.f_code.co_filename != path:
            return None
        if event == "line":
            ran.append(frame.f_code.co_name)
            if number in (None, len(ran)):
                call()
        return trace

    sys.settrace(trace)
    try:
        yield ran
    finally:
        sys.settrace(before)


def post(model: Model, work: Callable[[], object]) -> None:
    _sharding_after_a_step(model).shard_exchanges.inside.carrier._posting.submit(work)  # type: ignore[union-attr]


def over_collectives() -> contextlib.AbstractContextManager[object]:
    return mock.patch.dict(BACKENDS, gloo=Abilities(average=True, divide_first=True))


def without_averaging_backends() -> contextlib.AbstractContextManager[object]:
    return mock.patch.dict(BACKENDS, gloo=Abilities(send_from_host=True))


def interrupted_steps() -> contextlib.AbstractContextManager[object]:
    """Optimizers' steps are interrupted when they have updated everything."""
    step = private.step_unwatched

    def interrupted(optimizer: torch.optim.Optimizer) -> None:
        step(optimizer)
        raise KeyboardInterrupt

    return mock.patch.object(private, "step_unwatched", interrupted)


def reads_that_wait(model: Model) -> list[str]:
    """A list that every read of a parameter on its way, for which it waits, is added to from now on."""
    gathers, found = gathers_of(model), []
    gathers.before_read = _after(lambda: found.append("a read"), gathers.before_read)  # type: ignore[method-assign]
    return found


@contextlib.contextmanager
def looks_at_parameters() -> Iterator[list[int]]:
    """The thread of each look through all parameters of any model."""
    threads: list[int] = []
    noted = _after(lambda: threads.append(threading.get_ident()), module_params._Census.has_changed)
    with mock.patch.object(module_params._Census, "has_changed", lambda census: noted(census)):
        yield threads


def inner_optimizers(optimizer: Any) -> list[Any]:
    return [] if optimizer._inner is None else [optimizer._inner.optimizer]


def num_state_elements(optimizer: Any) -> int:
    states = [state for inner in inner_optimizers(optimizer) for state in inner.state.values()]
    return sum(value.numel() for state in states for value in state.values())


def open_with_rows(module: nn.Module, rows: tuple[tuple[int, ...], ...]) -> None:
    world = GroupRef.of(dist.group.WORLD)
    with contextlib.closing(
        GradientSync(
            module,
            process_group=GroupRef(world.ranks, world.backend, world.timeout, rows=rows),
            config=SyncConfig(strategy="hybrid"),
        )
    ) as sync:
        sync._engine.current_plan.open_group()


def global_values(model: undertow.DistributedDataParallel, name: str) -> torch.Tensor:
    """The global values of a parameter, with outer synchronization in one fragment."""
    (fragment,) = model.outer._exchanges.fragments
    return fragment.layout.named(fragment.values)[name]


def leave_unread(model: undertow.DistributedDataParallel, facts: list[list[float]]) -> None:
    """Makes these the facts of each rank in the last exchange, which nobody has read yet, as on a device."""
    (fragment,) = model.outer._exchanges.fragments
    finite_mean = torch.zeros(1)
    no_stop, same_frozen, no_skips, same_trained = 0.0, 0.0, 0.0, 0.0
    of_each_fact = torch.tensor([[*of_rank, no_stop, same_frozen, no_skips, same_trained] for of_rank in facts]).T
    fragment._said = torch.cat([of_each_fact.flatten(), finite_mean]), None
