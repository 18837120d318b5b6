"""Parameters that are frozen and thawed between the backwards of one step, of which no forward tells."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call

from support.drop_in import TIMEOUT_S, average_each, require_same_on_every_rank
from support.errors import text_of
from support.models import Branches, mlp, noise
from support.naive import require_same
from support.ranks import Ranks, in_ranks
from undertow import DistributedDataParallel, PhaseError, PlanMismatch, ShardedOptimizer, SyncConfig, attach


@contextlib.contextmanager
def only(module: nn.Module, *names: str) -> Iterator[None]:
    """As Lightning's toggle_optimizer and untoggle_optimizer: inside, the children of these names are trained alone."""
    were_trained = {param: param.requires_grad for param in module.parameters()}
    for name, child in module.named_children():
        child.requires_grad_(name in names)
    yield
    for param, was_trained in were_trained.items():
        param.requires_grad_(was_trained)


class Recipe(nn.Module):
    """A generator and a discriminator, which take turns within one forward, as a training_step of Lightning does."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.generator, self.discriminator = nn.Linear(4, 4), nn.Linear(4, 1)

    def loss(self, turn: str, x: Tensor) -> Tensor:
        fake = self.generator(x)
        if turn == "discriminator":
            return self.discriminator(fake.detach()).mean() - self.discriminator(x).mean()
        return -self.discriminator(fake).square().mean()

    def forward(self, x: Tensor, turns: tuple[str, ...], before_step: Callable[[nn.Module], object]) -> None:
        for turn in turns:
            with only(self, turn):
                self.loss(turn, x).backward()
                before_step(self)
                child = getattr(self, turn)
                torch.optim.SGD(child.parameters(), lr=0.25).step()
                child.zero_grad()


TURNS = {
    "both trained at first": ("generator", "discriminator"),
    "in the other order": ("discriminator", "generator"),
    "several times": ("generator", "discriminator", "discriminator", "generator"),
}


def takes_turns(name: str, is_attached: bool, is_frozen_at_first: bool) -> int:
    bare, module = Recipe(), Recipe()
    for each in (bare, module):
        each.discriminator.requires_grad_(not is_frozen_at_first)
    config = SyncConfig(bucket_cap_mb=1e-6)
    sync = attach(module, config=config) if is_attached else DistributedDataParallel(module, config=config)
    model = module if is_attached else sync
    for step in range(4):
        if step == 1:
            for each in (bare, module):
                each.discriminator.requires_grad_(True)
        x = noise(3, 4, step=step)
        model(x, TURNS[name], lambda _: None)
        bare(x, TURNS[name], average_each)
        require_same(*({key: it.detach() for key, it in each.named_parameters()} for each in (module, bare)))
        require_same_on_every_rank(module)
    generation = (sync if is_attached else sync.sync)._engine.generation
    sync.close()
    return generation


@pytest.mark.parametrize("is_attached", [False, True], ids=["wrapped", "attached"])
@pytest.mark.parametrize("name", TURNS)
def test_optimizers_that_are_toggled_within_one_forward_step_on_means(two_ranks: Ranks, name: str, is_attached: bool) -> None:
    # Freezing for a turn is no change of plan: one new plan, in the order observed.
    assert max(two_ranks.run(takes_turns, name, is_attached, False, timeout_s=TIMEOUT_S)) <= 1


def test_so_do_they_when_a_part_was_frozen_when_it_was_wrapped(two_ranks: Ranks) -> None:
    two_ranks.run(takes_turns, "both trained at first", False, True, timeout_s=TIMEOUT_S)


def backward_of(module: nn.Module, order: tuple[int, ...], step: int, *, trained: tuple[int, ...]) -> None:
    """Through the inner module, of which no forward of the wrapper tells."""
    for index, layer in enumerate(module.layers):
        layer.requires_grad_(index in trained)
    module(noise(3, 4, step=step), order).square().sum().backward()


def branches() -> Branches:
    torch.manual_seed(0)
    model = Branches()
    model.layers[2].requires_grad_(False)
    return model


@in_ranks(2, timeout_s=TIMEOUT_S)
@pytest.mark.parametrize(
    ("strategy", "eager", "with_no_sync"),
    [
        ("ddp", False, False),
        ("ddp", False, True),
        ("zero1", False, False),
        ("zero1", False, True),
        ("zero2", False, True),
        ("zero1", True, True),
    ],
    ids=lambda it: str(it),
)
def test_a_parameter_thawed_between_two_backwards_is_averaged(strategy: str, eager: bool, with_no_sync: bool) -> None:
    """Layer 2 is frozen when the model is wrapped, and trained in every second backward."""
    model, bare = branches(), branches()
    ddp = DistributedDataParallel(model, config=SyncConfig(strategy=strategy, bucket_cap_mb=1e-6))
    settings = {"lr": 0.05, "momentum": 0.9}
    optimizers = (
        torch.optim.SGD(model.parameters(), **settings)
        if strategy == "ddp"
        else ShardedOptimizer(torch.optim.SGD, ddp, eager=eager, **settings),
        torch.optim.SGD(bare.parameters(), **settings),
    )
    for step in range(4):
        for module, optimizer in zip((model, bare), optimizers, strict=True):
            optimizer.zero_grad()
            with ddp.no_sync() if with_no_sync and module is model else contextlib.nullcontext():
                backward_of(module, (0, 1), 2 * step, trained=(0, 1))
            backward_of(module, (1, 2), 2 * step + 1, trained=(2,))
            module.requires_grad_(True)
            if module is bare:
                average_each(bare)
            optimizer.step()
        ddp.wait()
        require_same(*({key: it.detach() for key, it in each.named_parameters()} for each in (model, bare)))
        require_same_on_every_rank(model)
    ddp.close()


def steps_of(model: nn.Module, bare: nn.Module, run: Callable[[nn.Module, nn.Module, int], Tensor]) -> None:
    """Three steps with the losses that `run` gives of a model and the module in it; every gradient is the mean."""
    for step in range(3):
        for each, module in ((model, getattr(model, "module", model)), (bare, bare)):
            each.zero_grad()
            run(each, module, step).backward()
        average_each(bare)
        module = getattr(model, "module", model)
        require_same(*({key: it.grad for key, it in each.named_parameters()} for each in (module, bare)))


class Grows(nn.Module):
    """Makes its head in the first forward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "head"):
            torch.manual_seed(1)
            self.head = nn.Linear(4, 1)
        return self.head(self.body(x)).square().sum()


