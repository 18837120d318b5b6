"""Beyond a plain backward: graphs of gradients, gradients by hand, mixed precision, hooks of the user's, compilers."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from support.drop_in import LEARNING_RATE, TIMEOUT_S, SideBySide, squares, with_both_plans
from support.models import mlp, noise
from support.naive import gradients, naive_mean, require_same, require_same_gradients
from support.ranks import Ranks, in_ranks

NUM_STEPS = 3


def smooth() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))


@in_ranks(2, 3, timeout_s=TIMEOUT_S)
@with_both_plans
def test_a_penalty_on_the_gradient_is_synchronised(bucket_cap_mb: float | None) -> None:
    def loss(model: nn.Module, step: int) -> Tensor:
        result = squares(5, 6, step=step)(model)
        slopes = torch.autograd.grad(result, list(model.parameters()), create_graph=True)
        return result + sum(slope.square().sum() for slope in slopes)

    with SideBySide(smooth(), bucket_cap_mb) as side:
        for step in range(NUM_STEPS):
            side.step(lambda model, step=step: loss(model, step))


def backward_with_graph(loss: Tensor) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Using backward\\(\\) with create_graph=True will create a reference cycle")
        loss.backward(create_graph=True)


@in_ranks(2, 3, timeout_s=TIMEOUT_S)
@with_both_plans
def test_gradients_with_a_graph_are_averaged(bucket_cap_mb: float | None) -> None:
    with SideBySide(smooth(), bucket_cap_mb) as side:
        for step in range(NUM_STEPS):
            side.zero_grad()
            for model in side.both:
                backward_with_graph(squares(5, 6, step=step)(model))
            for param in side.bare.parameters():
                param.grad = param.grad.detach()
            side.compare()
            side.optimize()


@in_ranks(2, 3, timeout_s=TIMEOUT_S)
@with_both_plans
def test_gradients_made_in_no_sync_keep_their_graph(bucket_cap_mb: float | None) -> None:
    """The first backward only makes slopes; the second one, through them, is synchronised."""
    with SideBySide(smooth(), bucket_cap_mb) as side:
        for step in range(NUM_STEPS):
            for model in side.both:
                model.zero_grad()
                with side.accumulating():
                    backward_with_graph(squares(5, 6, step=step)(model))
                slopes = [param.grad for param in model.parameters()]
                assert all(slope.requires_grad for slope in slopes[:-1]), [slope.requires_grad for slope in slopes]
                model.zero_grad()
                sum(slope.square().sum() for slope in slopes).backward()
            side.compare()
            side.optimize()


@in_ranks(2, 3, timeout_s=TIMEOUT_S)
@with_both_plans
def test_what_autograd_grad_returns_is_this_ranks_own(bucket_cap_mb: float | None) -> None:
    with SideBySide(mlp(), bucket_cap_mb) as side:
        for step in range(4):
            by_hand = [torch.autograd.grad(squares(5, 6, step=step)(model), list(model.parameters())) for model in side.both]
            assert all(map(torch.equal, *by_hand))
            if step % 2:  # nothing is left of it in a step that follows, nor in one that does not
                side.step(squares(5, 6, step=step))
        sums = [torch.zeros(()) for _ in range(dist.get_world_size())]
        dist.all_gather(sums, by_hand[0][0].sum())
        assert len(set(map(float, sums))) == len(sums)


def autocast(bucket_cap_mb: float | None) -> None:
    def loss(model: nn.Module, step: int) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(noise(5, 6, step=step)).float().square().mean()

    with SideBySide(mlp(), bucket_cap_mb) as side:
        for step in range(NUM_STEPS):
            side.step(lambda model, step=step: loss(model, step))
            assert {param.grad.dtype for param in side.module.parameters()} == {torch.float32}


@with_both_plans
def test_autocast_trains(ranks: Ranks, bucket_cap_mb: float | None) -> None:
    ranks.run(autocast, bucket_cap_mb, timeout_s=TIMEOUT_S)


def scaled(bucket_cap_mb: float | None) -> list[float]:
    """In the second step rank 1 has an infinity; every rank skips it, and halves its scale."""
    scales = []
    with SideBySide(mlp(), bucket_cap_mb) as side:
        scalers = {model: torch.amp.GradScaler("cpu", init_scale=1024.0) for model in side.both}
        optimizers = {model: torch.optim.SGD(model.parameters(), lr=LEARNING_RATE) for model in side.both}
        for step in range(4):
            before = [param.clone() for param in side.module.parameters()]
            for model, scaler in scalers.items():
                model.zero_grad()
                factor = float("inf") if step == 1 and dist.get_rank() == 1 else 1.0
                scaler.scale(squares(5, 6, step=step)(model) * factor).backward()
                if model is side.bare:
                    naive_mean(model)
                scaler.unscale_(optimizers[model])
            if step != 1:
                require_same_gradients(side.ddp, side.bare)
            for model, scaler in scalers.items():
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                scaler.step(optimizers[model])
                scaler.update()
            scales.append(scalers[side.ddp].get_scale())
            side.compare_parameters()
            assert (step == 1) == all(map(torch.equal, before, side.module.parameters()))
    return scales


@with_both_plans
def test_a_grad_scaler_skips_on_all_ranks_alike(ranks: Ranks, bucket_cap_mb: float | None) -> None:
    for scales in ranks.run(scaled, bucket_cap_mb, timeout_s=TIMEOUT_S):
        assert scales == [1024.0, 512.0, 512.0, 512.0]


def doubled(grad: Tensor) -> Tensor:
    return 2 * grad


def double_in_place(param: Tensor) -> None:
    param.grad.mul_(2)


HOOKS = {
    "on tensors": lambda param: param.register_hook(doubled),
    "after accumulation": lambda param: param.register_post_accumulate_grad_hook(double_in_place),
}


WHEN = ["before wrapping", "between two steps", "after a forward"]


@in_ranks(2, 3, timeout_s=TIMEOUT_S)
@with_both_plans
@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("name", HOOKS)
def test_hooks_of_the_user_see_and_change_this_ranks_gradient(name: str, when: str, bucket_cap_mb: float | None) -> None:
    def register(modules: Iterable[nn.Module]) -> None:
        for module in modules:
            for param in list(module.parameters())[::2]:
                HOOKS[name](param)

    model = mlp()
    bare = _same(model)
    if when == WHEN[0]:
        register([model, bare])
    with SideBySide(model, bucket_cap_mb, bare=bare) as side:
        for step in range(3):
            if when == WHEN[1] and step == 1:
                register(side.both_modules)
            side.zero_grad()
            losses = [squares(5, 6, step=step)(each) for each in side.both]
            if when == WHEN[2] and step == 1:
                register(side.both_modules)
            for each in losses:
                each.backward()
            side.compare()
            side.optimize()


@in_ranks(2, 3, timeout_s=TIMEOUT_S)
@with_both_plans
def test_a_hook_of_the_user_finds_a_gradient(bucket_cap_mb: float | None) -> None:
    """A hook that only looks, such as one that logs norms, finds the gradient of this rank."""
    with SideBySide(mlp(), bucket_cap_mb) as side:
        seen: dict[nn.Module, list[Tensor]] = {model: [] for model in side.both}
        for model in side.both:
            for param in model.parameters():
                param.register_post_accumulate_grad_hook(lambda param, model=model: seen[model].append(param.grad.clone()))
        for step in range(NUM_STEPS):
            side.step(squares(5, 6, step=step))
            assert all(map(torch.equal, seen[side.ddp], seen[side.bare]))
            assert len(seen[side.ddp]) == 4 * (step + 1)


def compiled_before(backend: str) -> None:
    model = mlp()
    with SideBySide(torch.compile(model, backend=backend), 1e-6, bare=_same(model)) as side:
        train_by_position(side, side.ddp)


def compiled_after(backend: str) -> None:
    with SideBySide(mlp(), 1e-6) as side:
        train_by_position(side, torch.compile(side.ddp, backend=backend))


def _same(model: nn.Module) -> nn.Module:
    other = mlp()
    other.load_state_dict(model.state_dict())
    return other


def train_by_position(side: SideBySide, compiled: nn.Module) -> None:
    """A compiled model calls its parameters by other names."""
    torch._dynamo.reset()  # of what other tests have compiled in this process
    optimizers = [torch.optim.SGD(model.parameters(), lr=LEARNING_RATE) for model in (compiled, side.bare)]
    for step in range(4):
        for model in (compiled, side.bare):
            model.zero_grad()
        with side.accumulating():
            squares(5, 6, step=2 * step)(compiled).backward()
        squares(5, 6, step=2 * step)(side.bare).backward()
        for model in (compiled, side.bare):
            squares(5, 6, step=2 * step + 1)(model).backward()
        naive_mean(side.bare)
        require_same(*(dict(enumerate(gradients(model).values())) for model in side.both_modules))
        for optimizer in optimizers:
            optimizer.step()
        require_same(*(dict(enumerate(param.detach() for param in model.parameters())) for model in side.both_modules))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("way", [compiled_before, compiled_after])
def test_a_compiled_model_trains(ranks: Ranks, way: Callable[[str], None], backend: str) -> None:
    ranks.run(way, backend)
