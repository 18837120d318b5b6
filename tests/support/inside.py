"""The one way into the library: what a test needs to know of a model's engine, and to do to it, that users cannot.

Outside of tests/unit no other file imports `undertow.runtime` or touches private attributes, so that a change inside of the
library changes this file and no test. Every function takes a wrapped model, or what `attach` has returned.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import nn

from undertow import Sync
from undertow.runtime.assembly import Assembly
from undertow.runtime.engine import Engine
from undertow.runtime.exchange import Exchanges
from undertow.runtime.executor import Executor
from undertow.runtime.gathers import Gathers
from undertow.runtime.group import OwnGroup
from undertow.runtime.member import Member
from undertow.runtime.sharding import Sharding
from undertow.schedule import Op, OpKind

Model = nn.Module | Sync
OpCall = Callable[[Op], object]


def sync_of(model: Model) -> Sync:
    return model if isinstance(model, Sync) else model.sync


def engine_of(model: Model) -> Engine:
    return sync_of(model)._engine


def generation_of(model: Model) -> int:
    """How many plans have been in force before the present one."""
    return engine_of(model).generation


def assembly_of(model: Model) -> Assembly:
    """The present plan, ready to run."""
    return engine_of(model).formation.assembly


def executor_of(model: Model) -> Executor:
    """The buckets of the present plan."""
    return assembly_of(model).executor


def storage_of(model: Model, bucket: int = 0) -> Any:
    """The tensor that a bucket's gradients are views of."""
    return executor_of(model)._bindings[bucket].bucket.storage


def sharding_of(model: Model) -> Sharding | None:
    """The layout of a sharded optimizer's shards; None before it has stepped."""
    return assembly_of(model).reducer.sharding


def gathers_of(model: Model) -> Gathers:
    sharding = sharding_of(model)
    assert sharding is not None, "no sharded optimizer has stepped"
    return sharding.gathers


def exchanges_of(model: Model) -> Exchanges:
    """The sends and receives between the ranks that share an optimizer's state."""
    sharding = sharding_of(model)
    assert sharding is not None, "no sharded optimizer has stepped"
    return sharding.exchanges


def own_group_of(model: Model) -> OwnGroup:
    """The clone of the user's group, over which the library communicates."""
    return sync_of(model).own_group


def member_of(model: Model) -> Member:
    """The model's place among the ranks that watch each other."""
    member = own_group_of(model).member
    assert member is not None, "one rank alone watches nobody"
    return member


def skip_a_round(model: Model) -> None:
    """Has this rank believe that it has finished a synchronization more than it has."""
    engine_of(model)._progress.num_rounds += 1


def nothing(_op: Op) -> None:
    """Does nothing before or after an op."""


class _Observers:
    """Calls one after the other, those that were added first."""

    def __init__(self) -> None:
        self._before: list[OpCall] = []
        self._after: list[OpCall] = []

    def add(self, before: OpCall, after: OpCall) -> None:
        self._before.append(before)
        self._after.append(after)

    def before(self, op: Op) -> None:
        for call in self._before:
            call(op)

    def after(self, op: Op) -> None:
        for call in self._after:
            call(op)


def observe(model: Model, *, before: OpCall = nothing, after: OpCall = nothing) -> None:
    """Has both called around every op of the model from now on, under later plans too."""
    recorder = sync_of(model)._recorder
    if recorder.observer is None:
        recorder.observer = _Observers()
    assert isinstance(recorder.observer, _Observers)
    recorder.observer.add(before, after)


def issued_ops(model: Model) -> list[str]:
    """A list that every op from now on is added to, as "all_reduce b0"."""
    ops: list[str] = []
    observe(model, before=lambda op: ops.append(op.label))
    return ops


def late_ops(model: Model, kind: OpKind, rank: int, *, seconds: float) -> list[OpKind]:
    """Delays every op of that kind on one rank from now on. The list that it returns has the ops that were late."""
    delayed: list[OpKind] = []

    def before(op: Op) -> None:
        if op.kind is kind and dist.get_rank() == rank:
            delayed.append(kind)
            time.sleep(seconds)

    observe(model, before=before)
    return delayed


def late_calls(owner: Any, name: str, *, seconds: float, rank: int | None = None) -> None:
    """Delays every call of that method of an object from now on, on one rank or all: also below the ops, in threads."""
    act = getattr(owner, name)

    def late_call(*args: Any, **kwargs: Any) -> Any:
        if rank is None or dist.get_rank() == rank:
            time.sleep(seconds)
        return act(*args, **kwargs)

    setattr(owner, name, late_call)


def late_gathers(model: Model, *, seconds: float) -> None:
    """Has every all-gather of this rank leave late, in the thread that sends it."""
    late_calls(exchanges_of(model), "_post_all_gather", seconds=seconds)


def slow_gathers(model: Model, *, seconds: float = 0.02) -> list[int]:
    """Has rank 0 send late, so that gathers take long. The list that it returns has the buckets that were waited for."""
    gathers, waited = gathers_of(model), []
    wait = gathers.wait

    def noted(buckets: Any) -> None:
        chosen = [bucket for bucket in buckets if bucket in gathers.in_flight]
        waited.extend(chosen)
        wait(chosen)

    gathers.wait = noted  # type: ignore[method-assign]
    late_calls(exchanges_of(model), "_send", seconds=seconds, rank=0)
    return waited
