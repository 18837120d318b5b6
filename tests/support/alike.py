"""What must be alike: ranks, and a wrapped model beside a bare one; what is logged."""

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from support.naive import naive_mean, require_same


def of_all_ranks(value: Any) -> list[Any]:
    """`value` of every rank, in order; a collective call."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered


def train(model: nn.Module, optimizer: Any, loss: Callable[[nn.Module, int], Tensor], *, steps: Iterable[int] = range(3)) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss(model, step).backward()
        optimizer.step()


def backwards(model: nn.Module, loss: Callable[[nn.Module, int], Tensor], steps: Iterable[int]) -> None:
    for step in steps:
        loss(model, step).backward()


def require_same_by_position(ours: nn.Module, bare: nn.Module) -> None:
    pairs = zip(bare.named_parameters(), ours.parameters(), strict=True)
    grads = [((name, mine.grad), (name, theirs.grad)) for (name, theirs), mine in pairs]
    require_same(*map(dict, zip(*grads, strict=True)))


def require_equal_gradients(ours: nn.Module, bare: nn.Module) -> None:
    """To the bit with any number of ranks."""
    pairs = [(name, mine.grad, it.grad) for (name, it), mine in zip(bare.named_parameters(), ours.parameters(), strict=True)]
    assert [name for name, mine, wanted in pairs if (mine is None) != (wanted is None)] == []
    assert [name for name, mine, wanted in pairs if wanted is not None and not torch.equal(mine, wanted)] == []


def require_equal_values(ours: nn.Module, bare: nn.Module) -> None:
    pairs = zip(bare.named_parameters(), ours.parameters(), strict=True)
    assert [name for (name, theirs), mine in pairs if not torch.equal(mine, theirs)] == []


def backward_alike(
    ours: nn.Module,
    bare: nn.Module,
    loss: Callable[[nn.Module, int], Tensor],
    *,
    steps: Iterable[int] = range(3),
    mean: Callable[[nn.Module], object] = naive_mean,
    require: Callable[[nn.Module, nn.Module], object] = require_same_by_position,
) -> None:
    """Backwards of both models, after each of which `mean` of the bare one's gradients must be what ours are."""
    for step in steps:
        for model in (ours, bare):
            model.zero_grad()
            loss(model, step).backward()
        mean(bare)
        require(ours, bare)


@contextlib.contextmanager
def heard(logger: str = "undertow") -> Iterator[list[str]]:
    """The warnings of that logger, and of those below it, as they come."""
    handler, texts = logging.Handler(logging.WARNING), list[str]()
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger(logger).addHandler(handler)
    try:
        yield texts
    finally:
        logging.getLogger(logger).removeHandler(handler)
