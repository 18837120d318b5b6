"""Outer synchronization as a script would write it: one process per replica, blocking, and nothing beneath computation."""

import contextlib
from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from support.inside import Stage, Turn
from undertow import DistributedDataParallel, Outer, SyncConfig
from undertow.wire import WIRES


def offsets(name: str | None, turn: Turn, stage: Stage, rank: int = 0) -> Tensor | None:
    """Returns the offsets that a format adds before it rounds; None if it adds none."""
    if name is None or not WIRES[name].is_dithered:
        return None
    return turn.offsets(WIRES[name].block, stage, rank=rank, device=torch.device("cpu"))


def sent(values: Tensor, name: str | None, dither: Tensor | None = None) -> Tensor:
    """Returns the values of a parameter as they arrive in a format."""
    if name is None or values.numel() < WIRES[name].block:
        return values.clone()
    wire, flat = WIRES[name], values.flatten()
    padded = torch.zeros(-(-flat.numel() // wire.block) * wire.block)
    padded[: flat.numel()] = flat
    message = torch.empty(wire.num_bytes(padded.numel()), dtype=torch.uint8)
    wire.encode(padded, message, dither)
    arrived = torch.empty_like(padded)
    wire.decode(message, arrived, adds=False)
    return arrived[: flat.numel()].view_as(values)


class NaiveOuter:
    """The reference: all replicas at once, in one process. `models` are the replicas, and `layers` the names of each layer."""

    def __init__(self, models: list[nn.Module], layers: list[list[str]], outer: Outer) -> None:
        self.models, self.outer = models, outer
        count = int(outer.fragments)
        self.fragments = [list(chain.from_iterable(layers[first::count])) for first in range(count)]
        first = {**dict(models[0].named_parameters()), **dict(models[0].named_buffers())}
        self.globals = {name: tensor.detach().float().clone() for name, tensor in first.items() if tensor.is_floating_point()}
        self.momentum: dict[str, Tensor] = {}
        self.means: dict[int, dict[str, Tensor]] = {}
        self.due: dict[int, int] = {}

    @torch.no_grad()
    def step(self, number: int) -> None:
        """Called when every replica has taken this step, from 1 on."""
        outer, count = self.outer, len(self.fragments)
        for index in [index for index, due in self.due.items() if due == number]:
            self._outer_step(index)
        for index in range(count):
            if number >= outer.every and (number - index * outer.every // count) % outer.every == 0:
                self.means[index] = {name: self._mean(name, number) for name in self.fragments[index]}
                self.due[index] = number + int(outer.delay)
                if outer.delay == 0:
                    self._outer_step(index)

    def _mean(self, name: str, number: int) -> Tensor:
        local = [dict(model.named_parameters()).get(name) for model in self.models]
        if local[0] is None:
            buffers = [dict(model.named_buffers())[name] for model in self.models]
            return sum(buffers[1:], start=buffers[0].clone()) / len(buffers)
        wire, turn = self.outer.wire, Turn(number)
        parts = [sent(self.globals[name] - one, wire, offsets(wire, turn, Stage.OWN, rank)) for rank, one in enumerate(local)]
        return sent(sum(parts[1:], start=parts[0]) / len(parts), wire, offsets(wire, turn, Stage.MEAN))

    def _outer_step(self, index: int) -> None:
        outer = self.outer
        for name, mean in self.means.pop(index).items():
            update = mean
            is_param = name in dict(self.models[0].named_parameters())
            if is_param and outer.momentum:
                self.momentum[name] = self.momentum[name] * outer.momentum + mean if name in self.momentum else mean.clone()
                update = self.momentum[name] * outer.momentum + mean if outer.nesterov else self.momentum[name]
            self.globals[name] = self.globals[name] - update * outer.lr if is_param else mean
            for model in self.models:
                own = dict(model.named_parameters()).get(name, dict(model.named_buffers()).get(name))
                mixed = self.globals[name]
                if is_param and outer.mix:
                    mixed = mixed * (1 - outer.mix) + own.float() * outer.mix
                own.copy_(mixed)
        del self.due[index]


@contextlib.contextmanager
def replica(model: nn.Module, outer: Outer | dict[str, Any], **settings: Any) -> Iterator[DistributedDataParallel]:
    how = {name: settings.pop(name) for name in ("device_mesh", "process_group") if name in settings}
    with contextlib.closing(DistributedDataParallel(model, config=SyncConfig(outer=outer, **settings), **how)) as ddp:
        yield ddp


def same_everywhere(values: Tensor) -> bool:
    found = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(found, values.contiguous())
    return all(torch.equal(found[0], each) for each in found)
