"""Losses, outputs, hooks and gradients of every kind, beyond what programs have: graphs of gradients, autocast, other dtypes."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call

from support.alike import backward_alike, of_all_ranks
from support.drop_in import TIMEOUT_S
from support.models import CASES, mlp, noise
from support.naive import naive_mean, require_same, require_same_gradients, wrapped, wrapped_and_bare
from support.ranks import in_ranks
from undertow import average_gradients

MLP = CASES["mlp"]


def smooth() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))


def with_a_penalty(model: nn.Module, x: Tensor) -> Tensor:
    value = model(x).square().mean()
    return value + sum(it.square().sum() for it in torch.autograd.grad(value, list(model.parameters()), create_graph=True))


def in_bfloat16(model: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return model(x).float().square().mean()


def changed_in_place(model: nn.Module, x: Tensor) -> Tensor:
    out = model(x).mul_(2).add_(1)
    out[:, 0] = 0
    return out.square().mean()


@in_ranks(2, 3, timeout_s=TIMEOUT_S)
@pytest.mark.parametrize("loss", [with_a_penalty, in_bfloat16, changed_in_place])
def test_the_loss_may_do_anything_with_a_forward(loss: Callable[[nn.Module, Tensor], Tensor]) -> None:
    with wrapped_and_bare(smooth(), bucket_cap_mb=1e-6) as (ddp, bare):
        backward_alike(ddp, bare, lambda model, step: loss(model, noise(5, 6, step=step)))
        assert {param.grad.dtype for param in ddp.parameters()} == {torch.float32}


@in_ranks(2, 3, timeout_s=TIMEOUT_S)
@pytest.mark.parametrize("of_the_wrapper", [True, False], ids=["of the wrapper", "of the module"])
def test_a_functional_call_trains_what_its_parameters_are_made_from(of_the_wrapper: bool) -> None:
    """Every second step runs on tensors that are made from the parameters."""

    def loss(model: nn.Module, step: int) -> Tensor:
        called = ddp.module if model is ddp and not of_the_wrapper and step % 2 else model
        doubled = {name: 2 * param for name, param in called.named_parameters()}
        return functional_call(called, doubled if step % 2 else {}, (noise(5, 6, step=step),)).square().mean()

    with wrapped_and_bare(mlp(), bucket_cap_mb=1e-6 if of_the_wrapper else None) as (ddp, bare):
        backward_alike(ddp, bare, loss, steps=range(4))


def backward_with_graph(loss: Tensor) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Using backward\\(\\) with create_graph=True will create a reference cycle")
        loss.backward(create_graph=True)


@in_ranks(2, 3, timeout_s=TIMEOUT_S)
@pytest.mark.parametrize("bucket_cap_mb", [1e-6, None])
def test_gradients_with_a_graph_are_averaged(bucket_cap_mb: float | None) -> None:
    with wrapped_and_bare(smooth(), bucket_cap_mb=bucket_cap_mb) as (ddp, bare):
        for step in range(3):
            for model in (ddp, bare):
                model.zero_grad()
                backward_with_graph(MLP.loss(model, step))
            for param in bare.parameters():
                param.grad = param.grad.detach()
            naive_mean(bare)
            require_same_gradients(ddp, bare)


@in_ranks(2, 3, timeout_s=TIMEOUT_S)
def test_gradients_made_in_no_sync_keep_their_graph() -> None:
    """The first backward only makes slopes; the second one, through them, is synchronised."""

    def loss(model: nn.Module, step: int) -> Tensor:
        with ddp.no_sync():
            backward_with_graph(MLP.loss(model, step))
        slopes = [param.grad for param in model.parameters()]
        assert [slope.requires_grad for slope in slopes[:-1]] == [True] * 3
        model.zero_grad()
        return sum(slope.square().sum() for slope in slopes)

    with wrapped_and_bare(smooth()) as (ddp, bare):
        backward_alike(ddp, bare, loss)


@in_ranks(2, 3, timeout_s=TIMEOUT_S)
@pytest.mark.parametrize("averages", [False, True])
def test_what_autograd_grad_returns_is_this_ranks_own(averages: bool) -> None:
    """Nothing is left of it, averaged by hand or not, in a step that follows, nor in one that does not."""
    with wrapped_and_bare(mlp()) as (ddp, bare):
        for step in range(4):
            by_hand = [torch.autograd.grad(MLP.loss(model, step), list(model.parameters())) for model in (ddp, bare)]
            assert all(map(torch.equal, *by_hand))
            if averages:
                average_gradients(by_hand[0])
            if step % 2:
                backward_alike(ddp, bare, MLP.loss, steps=[step])
        assert len({*of_all_ranks(float(by_hand[0][0].sum()))}) == dist.get_world_size()


def double_in_place(param: Tensor) -> None:
    param.grad.mul_(2)


HOOKS: dict[str, Callable[[Tensor], object]] = {
    "on tensors": lambda param: param.register_hook(lambda grad: 2 * grad),
    "after accumulation": lambda param: param.register_post_accumulate_grad_hook(double_in_place),
}
BEFORE, BETWEEN, AFTER = "before wrapping", "between two steps", "after a forward"


@in_ranks(2, 3, timeout_s=TIMEOUT_S)
@pytest.mark.parametrize("when", [BEFORE, BETWEEN, AFTER])
@pytest.mark.parametrize("name", HOOKS)
def test_hooks_of_the_user_see_and_change_this_ranks_gradient(name: str, when: str) -> None:
    def register(model: nn.Module) -> None:
        for param in [*model.parameters()][::2]:
            HOOKS[name](param)
            param.register_post_accumulate_grad_hook(lambda param: seen.append(param.grad.clone()))

    def loss(model: nn.Module, step: int) -> Tensor:
        if (step, when) == (1, BETWEEN):
            register(model)
        value = MLP.loss(model, step)
        if (step, when) == (1, AFTER):
            register(model)
        return value

    seen: list[Tensor] = []  # of a step, two of the wrapped model, then two of the bare one
    model, bare = MLP.model(), MLP.model()
    for each in (model, bare) if when == BEFORE else ():
        register(each)
    with wrapped(model) as ddp:
        backward_alike(ddp, bare, loss)
    assert len(seen) == 2 * 2 * (3 if when == BEFORE else 2)
    assert all(torch.equal(seen[at], seen[at + 2]) for step in range(0, len(seen), 4) for at in (step, step + 1))


class TwoOutputs(nn.Module):
    """Returns two tensors with parameters of their own in an object, and remembers it."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> SimpleNamespace:
        self.made = SimpleNamespace(left=self.left(x), more={"right": [self.right(x), None]})
        return self.made


