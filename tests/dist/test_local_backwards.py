"""Backwards of the bare module, which are this rank's own, and gradients that a hook of the user's takes away."""

import contextlib
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from support.errors import text_of
from support.ranks import in_ranks
from undertow import DistributedDataParallel, PhaseError, ShardedOptimizer, SyncConfig, attach

MEAN = [[1.5] * 4] * 3  # of rows of ones and of twos


def linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(4, 3)


def rows() -> Tensor:
    return torch.full((1, 4), dist.get_rank() + 1.0)


@contextlib.contextmanager
def wrapped(module: nn.Module) -> Iterator[DistributedDataParallel]:
    with contextlib.closing(DistributedDataParallel(module, config=SyncConfig(bucket_cap_mb=1e-6))) as ddp:
        yield ddp


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(rows()).sum().backward()
    optimizer.step()


FOLLOWED: dict[str, Callable[[DistributedDataParallel], Tensor]] = {
    "in eval mode": lambda ddp: ddp.eval()(rows()),
    "and a method": lambda ddp: ddp(rows()) * 0.0 + ddp.module.forward(rows()),
    "and another forward without gradients": lambda ddp: (ddp(rows()), torch.no_grad()(ddp)(rows()))[0],
    "functional": lambda ddp: torch.func.functional_call(ddp, dict(ddp.named_parameters()), (rows(),)),
    "before a step of other parameters": lambda ddp: (ddp(rows()), torch.optim.SGD([torch.zeros(1)], lr=1.0).step())[0],
    "before a step of some parameters": lambda ddp: (ddp(rows()), torch.optim.SGD([ddp.module.bias], lr=0.0).step())[0],
}


@in_ranks(2)
@pytest.mark.parametrize("how", FOLLOWED)
def test_a_backward_after_a_forward_of_the_wrapper_is_averaged(how: str) -> None:
    with wrapped(linear()) as ddp:
        step(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1))
        ddp.zero_grad()
        FOLLOWED[how](ddp).sum().backward()
        assert ddp.module.weight.grad.tolist() == MEAN


@in_ranks(2)
def test_a_container_has_no_forward_to_wait_for() -> None:
    layers = nn.ModuleDict({"layer": linear()})
    with contextlib.closing(attach(layers)):
        optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)
        for _ in range(2):
            step(layers["layer"], optimizer)
            assert layers["layer"].weight.grad.tolist() == MEAN


@in_ranks(2)
def test_a_backward_of_the_bare_module_beside_a_synchronized_one_stays_local_and_a_step_says_so_once() -> None:
    with wrapped(linear()) as ddp, warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        weight, bias = torch.optim.SGD([ddp.module.weight], lr=0.1), torch.optim.SGD([ddp.module.bias], lr=0.1)
        for _ in range(2):
            ddp.zero_grad()
            ddp(rows()).sum().backward()
            bias.step()
            weight.step()
            ddp.module(rows()).sum().backward()
            assert ddp.module.weight.grad.tolist() == [[2.5 + dist.get_rank()] * 4] * 3
            ddp(rows())  # so that it has no result of its own
            ddp.module.weight.grad.zero_()
    assert seen == []


# Gradients that are taken away


def take(param: Tensor) -> None:
    param.main_grad = param.grad.float()  # type: ignore[attr-defined, union-attr]
    param.grad = None


TAKEN = (
    "`.grad` was cleared during backward on ranks 0, 1: a gradient arrived, and was gone before it could be averaged.\n"
    "  parameter 'bias' with the hook take, synchronization {}\n"
    "  Leave `.grad` alone until backward ends. After backward it is the mean: copy it to another place then, or step."
)


@in_ranks(2)
@pytest.mark.parametrize("is_hooked_first", [True, False])
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2"])
def test_a_gradient_that_a_hook_takes_away_is_an_error_on_every_rank(strategy: str, is_hooked_first: bool) -> None:
    module = linear()
    if is_hooked_first:
        hook = module.bias.register_post_accumulate_grad_hook(take)
    kind = None if strategy == "ddp" else strategy
    with contextlib.closing(DistributedDataParallel(module, config=SyncConfig(strategy=kind, bucket_cap_mb=1e-6))) as ddp:
        if not is_hooked_first:
            hook = module.bias.register_post_accumulate_grad_hook(take)
        sgd = torch.optim.SGD
        optimizer = sgd(ddp.parameters(), lr=0.1) if strategy == "ddp" else ShardedOptimizer(sgd, ddp, lr=0.1)
        for number in range(2):
            assert text_of(PhaseError, ddp(rows()).sum().backward) == TAKEN.format(2 * number)
            hook.remove()
            step(ddp, optimizer)  # which forgets the failure
            hook = module.bias.register_post_accumulate_grad_hook(take)


@in_ranks(2)
def test_a_gradient_that_a_hook_replaces_is_averaged() -> None:
    with wrapped(linear()) as ddp:
        ddp.module.weight.register_post_accumulate_grad_hook(lambda param: setattr(param, "grad", param.grad * 2.0))
        ddp(rows()).sum().backward()
        assert ddp.module.weight.grad.tolist() == [[3.0] * 4] * 3