class Thaws(nn.Module):
    """Thaws its body in a hook, or by hand, in the middle of its forward."""

    def __init__(self, hook: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 1)
        self.body.requires_grad_(False)
        if hook == "a hook of a layer":
            self.body.register_forward_pre_hook(lambda layer, _: layer.requires_grad_(True) and None)
        self.hook = hook

    def forward(self, x: Tensor) -> Tensor:
        if self.hook == "the forward":
            self.body.requires_grad_(True)
        hidden = self.body(x)
        if self.hook == "a call of other parameters":
            params = {name: param.requires_grad_(True) for name, param in self.body.named_parameters()}
            hidden = functional_call(self.body, params, (x,))
        return self.head(hidden).square().sum()


@in_ranks(2, timeout_s=TIMEOUT_S)
@pytest.mark.parametrize("where", ["made", "the forward", "a hook of a layer", "a call of other parameters"])
def test_a_parameter_that_is_thawed_or_made_within_the_forward_is_averaged_at_once(where: str) -> None:
    model = Grows() if where == "made" else Thaws(where)
    bare, ddp = copy.deepcopy(model), DistributedDataParallel(model, bucket_cap_mb=1e-6)

    def run(each: nn.Module, module: nn.Module, step: int) -> Tensor:
        if where != "made":
            module.body.requires_grad_(False)
        return each(noise(3, 4, step=step))

    steps_of(ddp, bare, run)
    ddp.close()


@in_ranks(2, timeout_s=TIMEOUT_S)
def test_what_another_wrapper_trains_is_its_own() -> None:
    """One holds a frozen discriminator, which is trained in turns by the wrapper that it has to itself."""
    bare, module = Recipe(), Recipe()
    for each in (bare, module):
        each.discriminator.requires_grad_(False)
    ddp = DistributedDataParallel(module, bucket_cap_mb=1e-6)
    module.discriminator.requires_grad_(True)
    inner = DistributedDataParallel(module.discriminator, bucket_cap_mb=1e-6)
    module.discriminator.requires_grad_(False)
    for step in range(3):
        for each, discriminator in ((module, inner), (bare, bare.discriminator)):
            each.zero_grad()
            each.generator(noise(3, 4, step=step)).square().sum().backward()
            discriminator.requires_grad_(True)
            discriminator(noise(3, 4, step=step)).square().sum().backward()
            if each is bare:
                average_each(bare)
            discriminator.requires_grad_(False)
        require_same(*({key: it.grad for key, it in each.named_parameters()} for each in (module, bare)))
    assert len(ddp.plan.params) == len(inner.plan.params) == 2
    inner.close()
    ddp.close()


