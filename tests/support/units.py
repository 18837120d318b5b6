"""Units that models of programs are made of: layers of every kind that takes rows of four numbers to such rows."""

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

WIDTH = 4
_LOCK = threading.Lock()


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.empty = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.zeros(0, 3))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale + self.empty.sum()


class Complex(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.phase = nn.Parameter(torch.randn(WIDTH, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return (self.phase * x).abs()


class Strided(nn.Module):
    """Parameters whose memory is not one row after the other, and gradients that are laid out differently."""

    def __init__(self) -> None:
        super().__init__()
        self.turned = nn.Parameter(torch.randn(WIDTH, WIDTH).t())
        self.with_gaps = nn.Parameter(torch.randn(WIDTH, 2 * WIDTH)[:, ::2])
        self.used_turned = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.summed = nn.Parameter(torch.randn(3, 2))  # its gradient is one number, expanded
        self.block = nn.Parameter(torch.randn(2, 3, WIDTH).permute(2, 0, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = x @ self.turned @ self.with_gaps @ self.used_turned.t()
        return x * self.summed.sum() + self.block.sum((1, 2))


class Channels(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(WIDTH, WIDTH, 2).to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x[:, :, None, None].expand(-1, -1, 2, 2)).flatten(1)


class Table(nn.Module):
    """An embedding with sparse gradients, of which no row is used twice in a batch: that would be another order of additions."""

    def __init__(self, make: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.rows = make(7, WIDTH, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        first = int(x.detach().abs().sum() * 100) % 7
        words = (first + torch.arange(len(x))) % 7
        return x + self.rows(words[:, None] if isinstance(self.rows, nn.EmbeddingBag) else words)


class Shift(nn.Module):
    """May get a parameter later."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_parameter("shift", None)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) if self.shift is None else self.layer(x) + self.shift


class Adapted(nn.Module):
    """A layer that is frozen, with two small matrices beside it that are trained, as LoRA puts them in."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.up(self.down(x))


class Applied(nn.Module):
    def __init__(self, way: Callable[[nn.Linear, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.way = nn.Linear(WIDTH, WIDTH), way

    def forward(self, x: Tensor) -> Tensor:
        return self.way(self.layer, x)


class Written(torch.autograd.Function):
    """A product whose backward writes the weight's gradient itself, as fused kernels do; autograd knows nothing of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: nn.Linear) -> Tensor:
        ctx.save_for_backward(x)
        ctx.layer = layer
        return x @ layer.weight.detach().t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,), weight = ctx.saved_tensors, ctx.layer.weight
        new = grad.t() @ x
        weight.grad = new if weight.grad is None else weight.grad.add_(new)
        return grad @ weight.detach(), None


class Nested(torch.autograd.Function):
    """Runs whole backwards through a layer inside its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: nn.Module, num_times: int) -> Tensor:
        ctx.layer, ctx.num_times = layer, num_times
        ctx.save_for_backward(x)
        return layer(x).detach().clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (x,) = ctx.saved_tensors
        total = torch.zeros_like(x)
        for _ in range(ctx.num_times):
            with torch.enable_grad():
                inner = x.detach().requires_grad_()
                ctx.layer(inner).backward(grad)
            total += inner.grad
        return total, None, None


# A checkpoint that restores the state of torch's random numbers does so under a rank that is a thread and makes a unit.
recomputed = partial(checkpoint, preserve_rng_state=False)


def reentrant(layer: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return recomputed(layer, x if x.requires_grad else x.clone().requires_grad_(), use_reentrant=True)


# Gradients come in parts, some of them perhaps after their bucket has left.
IN_PARTS: dict[str, Callable[[nn.Linear, Tensor], Tensor]] = {
    "reentrant": reentrant,
    "nested": lambda layer, x: Nested.apply(x, layer, 1),
    "twice-reentrant": lambda layer, x: reentrant(layer, reentrant(layer, x).tanh()),
    "thrice-reentrant": lambda layer, x: reentrant(layer, reentrant(layer, reentrant(layer, x).tanh())),
    "inside-reentrant": lambda layer, x: reentrant(lambda x: layer(reentrant(layer, x)), x),
    "plain-and-reentrant": lambda layer, x: layer(reentrant(layer, x)) + reentrant(layer, x),
    "twice-nested": lambda layer, x: Nested.apply(x, layer, 2),
    "nested-and-plain": lambda layer, x: layer(Nested.apply(x, layer, 2).tanh()),
    "written": lambda layer, x: Written.apply(x, layer),
    "written-and-used": lambda layer, x: linear(layer(Written.apply(x, layer)).tanh(), layer.weight),
}
WAYS: dict[str, Callable[[nn.Linear, Tensor], Tensor]] = {
    **IN_PARTS,
    "twice": lambda layer, x: layer(layer(x).tanh()),
    "checkpoint": lambda layer, x: recomputed(layer, recomputed(layer, x, use_reentrant=False), use_reentrant=False),
}
UNITS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "tied": lambda: nn.Linear(WIDTH, WIDTH),  # with the weight of the first unit
    "double": lambda: nn.Linear(WIDTH, WIDTH, dtype=torch.float64),
    "bfloat16": lambda: nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16),
    "half": lambda: nn.Linear(WIDTH, WIDTH, dtype=torch.float16),
    "complex": lambda: Complex(torch.complex64),
    "complex128": lambda: Complex(torch.complex128),
    "norm": lambda: nn.BatchNorm1d(WIDTH),
    "table": lambda: Table(nn.Embedding),
    "bag": lambda: Table(lambda *sizes, sparse: nn.EmbeddingBag(*sizes, sparse=sparse, mode="sum")),
    "odd": Odd,
    "strided": Strided,
    "channels": Channels,
    "shift": Shift,
    **{name: lambda way=way: Applied(way) for name, way in WAYS.items()},  # type: ignore[misc]
}


def made(kind: str, seed: int) -> nn.Module:
    """The same on every rank, also if ranks are threads."""
    with _LOCK:
        torch.manual_seed(seed)
        return UNITS[kind]()


def adapted(layer: nn.Module, seed: int) -> nn.Module:
    """The same on every rank, also if ranks are threads."""
    with _LOCK:
        torch.manual_seed(seed)
        return Adapted(layer)


class Units(nn.Module):
    """Units that a call runs one after the other in the order it names, or leaves out; "-" names none."""

    def __init__(self, kinds: str) -> None:
        super().__init__()
        self.units = nn.ModuleList(made(kind, seed) for seed, kind in enumerate(kinds.split()))
        for unit, kind in zip(self.units, kinds.split(), strict=True):
            if kind == "tied":
                unit.weight = self.units[0].weight

    def forward(self, x: Tensor, order: str) -> Tensor:
        for unit in (self.units[int(index)] for index in order.strip("-")):
            x = unit(x.to(next(unit.parameters()).dtype.to_real())).float().tanh()
        return x


class Layers(nn.Module):
    """Three layers, of which `way` runs the middle one."""

    def __init__(self, way: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.middle, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.way(self.middle, self.first(x).tanh()).tanh())
