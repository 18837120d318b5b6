"""Undertow over logical streams: the fake accelerator enters the device layer, and the backend of the tests the abilities."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from support import programs
from support.inside import BACKENDS, MAKERS, Abilities, Accelerator, Host, device_layer
from support.naive import of_all
from support.programs import Program
from support.sharded import mesh_of, optimizer_for
from support.streams import Checker, Event
from support.streams.backend import BACKEND
from undertow import DistributedDataParallel, SyncConfig

PLACE = torch.device("cpu:0")
ABILITIES = Abilities(average=True, divide_first=True, order_streams=True)


def on_device(tensor: Tensor) -> Tensor:
    """A copy that the host does not wait for."""
    return tensor.to(PLACE, non_blocking=True)


class Logical(Accelerator):
    """The device layer's accelerator. Only the memory of its copies is not as on a device: to pin some takes a driver."""

    def __init__(self, place: torch.device, checker: Checker) -> None:
        super().__init__(place)
        self._checker = checker

    def to_device(self, values: Sequence[float] | Tensor, dtype: torch.dtype) -> Tensor:
        return on_device(torch.as_tensor(values, dtype=dtype))

    def to_host(self, tensor: Tensor) -> Tensor:
        return tensor.to("cpu", non_blocking=True)

    def memory_on_host(self, num_bytes: int) -> Tensor:
        return self._checker.place_tensor(torch.empty(num_bytes, dtype=torch.uint8), is_device=False)


def torch_of(checker: Checker) -> SimpleNamespace:
    """Returns torch with the streams and events of a checker, for the device layer."""
    accelerator = SimpleNamespace(
        current_stream=lambda _place: checker.current,
        set_stream=checker.switch,
        device_index=contextlib.nullcontext,
        synchronize=lambda _place: checker.synchronize(),
    )
    own = {
        "Stream": lambda _place: checker.new_stream(),
        "Event": lambda _place, *, enable_timing: Event(checker, {}, []),  # it is not recorded yet
        "accelerator": accelerator,
    }
    return SimpleNamespace(**vars(torch) | own)


@contextlib.contextmanager
def checked(*, lag: int | None = 1) -> Iterator[Checker]:
    """Context in which models on `cpu:0` are on a device."""
    with Checker(lag=lag) as checker, mock.patch.dict(BACKENDS, {BACKEND: ABILITIES}):

        def device(place: torch.device) -> Any:
            return Host(place) if place.index is None else Logical(place, checker)

        over_streams = mock.patch.object(device_layer, "torch", torch_of(checker))
        with mock.patch.dict(MAKERS, {"cpu": device}), over_streams:
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
            optimizer=optimizer_for(ddp, strategy, "foreach AdamW", **({} if whole is None else {"whole": whole})),
            bare=bare,
            bare_optimizer=torch.optim.AdamW(bare.parameters(), lr=0.01, foreach=True),
            group=target.get("process_group"),
        )


def run(program: Program, *, reads_late: bool = False) -> None:
    """Runs a program under a checker. On a device ranks read reports late, unless they look for what is not finite."""
    nonfinite = "ignore" if reads_late else "skip"
    program = dataclasses.replace(program, settings={"nonfinite": nonfinite} | program.settings)
    with checked() as checker:
        device = programs.Device(place=checker.place, move=on_device, backend=BACKEND, reads_late=reads_late)
        programs.run(program, device)
