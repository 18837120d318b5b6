"""Outer synchronization as a script would write it: one process per replica, blocking, and nothing beneath computation."""

import contextlib
import copy
from collections.abc import Collection, Iterator
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from support.inside import Rounding, Turn
from support.models import noise
from undertow import DistributedDataParallel, Outer, SyncConfig
from undertow.wire import WIRES


def offsets(name: str | None, turn: Turn, stage: Rounding, rank: int = 0) -> Tensor | None:
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
                bad = {place for place in range(len(self.models)) if self._is_bad(place, index)}
                self.means[index] = {name: self._mean(name, bad, number) for name in self.fragments[index]}
                self.due[index] = number + int(outer.delay)
                if outer.delay == 0:
                    self._outer_step(index)

    def _is_bad(self, place: int, index: int) -> bool:
        """True if a replica has values in this fragment that are not finite, and that it did not begin with."""
        own = {**dict(self.models[place].named_parameters()), **dict(self.models[place].named_buffers())}
        return any(
            not own[name].isfinite().all() and not torch.equal(own[name], self.globals[name]) for name in self.fragments[index]
        )

    def _mean(self, name: str, bad: set[int], number: int) -> Tensor:
        """Returns the mean over the replicas that are not bad, which send zeros."""
        count, num_good = len(self.models), len(self.models) - len(bad)
        local = [dict(model.named_parameters()).get(name) for model in self.models]
        if local[0] is None:
            buffers = [dict(model.named_buffers())[name] for place, model in enumerate(self.models) if place not in bad]
            if not buffers or all(torch.equal(buffer, buffers[0]) for buffer in buffers):
                return buffers[0].clone() if buffers else self.globals[name]
            return sum(buffers[1:], start=buffers[0].clone()) / len(buffers)
        wire, turn = self.outer.wire, Turn(number)
        zero = torch.zeros_like(self.globals[name])
        parts = []
        for place, one in enumerate(local):
            own = zero if place in bad else self.globals[name] - one
            parts.append(sent(own, wire, offsets(wire, turn, Rounding.OWN, place)))
        mean = sent(sum(parts[1:], start=parts[0]) / count, wire, offsets(wire, turn, Rounding.MEAN))
        return mean * (count / num_good) if 0 < num_good < count else mean

    def _outer_step(self, index: int) -> None:
        outer = self.outer
        for name, mean in self.means.pop(index).items():
            update = mean
            is_param = name in dict(self.models[0].named_parameters())
            if is_param and not mean.any():  # no replica has moved it: it stays where it is
                self.momentum.pop(name, None)
                mean = update = torch.zeros_like(mean)
            elif is_param and outer.momentum:
                self.momentum[name] = self.momentum[name] * outer.momentum + mean if name in self.momentum else mean.clone()
                update = self.momentum[name] * outer.momentum + mean if outer.nesterov else self.momentum[name]
            self.globals[name] = self.globals[name] - update * outer.lr if is_param else mean
            for model in self.models:
                own = dict(model.named_parameters()).get(name, dict(model.named_buffers()).get(name))
                mixed = self.globals[name]
                if is_param and outer.mix:
                    mixed = torch.where(own.isfinite(), mixed * (1 - outer.mix) + own.float() * outer.mix, mixed)
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


class Net(nn.Module):
    """Three layers of blocks, one with a buffer, and one below a list."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 80)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(80, 80), nn.BatchNorm1d(80)) for _ in range(2)])
        self.last = nn.Linear(80, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x).tanh()
        return self.last(x)


LAYERS = ["first", "blocks.0", "blocks.1", "last"]


def net() -> Net:
    torch.manual_seed(3)
    return Net()


def layers_of(model: nn.Module) -> list[list[str]]:
    names = [name for name, _ in model.named_parameters()]
    names += [name for name, buffer in model.named_buffers() if buffer.is_floating_point()]
    return [[name for name in names if name.startswith(f"{layer}.")] for layer in LAYERS]


def loss_of(model: nn.Module, step: int, rank: int, micro_batch: int = 0) -> Tensor:
    return model(noise(6, 8, step=step + 100 * micro_batch, rank=rank)).square().mean()


def require_equal(model: nn.Module, reference: nn.Module, what: str = "") -> None:
    for name, value in reference.state_dict().items():
        own = model.state_dict()[name]
        # A replica that is left out has NaN until its fragment is due.
        assert torch.equal(own.nan_to_num(), value.nan_to_num()), (name, what)
        assert torch.equal(own.isnan(), value.isnan()), (name, what)


class Reference:
    """As many replicas as there are ranks, with an optimizer each."""

    def __init__(self, outer: Outer, num_replicas: int, make=net, optimizer=torch.optim.AdamW) -> None:
        self.models = [make() for _ in range(num_replicas)]
        self.optimizers = [optimizer(model.parameters(), lr=0.01) for model in self.models]
        self.outer = NaiveOuter(self.models, layers_of(self.models[0]), outer)
        self.number = 0

    def step(self, num_micro_batches: int = 1, breaks: Collection[int] = ()) -> None:
        """Replicas in `breaks` get a NaN before they step. A replica whose gradient is not finite does not step."""
        for rank, (model, optimizer) in enumerate(zip(self.models, self.optimizers, strict=True)):
            optimizer.zero_grad()
            for micro_batch in range(num_micro_batches):
                loss_of(model, self.number, rank, micro_batch).backward()
            if rank in breaks:
                break_(model)
            if all(param.grad.isfinite().all() for param in model.parameters()):
                optimizer.step()
        self.number += 1
        self.outer.step(self.number)


@torch.no_grad()
def break_(model: nn.Module) -> None:
    model.blocks[0][0].weight[1, 2] = torch.nan


def step(
    ddp: DistributedDataParallel,
    optimizer: torch.optim.Optimizer,
    number: int,
    num_micro_batches: int = 1,
    breaks: Collection[int] = (),
    *,
    is_cut: bool = False,
) -> None:
    """With `is_cut`, all backwards only accumulate, as in a window that ends with the epoch."""
    optimizer.zero_grad()
    for micro_batch in range(num_micro_batches):
        is_last = micro_batch == num_micro_batches - 1
        with contextlib.nullcontext() if is_last and not is_cut else ddp.no_sync():
            loss_of(ddp, number, dist.get_rank(), micro_batch).backward()
    if dist.get_rank() in breaks:
        break_(ddp.module)
    optimizer.step()


def train(ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for number in steps:
        step(ddp, optimizer, number)


def values_of(model: nn.Module) -> dict[str, Tensor]:
    return copy.deepcopy(model.state_dict())
