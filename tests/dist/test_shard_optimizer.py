"""An optimizer that exists already continues in shards with the bits of the plain one, or is refused by name."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import lr_scheduler

from support.errors import in_pieces, text_of
from support.inside import num_state_elements
from support.levels import some
from support.ranks import in_ranks
from support.sharded import MLP, OPTIMIZERS, ORDERED, one_step, parameters, require_equal
from undertow import (
    ConfigError,
    DistributedDataParallel,
    PhaseError,
    PlanMismatch,
    ShardedOptimizer,
    SyncConfig,
    WrongType,
    shard_optimizer,
)


@contextlib.contextmanager
def wrapped() -> Iterator[DistributedDataParallel]:
    with contextlib.closing(DistributedDataParallel(MLP.model(), config=SyncConfig(**ORDERED))) as ddp:
        yield ddp


def made(ddp: nn.Module, name: str = "AdamW") -> Any:
    """As a factory makes it: weights and biases have different settings."""
    cls, settings = OPTIMIZERS[name]
    weights, biases = ([it for it in ddp.named_parameters() if (it[1].dim() > 1) is is_weight] for is_weight in (True, False))
    return cls(
        [{"params": weights, "weight_decay": 0.1}, {"params": biases, "weight_decay": 0.0, "lr": settings["lr"] / 2}], **settings
    )


def flat(state: dict[str, Any]) -> dict[str, Tensor]:
    return {f"{number} {key}": torch.as_tensor(value) for number, of in state["state"].items() for key, value in of.items()}


def trained(name: str, num_plain: int, then: Callable[[Any, Any], Any]) -> dict[str, Tensor]:
    """The parameters and the state after six steps; after `num_plain` of them `then` gives another optimizer, with a schedule."""
    with wrapped() as ddp:
        opt = made(ddp, name)
        for step in range(num_plain):
            one_step(ddp, opt, step)
        opt = then(opt, ddp)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=8)
        for step in range(num_plain, 6):
            one_step(ddp, opt, step)
            schedule.step()
            assert [group["lr"] for group in opt.param_groups] == schedule.get_last_lr()
        return {**parameters(ddp), **flat(opt.state_dict())}


@in_ranks(2)
@pytest.mark.parametrize("num_plain", some([0, 3], most=1))
@pytest.mark.parametrize("name", some(["AdamW", "SGD", "Adagrad", "foreach AdamW"], most=1))
def test_it_continues_with_the_bits_of_the_plain_one(name: str, num_plain: int) -> None:
    require_equal(
        trained(name, num_plain, lambda opt, _: opt),
        trained(name, num_plain, lambda opt, ddp: shard_optimizer(opt, ddp)),
    )


@in_ranks(2)
def test_its_groups_are_those_of_the_plain_one_and_its_state_is_moved() -> None:
    with wrapped() as ddp:
        plain = made(ddp)
        one_step(ddp, plain)
        groups, state = [dict(group) for group in plain.param_groups], plain.state_dict()
        opt = shard_optimizer(plain, ddp)
        assert (opt.optimizer_class, opt.param_groups, opt.defaults) == (torch.optim.AdamW, groups, plain.defaults)
        assert opt.param_groups is plain.param_groups  # a scheduler that was left out acts on the result
        assert not plain.state
        require_equal(flat(state), flat(opt.state_dict()))
        one_step(ddp, opt, 1)
        assert num_state_elements(opt) < 1.3 * sum(param.numel() for param in ddp.parameters())  # it was twice as many
        MLP.loss(ddp, 2).backward()
        assert "AdamW steps on parameters that a ShardedOptimizer updates" in text_of(PhaseError, plain.step)


def in_turn_and_together(opt: Any) -> Any:
    turns = [lr_scheduler.LinearLR(opt, 0.1, total_iters=2), lr_scheduler.ExponentialLR(opt, 0.9)]
    return lr_scheduler.ChainedScheduler([lr_scheduler.StepLR(opt, 2), lr_scheduler.SequentialLR(opt, turns, milestones=[2])])


def on_a_plateau(opt: Any) -> Any:
    schedule = lr_scheduler.ReduceLROnPlateau(opt, factor=0.5, patience=0)
    schedule.step = functools.partial(schedule.step, 1.0)  # the metric stays the same
    return schedule


SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda opt: lr_scheduler.LambdaLR(opt, lambda step: 1.0 / (1 + step)),
    "ChainedScheduler of SequentialLR": in_turn_and_together,
    "OneCycleLR": lambda opt: lr_scheduler.OneCycleLR(opt, max_lr=0.1, total_steps=9),
    "CyclicLR": lambda opt: lr_scheduler.CyclicLR(opt, 0.01, 0.1, step_size_up=2),
    "ReduceLROnPlateau": on_a_plateau,
}


def scheduled(make: Callable[[Any], Any], num_plain: int, *, shards: bool, reloads: bool) -> tuple[list[Any], dict[str, Tensor]]:
    """The settings of each of six steps, and the parameters; the schedule exists before the optimizer is taken over."""
    settings = []
    with wrapped() as ddp:
        opt = made(ddp)
        schedule = make(opt)
        for step in range(6):
            if shards and step == num_plain:
                opt = shard_optimizer(opt, ddp, schedulers=[schedule])
                assert schedule.optimizer is opt
            one_step(ddp, opt, step)
            schedule.step()
            settings.append([{key: it for key, it in group.items() if "params" not in key} for group in opt.param_groups])
            if reloads and step == 3:
                schedule.load_state_dict(schedule.state_dict())
        return settings, parameters(ddp)


@in_ranks(2)
@pytest.mark.parametrize("num_plain", some([0, 2], most=1))
@pytest.mark.parametrize("name", some(SCHEDULES, most=1))
def test_schedulers_of_the_plain_one_continue(name: str, num_plain: int) -> None:
    """torch warns if a scheduler steps before its optimizer, and warnings are errors here."""
    wanted, found = (
        scheduled(SCHEDULES[name], num_plain, shards=it, reloads=it and "Lambda" not in name) for it in (False, True)
    )
    assert wanted[0] == found[0]
    require_equal(wanted[1], found[1])


@in_ranks(2)
def test_it_is_taken_over_between_its_step_and_its_schedulers() -> None:
    with wrapped() as ddp:
        plain = made(ddp)
        schedule = lr_scheduler.StepLR(plain, 1, gamma=0.5)
        one_step(ddp, plain)
        left_out, rates = lr_scheduler.ExponentialLR(plain, 0.5), [group["lr"] for group in plain.param_groups]
        opt = shard_optimizer(plain, ddp, schedulers=[schedule])
        schedule.step()
        assert [group["lr"] for group in opt.param_groups] == [rate / 2 for rate in rates]
        left_out.step()
        assert [group["lr"] for group in opt.param_groups] == [rate / 4 for rate in rates]
        assert "AdamW steps on parameters that a ShardedOptimizer updates" in text_of(PhaseError, plain.step)


@in_ranks(2)
def test_a_scheduler_of_another_optimizer_is_refused() -> None:
    with wrapped() as ddp:
        schedule = lr_scheduler.StepLR(other := made(ddp), 1)
        given = made(ddp)
        text = text_of(ConfigError, lambda: shard_optimizer(given, ddp, schedulers=[schedule]))
        assert text.startswith("AdamW cannot be taken over: StepLR is not a scheduler of it.")
        assert "as schedulers=[...]" in text
        assert schedule.optimizer is other


class Named(torch.optim.AdamW):
    """Has a setting that is not in its groups."""

    def __init__(self, params: Any, *, name: str, **settings: Any) -> None:
        super().__init__(params, **settings)
        self.name = name

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert self.name == "mine"
        super().step(closure)


class Settings(torch.optim.Optimizer):
    def __init__(self, params: Any, **settings: Any) -> None:
        super().__init__(params, settings)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.data.add_(param.grad, alpha=-group["rate"])


@in_ranks(2)
@pytest.mark.parametrize(("cls", "settings"), some([(Named, {"name": "mine", "lr": 0.01}), (Settings, {"rate": 0.1})], most=1))
def test_optimizers_of_other_classes_are_taken_over_if_the_user_vouches_for_them(cls: Any, settings: dict[str, Any]) -> None:
    found = []

    def cut(opt: torch.optim.Optimizer, ddp: Any) -> ShardedOptimizer:
        with in_pieces():
            return shard_optimizer(opt, ddp, whole=False)

    for then in (lambda opt, _: opt, functools.partial(shard_optimizer, whole=True), cut):
        with wrapped() as ddp:
            opt = cls(ddp.parameters(), **settings)
            one_step(ddp, opt)
            opt = then(opt, ddp)
            one_step(ddp, opt, 1)
            found.append(parameters(ddp))
    require_equal(found[0], found[1])
    require_equal(found[0], found[2])


def changed(change: Callable[[Any], object]) -> Callable[[Any], Any]:
    def make(ddp: Any) -> Any:
        opt = torch.optim.SGD(ddp.parameters(), lr=0.1)
        change(opt)
        return opt

    return make


REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a scheduler": (changed(lambda opt: lr_scheduler.StepLR(opt, 1)), "SGD cannot be taken over: it has a scheduler that is not"),
    "a step of its own": (
        changed(lambda opt: setattr(opt, "step", lambda: None)),
        "SGD cannot be taken over: its `step` was",
    ),
    "a hook": (changed(lambda opt: opt.register_step_pre_hook(lambda *_: None)), "SGD cannot be taken over: it has hooks."),
    "a class of the user's": (
        lambda ddp: Settings(ddp.parameters(), rate=0.1),
        "Settings cannot be sharded: Undertow does not know that it updates each parameter on its own.",
    ),
    "an optimizer of all parameters": (
        lambda ddp: torch.optim.LBFGS(ddp.parameters()),
        "LBFGS cannot be sharded: it needs all parameters at once",
    ),
}


@in_ranks(2)
def test_an_optimizer_that_cannot_be_taken_over_is_refused_and_left_alone() -> None:
    with wrapped() as ddp:
        for what, (make, text) in REFUSED.items():
            opt = make(ddp)
            before = opt.state_dict()
            assert text_of(ConfigError, lambda opt=opt: shard_optimizer(opt, ddp)).startswith(text), what
            assert opt.state_dict() == before
        for given in (MLP, ShardedOptimizer(torch.optim.SGD, ddp, lr=0.1)):
            assert text_of(WrongType, lambda given=given: shard_optimizer(given, ddp)).startswith(
                "optimizer must be an optimizer of"
            )


@in_ranks(2)
def test_a_state_on_one_rank_only_is_an_error_on_every_rank() -> None:
    with wrapped() as ddp:
        plain = torch.optim.AdamW(ddp.parameters())
        if dist.get_rank() == 0:
            for param in ddp.parameters():
                plain.state[param] = {"step": torch.tensor(5.0), "exp_avg": torch.ones_like(param)}
        assert "state of the optimizer" in text_of(PlanMismatch, lambda: shard_optimizer(plain, ddp))


def of_two_kinds(ddp: nn.Module) -> list[Any]:
    weights, biases = ([it for it in ddp.parameters() if (it.dim() > 1) is is_weight] for is_weight in (True, False))
    return [torch.optim.Muon(weights, lr=0.02), torch.optim.AdamW(biases, lr=0.01)]


@in_ranks(2, 3)
@pytest.mark.parametrize("num_plain", some([0, 2], most=1))
def test_several_continue_with_the_bits_of_the_plain_ones(num_plain: int) -> None:
    found = []
    for shards in (False, True):
        with wrapped() as ddp:
            optimizers = of_two_kinds(ddp)
            schedules = [lr_scheduler.ExponentialLR(opt, gamma) for opt, gamma in zip(optimizers, (0.9, 0.5), strict=True)]
            for step in range(5):
                if shards and step == num_plain:
                    optimizers = shard_optimizer(optimizers, ddp, schedulers=schedules)
                    assert [opt.optimizer_class.__name__ for opt in optimizers] == ["Muon", "AdamW"]
                    assert [schedule.optimizer for schedule in schedules] == optimizers
                MLP.loss(ddp, step).backward()
                for each in (*optimizers, *schedules):
                    each.step()
                for opt in optimizers:
                    opt.zero_grad()
            ddp.wait()
            states = {
                f"{number} {key}": value for number, opt in enumerate(optimizers) for key, value in flat(opt.state_dict()).items()
            }
            found.append({**parameters(ddp), **states})
    require_equal(*found)


@in_ranks(2)
def test_several_are_refused_before_one_is_taken_over() -> None:
    with wrapped() as ddp:
        matrices, rest = of_two_kinds(ddp)
        again = torch.optim.AdamW(ddp.parameters())
        stranger = lr_scheduler.StepLR(torch.optim.SGD(ddp.parameters()), 1)
        refused: list[tuple[list[Any], list[Any], str]] = [
            ([matrices, again], [], "several of the optimizers have the same parameters, 2 of 4."),
            ([matrices, rest, rest], [], "several of the optimizers have the same parameters, 2 of 4."),
            ([matrices, rest], [stranger], "Muon cannot be taken over: StepLR is not a scheduler of it."),
            ([matrices, changed(lambda opt: lr_scheduler.StepLR(opt, 1))(ddp)], [], "SGD cannot be taken over: it has a sched"),
            ([matrices, torch.optim.LBFGS(ddp.parameters())], [], "LBFGS cannot be sharded"),
        ]
        for given, schedulers, text in refused:
            call = functools.partial(shard_optimizer, given, ddp, schedulers=schedulers)
            assert text_of(ConfigError, call).startswith(text)
        assert text_of(WrongType, lambda: shard_optimizer([], ddp)).startswith("optimizer must be an optimizer of torch's")
        one_step(ddp, matrices)  # it is as it was
        assert matrices.state
