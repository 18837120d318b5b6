"""A model with experts on 2 x 2 ranks, and the naive reference: each gradient added up in rank order over its own ranks."""

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from support.alike import backward_alike, require_equal_gradients, require_equal_values  # noqa: F401  # one place for mixtures
from support.naive import within
from support.sharded import chain, of_ranks
from undertow import DistributedDataParallel, ExpertGroup, SyncConfig

MATCH, WIDTH = "*experts.*", 6
SGD: dict[str, Any] = {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}

# Which of its two experts a rank uses in which step: both, one, none, or one that its peer does not use.
ROUTES = (((0, 1), (0,), (1,), (0, 1)), ((0,), (1,), (1,), (1,)), ((), (), (0, 1), ()), ((1,), (0, 1), (), (0, 1)))


class Mixture(nn.Module):
    def __init__(self, names: Sequence[str] = ("0", "1")) -> None:
        super().__init__()
        self.names = tuple(names)
        self.before = nn.Linear(WIDTH, WIDTH)
        self.experts = nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH) for name in names})
        self.after = nn.Linear(WIDTH, 1)

    def forward(self, rows: Tensor, route: Sequence[int] = (0, 1)) -> Tensor:
        hidden = self.before(rows).tanh()
        for index in route:
            hidden = hidden + self.experts[self.names[index]](hidden).tanh()
        return self.after(hidden)


def mixture(names: Sequence[str] = ("0", "1")) -> Mixture:
    """Another one on every rank: what ranks have in common they are given."""
    torch.manual_seed(dist.get_rank())
    return Mixture(names)


def loss(model: nn.Module, step: int, *, part: int = 0) -> Tensor:
    rank = dist.get_rank()
    rows = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(1000 * step + 10 * part + rank))
    return model(rows, ROUTES[(step + part) % len(ROUTES)][rank]).square().mean()


def experts_group() -> contextlib.AbstractContextManager[dist.ProcessGroup]:
    """The group of the ranks with the same experts as this one: 0 and 2, or 1 and 3."""
    return within([0, 2], [1, 3])


@contextlib.contextmanager
def wrapped_mixture(
    model: nn.Module, *, divisor: float | None = 4, **settings: Any
) -> Iterator[tuple[DistributedDataParallel, nn.Module, dist.ProcessGroup]]:
    """`model` under our wrapper, a bare copy of what it is then, and the group of its experts."""
    with (
        experts_group() as group,
        contextlib.closing(
            DistributedDataParallel(
                model,
                config=SyncConfig(
                    **{"reduction": "ordered", **settings},
                    experts=(ExpertGroup(match=MATCH, process_group=group, divisor=divisor),),
                ),
            )
        ) as ddp,
    ):
        yield ddp, copy.deepcopy(model), group


def reduce_naively(model: nn.Module, group: dist.ProcessGroup, *, divisor: float = 4, dense_divisor: float = 4) -> None:
    """Makes every `.grad` what `reduced` returns; one that none of its ranks has stays None."""
    for name, param in model.named_parameters():
        if param.requires_grad:
            is_expert = ".experts." in f".{name}"
            param.grad = reduced(param, group if is_expert else None, divisor=divisor if is_expert else dense_divisor)


def reduced(param: Tensor, group: dist.ProcessGroup | None, *, divisor: float) -> Tensor | None:
    """The mean over its ranks, added in their order, of each gradient times the number of the ranks over the divisor."""
    parts = of_ranks(param, group)
    if parts is None:
        return None
    return chain([part * (len(parts) / divisor) for part in parts]) / len(parts)


def steps_alike(
    ddp: nn.Module,
    bare: nn.Module,
    group: dist.ProcessGroup,
    *,
    steps: Iterable[int] = range(4),
    loss: Callable[[nn.Module, int], Tensor] = loss,
    **divisors: float,
) -> None:
    backward_alike(
        ddp, bare, loss, steps=steps, mean=partial(reduce_naively, group=group, **divisors), require=require_equal_gradients
    )


def trained_naively(model: nn.Module, group: dist.ProcessGroup, optimizer: torch.optim.Optimizer, *, num_steps: int) -> None:
    for step in range(num_steps):
        optimizer.zero_grad()
        loss(model, step).backward()
        reduce_naively(model, group)
        optimizer.step()