def thawed_on_one_rank(situation: str) -> str:
    """Rank 0 trains what is frozen on rank 1."""
    model = branches()
    ddp = DistributedDataParallel(model, bucket_cap_mb=1e-6)

    def train(step: int) -> None:
        trained = {"alone": (2,), "besides": (0, 1, 2)}[situation] if dist.get_rank() == 0 else (0, 1)
        ddp(noise(3, 4, step=step), (0, 1))  # of which no backward comes
        backward_of(model, (0, 1, 2), step, trained=trained)

    backward_of(model, (0, 1), 0, trained=(0, 1))
    return text_of(PlanMismatch, lambda: train(1)).splitlines()[0]


@pytest.mark.parametrize("situation", ["alone", "besides"])
def test_a_parameter_thawed_on_one_rank_is_an_error_on_both(fresh_pair: Ranks, situation: str) -> None:
    first, second = fresh_pair.run(thawed_on_one_rank, situation, timeout_s=TIMEOUT_S)
    assert first == second


class Unfreezes(torch.autograd.Function):
    """Thaws a layer within a backward, which then trains it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: nn.Module) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(x.detach())
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.layer.requires_grad_(True)
        with torch.enable_grad():
            ctx.layer(ctx.saved_tensors[0]).square().sum().backward()
        return grad, None


def thawed_in_backward() -> str:
    model = branches()
    ddp = DistributedDataParallel(model, bucket_cap_mb=1e-6)

    def train() -> None:
        x = Unfreezes.apply(model.layers[0](noise(3, 4)), model.layers[2])
        model.layers[1](x).square().sum().backward()

    text = text_of(PhaseError, train)
    ddp.close()
    return text


def test_a_parameter_thawed_within_a_backward_is_an_error_that_names_it(fresh_pair: Ranks) -> None:
    for rank, text in enumerate(fresh_pair.run(thawed_in_backward, timeout_s=TIMEOUT_S)):
        assert text == (
            "a parameter was unfrozen while the backward ran that trains it: its gradient cannot be averaged.\n"
            f"  parameter 'layers.2.bias', rank {rank}\n"
            "  Unfreeze parameters before their backward, and outside of functional_call."
        )


class LowRank(nn.Module):
    """A frozen layer, and what is trained in its place."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.left, self.right = nn.Parameter(torch.eye(4, 2)), nn.Parameter(torch.ones(2, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + x @ self.left @ self.right


@in_ranks(2, timeout_s=TIMEOUT_S)
@pytest.mark.parametrize("kind", ["low rank", "loaded by assignment"])
def test_parameters_that_replace_all_that_were_trained_are_averaged_before_their_first_step(kind: str) -> None:
    """No hook of ours is on what is trained, and no forward of the wrapper tells of it: the optimizer's step does."""
    model, bare = branches(), branches()
    ddp = DistributedDataParallel(model, bucket_cap_mb=1e-6)
    for step in range(4):
        for module in (model, bare):
            if step == 2 and kind == "low rank":
                module.layers = nn.ModuleList(map(LowRank, module.layers))
            elif step == 2:
                module.load_state_dict({name: it.clone() for name, it in module.state_dict().items()}, assign=True)
            optimizer = torch.optim.SGD([param for param in module.parameters() if param.requires_grad], lr=0.1)
            optimizer.zero_grad()
            module(noise(3, 4, step=step)).square().sum().backward()
            if module is bare:
                average_each(bare)
            optimizer.step()
        require_same(*({key: it.detach() for key, it in each.named_parameters()} for each in (model, bare)))
        require_same_on_every_rank(model)
    ddp.close()


def thawed_and_stepped(ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> None:
    ddp(noise(5, 6)).square().sum().backward()
    ddp.module[2].requires_grad_(True)
    optimizer.step()


@in_ranks(2, is_fresh=True, timeout_s=TIMEOUT_S)
@pytest.mark.parametrize("strategy", ["zero1", "zero2"])
def test_a_gradient_that_was_frozen_out_of_its_synchronisation_is_not_stepped_in_silence(strategy: str) -> None:
    """Accumulated, then frozen for the backward that synchronises, and thawed before the step: nobody averages that gradient."""
    ddp = DistributedDataParallel(mlp(), config=SyncConfig(strategy=strategy))
    optimizer = ShardedOptimizer(torch.optim.SGD, ddp, lr=0.1)
    for step in range(2):
        optimizer.zero_grad()
        ddp(noise(5, 6, step=step)).square().sum().backward()
        optimizer.step()
    optimizer.zero_grad()
    with ddp.no_sync():
        ddp(noise(5, 6)).square().sum().backward()
    ddp.module[2].requires_grad_(False)
    text = text_of(PhaseError, lambda: thawed_and_stepped(ddp, optimizer))
    assert text.startswith(("the optimizer steps on a gradient that is not synchronised", "the parameters have changed while"))
    ddp.close()
