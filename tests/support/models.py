"""Small models for tests with ranks, each with a loss of its own data for every rank and step."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy


def noise(*shape: int, step: int = 0, rank: int | None = None) -> Tensor:
    """Random numbers that differ from rank to rank and from step to step, and are the same in every run."""
    rank = dist.get_rank() if rank is None else rank
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1000 * rank + step))


def scripted(module: nn.Module) -> Any:
    """`module` in TorchScript, of which newer versions of torch warn."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.script(module)


class TiedTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 11)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.block(self.embedding(tokens)))


class Oddities(nn.Module):
    """Parameters of several dtypes, one without elements, one without dimensions, a complex one, one used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 5)
        self.fine, self.brain = nn.Linear(5, 4, dtype=torch.float64), nn.Linear(4, 5, dtype=torch.bfloat16)
        self.empty, self.scale = nn.Parameter(torch.zeros(0, 3)), nn.Parameter(torch.tensor(1.5))
        self.phase = nn.Parameter(torch.randn(4, dtype=torch.complex64))
        self.twice = nn.Linear(5, 5, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        wide = self.fine((self.twice(self.twice(self.first(x)).tanh()) * self.scale + self.empty.sum()).double())
        return self.brain((self.phase * wide.float()).abs().bfloat16()).float() + wide.float().sum()


class Branches(nn.Module):
    """Layers that a call runs one after the other in the order it names, or leaves out."""

    def __init__(self, num_layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(num_layers))

    def forward(self, x: Tensor, order: tuple[int, ...] = (0, 1, 2)) -> Tensor:
        for index in order:
            x = self.layers[index](x).tanh()
        return x


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))


def convolutions() -> nn.Module:
    """Two batch norms, so that buffers of two dtypes alternate; channels-last weights."""
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Conv2d(3, 2, 3), nn.BatchNorm2d(2)),
        nn.Flatten(),
        nn.Linear(8, 2),
    ).to(memory_format=torch.channels_last)


class Wide(nn.Module):
    """Parameters of less than a block, of a block, and of blocks that are not full; one without elements."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(20, 37, dtype=dtype), nn.Linear(37, 16, dtype=dtype)
        self.block = nn.Parameter(torch.randn(16, 32, dtype=dtype))
        self.scalar, self.empty = nn.Parameter(torch.tensor(1.0, dtype=dtype)), nn.Parameter(torch.empty(0, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.second(self.first(x).tanh())
        return self.scalar * (hidden @ self.block) + self.empty.sum()


@dataclass(frozen=True)
class Case:
    make: Callable[[], nn.Module]
    loss: Callable[[nn.Module, int], Tensor]

    def model(self) -> nn.Module:
        torch.manual_seed(7)
        return self.make()


def _tokens(step: int) -> Tensor:
    return torch.randint(11, (3, 5), generator=torch.Generator().manual_seed(1000 * dist.get_rank() + step))


CASES = {
    "mlp": Case(mlp, lambda model, step: model(noise(5, 6, step=step)).square().sum()),
    "convolutions": Case(convolutions, lambda model, step: model(noise(4, 2, 6, 6, step=step)).square().mean()),
    "tied transformer": Case(
        TiedTransformer,
        lambda model, step: cross_entropy(model(_tokens(step)).flatten(0, 1), _tokens(step + 1).flatten()),
    ),
    "oddities": Case(Oddities, lambda model, step: model(noise(5, 3, step=step)).square().mean() * 1e-3),
    "wide": Case(Wide, lambda model, step: model(noise(5, 20, step=step)).square().mean()),
}