@in_ranks(2, 3)
def test_an_output_comes_back_as_it_is_and_trains() -> None:
    def loss(model: nn.Module, step: int) -> Tensor:
        out = model(noise(5, 6, step=step))
        assert out is getattr(model, "module", model).made
        return out.left.square().mean() + (out.more["right"][0].square().mean() if step != 1 else 0)

    with wrapped_and_bare(TwoOutputs(), bucket_cap_mb=1e-6) as (ddp, bare):
        backward_alike(ddp, bare, loss)


@in_ranks(2, 3)
@pytest.mark.parametrize("clears", [True, False])
def test_new_data_of_a_gradient_is_noticed_while_another_is_held(clears: bool) -> None:
    with wrapped_and_bare(mlp(), bucket_cap_mb=1.0) as (ddp, bare):
        backward_alike(ddp, bare, MLP.loss, steps=[0])
        held, torn = ddp.module[0].weight.grad.detach(), ddp.module[2].weight.grad
        torn.data = torn.data * 0.5
        for model in (ddp, bare):
            model.zero_grad(set_to_none=clears)
            MLP.loss(model, 1).backward()
        naive_mean(bare)
        require_same_gradients(ddp, bare)
        assert held.shape == (8, 6)


class Float(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.float()


@in_ranks(2, 3, timeout_s=TIMEOUT_S)
@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="this torch has no grad_dtype")
def test_gradients_may_have_a_dtype_of_their_own() -> None:
    """Parameters of half the precision that accumulate in the full one."""

    def model() -> nn.Module:
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Linear(6, 5).bfloat16(), Float(), nn.Linear(5, 3))
        for param in layers[0].parameters():
            param.grad_dtype = torch.float32
        return layers

    def loss(model: nn.Module, step: int) -> Tensor:
        first, second = (noise(5, 6, step=2 * step + part).bfloat16() for part in (0, 1))
        with ddp.no_sync():
            model(first).square().mean().backward()
        return model(second).square().mean()

    ours, bare = model(), model()
    with wrapped(ours, bucket_cap_mb=1e-6) as ddp:
        backward_alike(ddp, bare, loss)
    assert {param.grad.dtype for param in ours.parameters()} == {torch.float32}


def integers(high: int, *shape: int, step: int) -> Tensor:
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(1000 * dist.get_rank() + step))


@in_ranks(2, 3, timeout_s=TIMEOUT_S)
@pytest.mark.parametrize("dense_on", [(), (0,), (0, 1, 2)], ids=["nowhere", "rank 0", "all ranks"])
def test_a_gradient_is_sparse_unless_a_rank_has_a_dense_part(dense_on: tuple[int, ...]) -> None:
    """A table, tied to a dense layer on some ranks. Gradients are integers, and none is zero: no row of a sum goes away."""

    def loss(model: nn.Module, step: int) -> Tensor:
        words, factors = integers(7, 5, step=step), 1.0 + integers(4, 5, 3, step=step)
        value = (model(words) * factors).sum()
        return value + (factors @ next(model.parameters()).t()).sum() if dist.get_rank() in dense_on else value

    with wrapped_and_bare(nn.Embedding(7, 3, sparse=True)) as (ddp, bare):
        for step in range(3):
            for model in (ddp, bare):
                model.zero_grad()
                loss(model, step).backward()
            ours, bare.weight.grad = ddp.module.weight.grad, bare.weight.grad.to_dense()
            naive_mean(bare)
            require_same({"table": ours.to_dense()}, {"table": bare.weight.grad})
            assert dense_on == (0,) or ours.is_sparse == (dense_on == ())  # what others make of a part of rank 0 alone is free
