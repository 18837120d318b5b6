"""Undertow over logical streams: the fake accelerator enters the device layer, and the backend of the tests the abilities."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from support import programs
from support.inside import BACKENDS, MAKERS, Abilities, Accelerator, Host
from support.naive import of_all
from support.programs import Program
from support.sharded import mesh_of, optimizer_for
from support.streams import Checker, Stream
from support.streams.backend import BACKEND
from undertow import DistributedDataParallel, SyncConfig

PLACE = torch.device("cpu:0")
ABILITIES = Abilities(average=True, divide_first=True, order_streams=True)


def on_device(tensor: Tensor) -> Tensor:
    """A copy that the host does not wait for."""
    return tensor.to(PLACE, non_blocking=True)


class Logical(Accelerator):
    """The device layer's accelerator, with the streams of a checker."""

    def __init__(self, place: torch.device, checker: Checker) -> None:
        super().__init__(place)
        self.checker = checker

    def new_stream(self) -> Any:
        return self.checker.new_stream()

    def use(self, stream: Any) -> AbstractContextManager[None]:
        assert isinstance(stream, Stream)
        return self.checker.use(stream)

    def stream_of(self, tensor: Tensor) -> Any:
        return self.checker.current

    def wait_for(self, streams: Iterable[Any]) -> None:
        for stream in streams:
            self.checker.record(stream).wait()

    def record(self, *, timed: bool = False) -> Any:
        return self.checker.record()

    def keep(self, tensor: Tensor) -> Tensor:
        self.checker.keep(tensor)
        return tensor

    def synchronize(self) -> None:
        self.checker.synchronize()

    def to_device(self, values: Sequence[float] | Tensor, dtype: torch.dtype) -> Tensor:
        return on_device(torch.as_tensor(values, dtype=dtype))

    def to_host(self, tensor: Tensor) -> Tensor:
        return tensor.to("cpu", non_blocking=True)

    def memory_on_host(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)


@contextlib.contextmanager
def checked(*, lag: int | None = 1) -> Iterator[Checker]:
    """Context in which models on `cpu:0` are on a device."""
    with Checker(lag=lag) as checker, mock.patch.dict(BACKENDS, {BACKEND: ABILITIES}):

        def device(place: torch.device) -> Any:
            return Host(place) if place.index is None else Logical(place, checker)

        with mock.patch.dict(MAKERS, {"cpu": device}):
            yield checker


@dataclass(frozen=True, kw_only=True)
class Streamed:
    """A model on the device of a checker, over a group with streams, and a bare copy on the host."""

    checker: Checker
    model: DistributedDataParallel
    optimizer: Any
    bare: nn.Module
    bare_optimizer: torch.optim.Optimizer
    group: dist.ProcessGroup | None  # None for a mesh


@contextlib.contextmanager
def placed(
    model: nn.Module, *, strategy: str = "ddp", lag: int | None = 1, whole: bool | None = None, **settings: Any
) -> Iterator[Streamed]:
    bare = copy.deepcopy(model)
    config = SyncConfig(strategy=strategy, **{"bucket_cap_mb": 1e-4} | settings)
    with checked(lag=lag) as checker, contextlib.ExitStack() as stack:
        checker.place(model)
        target: dict[str, Any] = {}
        if strategy == "hybrid":
            target["device_mesh"] = stack.enter_context(mesh_of(2, dist.get_world_size() // 2, backend=BACKEND))
        else:
            target["process_group"] = stack.enter_context(of_all(BACKEND))
        ddp = stack.enter_context(contextlib.closing(DistributedDataParallel(model, config=config, **target)))
        yield Streamed(
            checker=checker,
            model=ddp,
            optimizer=optimizer_for(ddp, strategy, "AdamW", **({} if whole is None else {"whole": whole})),
            bare=bare,
            bare_optimizer=torch.optim.AdamW(bare.parameters(), lr=0.01),
            group=target.get("process_group"),
        )


def run(program: Program, *, reads_late: bool = False) -> None:
    """Runs a program under a checker. On a device ranks read reports late, unless they look for what is not finite."""
    nonfinite = "ignore" if reads_late else "skip"
    program = dataclasses.replace(program, settings={"nonfinite": nonfinite} | program.settings)
    with checked() as checker:
        device = programs.Device(place=checker.place, move=on_device, backend=BACKEND, reads_late=reads_late)
        programs.run(program, device)
