from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import nn

from support.models import CASES, Branches, noise
from support.naive import naive_mean, require_same_gradients, require_same_parameters, wrapped_and_bare
from support.ranks import Ranks, in_ranks
from undertow import DistributedDataParallel

# Largest bucket in MiB.
PLANS = {"a bucket per parameter": 1e-6, "several buckets": 3e-4, "default": None, "one bucket": math.inf}
ORDERS = ["observed", "reverse", "largest_first"]


def every_gradient_is_the_mean(case_name: str, settings: dict[str, Any]) -> None:
    case = CASES[case_name]
    with wrapped_and_bare(case.model(), **settings, buffers="off") as (ddp, bare):
        for step in range(3):
            for model in (ddp, bare):
                model.zero_grad()
                case.loss(model, step).backward()
            naive_mean(bare)
            require_same_gradients(ddp, bare)
            require_views_of_buckets(ddp)


def require_views_of_buckets(model: nn.Module) -> None:
    """Every gradient lies in a storage that is larger than itself: a trailer follows it at least."""
    for name, param in model.named_parameters():
        assert param.grad is not None, name
        assert param.grad.untyped_storage().nbytes() > param.grad.nbytes, name


@pytest.mark.parametrize(
    ("overlap", "average_in_collective"),
    [(True, True), (True, False), (False, True)],
    ids=["overlap", "sum", "afterwards"],
)
@pytest.mark.parametrize("bucket_cap_mb", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("case_name", CASES)
def test_every_gradient_is_the_mean(
    ranks: Ranks, case_name: str, bucket_cap_mb: float | None, overlap: bool, average_in_collective: bool
) -> None:
    settings = {"bucket_cap_mb": bucket_cap_mb, "overlap": overlap, "average_in_collective": average_in_collective}
    ranks.run(every_gradient_is_the_mean, case_name, settings)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("case_name", CASES)
def test_every_gradient_is_the_mean_in_every_order(ranks: Ranks, case_name: str, order: str) -> None:
    ranks.run(every_gradient_is_the_mean, case_name, {"order": order, "bucket_cap_mb": 3e-4})


def gradients_stay_views(set_to_none: bool) -> list[list[int]]:
    case = CASES["mlp"]
    storages = []
    with wrapped_and_bare(case.model(), order="reverse") as (ddp, bare):
        for step in range(4):
            for model in (ddp, bare):
                model.zero_grad(set_to_none=set_to_none)
                case.loss(model, step).backward()
            naive_mean(bare)
            require_same_gradients(ddp, bare)
            storages.append([param.grad.data_ptr() for param in ddp.parameters()])
    return storages


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_are_at_the_same_place_in_every_step(ranks: Ranks, set_to_none: bool) -> None:
    for storages in ranks.run(gradients_stay_views, set_to_none):
        assert storages == storages[:1] * 4


OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01),
}


@in_ranks(2)
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("optimizer_name", OPTIMIZERS)
@pytest.mark.parametrize("case_name", CASES)
def test_five_steps_of_training_have_the_bits_of_the_naive_ones(case_name: str, optimizer_name: str, set_to_none: bool) -> None:
    case = CASES[case_name]
    with wrapped_and_bare(case.model(), bucket_cap_mb=3e-4, buffers="off") as (ddp, bare):
        optimizers = {model: OPTIMIZERS[optimizer_name](model.parameters()) for model in (ddp, bare)}
        for step in range(5):
            for model, optimizer in optimizers.items():
                optimizer.zero_grad(set_to_none=set_to_none)
                case.loss(model, step).backward()
                if model is bare:
                    naive_mean(bare)
                optimizer.step()
        require_same_parameters(ddp, bare)


HOLDERS = {
    "the gradient": lambda grad: grad,
    "a detached one": lambda grad: grad.detach(),
    "a slice": lambda grad: grad[1:],
    "a flat view": lambda grad: grad.view(-1),
    "an array": lambda grad: grad.numpy(),
}


@in_ranks(2)
@pytest.mark.parametrize("bucket_cap_mb", [1e-6, math.inf])
@pytest.mark.parametrize("holder_name", HOLDERS)
def test_a_gradient_that_the_user_holds_is_not_overwritten(holder_name: str, bucket_cap_mb: float) -> None:
    case, hold = CASES["mlp"], HOLDERS[holder_name]
    with wrapped_and_bare(case.model(), bucket_cap_mb=bucket_cap_mb, order="reverse") as (ddp, bare):
        held, copies = [], []
        for step in range(4):
            for model in (ddp, bare):
                model.zero_grad()
                case.loss(model, step).backward()
            naive_mean(bare)
            require_same_gradients(ddp, bare)
            held.append([hold(param.grad) for param in ddp.parameters()][: step + 1])
            copies.append([torch.as_tensor(grad).clone() for grad in held[-1]])
        for grads, wanted in zip(held, copies, strict=True):
            assert all(torch.equal(torch.as_tensor(grad), copied) for grad, copied in zip(grads, wanted, strict=True))


@in_ranks(2, 3)
def test_backward_adds_to_a_gradient_that_was_set_by_hand() -> None:
    with wrapped_and_bare(Branches(2), bucket_cap_mb=1e-4) as (ddp, bare):
        for step in range(3):
            for model in (ddp, bare):
                for param in model.parameters():
                    param.grad = torch.full_like(param, float(step))
                model(noise(2, 4, step=step), (0, 1)).sum().backward()
            naive_mean(bare)
            require_same_gradients(ddp, bare)


@in_ranks(2, 3)
def test_frozen_parameters_are_left_alone() -> None:
    model = Branches(3)
    for param in model.layers[1].parameters():
        param.requires_grad_(False)
    with wrapped_and_bare(model) as (ddp, bare):
        for model in (ddp, bare):
            model(noise(2, 4)).sum().backward()
        naive_mean(bare)
        require_same_gradients(ddp, bare)


@in_ranks(2, 3)
def test_ignored_parameters_keep_their_local_gradient() -> None:
    with wrapped_and_bare(Branches(2), ignore=("layers.0.weight",)) as (ddp, bare):
        local = copy.deepcopy(bare)
        for model in (ddp, bare, local):
            model(noise(2, 4), (0, 1)).sum().backward()
        naive_mean(bare)
        bare.layers[0].weight.grad = local.layers[0].weight.grad
        require_same_gradients(ddp, bare)


@in_ranks(2, 3)
def test_a_model_without_parameters_can_be_wrapped() -> None:
    with pytest.warns(UserWarning, match="Flatten has no parameter that requires a gradient"):
        ddp = DistributedDataParallel(nn.Flatten())
    x = torch.ones(2, 3, requires_grad=True)
    ddp(x).sum().backward()
    ddp.finish()
    assert torch.equal(x.grad, torch.ones(2, 3))
    ddp.close()
