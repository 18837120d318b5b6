"""A model of which nothing is trained is warned of, and needs no other rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from support.ranks import Ranks, in_ranks
from undertow import DistributedDataParallel, attach
from undertow.runtime import private

WRAPS = {"DistributedDataParallel": DistributedDataParallel, "attach": attach}
WARNING = (
    r"^Linear has no parameter that requires a gradient: nothing is averaged until it has one\.\n"
    r"  {}\(\.\.\.\)\n"
    r"  Look at requires_grad, and at what `ignore` names\. If parameters are unfrozen later, filter this warning\.$"
)


@in_ranks(2, is_fresh=True)
@pytest.mark.parametrize("name", WRAPS)
def test_a_rank_that_trains_nothing_needs_no_other_one(name: str) -> None:
    module = nn.Linear(4, 3).requires_grad_(False)
    with pytest.warns(UserWarning, match=WARNING.format(name)):
        model: Any = WRAPS[name](module)
    called: Callable[..., Any] = model if isinstance(model, nn.Module) else module
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    x = torch.ones(2, 4, requires_grad=True)
    if dist.get_rank() == 1:
        private.default_store().wait([f"left {name}"])
    for _ in range(2 if dist.get_rank() == 1 else 0):
        called(x).sum().backward()
        model.finish()
        called(x).sum().backward()
        optimizer.step()
    model.close()
    private.default_store().set(f"left {name}", "")


def thaw_after_steps_of_nothing() -> torch.Tensor:
    module = nn.Linear(4, 3).requires_grad_(False)
    with pytest.warns(UserWarning, match="no parameter that requires a gradient"):
        model = DistributedDataParallel(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    x = torch.full((2, 4), 1.0 + dist.get_rank(), requires_grad=True)
    for step in range(6):
        is_trained = step in (2, 3, 5)
        module.requires_grad_(is_trained)
        optimizer.zero_grad()
        for _ in range(1 if is_trained else 1 + (step + dist.get_rank()) % 2):  # each rank as it likes while nothing is
            model(x).sum().backward()
            model.finish()
        optimizer.step()
    grad = module.weight.grad
    model.close()
    return grad


def test_what_is_thawed_after_that_is_averaged(two_ranks: Ranks) -> None:
    for grad in two_ranks.run(thaw_after_steps_of_nothing):
        assert torch.equal(grad, torch.full((3, 4), 3.0))
